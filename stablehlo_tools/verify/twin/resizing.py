"""Resizes a module to a twin: types, attributes along dimensions, and positions.

Integers of the program mean the same as at full size. So an `iota` returns the positions that the
twin has. A position at which an op reads elements becomes the nearest position at or below it that
the twin has. So a shard's offset stays the offset of the shard, for any arithmetic.

    %p = stablehlo.iota dim = 0 : tensor<4096xi32>  ==>  dense<[0, 1, 2, 4094, 4095]>
    %y = stablehlo.dynamic_slice %x, %i             ==>  from position (count of those <= %i) - 1 on
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import conv_numbers, gather_numbers, scatter_numbers
from stablehlo_tools.dialect.dimensions import integer, integers
from stablehlo_tools.dialect.names import (
    ADD,
    CONVERT,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    IOTA,
    MULTIPLY,
    PAD,
    SCATTER,
    SELECT,
    SLICE,
    SUBTRACT,
)
from stablehlo_tools.dialect.traits import Trait, ops_with_any
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import CONSTANTS, describe_op, producer, splat_element
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import functions_by_name, ops_where
from stablehlo_tools.verify.twin.extents import TwinExtent
from stablehlo_tools.verify.twin.relations import TwinDimensions, is_cumulative


def resize(module: ir.Module, dims: TwinDimensions) -> None:
    """Resizes all values of a module to the twin's sizes, in place."""
    for op in ops_where(module.operation, lambda op: True):
        for region in op.regions:
            for block in region.blocks:
                for argument in block.arguments:
                    _retype(argument, dims)
        for result in op.results:
            _retype(result, dims)
        if op.name in _RESIZED:
            _RESIZED[op.name](op, dims, Builder(ir.InsertionPoint(op), op.location))
    context = module.context
    for op in functions_by_name(module).values():
        if len(op.regions[0].blocks):
            function = Function(op)
            inputs = [argument.type for argument in function.body.arguments]
            results = [value.type for value in function.yields]
            type_ = ir.FunctionType.get(inputs, results, context)
            op.attributes["function_type"] = ir.TypeAttr.get(type_, context)


def _retype(value: ir.Value, dims: TwinDimensions) -> None:
    if not isinstance(value.type, ir.RankedTensorType):
        return
    sizes, element = _sizes(value, dims), element_of(value)
    if sizes != shape_of(value):
        with element.context, ir.Location.unknown():
            value.set_type(ir.RankedTensorType.get(sizes, element))


def _sizes(value: ir.Value, dims: TwinDimensions) -> list[int]:
    return [extent.reduced for extent in dims.extents_of(value)]


def _set(op: ir.Operation, name: str, numbers: Sequence[int]) -> None:
    op.attributes[name] = ir.DenseI64ArrayAttr.get(list(numbers), op.context)


# Constants.


def _constant(op: ir.Operation, dims: TwinDimensions, builder: Builder) -> None:
    type_ = op.results[0].type
    splat = splat_element(op)
    if splat is not None:
        op.attributes["value"] = ir.DenseElementsAttr.get_splat(type_, splat)
        return
    extents = dims.extents_of(op.results[0])
    if all(extent.is_whole for extent in extents):
        return
    for extent in extents:
        extent.depend_on(describe_op(op))
    table = np.array(ir.DenseElementsAttr(op.attributes["value"]))
    rows = np.ascontiguousarray(table[np.ix_(*(extent.positions() for extent in extents))])
    op.attributes["value"] = ir.DenseElementsAttr.get(rows, type=type_)


def _iota(op: ir.Operation, dims: TwinDimensions, builder: Builder) -> None:
    result = op.results[0]
    counted = integer(op, "iota_dimension")
    extent = dims.extents_of(result)[counted]
    if extent.is_whole:
        return
    extent.depend_on(describe_op(op))
    positions = builder.convert(builder.constant(extent.positions()), element_of(result))
    result.replace_all_uses_with(builder.broadcast(positions, _sizes(result, dims), [counted]))
    op.erase()


def _get_dimension_size(op: ir.Operation, dims: TwinDimensions, builder: Builder) -> None:
    size = dims.extents_of(op.operands[0])[integer(op, "dimension")].size
    op.results[0].replace_all_uses_with(builder.splat_like(size, op.results[0]))
    op.erase()


# Attributes that are lengths along dimensions.


def _slice(op: ir.Operation, dims: TwinDimensions, builder: Builder) -> None:
    starts, limits = (list(integers(op, n)) for n in ("start_indices", "limit_indices"))
    strides = integers(op, "strides")
    for d, part in enumerate(dims.extents_of(op.results[0])):
        for low, taken, high in dims.segments.get((op.results[0], d), ()):
            starts[d] = low.reduced
            limits[d] = low.reduced + taken.reduced
            if (low.size or high.size) and not _is_blocks(
                taken, dims.extents_of(op.operands[0])[d]
            ):
                dims.extents_of(op.operands[0])[d].depend_on(describe_op(op))
        if strides[d] > 1:
            limits[d] = starts[d] + max(0, (part.reduced - 1) * strides[d] + 1)
    _set(op, "start_indices", starts)
    _set(op, "limit_indices", limits)


def _pad(op: ir.Operation, dims: TwinDimensions, builder: Builder) -> None:
    lows, highs = (list(integers(op, f"edge_padding_{end}")) for end in ("low", "high"))
    for d in range(len(lows)):
        segments = dims.segments.get((op.results[0], d))
        if segments:
            # In the order in which `relations` records the two for a pad.
            cut, put = segments
            lows[d] = put[0].reduced - cut[0].reduced
            highs[d] = put[2].reduced - cut[2].reduced
            for whole in (dims.extents_of(op.operands[0])[d], dims.extents_of(op.results[0])[d]):
                if whole.size != put[1].size and not _is_blocks(put[1], whole):
                    whole.depend_on(describe_op(op))
    _set(op, "edge_padding_low", lows)
    _set(op, "edge_padding_high", highs)


def _reduce_window(op: ir.Operation, dims: TwinDimensions, builder: Builder) -> None:
    windows = list(integers(op, "window_dimensions"))
    padding = np.array(integers(op, "padding", [0] * 2 * len(windows))).reshape(-1, 2)
    for d, extent in enumerate(dims.extents_of(op.results[0])):
        if is_cumulative(op, d):
            windows[d] = extent.reduced
            padding[d] = np.where(padding[d] > 0, extent.reduced - 1, 0)
    _set(op, "window_dimensions", windows)
    if "padding" in op.attributes:
        with op.context:
            op.attributes["padding"] = ir.DenseElementsAttr.get(padding.astype(np.int64))


def _convolution(op: ir.Operation, dims: TwinDimensions, builder: Builder) -> None:
    numbers = conv_numbers(op)
    image, kernel = (dims.extents_of(operand) for operand in op.operands)
    result = dims.extents_of(op.results[0])
    groups = {
        "feature_group_count": (image[numbers.input_feature], kernel[numbers.kernel_input_feature]),
        "batch_group_count": (image[numbers.input_batch], result[numbers.output_batch]),
    }
    for name, (whole, of_group) in groups.items():
        if integer(op, name, 1) > 1:
            count = whole.reduced // of_group.reduced
            op.attributes[name] = ir.IntegerAttr.get(op.attributes[name].type, count)


# Positions.


def _dynamic_window(op: ir.Operation, dims: TwinDimensions, builder: Builder) -> None:
    """Resizes a window and its start; the start of a window of all positions is always 0."""
    if op.name == DYNAMIC_SLICE:
        window, first = op.results[0], 1
        _set(op, "slice_sizes", _sizes(window, dims))
    else:
        window, first = op.operands[1], 2
    pairs = zip(dims.extents_of(op.operands[0]), dims.extents_of(window), strict=True)
    for number, (extent, taken) in enumerate(pairs, first):
        if taken.size != extent.size:
            start = op.operands[number]
            if not (_is_blocks(taken, extent) and _is_multiple(start, taken.size)):
                extent.depend_on(describe_op(op))
            op.operands[number] = _nearest(start, extent, builder)


def _is_blocks(part: TwinExtent, whole: TwinExtent) -> bool:
    """Returns True if a part is some of the blocks that a whole is divided into."""
    return part.leaves[-1] is whole.leaves[-1]


def _is_multiple(value: ir.Value, number: int) -> bool:
    """Returns True if integers are surely multiples of a number."""
    op = producer(value)
    while op is not None and op.name in _MOVING:
        op = producer(op.operands[0])
    if op is None:
        return False
    if op.name in CONSTANTS:
        return not np.any(np.array(ir.DenseElementsAttr(op.attributes["value"])) % number)
    operands = [_is_multiple(v, number) for v in op.operands] if op.name in _LINEAR else [False]
    return any(operands) if op.name == MULTIPLY else all(operands[int(op.name == SELECT) :])


_MOVING = ops_with_any(Trait.LAYOUT | Trait.PIECE) | {CONVERT}
_LINEAR = frozenset({ADD, MULTIPLY, SELECT, SUBTRACT})


def _gather(op: ir.Operation, dims: TwinDimensions, builder: Builder) -> None:
    numbers = gather_numbers(op)
    table, result = dims.extents_of(op.operands[0]), dims.extents_of(op.results[0])
    sizes = list(integers(op, "slice_sizes"))
    indexed = [_startable(table[d], sizes[d]) for d in numbers.index_map]
    for d, offset in zip(numbers.window_dims(len(sizes)), numbers.windows, strict=True):
        sizes[d] = result[offset].reduced
    _set(op, "slice_sizes", sizes)
    _index(op, 1, indexed, numbers.index_vector, builder)


def _scatter(op: ir.Operation, dims: TwinDimensions, builder: Builder) -> None:
    numbers = scatter_numbers(op)
    count = len(op.results)
    table, update = dims.extents_of(op.operands[0]), dims.extents_of(op.operands[count + 1])
    windows = zip(numbers.window_dims(len(table)), numbers.windows, strict=True)
    sizes = {d: update[window].size for d, window in windows}
    indexed = [_startable(table[d], sizes.get(d, 1)) for d in numbers.index_map]
    _index(op, count, indexed, numbers.index_vector, builder)


def _startable(extent: TwinExtent, window: int) -> TwinExtent:
    """Returns the extent of a window's start: only 0 if the window has all positions."""
    return TwinExtent(1) if window == extent.size else extent


def _index(
    op: ir.Operation, number: int, indexed: Sequence[TwinExtent], vector: int, builder: Builder
) -> None:
    """Resizes indices whose components are positions of several extents."""
    indices = op.operands[number]
    if all(extent.is_whole for extent in indexed):
        return
    for extent in indexed:
        extent.depend_on(describe_op(op))
    if vector == len(shape_of(indices)):
        op.operands[number] = _nearest(indices, indexed[0], builder)
        return
    columns = [
        _nearest(builder.slice_along(indices, vector, c, c + 1), extent, builder)
        for c, extent in enumerate(indexed)
    ]
    op.operands[number] = columns[0] if len(columns) == 1 else builder.concatenate(columns, vector)


def _nearest(index: ir.Value, extent: TwinExtent, builder: Builder) -> ir.Value:
    """Maps each index to the number of the twin's last position that is at or below it.

    An index from the full size on stays out of range, and so does one below 0."""
    if extent.is_whole:
        return index
    shape = shape_of(index)
    table = builder.constant(np.append(extent.positions(), extent.size))
    all_shape = [*shape, len(extent.positions()) + 1]
    wide = builder.convert(index, element_of(table))
    reached = builder.compare(
        "GE",
        builder.broadcast(wide, all_shape, list(range(len(shape)))),
        builder.broadcast(table, all_shape, [len(shape)]),
    )
    ones = builder.convert(reached, element_of(table))
    count = builder.reduce(ones, builder.splat(0, [], element_of(table)), [len(shape)], "add")
    below = builder.same("subtract", count, builder.splat_like(1, count))
    return builder.convert(below, element_of(index))


_RESIZED = {
    **dict.fromkeys(CONSTANTS, _constant),
    DYNAMIC_SLICE: _dynamic_window,
    DYNAMIC_UPDATE_SLICE: _dynamic_window,
    GATHER: _gather,
    IOTA: _iota,
    PAD: _pad,
    SCATTER: _scatter,
    SLICE: _slice,
    "stablehlo.convolution": _convolution,
    "stablehlo.get_dimension_size": _get_dimension_size,
    "stablehlo.reduce_window": _reduce_window,
}
