"""Writes a block of a manual computation without one of its axes.

  %s = stablehlo.add %term, %same : tensor<4xf32>       // on each of 2 devices
==>
  %m = stablehlo.multiply %same, 2 : tensor<4xf32>
  %s = stablehlo.add %sum, %m : tensor<4xf32>           // the sum over both
"""

from __future__ import annotations

from collections.abc import Iterable

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
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
from stablehlo_tools.ir.builder import Builder, device_table, shape_of
from stablehlo_tools.ir.clone import reshaped_clone
from stablehlo_tools.ir.values import has_uses, maker_of, producer, splat_of
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.transforms.parts.axis_crossings import AcrossAxis, Crossings, is_moved
from stablehlo_tools.transforms.parts.block_rewriter import BlockRewriter, part_type
from stablehlo_tools.transforms.parts.one_part import apart
from stablehlo_tools.transforms.parts.scaling import NotScaledError, Scaling

_MOVES = LAYOUT | {PAD, SELECT, SHARDING_CONSTRAINT, SLICE}
_MOVED = {PAD: (0, 1), SELECT: (1, 2)}  # the operands that are moved; default: the first
_SLICING = frozenset({DYNAMIC_SLICE, RESHAPE, SHARDING_CONSTRAINT, SLICE})


class AxisRemoval(Scaling):
    """Writes a block without the axis: a value in shards becomes the whole value."""

    def __init__(self, crossings: Crossings, across: AcrossAxis, size: int) -> None:
        super().__init__(across.dims, size)
        self._crossings = crossings
        self._sums = across.sums
        self._products: list[ir.Operation] = []

    def take(self, values: Iterable[ir.Value]) -> None:
        """Uses values from outside of the block unchanged."""
        self.values.update((self.dims.graph.number(value), value) for value in values)

    def type_in(self, value: ir.Value, shard: DimTiling | None) -> ir.Type:
        """Returns the type of a value without the axis. `shard` is its tiling if it has none of its
        own."""
        tiling = self.dims.tiling_of(value) or shard
        return part_type(value, tiling, self.dims.parts, self.count)

    def shard(
        self, value: ir.Value, shard: DimTiling | None, end: ir.Operation, point: ir.InsertionPoint
    ) -> ir.Value:
        """Returns the new value for an operand of `end`. `shard` is its tiling if it has none of
        its own."""
        number = self.dims.graph.number(value)
        if shard is None or number in self.dims.tilings:
            return self.values[number]
        return self.resize_shared(number, shard, Builder(point, end.location), end)

    def write_node(self, node: Node, point: ir.InsertionPoint) -> None:
        """Writes an op. An operand that is added to terms without being a term becomes its
        multiple."""
        crossing = self._crossings.get(node.op)
        if crossing is not None:
            values = [self.values[number] for number in node.operands]
            if crossing.others is not None:
                copy = reshaped_clone(node.op, values, [value.type for value in values], point)
                copy.attributes["replica_groups"] = device_table(crossing.others, copy.context)
                values = list(copy.results)
            for number, value in zip(node.results, values, strict=True):
                repeated = number in self._sums.repeated
                self.values[number] = self._multiple(value, point) if repeated else value
            return
        # Control flow multiplies the values that it carries itself, in `pass_value`.
        among = () if node.bodies else self._sums.among.get(node, ())
        once = {number: self.values[number] for number in among}
        self.values.update((n, self._multiple(each, point)) for n, each in once.items())
        super().write_node(node, point)
        self.values.update(once)

    def write_op(self, node: Node, point: ir.InsertionPoint) -> None:
        """Writes an op. A reshape may move the devices to another dimension."""
        step = self.dims.op_tilings.get(node)
        if step is not None and node.name == RESHAPE:
            (taken,), (given,) = step.operands, step.results
            shapes = (tuple(shape_of(v)) for v in (node.op.operands[0], node.op.results[0]))
            if taken and given and is_moved(taken, given, *shapes):
                build = Builder(point, node.op.location)
                self.values[node.results[0]] = self._move_devices(node, taken, given.dim, build)
                return
        super().write_op(node, point)

    def inner_writer(self, dims: BatchDims, block: ir.Block) -> BlockRewriter:
        raise NotScaledError(block.owner.operation)

    def _move_devices(self, node: Node, taken: DimTiling, at: int, build: Builder) -> ir.Value:
        """Returns the reshaped value with its parts moved: devices become the major part of
        dimension `at`."""
        value, after = self.values[node.operands[0]], shape_of(node.op.results[0])
        dim, split = taken.dim, apart(shape_of(value), taken, self.count)
        places = [dim + 1, *(d for d in range(len(split)) if d != dim + 1)]
        devices_first = build.transpose(build.reshape(value, split), places)
        whole = build.reshape(devices_first, [self.count, *after])
        placed = build.transpose(whole, [*range(1, at + 1), 0, *range(at + 1, len(after) + 1)])
        after[at] *= self.count
        return build.reshape(placed, after)

    def pass_value(
        self, number: int, result: int | None, build: Builder, user: ir.Operation
    ) -> ir.Value:
        """Returns the copy of a value; the sum of all copies if the result is a sum over the
        axis."""
        copy = super().pass_value(number, result, build, user)
        reducer = None if result is None else self._sums.terms.get(result)
        is_term = self._sums.is_multiple(number, reducer)
        return self._multiple(copy, build.point) if is_term else copy

    def resize_shared(
        self, number: int, tiling: DimTiling, build: Builder, user: ir.Operation
    ) -> ir.Value:
        """Returns a value at its full size. Repeats it once per device if it cannot be written
        larger."""
        try:
            return super().resize_shared(number, tiling, build, user)
        except NotScaledError:
            return self._repeat_per_device(self.values[number], tiling, build)

    def _repeat_per_device(self, value: ir.Value, tiling: DimTiling, build: Builder) -> ir.Value:
        """Repeats a value that is the same on all devices along the tiled dimension, once per
        device."""
        shape, dim = shape_of(value), tiling.dim
        split = [*shape[:dim], tiling.outer, shape[dim] // tiling.outer, *shape[dim + 1 :]]
        places = [*range(dim + 1), *range(dim + 2, len(split) + 1)]
        wide = [*split[: dim + 1], self.count, *split[dim + 1 :]]
        value = build.broadcast(build.reshape(value, split), wide, places)
        shape[dim] *= self.count
        return build.reshape(value, shape)

    def _multiple(self, value: ir.Value, point: ir.InsertionPoint) -> ir.Value:
        """Returns the sum of a value over all devices. For a layout op or a select it multiplies
        the sources instead, so that zeros stay zeros."""
        op, build = producer(value), Builder(point, value.location)
        if splat_of(value) == 0:
            return value
        if op is None or op.name not in _MOVES:
            product = build.same("multiply", value, build.splat_like(self.count, value))
            self._products.append(maker_of(product))
            return product
        moved = _MOVED.get(op.name, (0,))
        sources = [self._multiple(op.operands[position], point) for position in moved]
        copy = op.clone(ip=point)
        for position, source in zip(moved, sources, strict=True):
            copy.operands[position] = source
        return copy.results[0]

    def multiply_outside(self) -> None:
        """Moves products out of loops, if their operand is a slice of a value that no iteration
        changes."""
        while self._products:
            product = self._products.pop()
            source = product.operands[0]
            # Follow slices and reshapes with one user up to the carry of the loop.
            while (op := producer(source)) and op.name in _SLICING and len(_takers(source)) == 1:
                source = op.operands[0]
            carry = _only_sliced(source)
            if carry is None:
                continue
            loop, number = carry
            whole = self._multiple(loop.operands[number], ir.InsertionPoint(loop))
            loop.operands[number] = whole
            product.results[0].replace_all_uses_with(product.operands[0])
            product.erase()


def _takers(value: ir.Value) -> list[ir.Operation]:
    """Returns the ops that use a value, without those whose own results are unused."""
    ops = [use.owner.operation for use in value.uses]
    return [op for op in ops if not len(op.results) or any(map(has_uses, op.results))]


def _only_sliced(value: ir.Value) -> tuple[ir.Operation, int] | None:
    """Returns the loop and the number of the carry that a value is.

    Returns None for any other value, for a carry that an iteration changes, and for one with
    several users.
    """
    if producer(value) is not None:
        return None
    argument = ir.BlockArgument(value)
    loop, number = argument.owner.owner.operation, argument.arg_number
    if loop.name != WHILE or argument.owner != While(loop).body:
        return None
    end = terminator(argument.owner)
    handed_on = [op == end for op in _takers(value)]
    asked = has_uses(While(loop).condition.arguments[number]) or has_uses(loop.results[number])
    is_same = end.operands[number] == value and sorted(handed_on) == [False, True]
    return (loop, number) if is_same and not asked else None
