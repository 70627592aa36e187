"""Writes a manual computation over one axis of the mesh, from the inside.

Its operands are found while its ops are written: `RankRegion.bring` adds an operand at its first
use. So the ops are first written to a holder without operands. Closing the region creates the
computation itself, with all operands, results and shardings.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.replica_groups import AxisRef, DeviceMesh, mesh_axes_groups
from stablehlo_tools.analysis.shardings import drop_axis, open_dims, rank_of, tensor_sharding
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import ANY_CHANNEL, Builder, element_of, shape_of
from stablehlo_tools.ir.clone import alike_clone
from stablehlo_tools.ir.values import in_block_order, is_spread_constant, maker_of, producer
from stablehlo_tools.ir.walk import values_used
from stablehlo_tools.transforms.parts.block_rewriter import part_type
from stablehlo_tools.transforms.parts.one_part import apart, cut, window


def without_axis(op: ir.Operation, axis: str) -> None:
    """Removes an axis from the shardings that an op states."""
    for name in ("sharding", "sdy.sharding"):
        if name not in op.attributes or f'"{axis}"' not in str(op.attributes[name]):
            continue
        op.attributes[name] = drop_axis(op.attributes[name], axis)


def sum_identity(build: Builder, shape: Sequence[int], element: ir.Type) -> ir.Value:
    """Returns a splat of the identity of addition: -0.0 for floats.

    Ranks without results of their own hold it, so that a sum over all ranks gives the others' bits.
    """
    return build.splat(-0.0 if isinstance(element, ir.FloatType) else 0, shape, element)


def of_one(build: Builder, value: ir.Value, is_one: ir.Value) -> ir.Value:
    """Returns a value on the rank for which `is_one` is set, and the identity of addition on
    others."""
    none = sum_identity(build, shape_of(value), element_of(value))
    return build.same("select", is_one, value, none)


class Axis:
    """An axis of a mesh, with its groups of devices and their neighbours for collectives."""

    def __init__(self, name: str, mesh_name: str, mesh: DeviceMesh) -> None:
        self.name = name
        self.mesh_name = mesh_name
        self.mesh = mesh
        self.size = dict(mesh.axes)[name]
        self.groups = mesh_axes_groups(mesh, (AxisRef(name),))

    def ring(self, step: int) -> list[tuple[int, ...]]:
        """Returns pairs of each device and the one `step` further along the axis, which wraps
        around."""
        size = self.size
        return [
            (group[rank], group[(rank + step) % size])
            for rank in range(size)
            for group in self.groups
        ]


class RankRegion:
    """The inside of a manual computation before `anchor`, and the values that it uses."""

    def __init__(self, axis: Axis, anchor: ir.Operation, channel: int) -> None:
        self.axis = axis
        self.location = anchor.location
        self.context = anchor.context
        self.channel = channel  # the last one that was used
        self._holder = Builder(ir.InsertionPoint(anchor), self.location).manual_computation(
            [], [], ([], []), [axis.name]
        )
        self.block = self._holder.regions[0].blocks.append()
        self._taken: list[tuple[ir.Value, int | None]] = []
        self._inside: dict[tuple[ir.Value, int | None], ir.Value] = {}
        self._constants: dict[ir.Value, ir.Value] = {}

    @property
    def outside(self) -> Builder:
        """A builder before the computation."""
        return Builder(ir.InsertionPoint(self._holder), self.location)

    @property
    def end(self) -> Builder:
        """A builder at the end of the region."""
        return Builder(ir.InsertionPoint(self.block), self.location)

    def bring(self, value: ir.Value, dimension: int | None = None) -> ir.Value:
        """Returns a value from outside: whole, or each rank's part along a dimension."""
        key = value, dimension
        if key not in self._inside:
            self._make_before(value)
            self._taken.append(key)
            shape = shape_of(value)
            if dimension is not None:
                shape[dimension] //= self.axis.size
            type_ = self.outside.tensor(shape, element_of(value))
            self._inside[key] = self.block.add_argument(type_, self.location)
        return self._inside[key]

    def _make_before(self, value: ir.Value) -> None:
        """Moves ops that a value depends on before the computation, if they are after it."""
        pending, behind = [value], set[ir.Operation]()
        while pending:
            op = producer(pending.pop())
            if op is None or op in behind or op.block != self._holder.block:
                continue
            if not op.is_before_in_block(self._holder):
                behind.add(op)
                pending += values_used(op)
        for op in in_block_order(list(behind)):
            op.move_before(self._holder)

    def whole(self, value: ir.Value) -> ir.Value:
        """Returns a value from outside: constants are copied, others become operands."""
        if value in self._constants:
            return self._constants[value]
        if not is_spread_constant(value):
            return self.bring(value)
        made = maker_of(value)
        inner = [self.whole(made.operands[i]) for i in range(len(made.operands))]
        copy = made.clone(ip=ir.InsertionPoint.at_block_begin(self.block))
        for position, source in enumerate(inner):
            copy.operands[position] = source
            # The copy is at the start of the block, before its operands.
            copy.move_after(maker_of(source))
        self._constants[value] = copy.results[0]
        return copy.results[0]

    def part(
        self,
        build: Builder,
        value: ir.Value,
        layout: DimTiling | None,
        parts: int,
        microbatch: ir.Value,
    ) -> ir.Value:
        """Returns one microbatch of a value from outside; all of it if it has no layout. If a
        broadcast repeats a value along the batch, such as a mask for all samples, only that value
        is an operand."""
        if layout is None:
            return self.whole(value)
        alike = alike_clone(value, layout.dim, part_type(value, layout, parts), build.point)
        if alike is None:
            return cut(build, self.whole(value), layout, parts, microbatch)
        copy = maker_of(alike)
        for position in range(len(copy.operands)):
            copy.operands[position] = self.whole(copy.operands[position])
        without_axis(copy, self.axis.name)
        return alike

    def permute(self, build: Builder, value: ir.Value, step: int) -> ir.Value:
        """Returns the value of the rank `step` before."""
        # No two collectives may have the same channel.
        self.channel += 1
        return build.permute(value, self.axis.ring(step), self.channel, ANY_CHANNEL)

    def total(self, build: Builder, value: ir.Value) -> ir.Value:
        """Returns the sum over the ranks; for booleans, the disjunction."""
        self.channel += 1
        groups = self.axis.groups
        return build.all_reduce(value, groups, self.channel, channel_type=ANY_CHANNEL)

    def from_one(self, build: Builder, value: ir.Value, is_one: ir.Value) -> ir.Value:
        """Returns the value of the rank for which `is_one` is set."""
        return self.total(build, of_one(build, value, is_one))

    def join_parts(
        self,
        build: Builder,
        part: ir.Value,
        layout: DimTiling,
        shape: Sequence[int],
        rank: ir.Value,
    ) -> ir.Value:
        """Returns a value of shape `shape`, joined from each rank's part by an all_reduce of parts
        between zeros. For an all_gather, XLA's partitioner would first gather the value along the
        other axes."""
        rows = apart(shape, layout, self.axis.size)
        at, sizes = window(rows, layout, rank, build.i32(0))
        room = sum_identity(build, rows, element_of(part))
        own = build.update(room, build.reshape(part, sizes), at)
        return build.reshape(self.total(build, own), shape)

    def close(self, results: Sequence[tuple[ir.Value, int | None]]) -> list[ir.Value]:
        """Ends the region; returns its results outside, joined along their dimensions."""
        build, types = self.outside, list[ir.Type]()
        for value, dim in results:
            shape = shape_of(value)
            if dim is not None:
                shape[dim] *= self.axis.size
            types.append(build.tensor(shape, element_of(value)))
        self.end.create("sdy.return", [value for value, _ in results], [])
        computation = build.manual_computation(
            [value for value, _ in self._taken],
            types,
            (self._shardings(self._taken), self._shardings(results)),
            [self.axis.name],
        )
        self.block.append_to(computation.regions[0])
        self._holder.erase()
        return list(computation.results)

    def _shardings(self, values: Sequence[tuple[ir.Value, int | None]]) -> list[ir.Attribute]:
        own, mesh = AxisRef(self.axis.name), self.axis.mesh_name
        return [
            # Dimensions stay open, so that a partitioner can divide them over other axes.
            tensor_sharding(mesh, open_dims(rank_of(value), dim, (own,)), self.context)
            for value, dim in values
        ]
