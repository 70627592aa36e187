"""Prove on random inputs that two artifacts compute the same values.

Both run on the same inputs, on as many virtual CPU devices as they need, and every output is
compared bit for bit on every device (the payload of a NaN and the sign of a zero count), or within
--rtol and --atol. Inputs are put where a program wants them (no negative second moments, labels
below their number of classes) in every trial but the second, the fourth and so on, and an input
that is replicated is the same on all devices. An output that is NaN or infinite everywhere is not
compared, and counted. Programs that take more memory than --memory-limit are compared as a twin of
them: both at reduced sizes, with the shards, loops and order that they have. Exit code 0: what was
compared is the same; 1: it differs, and where first; 2: the programs cannot be run, or nothing of
them could be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from stablehlo_tools.cli.shared_arguments import (
    add_set_argument,
    gib,
    positive,
    seconds,
    tolerance,
    whole_number,
)
from stablehlo_tools.cli.streams import print_answer
from stablehlo_tools.cli.usage_errors import typed
from stablehlo_tools.processes import activity

if TYPE_CHECKING:
    from stablehlo_tools.artifacts.artifact import Artifact
    from stablehlo_tools.verify import Rule, Verification
    from stablehlo_tools.verify.twin import Twin, TwinVerification
    from stablehlo_tools.verify.verification import Output

SHOWN_OUTPUTS = 20
SHOWN_FACTORS = 8
_FAR = 0.1  # of a value, or of the largest difference
_DEFAULT_LIMIT = 4 * 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("before", metavar="BEFORE", help="an artifact in any form, - for stdin")
    parser.add_argument("after", metavar="AFTER", help="the artifact to compare it with")
    parser.add_argument("--json", action="store_true", help="answer with one JSON object")
    parser.add_argument("--seed", type=whole_number, default=0, help="of the random inputs (0)")
    parser.add_argument("--trials", type=positive, default=3, help="sets of inputs to try (3)")
    parser.add_argument(
        "--specials",
        action="store_true",
        help="mix NaNs, infinities, -0.0, denormals and integer extremes into the inputs",
    )
    add_set_argument(parser)
    parser.add_argument(
        "--rtol", type=tolerance, help="accept |difference| <= ATOL + RTOL * |before|"
    )
    parser.add_argument("--atol", type=tolerance, help="see --rtol; either one makes NaN equal NaN")
    parser.add_argument(
        "--any-nan", action="store_true", help="bitwise, but any NaN equals any other NaN"
    )
    parser.add_argument(
        "--as-deployed",
        action="store_true",
        help="let XLA:CPU fuse and simplify ops: rounding then moves with what it makes of them",
    )
    parser.add_argument(
        "--backend",
        choices=("cpu", "interpreter", "both"),
        default="cpu",
        help="XLA:CPU, the StableHLO reference interpreter (static shapes, few devices), or both",
    )
    parser.add_argument(
        "--twin",
        choices=("auto", "always", "never"),
        default="auto",
        help="compare both at reduced sizes: where they take more than the limit (auto), or not",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="GIB",
        type=_limit,
        default=_DEFAULT_LIMIT,
        help="of running either program, on all of its devices (4)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        default=600.0,
        help="for everything (600)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the answer; 0 when the values are the same, 1 when they differ."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.files import atomic
    from stablehlo_tools.verify import Options, Rule, verify_artifacts

    if arguments.before == arguments.after == atomic.STDIN:
        raise ToolError("only one of BEFORE and AFTER can be standard input")
    options = Options(
        seed=arguments.seed,
        trials=arguments.trials,
        specials=arguments.specials,
        rule=Rule(arguments.rtol, arguments.atol, arguments.any_nan),
        backend=arguments.backend,
        timeout=arguments.timeout,
        fixed=dict(arguments.set),
        as_deployed=arguments.as_deployed,
    )
    before, after = (artifact.load(path) for path in (arguments.before, arguments.after))
    activity.show(f"running {before.name} and {after.name} on random inputs")
    limit = arguments.memory_limit
    answer: Verification | TwinVerification
    if arguments.twin == "always" or (arguments.twin == "auto" and _is_large(before, after, limit)):
        from stablehlo_tools.verify.twin import verify_twins

        answer = verify_twins(before, after, options, limit)
        verification, twin = answer.verification, answer.twin
    else:
        answer = verification = verify_artifacts(before, after, options)
        twin = None
    if verification.same and not verification.compared:
        raise ToolError(
            f"nothing was compared: {_number(len(verification.vacuous), 'output')}, "
            f"{_emptiness(verification)} in both programs, in every trial: --set INDEX=VALUE gives "
            "an input a value that the programs can live with, --seed draws others"
        )
    if arguments.json:
        print(json.dumps(answer.to_json()))
    else:
        print_answer(render(verification), holds=verification.same)
        if twin is not None:
            print("\n".join(_of_twin(twin, verification.rule, options.rule)))
        if _may_be_rounding(verification):
            print("floats that are added up in another order differ like this: tolerances allow it")
            print(f"try: {typed([*arguments.words, '--rtol', '1e-4', '--atol', '1e-6'])}")
        elif arguments.twin == "auto" and twin is None and _may_be_unstable(verification):
            print("a step may move what it rounds this far: a twin in f64 tells the two apart")
            print(f"try: {typed([*arguments.words, '--twin', 'always'])}")
    if verification.same and verification.vacuous:
        first = _title(verification.outputs[verification.vacuous[0]])
        print(
            f"warning: {_number(len(verification.vacuous), 'output')}, first {first}, "
            f"{_emptiness(verification)} in every trial: nothing was shown about that; --set gives "
            "an input a value",
            file=sys.stderr,
        )
    return 0 if verification.same else 1


def render(verification: Verification) -> str:
    """The answer in words: one line when the same, two for each output that differs."""
    if verification.same:
        compared = f"{len(verification.compared)} of " if verification.vacuous else ""
        elements = sum(output.elements for output in verification.compared)
        skipped = rounded = ""
        if verification.vacuous:
            count = len(verification.vacuous)
            skipped = f"{count} not compared: {_emptiness(verification)} in every trial"
        if verification.rounded:
            rounded = (
                f"{len(verification.rounded)} only within what rounding alone moves them: nudged "
                "inputs move them as far"
            )
        return (
            f"same: {compared}{_number(len(verification.outputs), 'output')}, "
            f"{_number(elements, 'element')}, {verification.rule}, "
            f"{_number(verification.trials, 'trial')}, {_number(verification.devices, 'device')}"
        ) + "".join(f"; {each}" for each in (skipped, rounded) if each)
    differing = [output for output in verification.outputs if output.differing]
    lines = [line for output in differing[:SHOWN_OUTPUTS] for line in _difference(output)]
    if len(differing) > SHOWN_OUTPUTS:
        lines.append(f"and {_number(len(differing) - SHOWN_OUTPUTS, 'output')} more")
    lines.append(f"compared {verification.rule}, in trial {verification.trials - 1}")
    if verification.simplified:
        lines.append("XLA:CPU needs its simplifier for these programs, and that moves rounding")
    if not verification.before_repeats:
        lines.append("BEFORE differs from itself when run again: it is not deterministic")
    lines += [f"note: {hint}" for hint in verification.steering]
    return "\n".join(lines)


def _may_be_rounding(verification: Verification) -> bool:
    """Whether all that differs, and was compared bit by bit, are floats, and near each other."""
    is_near = not any(map(_is_far, verification.outputs))
    return verification.rule.is_bitwise and _only_floats_differ(verification) and is_near


def _is_far(output: Output) -> bool:
    """Whether the first element that differs shows that this is no rounding: by a good part of
    itself, and about as much as any other."""
    if output.first is None or output.max_abs_difference is None:
        return False
    try:
        before, after = complex(output.first.before), complex(output.first.after)
    except ValueError:  # no number
        return False
    apart, largest = abs(before - after), max(abs(before), abs(after))
    return apart > _FAR * largest and apart > _FAR * output.max_abs_difference


def _may_be_unstable(verification: Verification) -> bool:
    """Whether all that differs by more than a tolerance are floats, on XLA:CPU."""
    in_tolerance = not verification.rule.is_bitwise and verification.backend == "cpu"
    return in_tolerance and _only_floats_differ(verification)


def _only_floats_differ(verification: Verification) -> bool:
    differing = [output for output in verification.outputs if output.differing]
    return not verification.same and all(_is_rounded(output.dtype) for output in differing)


def _is_rounded(dtype: str) -> bool:
    """Whether sums of this type depend on their order."""
    from stablehlo_tools.verify.element_types import element_type

    element = element_type(dtype)
    return element is not None and element.is_inexact


def _emptiness(verification: Verification) -> str:
    """What the outputs were that nothing was shown about."""
    if any(verification.outputs[i].rounding for i in verification.vacuous):
        return "NaN, infinite or no more than rounding everywhere"
    return "NaN or infinite everywhere"


def _is_large(before: Artifact, after: Artifact, limit: int) -> bool:
    """Whether a program takes more than a host may give; one of unknown sizes cannot be run."""
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.verify.twin import estimated_bytes

    try:
        return max(estimated_bytes(each.module) for each in (before, after)) > limit
    except ToolError:
        return False


def _of_twin(twin: Twin, rule: Rule, given: Rule) -> list[str]:
    factors = [f"{full} → {_sizes(reduced)}" for full, reduced in twin.factors.items()]
    if len(factors) > SHOWN_FACTORS:
        factors[SHOWN_FACTORS:] = [f"{len(factors) - SHOWN_FACTORS} more"]
    stricter = f"compared {rule}, not {given}: a twin computes in f64, which rounds less"
    return [
        *([stricter] if rule != given else []),
        f"on a twin of about {_amount(twin.bytes)}, for the programs take about "
        f"{_amount(twin.full_bytes)}; dimensions: {', '.join(factors) or 'as they are'}",
        f"not shown by a twin: {'; '.join(twin.notes)}",
    ]


def _sizes(counts: tuple[int, ...]) -> str:
    return " or ".join(map(str, counts))


def _amount(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _difference(output: Output) -> list[str]:
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


def _title(output: Output) -> str:
    return f"output {output.index}" + (f" ({output.name})" if output.name else "")


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _limit(text: str) -> int:
    return int(gib(text) * 2**30)
