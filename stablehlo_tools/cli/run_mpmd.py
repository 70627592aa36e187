"""Run a set of rank programs on random inputs and compare it with the program that it was made of.

DIR is what expand-mpmd wrote. ORIGINAL is the exported step; without it the set is run and nothing
is compared. A set sums in another order than the original, so it may differ by rounding: by a few
times what the original itself changes by when its inputs are moved by one rounding, unless --rtol
or --atol say how much.

  --how sequential   in one process on XLA:CPU, a rank at a time, every message checked
  --how interpreter  two ranks at once in the StableHLO reference interpreter
  --how processes    a real process for each rank, connected by gloo
  --train SCRIPT     not compared: a process for each rank runs a script of yours on this machine,
                     which trains with stablehlo_tools.mpmd.load(DIR); what follows is the script's
  --compile gpu      not run: every rank compiled ahead of time for XLA:GPU

Exit code 0: the same (all compiled); 1: outputs differ (a rank did not compile, or its transfers
are out of order); 2: the set cannot be run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stablehlo_tools.cli.shared_arguments import add_set_argument, seconds, tolerance, whole_number
from stablehlo_tools.processes import activity

if TYPE_CHECKING:
    from stablehlo_tools.mpmd.rank_set import RankSet
    from stablehlo_tools.mpmd.running.compiling import RankCompilation
    from stablehlo_tools.mpmd.running.outcome import Outcome, Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run-mpmd`."""
    parser.add_argument("directory", metavar="DIR", help="a set of rank programs")
    parser.add_argument(
        "original", metavar="ORIGINAL", nargs="?", help="the program that it was made of"
    )
    parser.add_argument(
        "--how",
        choices=("sequential", "interpreter", "processes"),
        default="sequential",
        help="how to run the ranks (sequential)",
    )
    parser.add_argument("--compile", choices=("gpu",), help="compile the ranks, and run nothing")
    parser.add_argument(
        "--train",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="run a script in a process for each rank, with the words behind it",
    )
    parser.add_argument("--seed", type=whole_number, default=0, help="of the random inputs (0)")
    add_set_argument(parser)
    parser.add_argument(
        "--rtol", type=tolerance, help="accept |difference| <= ATOL + RTOL * |original|"
    )
    parser.add_argument("--atol", type=tolerance, help="see --rtol")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        default=600.0,
        help="stop each run or compiler after so many seconds (600)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints what came of it. Raises ToolError for what cannot be run."""
    from stablehlo_tools.mpmd.rank_set import digest_of, load

    ranks = load(arguments.directory)
    if arguments.train is not None:
        return _train(ranks, arguments.train)
    if arguments.compile:
        from stablehlo_tools.mpmd.running.compiling import compile_ranks

        compiled = compile_ranks(ranks, arguments.timeout)
        listed = [compilation.to_json() for compilation in compiled]
        print(json.dumps({"ranks": listed}) if arguments.json else _compilations(compiled))
        return 0 if all(compilation.is_right for compilation in compiled) else 1
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.mpmd.running.outcome import Options, run_set
    from stablehlo_tools.verify import Rule

    given = arguments.rtol is not None or arguments.atol is not None
    options = Options(
        how=arguments.how,
        seed=arguments.seed,
        timeout=arguments.timeout,
        rule=Rule(arguments.rtol, arguments.atol) if given else None,
        fixed=dict(arguments.set),
    )
    original = artifact.load(arguments.original) if arguments.original else None
    activity.show(f"running {arguments.directory}")
    try:
        outcome = run_set(ranks, original, options)
    except MemoryError:
        raise ToolError("this machine has too little memory for the arrays of this set") from None
    print(json.dumps(outcome.to_json()) if arguments.json else _outcome(outcome))
    if original is not None and ranks.manifest.digest not in ("", digest_of(original)):
        print(
            f"warning: {original.name} is not the program that the set was made of, "
            f"{ranks.manifest.source}: their texts differ",
            file=sys.stderr,
        )
    vacuous = [o.path for o in outcome.outputs if o.comparison and o.comparison.shows_nothing]
    if vacuous:
        print(
            f"warning: output {vacuous[0]}{' and others' * (len(vacuous) > 1)}, NaN or infinite "
            "everywhere: nothing was shown about that; --set gives an input a value",
            file=sys.stderr,
        )
    return 0 if outcome.same else 1


def _train(ranks: RankSet, words: Sequence[str]) -> int:
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.mpmd.runtime.launching import launch

    if not words or not Path(words[0]).is_file():
        raise ToolError(f"--train: there is no script {words[0] if words else ''!r}")
    activity.show(None)
    return launch(ranks, words[0], words[1:], grace=60.0)


def _outcome(outcome: Outcome) -> str:
    functions = f", {outcome.functions} functions compiled" if outcome.functions else ""
    lines = [f"{outcome.ranks} ranks, {outcome.how}{functions}, {outcome.seconds:.1f} s", ""]
    compared = [output for output in outcome.outputs if output.comparison is not None]
    if compared:
        headings = ("output", "type", "largest difference", "allowed", "")
        lines += _table(headings, [_row(output) for output in outcome.outputs])
    else:
        count = len(outcome.outputs)
        lines.append(f"{count} outputs, compared with nothing: name the original, too")
    if outcome.played:
        from stablehlo_tools.diagnostics import size

        rows = [
            (str(rank), str(len(played.actions)), size(played.peak_bytes), played.peak_at)
            for rank, played in enumerate(outcome.played)
        ]
        lines += ["", *_table(("rank", "actions", "most held", "in"), rows)]
    if compared:
        differing = sum(bool(o.comparison and o.comparison.differing) for o in compared)
        word = "differ" if differing != 1 else "differs"
        same = f"same: {len(compared)} outputs, within rounding"
        lines += ["", f"{differing} of {len(compared)} outputs {word}" if differing else same]
    return "\n".join(lines)


def _row(output: Output) -> tuple[str, ...]:
    comparison = output.comparison
    if comparison is None:
        return (output.path, output.type, "", "", "")
    largest = comparison.max_abs_difference
    verdict = ""
    if comparison.first is not None:
        place = f"[{', '.join(map(str, comparison.first.index))}]"
        verdict = (
            f"{comparison.differing} of {comparison.elements} differ, first {place}: "
            f"{comparison.first.before} original, {comparison.first.after} here"
        )
    return (
        output.path,
        output.type,
        "" if largest is None else f"{largest:.3g}",
        "" if output.allowed is None else f"{output.allowed:.3g}",
        verdict,
    )


def _compilations(compiled: Sequence[RankCompilation]) -> str:
    from stablehlo_tools.diagnostics import size

    rows = [
        (
            str(compilation.rank),
            compilation.refusal or f"compiled in {compilation.seconds:.1f} s",
            "" if compilation.refusal else f"{compilation.transfers} of {compilation.expected}",
            "" if compilation.refusal else "the program's" if compilation.in_order else "another",
            "" if compilation.refusal else size(compilation.temporaries),
        )
        for compilation in compiled
    ]
    headings = ("rank", "XLA:GPU", "sends and recvs", "order", "temporaries")
    return "\n".join(_table(headings, rows))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (headings, *rows)
    ]
