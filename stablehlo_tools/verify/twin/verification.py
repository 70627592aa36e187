"""Whether two programs that are too large to run compute the same values, asked of their twin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.exported import argument_leaves
from stablehlo_tools.ir.platform_index import platform_arguments
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.verify.plan import no_input
from stablehlo_tools.verify.twin.twin import Twin, twins
from stablehlo_tools.verify.verification import Options, Verification, verify_artifacts


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

    Raises ToolError as `twins` and `verify_artifacts` do.
    """
    twin = twins(before, after, bytes_limit)
    fixed = _by_argument(before, options)
    options = replace(options, fixed=fixed, ranges=twin.ranges)
    return TwinVerification(twin, verify_artifacts(twin.before, twin.after, options))


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
