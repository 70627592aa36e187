"""Writes a block of a manual computation without one of its axes.

  %s = stablehlo.add %term, %same : tensor<4xf32>       // on each of 2 devices
==>
  %m = stablehlo.multiply %same, 2 : tensor<4xf32>
  %s = stablehlo.add %sum, %m : tensor<4xf32>           // the sum over both
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, OpTiling
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    DYNAMIC_SLICE,
    PAD,
    RESHAPE,
    SELECT,
    SHARDING_CONSTRAINT,
    SLICE,
    WHILE,
)
from stablehlo_tools.dialect.traits import LAYOUT
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import has_uses, maker_of, producer, splat_of
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.transforms.parts.axis_crossings import (
    AcrossAxis,
    Crossing,
    Crossings,
    is_moved,
)
from stablehlo_tools.transforms.parts.partition.local_body import dense_groups
from stablehlo_tools.transforms.parts.scaling import NotScaledError, Scaling

_MOVES = LAYOUT | {PAD, SELECT, SHARDING_CONSTRAINT, SLICE}
_MOVED = {PAD: (0, 1), SELECT: (1, 2)}  # the operands that are moved, else the first
_SLICING = frozenset({DYNAMIC_SLICE, RESHAPE, SHARDING_CONSTRAINT, SLICE})


class AxisRemoval(Scaling):
    """Writes a block without the axis: what devices have parts of, for all of them."""

    def __init__(self, crossings: Crossings, across: AcrossAxis, size: int) -> None:
        super().__init__(across.dims, size)
        self._crossings = crossings
        self._sums = across.sums
        self._devices = size
        self._products: list[ir.Operation] = []

    def take(self, values: Iterable[ir.Value]) -> None:
        """Lets values of the outside stand for themselves."""
        self._values.update((value, value) for value in values)

    def write_all(self, arguments: Sequence[ir.Value], point: ir.InsertionPoint) -> list[ir.Value]:
        """Writes the block for arguments; returns what stands for what it returns."""
        return self.write(self._dims.graph.root, arguments, point)

    def type_in(self, value: ir.Value, shard: DimTiling | None) -> ir.Type:
        """The type of what stands for a value, in a shard if it has none of its own."""
        return self._type(value, self._dims.tiling_of(value) or shard)

    def shard(
        self, value: ir.Value, shard: DimTiling | None, end: ir.Operation, point: ir.InsertionPoint
    ) -> ir.Value:
        """What stands for a value that `end` returns, in a shard if it has none of its own."""
        if shard is None or self._dims.tiling_of(value) is not None:
            return self._values[value]
        return self._repeated(value, shard, point, end)

    def _node(self, node: Node, point: ir.InsertionPoint) -> None:
        crossing = self._crossings.get(node.op)
        if crossing is not None:
            self._cross(node, crossing, point)
            return
        among = () if node.bodies else self._sums.among.get(node, ())
        once = {
            value: self._values[value] for value in map(self._dims.graph.values.__getitem__, among)
        }
        self._values.update((v, self._multiple(each, point)) for v, each in once.items())
        super()._node(node, point)
        self._values.update(once)

    def _scaled(self, op: ir.Operation, op_tiling: OpTiling, point: ir.InsertionPoint) -> None:
        if op.name == RESHAPE and self._moves(op, op_tiling):
            (taken,), (given,) = op_tiling.operands, op_tiling.results
            assert taken is not None
            assert given is not None
            value = self._values[op.operands[0]]
            moved = self._moved(value, taken, op.results[0], given, Builder(point, op.location))
            self._values[op.results[0]] = moved
            return
        super()._scaled(op, op_tiling, point)

    def _moves(self, reshape: ir.Operation, op_tiling: OpTiling) -> bool:
        (taken,), (given,) = op_tiling.operands, op_tiling.results
        if taken is None or given is None:
            return False
        shapes = (tuple(shape_of(v)) for v in (reshape.operands[0], reshape.results[0]))
        return is_moved(taken, given, *shapes)

    def _moved(
        self,
        value: ir.Value,
        taken: DimTiling,
        result: ir.Value,
        given: DimTiling,
        build: Builder,
    ) -> ir.Value:
        """What all devices have, reshaped, with the devices in front of another dimension."""
        shape, dim = shape_of(value), taken.dim
        inner = shape[dim] // (taken.outer * self._devices)
        split = [*shape[:dim], taken.outer, self._devices, inner, *shape[dim + 1 :]]
        places = [dim + 1, *(d for d in range(len(split)) if d != dim + 1)]
        devices_first = build.transpose(build.reshape(value, split), places)
        after = shape_of(result)
        whole = build.reshape(devices_first, [self._devices, *after])
        at = given.dim
        placed = build.transpose(whole, [*range(1, at + 1), 0, *range(at + 1, len(after) + 1)])
        after[at] *= self._devices
        return build.reshape(placed, after)

    def _handed_on(
        self, value: ir.Value, result: int, point: ir.InsertionPoint, user: ir.Operation
    ) -> ir.Value:
        taken = super()._handed_on(value, result, point, user)
        number = self._dims.graph.number(value)
        among = self._sums.is_multiple(number, self._sums.terms.get(result))
        return self._multiple(taken, point) if among else taken

    def _repeated(
        self, value: ir.Value, tiling: DimTiling, point: ir.InsertionPoint, user: ir.Operation
    ) -> ir.Value:
        try:
            return super()._repeated(value, tiling, point, user)
        except NotScaledError:
            return self._joined(self._values[value], tiling, Builder(point, user.location))

    def _joined(self, value: ir.Value, tiling: DimTiling, build: Builder) -> ir.Value:
        """What all devices have, one behind the other."""
        shape, dim = shape_of(value), tiling.dim
        split = [*shape[:dim], tiling.outer, shape[dim] // tiling.outer, *shape[dim + 1 :]]
        places = [*range(dim + 1), *range(dim + 2, len(split) + 1)]
        wide = [*split[: dim + 1], self._devices, *split[dim + 1 :]]
        value = build.broadcast(build.reshape(value, split), wide, places)
        shape[dim] *= self._devices
        return build.reshape(value, shape)

    def _multiple(self, value: ir.Value, point: ir.InsertionPoint) -> ir.Value:
        """The sum of what all devices have; of what is moved, or chosen, it is that of its source,
        so that zeros stay zeros."""
        op, build = producer(value), Builder(point, value.location)
        if splat_of(value) == 0:
            return value
        if op is None or op.name not in _MOVES:
            product = build.same("multiply", value, build.splat_like(self._devices, value))
            self._products.append(maker_of(product))
            return product
        moved = _MOVED.get(op.name, (0,))
        sources = [self._multiple(op.operands[position], point) for position in moved]
        copy = op.clone(ip=point)
        for position, source in zip(moved, sources, strict=True):
            copy.operands[position] = source
        return copy.results[0]

    def multiply_outside(self) -> None:
        """Lets loops take multiples, which take slices of what is the same for all iterations."""
        while self._products:
            product = self._products.pop()
            source = product.operands[0]
            while _is_sliced_once(source):
                source = maker_of(source).operands[0]
            carry = _only_sliced(source)
            if carry is None:
                continue
            loop, number = carry
            whole = self._multiple(loop.operands[number], ir.InsertionPoint(loop))
            loop.operands[number] = whole
            product.results[0].replace_all_uses_with(product.operands[0])
            product.erase()

    def _cross(self, node: Node, crossing: Crossing, point: ir.InsertionPoint) -> None:
        values = [self._values[operand] for operand in node.op.operands]
        if crossing.others is not None:
            values = list(self._over_others(crossing, point).results)
        for number, result, value in zip(node.results, node.op.results, values, strict=True):
            repeated = number in self._sums.repeated
            self._values[result] = self._multiple(value, point) if repeated else value

    def _over_others(self, crossing: Crossing, point: ir.InsertionPoint) -> ir.Operation:
        copy = copy_with(crossing.op, self._values, point)
        assert crossing.others is not None
        copy.attributes["replica_groups"] = dense_groups(crossing.others, copy.context)
        for result, operand in zip(copy.results, copy.operands, strict=True):
            result.set_type(operand.type)
        return copy


def _takers(value: ir.Value) -> list[ir.Operation]:
    """The ops that use a value, and are not left over themselves."""
    ops = [use.owner.operation for use in value.uses]
    return [op for op in ops if not len(op.results) or any(map(has_uses, op.results))]


def _is_sliced_once(value: ir.Value) -> bool:
    """Whether a value is a slice, or moved, and used once."""
    op = producer(value)
    return op is not None and op.name in _SLICING and len(_takers(value)) == 1


def _only_sliced(value: ir.Value) -> tuple[ir.Operation, int] | None:
    """The loop, and the carry of it, that a value is, if every iteration hands it on as it came
    and nothing but one op takes it."""
    if producer(value) is not None:
        return None
    argument = ir.BlockArgument(value)
    loop, number = argument.owner.owner.operation, argument.arg_number
    if loop.name != WHILE or argument.owner != loop.regions[1].blocks[0]:
        return None
    end = terminator(argument.owner)
    handed_on = [op == end for op in _takers(value)]
    asked = has_uses(loop.regions[0].blocks[0].arguments[number]) or has_uses(loop.results[number])
    is_same = end.operands[number] == value and sorted(handed_on) == [False, True]
    return (loop, number) if is_same and not asked else None
