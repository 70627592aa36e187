"""Removes moves that undo each other after a pipeline was folded.

A pipeline with several microbatches for each stage keeps them in the slots of a buffer, in the
order in which it filled the slots. The program then restores their own order:

    %buffer = concatenate (slice %y [8:16]), (slice %y [0:8])
    %z = gather %buffer, [1, 0]
  ==>
    %z = reshape %y

Later passes can schedule a whole batch, but not one in slices. Successive reshapes and transposes
of a batch that a pipeline had split and joined become at most one transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from stablehlo_tools.analysis.device_values import DeviceValues, Values
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import CONCATENATE, CONVERT, GATHER, RESHAPE, SCATTER, TRANSPOSE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import before_reshapes, producer
from stablehlo_tools.transforms.parts.fold_pipeline.segments import erase_unused
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    BoxQuery,
    BoxView,
    TraceReshape,
    UnresolvedError,
    reshaped_box,
)
from stablehlo_tools.transforms.parts.fold_pipeline.traced_moves import follow_move

_JOINING = frozenset({CONCATENATE, GATHER, SCATTER})
_MOST_PIECES = 1 << 10  # of one value


def rejoin(block: ir.Block, values: DeviceValues) -> None:
    """Replaces ops that reassemble all of a tensor by that tensor."""
    for view in list(block.operations):
        op = view.operation
        whole = _whole(op, values) if op.name in _JOINING and len(op.results) == 1 else None
        if whole is not None:
            op.results[0].replace_all_uses_with(whole)
        elif op.name == RESHAPE:
            value = before_reshapes(op.operands[0])
            maker = producer(value)
            if maker is not None and maker.name == CONVERT:
                # Move the conversion before the reshapes, which then cancel.
                before = before_reshapes(maker.operands[0])
                if before != maker.operands[0]:
                    build = Builder(ir.InsertionPoint(op), maker.location)
                    value = build.convert(before, element_of(value))
            op.operands[0] = value
            if op.operands[0].type == op.results[0].type:
                op.results[0].replace_all_uses_with(op.operands[0])
            else:
                _merge_transposes(op)
    erase_unused(block)


def _merge_transposes(op: ir.Operation) -> None:
    """Replaces several transposes and reshapes that end in an op by at most one transpose."""
    moves, value = list[ir.Operation](), op.results[0]
    while (maker := producer(value)) is not None and maker.name in (RESHAPE, TRANSPOSE):
        moves.append(maker)
        value = maker.operands[0]
    if sum(move.name == TRANSPOSE for move in moves) < 2 or 0 in shape_of(value):
        return
    sizes = _DimensionFactors.from_value(value)
    for move in reversed(moves):
        if move.name == TRANSPOSE:
            sizes.transpose(shape_of(move.operands[0]), integers(move, "permutation"))
    if not sizes.are_known:
        return
    build = Builder(ir.InsertionPoint(op), op.location)
    apart = [sizes.of_part[part] for part in sizes.first]
    order = [sizes.first.index(part) for part in sizes.now]
    if order != sorted(order):
        value = build.transpose(build.reshape(value, apart), order)
    shape = shape_of(op.results[0])
    joined = value if shape_of(value) == shape else build.reshape(value, shape)
    op.results[0].replace_all_uses_with(joined)


@dataclass
class _DimensionFactors:
    """The factors of a tensor's dimensions, as transposes move them: `first` lists them in their
    original order, `now` in the current one, without those of size 1. `are_known` is False if a
    dimension begins inside of a factor that its size does not divide."""

    of_part: dict[int, int]
    first: list[int]
    now: list[int]
    are_known: bool = True

    @staticmethod
    def from_value(value: ir.Value) -> _DimensionFactors:
        """Returns the factors of a tensor that has not been moved."""
        sizes = dict(enumerate(size for size in shape_of(value) if size != 1))
        return _DimensionFactors(sizes, list(sizes), list(sizes))

    def transpose(self, shape: Sequence[int], order: Sequence[int]) -> None:
        """Applies a transpose to a tensor of a shape."""
        rest, dims = list(self.now), list[list[int]]()
        for size in shape:
            dims.append([])
            left = size
            while left > 1 and self.are_known:
                # Split the factor in two if it is larger than the rest of the dimension.
                whole = rest[0]
                inner, more = divmod(self.of_part[whole], left)
                if inner > 1 and not more:
                    new = len(self.of_part)
                    self.of_part |= {whole: left, new: inner}
                    for parts in (self.first, rest):
                        parts.insert(parts.index(whole) + 1, new)
                part = rest.pop(0)
                dims[-1].append(part)
                self.are_known = left % self.of_part[part] == 0
                left //= self.of_part[part]
        self.now = [part for dim in order for part in dims[dim]]


def _whole(op: ir.Operation, values: DeviceValues) -> ir.Value | None:
    """Returns the tensor that a result is a reshape of; None if there is none."""
    result = op.results[0]
    try:
        ends = _ends(result, values)
    except UnresolvedError:
        return None
    source, shape = ends[0].value, shape_of(result)
    if source == result or any(end.value != source for end in ends):
        return None
    if prod(shape_of(source)) != prod(shape):
        return None
    # Each box must have the same place among the elements of its tensor as in the result.
    before, after = tuple(shape_of(source)), tuple(shape)
    for end in ends:
        if not all(isinstance(move, TraceReshape) for move in end.view.ops):
            return None
        if reshaped_box(end.box, before, after) != end.view.target:
            return None
    if shape_of(source) == shape:
        return source
    return Builder(ir.InsertionPoint(op), op.location).reshape(source, shape)


def _ends(value: ir.Value, values: DeviceValues) -> list[BoxQuery]:
    """Returns the boxes that a value consists of, traced past moves. Raises UnresolvedError."""

    def known(value: ir.Value) -> Values | None:  # the same on all devices
        integers = values.known_tensor(value)
        return integers[0] if integers is not None and len(integers) == 1 else None

    whole = Box.whole(shape_of(value))
    pending, ends = [BoxQuery(value, 0, -1, whole, BoxView(whole))], list[BoxQuery]()
    while pending:
        query = pending.pop()
        op = producer(query.value)
        more = None if op is None else follow_move(op, query, known)
        if more is None:
            ends.append(query)
        else:
            pending += more
        if op is not None and len(pending) + len(ends) > _MOST_PIECES:
            raise UnresolvedError("it is in too many pieces", op, 4)
    return ends
