"""The tables by which a device finds its own part: which elements of a dimension it holds."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.tensor_shardings import Axes, MeshAxes
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.values import maker_of


class DeviceOffsets:
    """Where a device's part of a dimension starts: scalars of i32, made at the top of a body."""

    def __init__(self, body: ir.Block, axes: MeshAxes, location: ir.Location) -> None:
        self._axes = axes
        self._location = location
        build = Builder(ir.InsertionPoint.at_block_begin(body), location)
        unsigned = ir.IntegerType.get_unsigned(32, location.context)
        self._partition = build.op("partition_id", [], build.tensor([], unsigned))
        self._last = maker_of(self._partition)
        self._made: dict[tuple[Axes, int], ir.Value] = {}
        self._tables: dict[tuple[Axes, tuple[int, ...]], ir.Value] = {}

    def start(self, axes: Axes, local_size: int) -> ir.Value:
        """The first element of the device's part, `local_size` elements long, along the axes."""
        key = (axes, local_size)
        if key not in self._made:
            table = [int(position) * local_size for position in self._axes.positions(axes)]
            self._made[key] = self._lookup(table)
        return self._made[key]

    def by_position(self, axes: Axes, numbers: Sequence[int]) -> ir.Value:
        """The number that belongs to the device's position along the axes."""
        key = (axes, tuple(numbers))
        if key not in self._tables:
            table = [numbers[int(position)] for position in self._axes.positions(axes)]
            self._tables[key] = self._lookup(table)
        return self._tables[key]

    def zero(self) -> ir.Value:
        """The constant 0."""
        key = ((), 0)
        if key not in self._made:
            i32 = ir.IntegerType.get_signless(32, self._location.context)
            self._made[key] = self._kept(self._builder().splat(0, [], i32))
        return self._made[key]

    def finish(self) -> None:
        """Takes the partition id out again where no table was looked up."""
        if not list(self._partition.uses):
            maker_of(self._partition).erase()

    def _lookup(self, table: list[int]) -> ir.Value:
        build = self._builder()
        row = build.dynamic_slice(build.table(table), [self._partition], [1])
        return self._kept(build.reshape(row, []))

    def _builder(self) -> Builder:
        return Builder(ir.InsertionPoint.after(self._last), self._location)

    def _kept(self, value: ir.Value) -> ir.Value:
        self._last = maker_of(value)
        return value
