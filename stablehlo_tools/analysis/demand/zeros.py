"""Which values are surely zeros, on which devices and at which places: +0.0, 0 or false.

A permute of zeros moves nothing that its result would not be without it. What zeros are multiplied
with may be NaN, so a product is zeros only if both factors are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stablehlo_tools.analysis.demand.dimensions import Lane
from stablehlo_tools.analysis.demand.indexing import Access
from stablehlo_tools.analysis.demand.levels import Need
from stablehlo_tools.analysis.demand.program import Step
from stablehlo_tools.analysis.demand.splats import Values, is_splat, lone
from stablehlo_tools.analysis.device_arithmetic import clamped_starts
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import SHARDING_CONSTRAINT
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.constants import splat_of

SELECT = "stablehlo.select"
PERMUTE = "stablehlo.collective_permute"
SLICE = "stablehlo.dynamic_slice"
UPDATE = "stablehlo.dynamic_update_slice"
PAD = "stablehlo.pad"
# Zeros of one operand are zeros of the result.
KEEPING = ops_with(Trait.ZERO_OF_ZERO) | {SHARDING_CONSTRAINT}
# Zeros of all operands are zeros of the result.
JOINING = ops_with(Trait.ZERO_OF_ZEROS)


def is_zero(op: ir.Operation) -> bool:
    """Whether an op is a constant of zeros, none of them negative."""
    number = splat_of(op.results[0]) if op.name == "stablehlo.constant" else None
    if number is None:
        return False
    parts = (number.real, number.imag) if isinstance(number, complex) else (number,)
    return all(part == 0 and not np.signbit(part) for part in parts)


def can_be_zero(step: Step, can: Sequence[bool]) -> bool:
    """Whether a result may be known to be zeros, given the operands that may."""
    known = [can[operand] for operand in step.operands]
    if step.name == PERMUTE:
        return True  # on devices that are no target
    if step.name in (SELECT, UPDATE):
        return any(known)
    if step.name in KEEPING or step.name == SLICE:
        return known[0]
    return (step.name in JOINING or step.name == PAD) and all(known)


def moved(zeros: Need, places: int, lane: Lane | None) -> Need:
    """Where a result is zeros that holds an operand's elements and no others."""
    if lane is None:
        return np.broadcast_to(zeros.all(axis=1, keepdims=True), (len(zeros), places))
    if lane.is_whole:
        return zeros
    found = np.ones((len(zeros), places), np.bool_)
    found[:, lane.results] = zeros[:, lane.operands]
    return found


def selected(predicate: Values | None, one: Need, other: Need, dimension: int | None) -> Need:
    """Where the result of a select is zeros. Of a predicate that is unknown either side may be."""
    if predicate is None:
        return one & other
    if is_splat(predicate):
        return np.where(lone(predicate)[:, None], one, other)
    either = one | ~taken(predicate, True, dimension)
    return either & (other | ~taken(predicate, False, dimension))


def taken(predicate: Values, wanted: bool, dimension: int | None) -> Need:
    """By device and place: whether a known predicate has a wanted value at any element."""
    if is_splat(predicate):
        return (lone(predicate) == wanted)[:, None]
    mask = predicate == wanted
    if dimension is None:
        return mask.reshape(len(mask), -1).any(axis=1)[:, None]
    along = np.moveaxis(mask, 1 + dimension, 1)
    return along.reshape(len(mask), along.shape[1], -1).any(axis=2)


def window(access: Access, index: Values, extent: int) -> Need:
    """The places that an access touches on each device; `index` has one number for each."""
    places = np.arange(extent)
    starts = index.reshape(len(index))
    if access.clamps:
        starts = clamped_starts(starts, access.size, extent)
    starts = starts.astype(np.int64)
    return (places >= starts[:, None]) & (places < starts[:, None] + access.size)


def permuted(pairs: Sequence[tuple[int, int]]) -> Callable[[Need], Need]:
    """Where a permute's result is zeros: where no device sends, or one that holds zeros."""
    sources, targets = [s for s, _ in pairs], [t for _, t in pairs]

    def rule(zeros: Need) -> Need:
        found = np.ones_like(zeros)
        found[targets] = zeros[sources]
        return found

    return rule
