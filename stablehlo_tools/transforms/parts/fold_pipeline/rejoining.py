"""Moves that undo each other where a pipeline was folded.

A pipeline with several microbatches for each stage leaves them in the slots of a buffer, in the
order in which it has filled them, and the program takes them out in their own:

    %buffer = concatenate (slice %y [8:16]), (slice %y [0:8])
    %z = gather %buffer, [1, 0]
  ==>
    %z = reshape %y

A schedule is written anew for a batch that is whole, and not for one in slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from stablehlo_tools.analysis.device_values import DeviceValues, Values
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CONCATENATE, CONVERT, GATHER, RESHAPE, SCATTER
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import before_reshapes, producer
from stablehlo_tools.transforms.parts.fold_pipeline.moves import follow_move
from stablehlo_tools.transforms.parts.fold_pipeline.segments import erase_unused
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    BoxQuery,
    Reshape,
    UnresolvedError,
    View,
)

_JOINING = frozenset({CONCATENATE, GATHER, SCATTER})
_MOST_PIECES = 1 << 10  # of one value


def rejoin(block: ir.Block, values: DeviceValues) -> None:
    """Replaces what puts all of one tensor together again by that tensor."""
    for view in list(block.operations):
        op = view.operation
        whole = _whole(op, values) if op.name in _JOINING and len(op.results) == 1 else None
        if whole is not None:
            op.results[0].replace_all_uses_with(whole)
        elif op.name == RESHAPE:
            op.operands[0] = _converted_before(op, before_reshapes(op.operands[0]))
    erase_unused(block)


def _converted_before(op: ir.Operation, value: ir.Value) -> ir.Value:
    """The value that an op reshapes; where it was reshaped, then converted: only converted."""
    maker = producer(value)
    if maker is None or maker.name != CONVERT:
        return value
    before = before_reshapes(maker.operands[0])
    if before == maker.operands[0]:
        return value
    build = Builder(ir.InsertionPoint(op), maker.location)
    return build.convert(before, element_of(value))


def _whole(op: ir.Operation, values: DeviceValues) -> ir.Value | None:
    """The tensor that a result is, reshaped; None for any other."""
    result = op.results[0]
    try:
        ends = _ends(result, values)
    except UnresolvedError:
        return None
    source, shape = ends[0].value, shape_of(result)
    if source == result or any(end.value != source for end in ends):
        return None
    if prod(shape_of(source)) != prod(shape) or not all(_stays(end, shape) for end in ends):
        return None
    if shape_of(source) == shape:
        return source
    return Builder(ir.InsertionPoint(op), op.location).reshape(source, shape)


def _stays(end: BoxQuery, shape: Sequence[int]) -> bool:
    """Whether a box has the same place among the elements of its tensor as in the result."""
    target, source = end.view.target, shape_of(end.value)
    if not end.view.ops and (target, shape) == (end.box, source):
        return True
    if not all(isinstance(op, Reshape) for op in end.view.ops):
        return False
    span = _span(target, shape)
    return span is not None and span == _span(end.box, source)


def _span(box: Box, shape: Sequence[int]) -> tuple[int, int] | None:
    """Where a box begins and ends among the elements of a tensor; None where there are others in
    between."""
    start, stride, is_whole = 0, 1, True
    for first, size, extent in reversed(list(zip(box.starts, box.sizes, shape, strict=True))):
        if size > 1 and not is_whole:
            return None
        is_whole = is_whole and size == extent
        start += first * stride
        stride *= extent
    return start, start + prod(box.sizes)


def _ends(value: ir.Value, values: DeviceValues) -> list[BoxQuery]:
    """What a value consists of, past ops that only move elements. Raises UnresolvedError."""
    whole = Box.whole(shape_of(value))
    pending, ends = [BoxQuery(value, 0, -1, whole, View(whole))], list[BoxQuery]()
    while pending:
        query = pending.pop()
        op = producer(query.value)
        more = None if op is None else follow_move(op, query, lambda v: _known(v, values))
        if more is None:
            ends.append(query)
        else:
            pending += more
        if op is not None and len(pending) + len(ends) > _MOST_PIECES:
            raise UnresolvedError("it is in too many pieces", op, 4)
    return ends


def _known(value: ir.Value, values: DeviceValues) -> Values | None:
    """Integers that are the same on all devices."""
    known = values.of(value)
    return known[0] if known is not None and len(known) == 1 else None
