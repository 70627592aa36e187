"""Copies whole modules, and ops at other shapes.

%y = stablehlo.slice %x [0:8, 2:4] : (tensor<8x6xf32>) -> tensor<8x2xf32>
  ==>                                              // a half of dimension 0
    %y = stablehlo.slice %h [0:4, 2:4] : (tensor<4x6xf32>) -> tensor<4x2xf32>

MLIR has no such clone: the copy needs other result types, and its attributes that hold sizes must
change with them. The caller has to know which ops can be cloned at which shapes (see
`analysis/dimension_propagation`); a clone at wrong shapes does not verify.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import gather_numbers
from stablehlo_tools.dialect.dimensions import integer, integers, static_shapes
from stablehlo_tools.dialect.kernels.table import resize_kernel
from stablehlo_tools.dialect.microbatch_marks import ROWS
from stablehlo_tools.dialect.names import (
    BROADCAST,
    CUSTOM_CALL,
    DYNAMIC_SLICE,
    GATHER,
    IOTA,
    PAD,
    SLICE,
)
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import CONSTANTS, copy_constant, is_splat, producer


def copy_module(module: ir.Module) -> ir.Module:
    """Returns a copy of a module, in the same context."""
    return bindings.parse_module(bindings.write_bytecode(module), module.context)


def counterparts(block: ir.Block, copy: ir.Block) -> dict[ir.Value, ir.Value]:
    """Maps each value of a block, except those of nested blocks, to its counterpart in a copy."""
    values: dict[ir.Value, ir.Value] = {}
    values.update(zip(block.arguments, copy.arguments, strict=True))
    for view, other in zip(block.operations, copy.operations, strict=True):
        values.update(zip(view.operation.results, other.operation.results, strict=True))
    return values


def take_over(module: ir.Module, other: ir.Module) -> None:
    """Replaces the ops of a module by those of another, which is empty afterwards."""
    for view in list(module.body.operations):
        view.operation.erase()
    for view in list(other.body.operations):
        module.body.append(view.operation.detach_from_parent())


# Shardings, one for each result. If the results change, these would describe other values.
_PER_RESULT = frozenset({"sdy.sharding", "mhlo.sharding"})


# Attributes whose entry for a dimension scales with that size of the first operand. Strides and
# interior padding do not, as they count between neighbouring elements.
_EXTENTS = {
    DYNAMIC_SLICE: ("slice_sizes",),
    GATHER: ("slice_sizes",),
    PAD: ("edge_padding_low", "edge_padding_high"),
    SLICE: ("start_indices", "limit_indices"),
}


@dataclass(frozen=True, slots=True)
class Resize:
    """A change of a dimension of an op's first operand from size `before` to `after`.

    Sizes that are multiples of `before` scale by the same ratio.
    """

    dim: int
    before: int
    after: int

    def size(self, size: int) -> int:
        """Returns a size after the change."""
        return size // self.before * self.after


def reshaped_clone(
    op: ir.Operation,
    operands: Sequence[ir.Value],
    types: Sequence[ir.Type],
    point: ir.InsertionPoint,
    resize: Resize | None = None,
    captured: Mapping[ir.Value, ir.Value] | None = None,
) -> ir.Operation:
    """Returns a copy of an op with other operands and result types.

    With `resize`, the attributes that hold sizes of that dimension of the first operand change too.
    `captured` maps the values that the regions capture to others; by default they stay.
    """
    copy = copy_with(op, captured, point) if captured else op.clone(ip=point)
    for position, value in enumerate(operands):
        copy.operands[position] = value
    for result, type_ in zip(copy.results, types, strict=True):
        result.set_type(type_)
    if op.name == CUSTOM_CALL:
        before = (static_shapes(op.operands), static_shapes(op.results))
        if before[0] is not None and before[1] is not None:
            resize_kernel(copy, before[0], before[1])
    elif resize is not None:
        # A gather takes one element at a time along a batching dimension, and in rows it brings.
        is_single = op.name == GATHER and (
            ROWS in op.attributes or resize.dim in gather_numbers(op).operand_batching
        )
        for name in () if is_single else _EXTENTS.get(op.name, ()):
            numbers = list(ir.DenseI64ArrayAttr(copy.attributes[name]))
            numbers[resize.dim] = resize.size(numbers[resize.dim])
            copy.attributes[name] = ir.DenseI64ArrayAttr.get(numbers, copy.context)
    return copy


def emptied_clone(
    op: ir.Operation,
    operands: Sequence[ir.Value],
    types: Sequence[ir.Type],
    point: ir.InsertionPoint,
    *,
    keep_shardings: bool = False,
) -> ir.Operation:
    """Returns a copy of an op with other operands and results, and regions without blocks.

    Drops the shardings of its results unless `keep_shardings` is set.
    """
    attributes = {
        name: value
        for name, value in op.attributes.items()
        if keep_shardings or name not in _PER_RESULT
    }
    build = Builder(point, op.location)
    return build.create(op.name, operands, types, attributes, regions=len(op.regions))


def alike_clone(
    value: ir.Value, dim: int, type_: ir.Type, point: ir.InsertionPoint
) -> ir.Value | None:
    """Returns a copy of a value at another size of a dimension along which it is constant.

    The value is a splat, an iota along another dimension, or a broadcast. Otherwise returns None.
    """
    op = producer(value)
    if op is None:
        return None
    if op.name in CONSTANTS and is_splat(op):
        return copy_constant(op, type_, point)
    counts = op.name == IOTA and integer(op, "iota_dimension") != dim
    repeats = False
    if op.name == BROADCAST:
        dims = integers(op, "broadcast_dimensions")
        repeats = dim not in dims or shape_of(op.operands[0])[dims.index(dim)] == 1
    if counts or repeats:
        return reshaped_clone(op, list(op.operands), [type_], point).results[0]
    return None
