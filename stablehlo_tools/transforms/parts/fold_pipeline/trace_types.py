"""The queries of a trace, and the pieces that it finds a value to consist of.

Elements are traced a `Box` at a time. A `BoxQuery` asks where the elements of a box come from. It
ends in a `SourceBox`: a box of a source, and the `BoxView` that puts that box into the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from stablehlo_tools.analysis.device_values import Values
from stablehlo_tools.analysis.elements.boxes import reshape_box
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError

Shape = tuple[int, ...]


class UnresolvedError(Exception):
    """Elements that cannot be traced; `rule` is the number of the precondition that they break."""

    def __init__(self, message: str, op: ir.Operation, rule: int) -> None:
        super().__init__(message)
        self.op = op
        self.rule = rule

    def error(self) -> ToolError:
        """Returns the refusal, located at the op."""
        return ToolError(f"fold-pipeline: {self} (P{self.rule})", self.op.location)


class InterleavedError(UnresolvedError):
    """A reshape that leaves the elements of a box with gaps between them. If it is outside of the
    loop, the trace can end there: its `result` then counts as computed."""

    def __init__(self, op: ir.Operation, result: ir.Value | None) -> None:
        super().__init__(
            "this op interleaves microbatches in an order that is not recognized", op, 4
        )
        self.result = result


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor from `starts` on, `sizes` many along each dimension."""

    starts: Shape
    sizes: Shape

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Returns the box of all elements of a tensor."""
        return Box((0,) * len(shape), tuple(shape))

    def along(self, dim: int, start: int, size: int) -> Box:
        """Returns the box with another range along one dimension."""
        starts, sizes = list(self.starts), list(self.sizes)
        starts[dim], sizes[dim] = start, size
        return Box(tuple(starts), tuple(sizes))

    def share(self, dim: int | None, row: int, count: int) -> Box:
        """Returns part `row` of `count` equal parts along a dimension; the whole box if `dim` is
        None."""
        if dim is None:
            return self
        size = self.sizes[dim] // count
        return self.along(dim, self.starts[dim] + row * size, size)

    def shift_by(self, by: Sequence[int]) -> Box:
        """Returns the box shifted by an offset along each dimension."""
        return replace(self, starts=tuple(a + b for a, b in zip(self.starts, by, strict=True)))

    def relative_to(self, origin: Box) -> Box:
        """Returns the box in coordinates that start where `origin` starts."""
        return self.shift_by([-start for start in origin.starts])

    def end(self, dim: int) -> int:
        """Returns the first position after the box along a dimension."""
        return self.starts[dim] + self.sizes[dim]

    def cut(self, dim: int, positions: Sequence[int]) -> list[Box]:
        """Returns the box cut along a dimension at those of the positions that are inside of it."""
        inside = [p for p in sorted(set(positions)) if self.starts[dim] < p < self.end(dim)]
        edges = [self.starts[dim], *inside, self.end(dim)]
        return [self.along(dim, a, b - a) for a, b in pairwise(edges)]

    def overlaps(self, other: Box) -> bool:
        """Returns True if two boxes of a tensor have elements in common."""
        return all(
            self.starts[d] < other.end(d) and other.starts[d] < self.end(d)
            for d in range(len(self.sizes))
        )

    def contains(self, other: Box) -> bool:
        """Returns True if this box contains all of another one."""
        dims = range(len(self.sizes))
        return all(self.starts[d] <= other.starts[d] and other.end(d) <= self.end(d) for d in dims)

    def slices(self) -> tuple[slice, ...]:
        """Returns the box as an index of a NumPy array."""
        return tuple(slice(s, s + n) for s, n in zip(self.starts, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class TraceReshape:
    """Elements of shape `before`, in the same order, in shape `after`."""

    before: Shape
    after: Shape


@dataclass(frozen=True, slots=True)
class Transpose:
    """Dimension i of the result is dimension `order[i]` of the operand."""

    order: Shape

    def transpose_box(self, box: Box) -> Box:
        """Returns the box of the result that holds the elements of a box of the operand."""
        starts = tuple(box.starts[d] for d in self.order)
        return Box(starts, tuple(box.sizes[d] for d in self.order))


@dataclass(frozen=True, slots=True)
class Convert:
    """Conversion of each element to another element type, given as MLIR text."""

    element: str


@dataclass(frozen=True, slots=True)
class BroadcastScalar:
    """A scalar broadcast to this shape."""

    shape: Shape


ViewOp = TraceReshape | Transpose | Convert | BroadcastScalar


@dataclass(frozen=True, slots=True)
class BoxView:
    """The ops that turn a box of a source into the box `target` of the tensor that was queried.

    They lead from the queried tensor back to the source, so the last of `ops` is applied first.
    """

    target: Box
    ops: tuple[ViewOp, ...] = ()

    def of_operand(self, op: ViewOp) -> BoxView:
        """Returns the view of an op's operand, given this view of its result."""
        ops = self.ops
        if isinstance(op, TraceReshape):
            if ops and isinstance(later := ops[-1], TraceReshape):
                op, ops = TraceReshape(op.before, later.after), ops[:-1]
            if op.before == op.after:
                return BoxView(self.target, ops)
        return BoxView(self.target, (*ops, op))

    def restrict_to(self, box: Box) -> BoxView | None:
        """Returns the view of a box of the source; None if that box does not become a box."""
        ops: list[ViewOp] = []
        for op in reversed(self.ops):
            own: ViewOp = op
            if isinstance(op, TraceReshape):
                after = reshaped_box(box, op.before, op.after)
                if after is None:
                    return None
                box, own = after, TraceReshape(box.sizes, after.sizes)
            elif isinstance(op, Transpose):
                box = op.transpose_box(box)
            elif isinstance(op, BroadcastScalar):
                box = Box.whole(op.shape)
            ops.append(own)
        return BoxView(box.shift_by(self.target.starts), tuple(reversed(ops)))


def reshaped_box(box: Box, before: Shape, after: Shape) -> Box | None:
    """Returns the box that a reshape turns a box into; None if its elements do not fill a box."""
    if box == Box.whole(before):
        return Box.whole(after)
    if 0 in box.sizes:
        return None
    ranges = zip(box.starts, box.sizes, strict=True)
    filled = reshape_box(tuple(range(start, start + size) for start, size in ranges), before, after)
    sizes = tuple(map(len, filled))
    # `reshape_box` returns too few elements, or a step other than 1, if they do not fill a box.
    if prod(sizes) != prod(box.sizes) or any(numbers.step != 1 for numbers in filled):
        return None
    return Box(tuple(numbers.start for numbers in filled), sizes)


@dataclass(frozen=True)
class Outside:
    """A value from outside of the loop. An argument of a manual computation denotes the whole value
    that it is a shard of along the axis of the stages."""

    value: ir.Value


@dataclass(frozen=True)
class Splat:
    """One number in every element: `text` of the constant, and `element`, the text of its type."""

    text: str
    element: str
    zero: bool


@dataclass(frozen=True)
class Known:
    """Integers whose values are known, of this NumPy type."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def from_array(array: Values) -> Known:
        """Returns integers as a source, which can be compared and hashed."""
        return Known(str(array.dtype), array.shape, array.tobytes())


@dataclass(frozen=True)
class Computed:
    """The result of an op on a rank in a tick; `tick` is -1 outside of the loop."""

    value: ir.Value
    rank: int
    tick: int


@dataclass(frozen=True)
class Summed:
    """The sum over some ticks of a value in the loop's body, on one rank."""

    value: ir.Value
    rank: int
    ticks: Shape


Source = Outside | Splat | Known | Computed | Summed


@dataclass(frozen=True)
class SourceBox:
    """A box of a source, and the view that puts it into the tensor that was queried."""

    source: Source
    box: Box
    view: BoxView

    @property
    def is_zero(self) -> bool:
        """True if the piece is known to be zero."""
        if isinstance(self.source, Known):
            return not any(self.source.data)
        return isinstance(self.source, Splat) and self.source.zero

    def with_zeros(self, element: ir.Type) -> SourceBox:
        """Returns zeros in place of the piece; `element` is the element type of its source."""
        view = replace(self.view, ops=())
        return SourceBox(zeros(element), Box.whole(self.view.target.sizes), view)


@dataclass(frozen=True)
class BoxQuery:
    """A query for the origin of a box of a value, on a rank in a tick.

    `view` puts that box into the tensor of the first query. `reshape_box` is the result of the last
    reshape on the way that is outside of the loop and merges dimensions.
    """

    value: ir.Value
    rank: int
    tick: int
    box: Box
    view: BoxView
    reshaped: ir.Value | None = None

    def in_value(self, value: ir.Value, box: Box) -> BoxQuery:
        """Returns the query for the same elements in another value."""
        return replace(self, value=value, box=box)

    def in_tick(self, value: ir.Value, tick: int) -> BoxQuery:
        """Returns the query for the same elements, as a carry held them in another tick."""
        return replace(self, value=value, tick=tick)

    def ending_in(self, source: Source) -> SourceBox:
        """Returns the answer that the elements are all of a source."""
        return SourceBox(source, Box.whole(self.box.sizes), self.view)

    def through(self, value: ir.Value, box: Box, op: ViewOp) -> BoxQuery:
        """Returns the query for the same elements in the operand of a view op."""
        return replace(self, value=value, box=box, view=self.view.of_operand(op))

    def part(self, op: ir.Operation, box: Box) -> BoxQuery:
        """Returns the query for a box inside of this one's. Raises InterleavedError at `op`, which
        cuts it, if the view does not turn that box into a box."""
        if box == self.box:
            return self
        view = self.view.restrict_to(box.relative_to(self.box))
        if view is None:
            raise InterleavedError(op, self.reshaped)
        return replace(self, box=box, view=view)


def zeros(element: ir.Type) -> Splat:
    """Returns zeros of an element type."""
    if isinstance(element, ir.FloatType):
        text = "dense<0.000000e+00>"
    elif isinstance(element, ir.ComplexType):
        text = "dense<(0.000000e+00,0.000000e+00)>"
    else:
        is_bool = isinstance(element, ir.IntegerType) and element.width == 1
        text = "dense<false>" if is_bool else "dense<0>"
    return Splat(text, str(element), True)
