"""A pipeline and its backward in one manual computation, as `jax.value_and_grad` inside of
`jax.shard_map` gives them, as two: as jax itself divides one that it differentiates.

    %r = sdy.manual_computation(%x) { pipeline; ...; its backward; ... }
  ==>
    %rows = sdy.manual_computation(%x) { pipeline }
    %r = sdy.manual_computation(%x, %rows) { ...; its backward; ... }
"""

from __future__ import annotations

from math import prod

from stablehlo_tools import bindings
from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import manual_axes, sharding_per_value, tensor_sharding
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, WHILE
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.inline import copy_with, rename
from stablehlo_tools.ir.values import CONSTANTS, producer
from stablehlo_tools.ir.views import ManualComputation
from stablehlo_tools.ir.walk import values_used
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion, mesh_of
from stablehlo_tools.transforms.parts.fold_pipeline.recognition import permutes_of

_AGAIN = CONSTANTS | ops_with(Trait.DEVICE_ID)


def separate_backward(region: LoopRegion) -> bool:
    """Divides the manual computation behind a region's loop, where another one in it, which
    permutes, too, takes what its ticks leave; whether it did.

    What the later ops use of the earlier ones is made again, or an argument, or handed on as one
    device's row of a whole value, which all axes divide in its first dimension:

    %whole = sdy.manual_computation ... { ... sdy.return %row : tensor<1x2xf32> }
             out_shardings=[[{"data", "stage"}, {}]] ... -> tensor<8x2xf32>
    """
    manual = region.manual
    if manual is None:
        return False
    block: ir.Block = ManualComputation(manual).body
    ops = [view.operation for view in block.operations]
    place = ops.index(region.loop) + 1
    later = ops[place:]
    if not any(
        op.name == WHILE
        and permutes_of(op)
        and any(
            producer(value) == region.loop and shape_of(value)[:1] == [region.ticks]
            for value in op.operands
        )
        for op in later
    ):
        return False
    earlier = set(ops[:place])
    used = [
        value
        for value in dict.fromkeys(value for op in later for value in values_used(op))
        if (value.owner == block if (op := producer(value)) is None else op in earlier)
    ]
    again = [value for value in used if _is_made_again(value)]
    arguments = [value for value in used if producer(value) is None]
    others = {*again, *arguments}
    handed = [value for value in used if value not in others]
    build = Builder(ir.InsertionPoint(later[0]), manual.location)
    rows = [build.reshape(value, [1, *shape_of(value)]) for value in handed]

    # The rows of all devices: their types and shardings.
    axes = [(name, size) for name, size in region.mesh_axes() if name in manual_axes(manual)]
    count, refs = prod(size for _, size in axes), tuple(AxisRef(name) for name, _ in axes)
    types: list[ir.Type] = []
    shardings: list[ir.Attribute] = []
    for row in rows:
        shape = [count, *shape_of(row)[1:]]
        types.append(ir.RankedTensorType.get(shape, element_of(row), loc=manual.location))
        dims = [(refs, False), *[((), False)] * (len(shape) - 1)]
        shardings.append(tensor_sharding(mesh_of(manual), dims, row.context))

    first = _like(manual, types, list(manual.operands), "out_shardings", shardings)
    numbers = [ir.BlockArgument(value).arg_number for value in arguments]
    listed = sharding_per_value(manual.attributes["in_shardings"])
    second = _like(
        manual,
        [result.type for result in manual.results],
        [*(manual.operands[number] for number in numbers), *first.results],
        "in_shardings",
        [*(listed[number] for number in numbers), *shardings],
    )
    given = [value.type for value in (*arguments, *rows)]
    inner = second.regions[0].blocks.append(*given, arg_locs=[manual.location] * len(given))
    end = later[-1].clone(ip=ir.InsertionPoint(inner))
    for op in later[:-1]:
        op.move_before(end)
    later[-1].erase()

    # What stands in the second block for values of the first.
    start = ir.InsertionPoint.at_block_begin(inner)
    build = Builder(start, manual.location)
    values: dict[ir.Value, ir.Value] = dict(zip(arguments, inner.arguments, strict=False))
    for value, row in zip(handed, list(inner.arguments)[len(arguments) :], strict=True):
        values[value] = build.reshape(row, shape_of(value))
    for value in again:
        _make_again(value, values, start)
    for view in inner.operations:
        rename(view.operation, values)
    Builder(ir.InsertionPoint(block), manual.location).create("sdy.return", rows, [])
    block.append_to(first.regions[0])
    for old, new in zip(manual.results, second.results, strict=True):
        old.replace_all_uses_with(new)
    manual.erase()
    return True


def _like(
    manual: ir.Operation,
    types: list[ir.Type],
    operands: list[ir.Value],
    name: str,
    shardings: list[ir.Attribute],
) -> ir.Operation:
    """A manual computation like another one, but for its operands, results and one attribute."""
    per_value = bindings.TensorShardingPerValueAttr.get(shardings, manual.context)
    attributes = {**dict(manual.attributes.items()), name: per_value}
    build = Builder(ir.InsertionPoint(manual), manual.location)
    return build.create(MANUAL_COMPUTATION, operands, types, attributes, regions=1)


def _is_made_again(value: ir.Value) -> bool:
    """Whether a value is made of constants and the number of the device alone, as an integer."""
    op = producer(value)
    if op is None or len(op.regions) or len(op.results) != 1:
        return False
    if op.name in _AGAIN:
        return True
    is_integer = isinstance(element_of(value), ir.IntegerType) and not shape_of(value)
    return is_integer and all(map(_is_made_again, op.operands))


def _make_again(value: ir.Value, made: dict[ir.Value, ir.Value], point: ir.InsertionPoint) -> None:
    """Makes a value at a point, too."""
    if value not in made:
        op = producer(value)
        assert op is not None
        for operand in op.operands:
            _make_again(operand, made, point)
        made[value] = copy_with(op, made, point).results[0]
