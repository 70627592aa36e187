"""Whether two programs that are too large to run compute the same values, asked of their twin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.exported import argument_leaves
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.platform_index import platform_arguments
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline
from stablehlo_tools.verify.comparison import Rule
from stablehlo_tools.verify.device_grid import is_partitioned
from stablehlo_tools.verify.plan import no_input
from stablehlo_tools.verify.twin.twin import Twin, twins
from stablehlo_tools.verify.verification import Options, Verification, verify_artifacts

WIDE = Rule(rtol=1e-6, atol=1e-9)


@dataclass(frozen=True)
class TwinVerification:
    """What the comparison of a twin showed."""

    twin: Twin
    verification: Verification

    def to_json(self) -> dict[str, Any]:
        """The answer as plain data: that of `verify`, and what was compared in place of what."""
        shapes = [{"full": list(full), "reduced": list(small)} for full, small in self.twin.shapes]
        twin = {
            "bytes": self.twin.bytes,
            "full_bytes": self.twin.full_bytes,
            "shapes": shapes,
            "not_shown": list(self.twin.notes),
        }
        return {**self.verification.to_json(), "twin": twin}


def verify_twins(
    before: Artifact, after: Artifact, options: Options, bytes_limit: int
) -> TwinVerification:
    """Runs the twin of two programs on random inputs and compares what the two compute.

    Where rounding may differ (a rule with a tolerance), both compute in f64 and are held to
    `WIDE`, or to what was given where that is less: a mistake that a clipped gradient makes small
    still shows. What a deep model makes of random weights can be so sensitive that rounding in f64
    moves it further: see `Options.conditioned`.

    Raises ToolError as `twins` and `verify_artifacts` do. Where they differ in f64, too, BEFORE is
    also compared with what `partition` makes of it: if that differs as well, the twin may be at
    fault, and a ToolError says that nothing was shown.
    """
    wide = options.rule.rtol is not None or options.rule.atol is not None
    twin = twins(before, after, bytes_limit, wide=wide)
    options = replace(options, fixed=_by_argument(before, options))
    if wide:
        options = replace(options, rule=in_f64(options.rule), as_deployed=True, conditioned=True)
    answer = TwinVerification(twin, _compared(twin, options))
    if wide and not answer.verification.same:  # else it may be no more than rounding
        _check_trusted(before, options, bytes_limit)
    return answer


def in_f64(given: Rule) -> Rule:
    """The tolerances of programs in f64: the lesser ones of what was given and of `WIDE`."""
    rtol, atol = (
        usual if asked is None else min(usual, asked)
        for asked, usual in ((given.rtol, WIDE.rtol or 0), (given.atol, WIDE.atol or 0))
    )
    return Rule(rtol, atol, given.any_nan)


def _compared(twin: Twin, options: Options) -> Verification:
    return verify_artifacts(twin.before, twin.after, replace(options, ranges=twin.ranges))


def _check_trusted(before: Artifact, options: Options, bytes_limit: int) -> None:
    if not is_partitioned(before.module):
        return
    try:
        partitioned = before.copy()
        run_pipeline(partitioned, Pipeline.parse("partition"))
        trusted = _compared(twins(before, partitioned, bytes_limit, wide=True), options)
    except ToolError:
        return  # nothing to compare with: the difference stands as it is
    if not trusted.same:
        raise ToolError(
            "nothing was shown: the values differ on the twin, but BEFORE's also differ there from "
            "what `partition` alone makes of it. Either that is wrong, or the sizes of the twin "
            "are; compare a smaller export of the program"
        )


def _by_argument(artifact: Artifact, options: Options) -> dict[int, float]:
    """The fixed values by the number of the module's argument, the index of a platform not counted;
    a caller's input that the program does not use is none."""
    if artifact.exported is None:
        return dict(options.fixed)
    main = entry_function(artifact.module)
    leaves, first = argument_leaves(artifact.exported, main), len(platform_arguments(main))
    absent = [leaf for leaf in options.fixed if leaf >= len(artifact.exported.in_avals)]
    if absent:
        count = len(artifact.exported.in_avals)
        raise no_input(absent[0], options.fixed[absent[0]], count)
    fixed = options.fixed
    return {place - first: fixed[leaf] for place, leaf in leaves.items() if leaf in fixed}
