"""Arrays that are zero or one number all over, a device or a place at a time.

A permute of zeros moves nothing that its result would not be without it. What zeros are multiplied
with may be NaN, so a product is zeros only if both factors are.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.collectives import ModuleFacts, classify_communication
from stablehlo_tools.analysis.dataflow import Node, handed_on
from stablehlo_tools.analysis.demand.program import Access, DimMap, Need, Program, TrackedDims
from stablehlo_tools.analysis.device_values import apply, clamped_starts
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    COLLECTIVE_PERMUTE,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    PAD,
    SELECT,
    SHARDING_CONSTRAINT,
)
from stablehlo_tools.dialect.traits import ELEMENTWISE, LAYOUT, Trait, ops_with
from stablehlo_tools.ir.values import splat_of

Values = NDArray[Any]

_MOVED = LAYOUT | ops_with(Trait.PIECE) - {GATHER}


def is_splat(values: Values) -> bool:
    """Whether a tensor is, on each device, one number all over, as can be told without looking."""
    if values.size == len(values):
        return True
    parts = zip(values.strides[1:], values.shape[1:], strict=True)
    return values.size > 0 and all(stride == 0 or size == 1 for stride, size in parts)


def lone(values: Values) -> Values:
    """The number that a splat is, for each device."""
    return values[(slice(None), *[0] * (values.ndim - 1))]


def spread(numbers: Values, shape: tuple[int, ...]) -> Values:
    """A splat of one number for each device."""
    return np.broadcast_to(numbers.reshape(-1, *[1] * len(shape)), (len(numbers), *shape))


def computed_splat(node: Node, operands: list[Values], shape: tuple[int, ...]) -> Values | None:
    """What an op makes of splats, where that is a splat."""
    if node.name in _MOVED:
        return spread(lone(operands[0]), shape)
    if node.name not in ELEMENTWISE:
        return None
    computed = apply(node.op, [lone(operand) for operand in operands])
    return None if computed is None else spread(computed, shape)


def converted(values: Values, dtype: np.dtype[Any] | None) -> Values:
    """The values as another NumPy type; a view stays one."""
    if values.dtype == dtype or dtype is None:
        return values
    if not is_splat(values) or values.ndim == 1:
        return values.astype(dtype)
    return spread(lone(values).astype(dtype), values.shape[1:])


def updated(whole: Values, part: Values, starts: list[Values]) -> Values:
    """What dynamic_update_slice makes of known tensors."""
    devices = max(len(array) for array in (whole, part, *starts))
    result = np.array(np.broadcast_to(whole, (devices, *whole.shape[1:])))
    begins = [
        np.broadcast_to(clamped_starts(start, size, extent), devices)
        for start, size, extent in zip(starts, part.shape[1:], whole.shape[1:], strict=True)
    ]
    for device in range(devices):
        window = tuple(
            slice(int(begin[device]), int(begin[device]) + size)
            for begin, size in zip(begins, part.shape[1:], strict=True)
        )
        result[(device, *window)] = part[device % len(part)]
    return result


def merged(chosen: Values | None, parts: list[Values | None], most: int) -> Values | None:
    """The rows of the region that each device runs; None above `most` numbers a device."""
    known = [part for part in parts if part is not None]
    if chosen is None or len(known) != len(parts):
        return None
    if sum(part.size for part in known) > most * len(chosen):
        return None
    return np.stack(known)[chosen, np.arange(len(chosen))]


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


def moved(zeros: Need, places: int, dim_map: DimMap | None) -> Need:
    """Where a result is zeros that holds an operand's elements and no others."""
    if dim_map is None:
        return np.broadcast_to(zeros.all(axis=1, keepdims=True), (len(zeros), places))
    if dim_map.is_whole:
        return zeros
    result_zeros = np.ones((len(zeros), places), np.bool_)
    result_zeros[:, dim_map.results] = zeros[:, dim_map.operands]
    return result_zeros


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


Rule = Callable[[], Need | None]


class ZeroTracking:
    """`now[n]` says where value n is zeros; None where that is known nowhere.

    `known` gives the known integers of a value, with a row for each device.
    """

    def __init__(
        self,
        program: Program,
        module: ir.Module,
        facts: ModuleFacts,
        tracked: TrackedDims,
        known: Callable[[int], Values | None],
    ) -> None:
        self.now: list[Need | None] = [None] * len(program.types)
        self._tracked = tracked
        self._known = known
        self._facts = facts
        self._devices = facts.grid.size
        self._program = program
        self._outside = program.is_global
        self._classify = classify_communication(module.context)
        self._rules: dict[Node, Rule] = {}

    def start(self, node: Node) -> bool:
        """Notes a constant of zeros; whether it is one."""
        if not is_zero(node.op):
            return False
        shape = (self._devices, self._tracked.counts[node.results[0]])
        self.now[node.results[0]] = np.broadcast_to(np.True_, shape)
        return True

    def may_be(self, node: Node, unknown: Set[int]) -> bool:
        """Whether a result may be known to be zeros, given the values that may not."""
        if self._outside and self._program.computation(node) is None:
            return False
        known = [operand not in unknown for operand in node.operands]
        if node.name == COLLECTIVE_PERMUTE:
            return True  # on devices that are no target
        if node.name in (SELECT, DYNAMIC_UPDATE_SLICE):
            return any(known)
        if node.name in KEEPING or node.name == DYNAMIC_SLICE:
            return known[0]
        return (node.name in JOINING or node.name == PAD) and all(known)

    def evaluate(self, node: Node) -> None:
        """Brings the result of an op up to date."""
        if node not in self._rules:
            self._rules[node] = self._rule(node)
        zeros = self._rules[node]()
        self.now[node.results[0]] = zeros if zeros is not None and zeros.any() else None

    def merge(self, node: Node, chosen: Values | None) -> None:
        """Brings the results of an `if` or `case` up to date."""
        for result, returned in handed_on(node):
            parts = [self.handed(end, result) for end in returned]
            if chosen is None:
                zeros = np.logical_and.reduce(parts)
            else:
                zeros = np.stack(parts)[chosen, np.arange(self._devices)]
            self.now[result] = zeros if zeros.any() else None

    def handed(self, value: int, to: int) -> Need:
        """Where a value is zeros, by the places of one that takes it over."""
        zero = self._of(value)
        if self._tracked.alike(value, to):
            return zero
        return moved(zero, self._tracked.counts[to], None)

    def _of(self, value: int) -> Need:
        zeros = self.now[value]
        if zeros is None:
            return np.zeros((self._devices, self._tracked.counts[value]), np.bool_)
        return zeros

    def _moved(self, value: int, result: int, dim_map: DimMap | None) -> Need:
        return moved(self._of(value), self._tracked.counts[result], dim_map)

    def _rule(self, node: Node) -> Rule:
        result = node.results[0]
        name = node.name
        if name == COLLECTIVE_PERMUTE:
            return self._permute(node)
        parts = [(v, self._tracked.dim_map(node, i)) for i, v in enumerate(node.operands)]
        if name == SELECT:
            (_, _), one, other = parts
            dimension = self._tracked.dimensions[result]
            return lambda: selected(
                self._known(node.operands[0]),
                self._moved(one[0], result, one[1]),
                self._moved(other[0], result, other[1]),
                dimension,
            )
        if name in (DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE):
            return self._access(node)
        if name == PAD:
            parts[1] = (node.operands[1], None)
            dim_map = parts[0][1]
            if dim_map is not None and not dim_map.is_whole:

                def padded() -> Need:
                    beside = self._moved(node.operands[1], result, None)
                    inside = np.zeros_like(beside)
                    inside[:, dim_map.results] = True
                    return np.where(inside, self._moved(node.operands[0], result, dim_map), beside)

                return padded
        taken = parts[:1] if name in KEEPING else parts
        return lambda: np.logical_and.reduce(
            [self._moved(v, result, dim_map) for v, dim_map in taken]
        )

    def _permute(self, node: Node) -> Rule:
        """Zeros where no device sends, or one that holds zeros."""
        collective = self._classify(node.op)
        groups = self._facts.groups(collective) if collective is not None else None
        if groups is None:
            return lambda: None
        sources, targets = [source for source, _ in groups], [target for _, target in groups]
        operand, result = node.operands[0], node.results[0]
        dim_map = self._tracked.dim_map(node, 0)

        def rule() -> Need:
            zeros = self._moved(operand, result, dim_map)
            result_zeros = np.ones_like(zeros)
            result_zeros[targets] = zeros[sources]
            return result_zeros

        return rule

    def _access(self, node: Node) -> Rule:
        buffer, result = node.operands[0], node.results[0]
        reads = node.name == DYNAMIC_SLICE
        access = self._tracked.access(node)
        extent = self._tracked.counts[buffer]
        whole = self._tracked.dim_map(node, 0)

        def rule() -> Need:
            index = self._known(node.operands[access.index]) if access is not None else None
            if access is None or index is None:
                kept = self._moved(buffer, result, whole)
                return kept if reads else kept & self._moved(node.operands[1], result, None)
            at = window(access, index, extent)
            if reads:
                inside = (self._of(buffer) | ~at).all(axis=1, keepdims=True)
                return np.broadcast_to(inside, (self._devices, self._tracked.counts[result]))
            written = self._of(node.operands[1]).all(axis=1, keepdims=True)
            before = self._of(buffer)
            return np.where(at, written if access.overwrites else written & before, before)

        return rule
