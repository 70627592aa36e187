"""Ops that know sizes or places of elements, on one device's part.

Each function gets an op with local operands and results and makes it compute the device's part of
them. All other ops change their types alone.
"""

from __future__ import annotations

from collections.abc import Callable

from stablehlo_tools import bindings
from stablehlo_tools.analysis.tensor_shardings import rank_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.constants import copy_constant, is_splat
from stablehlo_tools.transforms.parts.partition import indexed_ops
from stablehlo_tools.transforms.parts.partition.local_view import LocalView
from stablehlo_tools.transforms.parts.partition.moved_pieces import (
    concatenate_pieces,
    pad_pieces,
    slice_pieces,
)
from stablehlo_tools.transforms.parts.partition.resharding import all_reduce_of
from stablehlo_tools.transforms.parts.partition.undividable import integers


def constant(local: LocalView, op: ir.Operation) -> None:
    """A splat in the local shape; of any other constant, the device's part."""
    old = op.results[0]
    dims = local.shardings.of(old)
    point = ir.InsertionPoint(op)
    if any(dims) and is_splat(op):
        new = copy_constant(op, local.part_type(old, dims), point)
    else:
        new = copy_constant(op, old.type, point)
        if any(dims):
            new = local.collectives.all_slice(Builder(point, op.location), new, dims)
    local.replace(op, new)


def _iota(local: LocalView, op: ir.Operation) -> None:
    """Counts from where the device's part starts."""
    result = op.results[0]
    dim = ir.IntegerAttr(op.attributes["iota_dimension"]).value
    axes = local.divided(result)[dim]
    if not axes:
        return
    build = Builder(ir.InsertionPoint.after(op), op.location)
    start = local.offsets.start(axes, shape_of(result)[dim])
    kind = build.tensor([], element_of(result))
    if start.type != kind:
        start = build.op("convert", [start], kind)
    shifted = build.same("add", build.broadcast(start, shape_of(result), []), result)
    local.stand_in(result, shifted)


def _slice(local: LocalView, op: ir.Operation) -> None:
    """Whole along what is divided, or the same element of each of fewer pieces."""
    result = op.results[0]
    starts, limits, strides = (
        integers(op, name) for name in ("start_indices", "limit_indices", "strides")
    )
    for dim, axes in enumerate(local.divided(result)):
        if axes:
            limits[dim] = starts[dim] + (shape_of(result)[dim] - 1) * strides[dim] + 1
    op.attributes["limit_indices"] = ir.DenseI64ArrayAttr.get(limits, op.context)
    for dim, axes in enumerate(local.divided(result)):
        shortened = shape_of(op.operands[0])[dim] != shape_of(result)[dim]
        if axes and shortened and strides[dim] == 1:
            slice_pieces(local, op, dim)
            return


def _concatenate(local: LocalView, op: ir.Operation) -> None:
    """Pieces to where they belong, along a dimension that is divided."""
    dim = ir.IntegerAttr(op.attributes["dimension"]).value
    if local.divided(op.results[0])[dim]:
        concatenate_pieces(local, op, dim)


def _pad(local: LocalView, op: ir.Operation) -> None:
    """Pieces to where they belong, along a dimension that is divided and grows."""
    result = op.results[0]
    for dim, axes in enumerate(local.divided(result)):
        if axes and shape_of(op.operands[0])[dim] != shape_of(result)[dim]:
            pad_pieces(local, op, dim)
            return


def _dynamic_slice(local: LocalView, op: ir.Operation) -> None:
    """Whole along what is divided, where every start is clamped to 0."""
    result = op.results[0]
    op.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(shape_of(result), op.context)


def _convolution(local: LocalView, op: ir.Operation) -> None:
    """As many groups as the device holds."""
    numbers = bindings.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    lhs, kernel, out = (shape_of(value) for value in (*op.operands, *op.results))
    counts = {
        "feature_group_count": (
            lhs[numbers.input_feature_dimension] // kernel[numbers.kernel_input_feature_dimension]
        ),
        "batch_group_count": (
            lhs[numbers.input_batch_dimension] // out[numbers.output_batch_dimension]
        ),
    }
    for name, count in counts.items():
        op.attributes[name] = ir.IntegerAttr.get(op.attributes[name].type, count)


def _reduce(local: LocalView, op: ir.Operation) -> None:
    """Partial results; where no all_reduce follows, gathered and reduced once more."""
    divided = local.divided(op.operands[0])
    axes = tuple(axis for dim in integers(op, "dimensions") for axis in divided[dim])
    if not axes or all_reduce_of(op.results[0]) is not None:
        return
    count = len(op.results)
    again = op.clone(ip=ir.InsertionPoint.after(op))
    for old, new in zip(op.results, again.results, strict=True):
        local.adopt(old, new)
    build = Builder(ir.InsertionPoint(again), op.location)
    for number, partial in enumerate(op.results):
        row = build.reshape(partial, [1, *shape_of(partial)])
        lists = [axes, *((),) * rank_of(partial)]
        again.operands[number] = local.collectives.all_gather(build, row, lists)
        again.operands[count + number] = op.operands[count + number]
    again.attributes["dimensions"] = ir.DenseI64ArrayAttr.get([0], op.context)


REWRITERS: dict[str, Callable[[LocalView, ir.Operation], None]] = {
    "stablehlo.iota": _iota,
    "stablehlo.slice": _slice,
    "stablehlo.pad": _pad,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.dynamic_slice": _dynamic_slice,
    "stablehlo.convolution": _convolution,
    "stablehlo.reduce": _reduce,
    "stablehlo.gather": indexed_ops.gather,
    "stablehlo.scatter": indexed_ops.scatter,
    "stablehlo.dynamic_update_slice": indexed_ops.dynamic_update_slice,
}
