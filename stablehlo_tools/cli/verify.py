"""Prove that two artifacts compute the same values, in exact arithmetic.

Both run on the same random inputs modulo a prime instead of in floats. Sums then have the same bits
in any order, and every output is compared bit for bit on every device, without a tolerance. If an
op has no form in exact arithmetic, floats are compared, and the first line says so; --exact refuses
instead. AFTER may be a set of rank programs.

--floats compares floats, bit for bit (including NaN payloads and the signs of zeros) or within
--rtol and --atol. It detects differences in rounding, overflow, NaN and -0.0. Programs that need
more memory than --memory-limit are compared as a twin: both at reduced sizes, with the same shards,
loops and order.

Exit code 0: the values are the same; 1: they differ, and where first; 2: the programs cannot run,
or no output could be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stablehlo_tools.cli.shared_arguments import (
    add_rules,
    add_set_argument,
    add_timeout,
    amount,
    gib,
    positive,
    state_given_rules,
    whole_number,
)
from stablehlo_tools.cli.streams import print_answer
from stablehlo_tools.cli.usage_errors import command_line
from stablehlo_tools.processes import activity

if TYPE_CHECKING:
    from stablehlo_tools.artifacts.artifact import Artifact
    from stablehlo_tools.mpmd.rank_set import RankSet
    from stablehlo_tools.mpmd.running.set_outcome import SetOptions, SetOutcome
    from stablehlo_tools.verify import Options, Verification
    from stablehlo_tools.verify.exact.programs import Exactness
    from stablehlo_tools.verify.twin import Twin, TwinVerification
    from stablehlo_tools.verify.verification import ComparedOutput

SHOWN_OUTPUTS = 20
SHOWN_FACTORS = 8
_FAR = 0.1  # of a value, or of the largest difference
_DEFAULT_LIMIT = 4 * 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `verify` to its parser."""
    parser.add_argument("before", metavar="BEFORE", help="an artifact in any form, - for stdin")
    parser.add_argument("after", metavar="AFTER", help="the artifact to compare it with")
    parser.add_argument("--json", action="store_true", help="answer with one JSON object")
    add_rules(parser)
    parser.add_argument(
        "--seed", type=whole_number, default=0, help="seed of the random inputs (0)"
    )
    parser.add_argument("--trials", type=positive, default=3, help="sets of inputs to try (3)")
    add_set_argument(parser)
    arithmetic = parser.add_mutually_exclusive_group()
    arithmetic.add_argument(
        "--exact",
        action="store_true",
        help="refuse programs with an op that has no form in exact arithmetic",
    )
    arithmetic.add_argument(
        "--floats",
        action="store_true",
        help="compare floats; the options from here to --backend imply it",
    )
    parser.add_argument("--rtol", type=amount, help="accept |difference| <= ATOL + RTOL * |before|")
    parser.add_argument("--atol", type=amount, help="see --rtol; either one makes NaN equal NaN")
    parser.add_argument(
        "--any-nan", action="store_true", help="bitwise, but any NaN equals any other NaN"
    )
    parser.add_argument(
        "--specials",
        action="store_true",
        help="mix NaNs, infinities, -0.0, denormals and integer extremes into the inputs",
    )
    parser.add_argument(
        "--as-deployed",
        action="store_true",
        help="let XLA:CPU fuse and simplify ops, which changes the rounding",
    )
    parser.add_argument(
        "--backend",
        choices=("cpu", "interpreter", "both"),
        help="XLA:CPU (the default), the StableHLO reference interpreter (static shapes, few "
        "devices), or both",
    )
    parser.add_argument(
        "--twin",
        choices=("auto", "always", "never"),
        default="auto",
        help="compare both at reduced sizes: if they need more than the memory limit (auto), "
        "always or never",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="GIB",
        type=lambda text: int(gib(text) * 2**30),
        default=_DEFAULT_LIMIT,
        help="memory limit of either program in GiB, on all of its devices (4)",
    )
    add_timeout(parser, "for everything (600)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the answer; returns 0 if the values are the same, 1 if they differ."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.files import atomic
    from stablehlo_tools.verify import Options, Rule, verify_artifacts

    if arguments.before == arguments.after == atomic.STDIN:
        raise ToolError("only one of BEFORE and AFTER can be standard input")
    in_floats = arguments.floats or arguments.backend is not None
    options = Options(
        arithmetic="floats" if in_floats else "exact" if arguments.exact else "auto",
        seed=arguments.seed,
        trials=arguments.trials,
        specials=arguments.specials,
        rule=Rule(arguments.rtol, arguments.atol, arguments.any_nan),
        backend=arguments.backend or "cpu",
        timeout=arguments.timeout,
        fixed=dict(arguments.set),
        as_deployed=arguments.as_deployed,
    )
    if arguments.exact and options.asks_for_floats:
        raise ToolError(
            "--exact has no rounding, NaN or -0.0: leave it out, or the option that only floats "
            "have"
        )
    if Path(arguments.after).is_dir():
        return _verify_set(arguments, options)
    before, after = (artifact.load(path) for path in (arguments.before, arguments.after))
    state_given_rules(arguments, before, after)
    activity.show(f"comparing {before.name} and {after.name} on random inputs")
    limit = arguments.memory_limit
    answer: Verification | TwinVerification
    if arguments.twin == "always" or (arguments.twin == "auto" and _is_large(before, after, limit)):
        from stablehlo_tools.verify.twin import verify_twins

        answer = verify_twins(before, after, options, limit)
        verification, twin, limits = answer.verification, answer.twin, answer.limits()
    else:
        answer = verification = verify_artifacts(before, after, options)
        twin, limits = None, list[str]()
    check_shown(verification)
    if arguments.json:
        print(json.dumps(answer.to_json()))
    else:
        more = [] if twin is None else [_of_twin(twin), *limits]
        print_comparison(verification, arguments.words, more)
    warn_of_zeros(verification)
    return 0 if answer.same else 1


def _verify_set(arguments: argparse.Namespace, options: Options) -> int:
    """Compares a set of rank programs with its origin, as `run-mpmd` does."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.mpmd.rank_set import load
    from stablehlo_tools.mpmd.running.set_outcome import SetOptions

    if options.specials or options.as_deployed or options.backend != "cpu":
        raise ToolError(
            "--specials, --backend and --as-deployed do not apply to a set of rank programs"
        )
    set_options = SetOptions(**vars(options))
    outcome = compare_with_origin(
        load(arguments.after), artifact.load(arguments.before), set_options
    )
    assert outcome.values is not None
    if arguments.json:
        print(json.dumps(outcome.values.to_json()))
    else:
        print_comparison(outcome.values, arguments.words)
    return 0 if outcome.same else 1


def compare_with_origin(
    ranks: RankSet, original: Artifact | None, options: SetOptions
) -> SetOutcome:
    """Runs a set and its original, and warns about outputs that prove nothing.

    Raises ToolError if they cannot be run, or if nothing could be compared.
    """
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.mpmd.rank_set import digest_of
    from stablehlo_tools.mpmd.running.set_outcome import run_set

    try:
        outcome = run_set(ranks, original, options)
    except MemoryError:
        raise ToolError("this machine has too little memory for the arrays of this set") from None
    if outcome.values is not None:
        check_shown(outcome.values)
        warn_of_zeros(outcome.values)
    if original is not None and ranks.manifest.digest not in ("", digest_of(original)):
        print(
            f"warning: {original.name} is not the program that the set was made from, "
            f"{ranks.manifest.source}: their texts differ",
            file=sys.stderr,
        )
    return outcome


def check_shown(verification: Verification) -> None:
    """Raises ToolError if the programs agree in nothing but zeros, NaN and infinities."""
    from stablehlo_tools.diagnostics import ToolError

    if verification.same and not verification.compared:
        raise ToolError(
            f"nothing was compared: {_number(len(verification.vacuous), 'output')}, "
            f"{_emptiness(verification)}, in both programs: --set INDEX=VALUE gives an input a "
            "value that the programs accept, --seed draws others"
        )


def print_comparison(
    verification: Verification, words: Sequence[str], more: Sequence[str] = ()
) -> None:
    """Prints the answer, then the lines `more`, then a command to try instead of `words`."""
    from stablehlo_tools.verify.element_types import element_type

    print_answer("\n".join([render(verification), *more]), holds=verification.same)
    # True if the only differences are small ones of floats, such as of rounding.
    is_near = verification.exact is None and not any(map(_is_far, verification.outputs))
    elements = [element_type(each.dtype) for each in verification.outputs if each.differing]
    # Sums of inexact numbers depend on their order.
    is_rounded = not verification.same and all(each and each.is_inexact for each in elements)
    if verification.rule.is_bitwise and is_rounded and is_near:
        print("a different order of float additions has this effect: allow it with tolerances")
        print(f"try: {command_line([*words, '--rtol', '1e-4', '--atol', '1e-6'])}")


def warn_of_zeros(verification: Verification) -> None:
    """Warns of outputs that agree in nothing but zeros, NaN and infinities."""
    if verification.same and verification.vacuous:
        first = _title(verification.outputs[verification.vacuous[0]])
        print(
            f"warning: {_number(len(verification.vacuous), 'output')}, first {first}, "
            f"{_emptiness(verification)}: not compared; --set gives an input a value",
            file=sys.stderr,
        )


def render(verification: Verification) -> str:
    """Renders the answer: the comparison, each output that differs, and the branches not run."""
    lines: list[str] = []
    if verification.in_floats:
        lines.append(
            f"compared in floats: {verification.in_floats}, which has no form modulo a prime"
        )
    exact = verification.exact
    if verification.same:
        lines.append(_agreement(verification))
    else:
        lines += _differences(verification)
    if verification.sizes:
        lines.append(f"symbolic dimensions: {'; then '.join(verification.sizes)}")
    if exact is not None:
        lines += _of_partitioner(verification, exact)
        lines += _of_branches(exact)
        chance = exact.chance(verification.trials)
        if verification.same and chance is not None:
            lines.append(
                "different programs agree in an element with a probability of at most "
                f"{chance:.1g}: ({exact.degree:,}/{exact.prime:,})^{verification.trials}, if "
                "hashes and reciprocals are random functions"
            )
    return "\n".join(lines)


def _agreement(verification: Verification) -> str:
    elements = sum(output.elements for output in verification.compared)
    what = f"{_number(len(verification.outputs), 'output')}, {_number(elements, 'element')}"
    skipped = ""
    if verification.vacuous:
        what = f"{len(verification.compared)} of {what}"
        skipped = f"; {len(verification.vacuous)} not compared: {_emptiness(verification)}"
    if verification.exact is not None:
        inputs = _number(verification.trials, "input")
        where = " in the code that ran" if any(verification.exact.not_entered.values()) else ""
        return f"identical in exact arithmetic{where}: {what}, {inputs}{skipped}"
    trials = _number(verification.trials, "trial")
    devices = _number(verification.devices, "device")
    return f"same: {what}, {verification.rule}, {trials}, {devices}{skipped}"


def _differences(verification: Verification) -> list[str]:
    differing = [output for output in verification.outputs if output.differing]
    lines = [line for output in differing[:SHOWN_OUTPUTS] for line in _difference(output)]
    if len(differing) > SHOWN_OUTPUTS:
        lines.append(f"and {_number(len(differing) - SHOWN_OUTPUTS, 'output')} more")
    trial = verification.trials - 1
    if verification.exact is None:
        lines.append(f"compared {verification.rule}, in trial {trial}")
    else:
        lines[0] = lines[0].replace("differs: ", "differs in exact arithmetic: ", 1)
        lines.append(f"values are residues modulo {verification.exact.prime}, of input {trial}")
    if verification.simplified:
        lines.append("these programs need XLA:CPU's simplifier, which changes the rounding")
    if not verification.before_repeats:
        lines.append("BEFORE differs from itself in a second run: it is not deterministic")
    return lines + [f"note: {hint}" for hint in verification.steering]


def _of_partitioner(verification: Verification, exact: Exactness) -> list[str]:
    """Returns the outputs that jax computes wrongly because of an error in XLA's partitioner."""
    lines: list[str] = []
    for side, wrong in exact.wrongly_partitioned.items():
        titles = ", ".join(_title(verification.outputs[i]) for i in wrong[:SHOWN_FACTORS])
        more = f" and {len(wrong) - SHOWN_FACTORS} more" if len(wrong) > SHOWN_FACTORS else ""
        said = f"jax computes {side.upper()} wrongly"
        if verification.same and "after" not in exact.wrongly_partitioned:
            said += ", AFTER is right"
        lines.append(f"{said}: XLA:CPU's partitioner changes {titles}{more}")
    return lines


def _of_branches(exact: Exactness) -> list[str]:
    lines: list[str] = []
    for side, missing in exact.not_entered.items():
        if missing:
            shown = "; ".join(missing[:SHOWN_FACTORS])
            more = f"; {len(missing) - SHOWN_FACTORS} more" if len(missing) > SHOWN_FACTORS else ""
            of = _number(exact.branches[side], "branch or loop", "branches and loops")
            lines.append(
                f"no input entered {len(missing)} of {of} in {side.upper()}: {shown}{more}"
            )
    return lines


def _is_far(output: ComparedOutput) -> bool:
    """Returns True if the first difference is too large for rounding.

    It must be a large share of the element, and of the largest difference."""
    if output.first is None or output.max_abs_difference is None:
        return False
    try:
        before, after = complex(output.first.before), complex(output.first.after)
    except ValueError:  # not a number
        return False
    apart, largest = abs(before - after), max(abs(before), abs(after))
    return apart > _FAR * largest and apart > _FAR * output.max_abs_difference


def _emptiness(verification: Verification) -> str:
    """Describes the values of vacuous outputs, in words."""
    if verification.exact is not None:
        return "zero everywhere, for all inputs"
    return "NaN or infinite everywhere, in every trial"


def _is_large(before: Artifact, after: Artifact, limit: int) -> bool:
    """Returns True if a program needs more than `limit` bytes; False if its sizes are unknown."""
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.verify.twin import estimated_bytes

    try:
        return max(estimated_bytes(each.module) for each in (before, after)) > limit
    except ToolError:
        return False


def _of_twin(twin: Twin) -> str:
    factors = [
        f"{full} → {' or '.join(map(str, reduced))}" for full, reduced in twin.factors.items()
    ]
    if len(factors) > SHOWN_FACTORS:
        factors[SHOWN_FACTORS:] = [f"{len(factors) - SHOWN_FACTORS} more"]
    return (
        f"on a twin of about {_amount(twin.bytes)}, because the programs need about "
        f"{_amount(twin.full_bytes)}; dimensions: {', '.join(factors) or 'as they are'}"
    )


def _amount(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _difference(output: ComparedOutput) -> list[str]:
    first = output.first
    assert first is not None
    shape = ",".join(map(str, output.shape))
    largest = output.max_abs_difference
    place = f"[{', '.join(map(str, first.index))}]" if first.index else "its only element"
    device = "" if first.device is None else f" on device {first.device}"
    return [
        f"differs: {_title(output)}, {output.dtype}[{shape}]: {output.differing} of "
        f"{_number(output.elements, 'element')}"
        + ("" if largest is None else f", largest absolute difference {largest:g}"),
        f"  first at {place}{device}: {first.before} before, {first.after} after",
    ]


def _title(output: ComparedOutput) -> str:
    return f"output {output.index}" + (f" ({output.name})" if output.name else "")


def _number(count: int, what: str, several: str = "") -> str:
    return f"{count:,} {what if count == 1 else several or f'{what}s'}"
