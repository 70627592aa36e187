"""Decides if two programs that are too large to run compute the same values, by their twin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.exported import argument_leaves
from stablehlo_tools.ir.platform_index import platform_arguments
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.verify.run_plan import no_input
from stablehlo_tools.verify.twin.compared_constants import ComparedConstant
from stablehlo_tools.verify.twin.twin import Twin, twins
from stablehlo_tools.verify.verification import Options, Verification, verify_artifacts
from stablehlo_tools.verify.verification_job import SIDES, Side


@dataclass(frozen=True)
class TwinVerification:
    """The answer for a twin, and its limits.

    `not_covered` are constants of each program whose comparisons had only one outcome.
    `unequal` are those of them without an equal constant in the other program.
    """

    twin: Twin
    verification: Verification
    not_covered: Mapping[Side, tuple[ComparedConstant, ...]]
    unequal: Mapping[Side, tuple[ComparedConstant, ...]]

    @property
    def same(self) -> bool:
        """True if the values agree, and so do the constants that the twin does not cover."""
        return self.verification.same and not any(self.unequal.values())

    def limits(self) -> list[str]:
        """Returns lines with the sizes for which the twin proves all sizes, and its limits."""
        lines: list[str] = []
        if self.twin.uniform:
            sizes = ", ".join(map(str, self.twin.uniform))
            lines.append(f"uniform in {sizes}: no op depends on a position in them")
        lines += [f"not uniform in {size}: {why}" for size, why in self.twin.positional]
        texts = dict.fromkeys(str(c) for found in self.not_covered.values() for c in found)
        if texts:
            lines.append(f"not covered: {'; '.join(texts)}")
        for side, found in self.unequal.items():
            if found:
                which = "; ".join(dict.fromkeys(map(str, found)))
                lines.append(f"differs: {side.upper()} alone compares with {which}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Returns the answer as plain data: that of `verify`, with the shapes of the twin."""
        shapes = [{"full": list(full), "reduced": list(small)} for full, small in self.twin.shapes]
        twin = {
            "bytes": self.twin.bytes,
            "full_bytes": self.twin.full_bytes,
            "shapes": shapes,
            "uniform": list(self.twin.uniform),
            "not_uniform": [{"size": size, "op": op} for size, op in self.twin.positional],
            "not_covered": {s: list(map(str, each)) for s, each in self.not_covered.items()},
            "unequal": {s: list(map(str, each)) for s, each in self.unequal.items()},
        }
        return {**self.verification.to_json(), "same": self.same, "twin": twin}


def verify_twins(
    before: Artifact, after: Artifact, options: Options, bytes_limit: int
) -> TwinVerification:
    """Runs the twin of two programs on random inputs and compares their outputs.

    Raises ToolError as `twins` and `verify_artifacts` do.
    """
    twin = twins(before, after, bytes_limit)
    fixed = _by_argument(before, options)
    options = replace(options, fixed=fixed, limits=twin.limits, partitioned=False)
    verification = verify_artifacts(twin.before, twin.after, options)
    not_covered = dict(twin.counted)
    if verification.exact is not None:  # floats count no outcomes
        for side, numbers in verification.exact.one_sided.items():
            not_covered[side] = tuple(twin.counted[side][number] for number in numbers)
    unequal: dict[Side, tuple[ComparedConstant, ...]] = {}
    for side, other in zip(SIDES, SIDES[::-1], strict=True):
        known = {constant.distance for constant in twin.constants[other]}
        unequal[side] = tuple(
            constant
            for constant in not_covered[side]
            if constant.distance not in known and not _counts_shards(constant)
        )
    return TwinVerification(twin, verification, not_covered, unequal)


def _counts_shards(constant: ComparedConstant) -> bool:
    distance = constant.distance
    return any(abs(distance - e.size * round(distance / e.size)) <= 1 for e in constant.extents)


def _by_argument(artifact: Artifact, options: Options) -> dict[int, float]:
    """Maps numbers of the module's arguments, without the platform index, to the fixed values.

    Inputs that the program does not use are left out. Raises ToolError for a missing input."""
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
