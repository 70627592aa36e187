"""Run a set of rank programs on random inputs and compare it with the program it was made from.

DIR is a set that expand-mpmd wrote. ORIGINAL is the exported step; without it nothing is compared.
Both run in exact arithmetic, as in `verify`, and every output is compared bit for bit. --floats
compares floats, bit for bit or within --rtol and --atol. A set adds up in another order than the
original, so floats may differ by rounding.

  --how sequential   in one process on XLA:CPU, a rank at a time, every message checked
  --how processes    a real process for each rank, connected by gloo, in floats
  --train SCRIPT     not compared: a process for each rank runs your script on this machine, which
                     trains with stablehlo_tools.mpmd.load(DIR)
  --compile gpu      not run: every rank compiled ahead of time for XLA:GPU

Exit code 0: the same (all compiled); 1: outputs differ (a rank did not compile, or its transfers
are out of order); 2: the set cannot be run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stablehlo_tools.cli.shared_arguments import add_set_argument, add_timeout, amount, whole_number
from stablehlo_tools.cli.verify import compare_with_origin, print_comparison
from stablehlo_tools.processes import activity

if TYPE_CHECKING:
    from stablehlo_tools.mpmd.running.rank_compilation import RankCompilation
    from stablehlo_tools.mpmd.running.set_outcome import SetOutcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `run-mpmd` to its parser."""
    parser.add_argument("directory", metavar="DIR", help="a set of rank programs")
    parser.add_argument(
        "original", metavar="ORIGINAL", nargs="?", help="the program that the set was made from"
    )
    parser.add_argument(
        "--how",
        choices=("sequential", "processes"),
        default="sequential",
        help="way to run the ranks (sequential)",
    )
    parser.add_argument(
        "--compile", choices=("gpu",), help="compile the ranks without running them"
    )
    parser.add_argument(
        "--train",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="run a script in one process per rank; the words after it are its arguments",
    )
    parser.add_argument(
        "--seed", type=whole_number, default=0, help="seed of the random inputs (0)"
    )
    add_set_argument(parser)
    parser.add_argument(
        "--floats",
        action="store_true",
        help="compare floats; --rtol, --atol and --how processes imply it",
    )
    parser.add_argument(
        "--rtol", type=amount, help="accept |difference| <= ATOL + RTOL * |original|"
    )
    parser.add_argument("--atol", type=amount, help="see --rtol")
    add_timeout(parser, "time limit of each run or compilation in seconds (600)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Runs the set and prints the outcome. Raises ToolError if it cannot be run."""
    from stablehlo_tools.mpmd.rank_set import load

    ranks = load(arguments.directory)
    if arguments.train is not None:
        words = arguments.train
        from stablehlo_tools.diagnostics import ToolError
        from stablehlo_tools.mpmd.runtime.launching import launch

        if not words or not Path(words[0]).is_file():
            raise ToolError(f"--train: script {words[0] if words else ''!r} does not exist")
        activity.show(None)
        return launch(ranks, words[0], words[1:], grace=60.0)
    if arguments.compile:
        from stablehlo_tools.mpmd.running.rank_compilation import compile_ranks

        compiled = compile_ranks(ranks, arguments.timeout)
        listed = [compilation.to_json() for compilation in compiled]
        print(json.dumps({"ranks": listed}) if arguments.json else _compilations(compiled))
        return 0 if all(compilation.is_right for compilation in compiled) else 1
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.mpmd.running.set_outcome import SetOptions
    from stablehlo_tools.verify import Rule

    options = SetOptions(
        arithmetic="floats" if arguments.floats else "auto",
        how=arguments.how,
        seed=arguments.seed,
        timeout=arguments.timeout,
        rule=Rule(arguments.rtol, arguments.atol),
        fixed=dict(arguments.set),
    )
    original = artifact.load(arguments.original) if arguments.original else None
    activity.show(f"running {arguments.directory}")
    outcome = compare_with_origin(ranks, original, options)
    if arguments.json:
        print(json.dumps(outcome.to_json()))
    else:
        if outcome.values is not None:
            print_comparison(outcome.values, arguments.words)
        print(_run_text(outcome))
    return 0 if outcome.same else 1


def _run_text(outcome: SetOutcome) -> str:
    """Describes the run of the set, and the actions of each rank if they are known."""
    from stablehlo_tools.diagnostics import size, table_lines

    functions = f", {outcome.functions} functions compiled" if outcome.functions else ""
    lines = [f"{outcome.ranks} ranks, {outcome.how}{functions}, {outcome.seconds:.1f} s"]
    if outcome.values is None:
        count = len(outcome.outputs)
        lines += [
            "",
            f"{count} outputs, not compared: to compare, name the original program as well",
        ]
    if outcome.played:
        rows = [
            (str(rank), str(len(played.actions)), size(played.peak_bytes), played.peak_at)
            for rank, played in enumerate(outcome.played)
        ]
        headings = ("rank", "actions", "most held", "in")
        lines += ["", *table_lines([headings, *rows], headings)]
    return "\n".join(lines)


def _compilations(compiled: Sequence[RankCompilation]) -> str:
    from stablehlo_tools.diagnostics import size, table_lines

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
    return "\n".join(table_lines([headings, *rows], headings))
