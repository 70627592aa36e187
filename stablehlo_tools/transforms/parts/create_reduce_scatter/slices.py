"""Finds the device-dependent slices that a collective's result reaches, with the ops on the way.

A window has, for each dimension, the chunk of a value that each device reads. The search follows it
backwards, from the window of an op's result to the window of its operand. The op must compute the
one from the other alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stablehlo_tools.analysis.device_values import DeviceValues, clamped_starts
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import dimensions_of, integers, static_shape
from stablehlo_tools.dialect.factors import (
    PASSED_THROUGH,
    DimensionLink,
    FactorRole,
    OpDimensions,
    Shape,
)
from stablehlo_tools.dialect.names import (
    BITCAST_CONVERT,
    BROADCAST,
    CONSTANT,
    DYNAMIC_SLICE,
    PAD,
    RESHAPE,
    SHARDING_CONSTRAINT,
    TRANSPOSE,
)
from stablehlo_tools.dialect.traits import Trait, full_names, ops_with, ops_with_any
from stablehlo_tools.ir.values import producer, splat_element

# Elementwise ops that are exact or round correctly: they return the same bits on a part as on the
# whole. Of the ops on bits, the pass only supports `bitcast_convert`.
ELEMENTWISE = (
    ops_with(Trait.ELEMENTWISE) & ops_with_any(Trait.EXACT | Trait.CORRECTLY_ROUNDED)
    | {BITCAST_CONVERT, SHARDING_CONSTRAINT}
) - full_names("count_leading_zeros popcnt reduce_precision")
_HANDED_ON = ELEMENTWISE | {BROADCAST, RESHAPE, TRANSPOSE}


@dataclass(frozen=True)
class ChunkCut:
    """A dimension divided into `count` equal chunks; device d reads chunk `taken[d]`.

    `start` is the scalar in the program that is the start of the chunk in a dimension of `extent`.
    """

    count: int
    taken: tuple[int, ...]
    start: ir.Value = field(compare=False)
    extent: int = field(compare=False)


Window = tuple[ChunkCut | None, ...]  # one entry for each dimension; None: the whole dimension


def shape_of(value: ir.Value) -> Shape | None:
    """Returns the static shape of a tensor; None for any other type."""
    return static_shape(value.type)


def narrowed_type(value: ir.Value, window: Window) -> ir.RankedTensorType:
    """Returns the type of one device's part of a value."""
    whole = ir.RankedTensorType(value.type)
    pairs = zip(whole.shape, window, strict=True)
    shape = [size if cut is None else size // cut.count for size, cut in pairs]
    return ir.RankedTensorType.get(shape, whole.element_type, loc=value.location)


def sliced_window(op: ir.Operation, values: DeviceValues) -> Window | None:
    """Returns the window of a dynamic_slice; None unless every cut is into equal chunks."""
    shape = shape_of(op.operands[0])
    if shape is None:
        return None
    sizes = integers(op, "slice_sizes")
    window: list[ChunkCut | None] = []
    for extent, size, start in zip(shape, sizes, list(op.operands)[1:], strict=True):
        if size == extent:
            window.append(None)
            continue
        if size == 0 or extent % size:
            return None
        starts = values.scalar(start)
        if starts is None:
            return None
        begins = clamped_starts(starts, size, extent)
        if (begins % size).any():
            return None
        window.append(
            ChunkCut(extent // size, tuple(int(i) for i in begins // size), start, extent)
        )
    return tuple(window)


def window_before(op: ir.Operation, position: int, window: Window) -> Window | None:
    """Returns the window of one operand that gives a window of an op's result; None for unsupported
    ops.

    Returns None, too, if a window of another operand cannot be computed.
    """
    if len(op.results) != 1 or len(op.regions):
        return None
    relation = dimensions_of(op)
    if op.name not in _HANDED_ON or relation is None:
        return None
    before, (after,) = relation.operands[position], relation.results
    if op.name in ELEMENTWISE:
        others = [value for i, value in enumerate(op.operands) if i != position]
        if before != after or not all(can_narrow(value, window) for value in others):
            return None
    if op.name == RESHAPE and 0 in before:
        return None
    taken: list[ChunkCut | None] = [None] * len(before)
    for dim, cut in enumerate(window):
        if cut is None or _is_repeated(relation, dim):
            continue
        leading = _leading(relation, position, dim)
        if leading is None or leading.factor.size % cut.count:
            return None
        taken[leading.operand.dim] = cut
    return tuple(taken)


def _leading(relation: OpDimensions, position: int, dim: int) -> DimensionLink | None:
    """Returns the outermost factor of a result's dimension if it is outermost in an operand's
    dimension, too; else None. In row-major order, a chunk of one is then a chunk of the other."""
    for link in relation.of_result(0, dim):
        one, other, size = link.operand, link.result, link.factor.size
        if one.tensor != position or link.role not in PASSED_THROUGH:
            continue
        if size * other.step == relation.results[0][dim]:
            whole = relation.operands[position][one.dim]
            return link if size * one.step == whole else None
    return None


def _is_repeated(relation: OpDimensions, dim: int) -> bool:
    return all(f.role is FactorRole.REPEATED for f in relation.along_result(0, dim))


def can_narrow(value: ir.Value, window: Window) -> bool:
    """Returns True if `smaller_collectives` can compute a window of a value."""
    shape = shape_of(value)
    if shape is None:
        return False
    if not shape or not any(window) or splat_of(value) is not None:
        return True
    maker = producer(value)
    if maker is not None and maker.name == BROADCAST and spreads(maker, window):
        return True
    return all(cut is None or cut.extent == e for cut, e in zip(window, shape, strict=True))


def splat_of(value: ir.Value) -> ir.Attribute | None:
    """Returns the element of a constant that is the same for all elements; None for any other
    value."""
    maker = producer(value)
    if maker is None or maker.name != CONSTANT:
        return None
    return splat_element(maker)


def spreads(broadcast: ir.Operation, window: Window) -> bool:
    """Returns True if a broadcast_in_dim fills every cut dimension with copies."""
    relation = dimensions_of(broadcast)
    if relation is None:
        return False
    return all(cut is None or _is_repeated(relation, d) for d, cut in enumerate(window))


_MOVABLE = frozenset({PAD, RESHAPE, TRANSPOSE})  # ops that may move to before a reduction
_FOLLOWED = _HANDED_ON | _MOVABLE | {DYNAMIC_SLICE}
_LONGEST = 16  # ops between a collective and a slice
_MOST = 64  # ops looked at for one result


@dataclass(frozen=True)
class SliceStep:
    """An op on the way: the number of the operand that is followed, and the window of its
    result."""

    op: ir.Operation
    operand: int
    window: Window


@dataclass(frozen=True)
class Slice:
    """A dynamic_slice, the steps that lead to it, and the window of the value from which they
    start.

    `before` are ops from the searched value to that value, if no window of the searched value is
    the same part: a pad, or a reshape that makes a middle dimension.
    """

    op: ir.Operation
    steps: tuple[SliceStep, ...]
    window: Window
    before: tuple[ir.Operation, ...] = ()

    @property
    def touched(self) -> list[ir.Value]:
        """The results of the slice and of all ops before it: two rewrites must not share one."""
        ops = (self.op, *(step.op for step in self.steps), *self.before)
        return [op.results[0] for op in ops]


@dataclass
class Slices:
    """The slices in program order, and the ops in which other uses of the value end."""

    found: list[Slice] = field(default_factory=list[Slice])
    others: list[ir.Operation] = field(default_factory=list[ir.Operation])


def find_slices(value: ir.Value, values: DeviceValues) -> Slices:
    """Follows a value's uses in its block to slices whose windows are windows of the value."""
    search = _SliceSearch(value, values)
    search.follow(value, ())
    return search.slices


class _SliceSearch:
    def __init__(self, source: ir.Value, values: DeviceValues) -> None:
        owner = source.owner
        assert not isinstance(owner, ir.Block)
        self.block = owner.operation.block
        self.values = values
        self.slices = Slices()
        self.seen: set[ir.Value] = set()

    def follow(self, value: ir.Value, path: tuple[tuple[ir.Operation, int], ...]) -> None:
        uses = [(use.owner.operation, use.operand_number) for use in value.uses]
        if not uses and path:
            self.slices.others.append(path[-1][0])
        for user, position in reversed(uses):  # MLIR lists the latest first
            if not self._enter(user, path):
                self.slices.others.append(user)
            elif user.name == DYNAMIC_SLICE:
                self._end(user, position, path)
            else:
                self.follow(user.results[0], (*path, (user, position)))

    def _enter(self, user: ir.Operation, path: tuple[tuple[ir.Operation, int], ...]) -> bool:
        """Returns True if the search may continue at an op. It visits an op once, even for `x
        * x`."""
        if len(user.results) != 1 or user.block != self.block:
            return False
        result = user.results[0]
        if result in self.seen or len(self.seen) == _MOST or len(path) == _LONGEST:
            return False
        self.seen.add(result)
        return user.name in _FOLLOWED

    def _end(
        self, user: ir.Operation, position: int, path: tuple[tuple[ir.Operation, int], ...]
    ) -> None:
        window = sliced_window(user, self.values) if position == 0 else None
        steps: list[SliceStep] = []
        left = list(path)
        while window is not None and left:
            earlier = window_before(*left[-1], window)
            if earlier is None:
                break
            steps.append(SliceStep(*left.pop(), window))
            window = earlier
        if window is None or not all(op.name in _MOVABLE and not n for op, n in left):
            self.slices.others.append(user)
            return
        before = tuple(op for op, _ in left)
        self.slices.found.append(Slice(user, tuple(reversed(steps)), window, before))
