"""What is asked of a value while it is traced, and what it turns out to consist of.

Elements are followed a `Box` at a time. A `BoxQuery` asks where the elements of a box come from; it
ends in a `Piece`: a box of a source, and the `View` by which that box is put into the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from stablehlo_tools.analysis.device_values import Values
from stablehlo_tools.analysis.elements.boxes import reshaped
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError

Shape = tuple[int, ...]


class UnresolvedError(Exception):
    """Why elements cannot be followed; `rule` is the precondition that this breaks."""

    def __init__(self, message: str, op: ir.Operation, rule: int) -> None:
        super().__init__(message)
        self.op = op
        self.rule = rule

    def error(self) -> ToolError:
        """The refusal."""
        return ToolError(f"fold-pipeline: {self} (P{self.rule})", self.op.location)


class InterleavedError(UnresolvedError):
    """That the elements of a box lie apart in the result of a reshape, which stands outside of the
    loop: there they can be followed to that `result`, and are computed by it."""

    def __init__(self, op: ir.Operation, result: ir.Value | None) -> None:
        super().__init__(
            "microbatches leave this op interleaved in a way that is not understood", op, 4
        )
        self.result = result


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor from `starts` on, `sizes` many along each dimension."""

    starts: Shape
    sizes: Shape

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """All elements of a tensor."""
        return Box((0,) * len(shape), tuple(shape))

    def along(self, dim: int, start: int, size: int) -> Box:
        """The same box with another range along one dimension."""
        starts, sizes = list(self.starts), list(self.sizes)
        starts[dim], sizes[dim] = start, size
        return Box(tuple(starts), tuple(sizes))

    def share(self, dim: int | None, row: int, count: int) -> Box:
        """The part of this number, of `count` equal ones along a dimension; all without one."""
        if dim is None:
            return self
        size = self.sizes[dim] // count
        return self.along(dim, self.starts[dim] + row * size, size)

    def moved(self, by: Sequence[int]) -> Box:
        """The box further on by an offset along each dimension."""
        return replace(self, starts=tuple(a + b for a, b in zip(self.starts, by, strict=True)))

    def relative_to(self, origin: Box) -> Box:
        """The box as counted from where another one starts."""
        return self.moved([-start for start in origin.starts])

    def end(self, dim: int) -> int:
        """The first position behind it along a dimension."""
        return self.starts[dim] + self.sizes[dim]

    def cut(self, dim: int, positions: Sequence[int]) -> list[Box]:
        """The box in pieces that begin at these positions along a dimension, where inside of it."""
        inside = [p for p in sorted(set(positions)) if self.starts[dim] < p < self.end(dim)]
        edges = [self.starts[dim], *inside, self.end(dim)]
        return [self.along(dim, a, b - a) for a, b in pairwise(edges)]

    def overlaps(self, other: Box) -> bool:
        """Whether two boxes of a tensor have elements in common."""
        return all(
            self.starts[d] < other.end(d) and other.starts[d] < self.end(d)
            for d in range(len(self.sizes))
        )

    def contains(self, other: Box) -> bool:
        """Whether another box lies in this one."""
        dims = range(len(self.sizes))
        return all(self.starts[d] <= other.starts[d] and other.end(d) <= self.end(d) for d in dims)

    def slices(self) -> tuple[slice, ...]:
        """The box as an index of a NumPy array."""
        return tuple(slice(s, s + n) for s, n in zip(self.starts, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Reshape:
    """Elements of shape `before`, in the same order, in shape `after`."""

    before: Shape
    after: Shape


@dataclass(frozen=True, slots=True)
class Transpose:
    """Dimension i of the result is dimension `order[i]` of the operand."""

    order: Shape

    def moved(self, box: Box) -> Box:
        """The box of the result that a box of the operand becomes."""
        starts = tuple(box.starts[d] for d in self.order)
        return Box(starts, tuple(box.sizes[d] for d in self.order))


@dataclass(frozen=True, slots=True)
class Convert:
    """Each element as another type, written as this text."""

    element: str


@dataclass(frozen=True, slots=True)
class BroadcastScalar:
    """A scalar, repeated in this shape."""

    shape: Shape


ViewOp = Reshape | Transpose | Convert | BroadcastScalar


@dataclass(frozen=True, slots=True)
class View:
    """How a box of a source becomes the box `target` of what was asked for.

    `ops` lead from the one to the other; the last is applied first.
    """

    target: Box
    ops: tuple[ViewOp, ...] = ()

    def of_operand(self, op: ViewOp) -> View:
        """The view of the operand of an op whose result is viewed."""
        ops = self.ops
        if isinstance(op, Reshape):
            if ops and isinstance(later := ops[-1], Reshape):
                op, ops = Reshape(op.before, later.after), ops[:-1]
            if op.before == op.after:
                return View(self.target, ops)
        return View(self.target, (*ops, op))

    def restricted(self, box: Box) -> View | None:
        """The view of a box of what is viewed; None where that does not become a box."""
        ops: list[ViewOp] = []
        for op in reversed(self.ops):
            own: ViewOp = op
            if isinstance(op, Reshape):
                after = reshaped_box(box, op.before, op.after)
                if after is None:
                    return None
                box, own = after, Reshape(box.sizes, after.sizes)
            elif isinstance(op, Transpose):
                box = op.moved(box)
            elif isinstance(op, BroadcastScalar):
                box = Box.whole(op.shape)
            ops.append(own)
        return View(box.moved(self.target.starts), tuple(reversed(ops)))


def reshaped_box(box: Box, before: Shape, after: Shape) -> Box | None:
    """The box that a box becomes by a reshape; None if its elements do not fill a box then."""
    if box == Box.whole(before):
        return Box.whole(after)
    if 0 in box.sizes:
        return None
    ranges = zip(box.starts, box.sizes, strict=True)
    filled = reshaped(tuple(range(start, start + size) for start, size in ranges), before, after)
    sizes = tuple(map(len, filled))
    # `reshaped` returns a part of the elements, or with gaps, where they do not fill a box.
    if prod(sizes) != prod(box.sizes) or any(numbers.step != 1 for numbers in filled):
        return None
    return Box(tuple(numbers.start for numbers in filled), sizes)


@dataclass(frozen=True)
class Outside:
    """A value from outside of the loop; for an argument of a manual computation, what it is a
    shard of along the axis of the stages."""

    value: ir.Value


@dataclass(frozen=True)
class Splat:
    """One number everywhere; `text` is that of the constant, `element` that of its type."""

    text: str
    element: str
    zero: bool


@dataclass(frozen=True)
class Known:
    """Integers that are known, of this NumPy type."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(array: Values) -> Known:
        """Integers as a source, which can be compared and hashed."""
        return Known(str(array.dtype), array.shape, array.tobytes())


@dataclass(frozen=True)
class Computed:
    """What an op computed on a rank in a tick; `tick` is -1 outside of the loop."""

    value: ir.Value
    rank: int
    tick: int


@dataclass(frozen=True)
class Summed:
    """What a value of the loop's body is on a rank, added up over some ticks."""

    value: ir.Value
    rank: int
    ticks: Shape


Source = Outside | Splat | Known | Computed | Summed


@dataclass(frozen=True)
class Piece:
    """A box of a source, and how it is put into what was asked for."""

    source: Source
    box: Box
    view: View

    @property
    def is_zero(self) -> bool:
        """Whether it is known to consist of zeros."""
        if isinstance(self.source, Known):
            return not any(self.source.data)
        return isinstance(self.source, Splat) and self.source.zero

    def zeroed(self, element: ir.Type) -> Piece:
        """Zeros in its place; `element` is the type of what it is a box of."""
        view = replace(self.view, ops=())
        return Piece(zeros(element), Box.whole(self.view.target.sizes), view)


@dataclass(frozen=True)
class BoxQuery:
    """Asks where a box of a value comes from, as it is on a rank in a tick.

    `view` is how that box is put into what was asked for at first; `reshaped` is what a reshape
    outside of the loop gives that merges dimensions, the last on the way.
    """

    value: ir.Value
    rank: int
    tick: int
    box: Box
    view: View
    reshaped: ir.Value | None = None

    def at(self, value: ir.Value, box: Box) -> BoxQuery:
        """The same elements in another value."""
        return replace(self, value=value, box=box)

    def in_tick(self, value: ir.Value, tick: int) -> BoxQuery:
        """The same elements in what a carry was in another tick."""
        return replace(self, value=value, tick=tick)

    def ending_in(self, source: Source) -> Piece:
        """The answer that the elements are all of a source."""
        return Piece(source, Box.whole(self.box.sizes), self.view)

    def through(self, value: ir.Value, box: Box, op: ViewOp) -> BoxQuery:
        """The same elements in the operand of a view op."""
        return replace(self, value=value, box=box, view=self.view.of_operand(op))

    def part(self, op: ir.Operation, box: Box) -> BoxQuery:
        """The query for a box of this one's; `op` is what cuts it, for a refusal."""
        if box == self.box:
            return self
        view = self.view.restricted(box.relative_to(self.box))
        if view is None:
            raise InterleavedError(op, self.reshaped)
        return replace(self, box=box, view=view)


def zeros(element: ir.Type) -> Splat:
    """Zeros of an element type."""
    if isinstance(element, ir.FloatType):
        text = "dense<0.000000e+00>"
    elif isinstance(element, ir.ComplexType):
        text = "dense<(0.000000e+00,0.000000e+00)>"
    else:
        is_bool = isinstance(element, ir.IntegerType) and element.width == 1
        text = "dense<false>" if is_bool else "dense<0>"
    return Splat(text, str(element), True)
