"""Values of a manual computation that leave it as they are on each device, and enter another one.

    %whole = sdy.manual_computation ... { ... sdy.return %row : tensor<1x2xf32> }
             out_shardings=[[{"data", "stage"}, {}]] ... -> tensor<8x2xf32>

Each device's is a row of the whole value, whose first dimension all of the axes divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.inline import rename
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import values_used

Axes = Sequence[tuple[str, int]]  # names and sizes, in the order of the mesh


def row_of(build: Builder, value: ir.Value) -> ir.Value:
    """A value as the row of a device."""
    return build.reshape(value, [1, *shape_of(value)])


def rows_type(row: ir.Value, axes: Axes) -> ir.Type:
    """The type of the rows of all devices along some axes."""
    shape = [prod(size for _, size in axes), *shape_of(row)[1:]]
    return ir.RankedTensorType.get(shape, element_of(row), loc=ir.Location.unknown(row.context))


def rows_sharding(row: ir.Value, axes: Axes, mesh: ir.Attribute) -> ir.Attribute:
    """How the rows of all devices are sharded."""
    context, of_dim = row.context, bindings.SdyDimensionShardingAttr
    named = [bindings.SdyAxisRefAttr.get(name, context=context) for name, _ in axes]
    others = [of_dim.get([], True, context=context) for _ in shape_of(row)[1:]]
    dims = [of_dim.get(named, True, context=context), *others]
    return bindings.TensorShardingAttr.get(mesh, dims, context=context)


def made_in(block: ir.Block, ops: Iterable[ir.Operation]) -> list[ir.Value]:
    """The values of a block, its arguments among them, that ops and those inside of them use."""
    used = (value for op in ops for value in values_used(op))
    return list(dict.fromkeys(value for value in used if _block_of(value) == block))


def replace_in(block: ir.Block, replacing: Mapping[ir.Value, ir.Value]) -> None:
    """Lets the ops of a block, and those inside of them, use other values."""
    for view in block.operations:
        rename(view.operation, replacing)


def _block_of(value: ir.Value) -> ir.Block:
    op = producer(value)
    return ir.BlockArgument(value).owner if op is None else op.block
