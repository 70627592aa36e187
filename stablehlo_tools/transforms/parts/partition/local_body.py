"""What the body of one device is written with: offsets, collectives, and a view of what is local.

`DeviceOffsets` looks up where a device's part begins; `CollectiveWriter` turns Shardy's collectives
into StableHLO's on parts; `LocalView` is what the rules for single ops (`local_ops`) know of the
body that is localized.

Replica groups are dense lists of partition ids, in the order of the axes: the member at position k
holds, or receives, part k.

A dimension that does not divide evenly is held in blocks of ceil(n / parts), the last ones padded.
Blocks for fewer parts start elsewhere then: what a collective moves is cut anew (`_held_as`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import permutations
from typing import Protocol

from stablehlo_tools.analysis.collectives import element_bits
from stablehlo_tools.analysis.reducers import captured, own_constants
from stablehlo_tools.analysis.shardings import Axes, Dims, MeshAxes, ValueShardings, axes_in
from stablehlo_tools.bindings import ChannelHandle, ir
from stablehlo_tools.cost.collectives import transfer_time
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.transfers import Transfer
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.builder import (
    DEVICE_TO_DEVICE,
    Builder,
    device_table,
    element_of,
    shape_of,
    write_reducer,
)
from stablehlo_tools.ir.values import maker_of, producer
from stablehlo_tools.transforms.parts.partition.halo import Parts, Piece
from stablehlo_tools.transforms.parts.partition.moving import Moved, resized, write


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


_LISTS = re.compile(r"\{([^{}]*)\}")
_EXCHANGES = re.compile(r"\{([^{}]*)\}\s*:\s*(\d+)\s*->\s*(\d+)")
_WORTH = 0.99  # of the time of one order, at which another one is taken
_SUM = 0  # as sdy.all_reduce says that it sums


# The ops of Shardy that `CollectiveWriter` writes. sdy-reshard-to-collectives, which runs before,
# is given no values in parts of a sum, and reduces by all_reduce alone.
WRITTEN = ops_with(Trait.RESHARDING) - {
    "sdy.reduce_scatter",
    "sdy.replicated_to_unreduced",
    "sdy.sharded_to_unreduced",
}


class CollectiveWriter:
    """Writes the collectives of one module, as is quickest on hardware; channel handles count up
    from `first_channel`."""

    def __init__(
        self,
        shardings: ValueShardings,
        offsets: DeviceOffsets,
        first_channel: int,
        hardware: Hardware,
    ) -> None:
        self._hardware = hardware
        self._shardings = shardings
        self._axes: MeshAxes = shardings.axes
        self._offsets = offsets
        self._channel = first_channel

    def write(self, op: ir.Operation, before: Dims) -> ir.Value:
        """What stands for a Shardy collective; its operand is local already, `before` its
        sharding."""
        build = Builder(ir.InsertionPoint(op), op.location)
        value, after = op.operands[0], self._shardings.of(op.results[0])
        whole = ir.RankedTensorType(op.results[0].type).shape if before else []
        name = op.name.removeprefix("sdy.")
        if 0 in whole:
            return build.reshape(value, self._shardings.local_shape(whole, after))
        if name == "all_gather":
            value = self.all_gather(build, value, _axis_lists(op, "gathering_axes"))
            return self._cut_anew(build, value, whole, after)
        if name == "all_slice":
            lists = _axis_lists(op, "slicing_axes")
            return self.all_slice(build, value, lists, whole, before)
        if name == "all_to_all":
            return self._cut_anew(build, self._all_to_all(build, value, op, before), whole, after)
        if name == "collective_permute":
            return self._permute(build, value, before, after)
        if name == "all_reduce":
            axes = axes_in(str(op.attributes["reduction_axes"]))
            return self._all_reduce(build, value, axes, op)
        raise AssertionError(f"no lowering for {op.name}")

    def all_gather(self, build: Builder, value: ir.Value, lists: Sequence[Axes]) -> ir.Value:
        """A value made whole along the axes of each dimension."""
        for dim in self._quickest_order(value, lists):
            axes, shape = lists[dim], shape_of(value)
            shape[dim] *= self._axes.size(axes)
            value = build.op(
                "all_gather",
                [value],
                build.tensor(shape, element_of(value)),
                all_gather_dim=build.integer(dim),
                use_global_device_ids=ir.UnitAttr.get(build.context),
                **self._groups(build, axes),
            )
        return value

    def _quickest_order(self, value: ir.Value, lists: Sequence[Axes]) -> Sequence[int]:
        """The dimensions to gather, one after the other: what goes over slow links first, while
        the parts are small."""
        shape = shape_of(value)
        dims = [dim for dim, axes in enumerate(lists) if axes and shape[dim]]
        held = math.prod(shape) * element_bits(element_of(value)) / 8

        def time(order: Sequence[int]) -> float:
            size, total = held, 0.0
            for dim in order:
                size *= self._axes.size(lists[dim])
                groups = tuple(map(tuple, self._axes.groups(lists[dim])))
                transfer = Transfer("all_gather", size, groups)
                total += transfer_time(transfer, self._hardware, self._axes.mesh.size).ns
            return total

        times = {order: time(order) for order in permutations(dims)} if len(dims) > 1 else {}
        best = min(times, key=times.__getitem__, default=dims)
        return best if times and times[tuple(best)] < _WORTH * times[tuple(dims)] else dims

    def all_slice(
        self,
        build: Builder,
        value: ir.Value,
        lists: Sequence[Axes],
        whole: Sequence[int] | None = None,
        before: Dims | None = None,
    ) -> ir.Value:
        """A device's own part of a value, divided further along the axes of each dimension: of one
        of the shape `whole` that is divided as `before`, or whole on each device."""
        whole = shape_of(value) if whole is None else whole
        starts: list[ir.Value] = []
        sizes: list[int] = []
        for dim, (axes, size) in enumerate(zip(lists, whole, strict=True)):
            outer = () if before is None else before[dim]
            parts = self._axes.size(axes)
            block = -(-size // (parts * self._axes.size(outer)))
            value = self._held_as(build, value, dim, outer, (size, block * parts))
            starts.append(self._offsets.start(axes, block) if axes else self._offsets.zero())
            sizes.append(block)
        return build.dynamic_slice(value, starts, sizes)

    def by_position(self, axes: Axes, numbers: Sequence[int]) -> ir.Value:
        """The number that belongs to the device's position along the axes, a scalar of i32."""
        return self._offsets.by_position(axes, numbers)

    def zero(self) -> ir.Value:
        """The constant 0 of i32."""
        return self._offsets.zero()

    def _cut_anew(
        self, build: Builder, value: ir.Value, whole: Sequence[int], dims: Dims
    ) -> ir.Value:
        """A value of which devices hold blocks of any size, in the blocks of its sharding."""
        for dim, (axes, size) in enumerate(zip(dims, whole, strict=True)):
            block = -(-size // self._axes.size(axes))
            value = self._held_as(build, value, dim, axes, (size, block))
        return value

    def _held_as(
        self, build: Builder, value: ir.Value, dim: int, axes: Axes, sizes: tuple[int, int]
    ) -> ir.Value:
        """A dimension of sizes[0] elements in blocks of sizes[1]; elements move where the blocks
        that it is held in start elsewhere."""
        size, block = sizes
        held = shape_of(value)[dim]
        if held == block or not axes:
            return resized(build, value, dim, block)
        parts = self._axes.size(axes)
        source, target = (Parts.steps(size, length, parts) for length in (held, block))
        moved = Moved((value,), (source,), (Piece(0, 0, 0, size),), target)
        return write(self, build, moved, dim, axes)

    def _all_to_all(
        self, build: Builder, value: ir.Value, op: ir.Operation, before: Dims
    ) -> ir.Value:
        whole = ir.RankedTensorType(op.results[0].type).shape
        outer = list(before)
        for text, source, target in _EXCHANGES.findall(str(op.attributes["params"])):
            axes, split, concat = axes_in(text), int(target), int(source)
            parts = self._axes.size(axes)
            size = whole[split]
            block = -(-size // (parts * self._axes.size(outer[split])))
            value = self._held_as(build, value, split, outer[split], (size, block * parts))
            outer[split] = self._axes.canonical((*outer[split], *axes))
            shape = shape_of(value)
            shape[split] //= parts
            shape[concat] *= parts
            value = build.op(
                "all_to_all",
                [value],
                build.tensor(shape, element_of(value)),
                split_dimension=build.integer(split),
                concat_dimension=build.integer(concat),
                split_count=build.integer(parts),
                **self._groups(build, axes),
            )
        return value

    def _permute(self, build: Builder, value: ir.Value, before: Dims, after: Dims) -> ir.Value:
        # Senders and receivers: each ends with its part by `after`; itself is the first sender.
        held, wanted = self._blocks(before), self._blocks(after)
        pairs = [(d, d) for d in range(len(held)) if held[d] == wanted[d]]
        settled = {device for device, _ in pairs}
        free: dict[tuple[int, ...], list[int]] = {}
        for device in range(len(held)):
            if device not in settled:
                free.setdefault(held[device], []).append(device)
        for device in range(len(held)):
            if device not in settled:
                pairs.append((free[wanted[device]].pop(0), device))
        pairs = sorted(pairs, key=lambda pair: pair[1])
        if all(source == target for source, target in pairs):
            return value
        return build.permute(value, pairs, self._next_channel())

    def permute(
        self, build: Builder, value: ir.Value, axes: Axes, pairs: Sequence[tuple[int, int]]
    ) -> ir.Value:
        """What each device gets when those at one position along the axes send to another; zeros
        where none does."""
        rows = [(group[s], group[t]) for group in self._axes.groups(axes) for s, t in pairs]
        return build.permute(value, rows, self._next_channel())

    def _blocks(self, dims: Dims) -> list[tuple[int, ...]]:
        """Which part of a value each device holds, as its number along each dimension."""
        positions = [self._axes.positions(axes) for axes in dims]
        return [tuple(int(p[device]) for p in positions) for device in range(self._axes.mesh.size)]

    def _all_reduce(
        self, build: Builder, value: ir.Value, axes: Axes, op: ir.Operation
    ) -> ir.Value:
        result = build.all_reduce(value, self._axes.groups(axes), self._next_channel(), None)
        region = maker_of(result).regions[0]
        maker = producer(value)
        if maker is not None and maker.name in ("stablehlo.reduce", "stablehlo.scatter"):
            copy_reducer(maker, region)
        else:
            if ir.IntegerAttr(op.attributes["reduction_op"]).value != _SUM:
                raise ToolError(f"partition: {op.name} of what no reduce made", op.location)
            write_reducer("add", element_of(value), region, op.location)
        return result

    def _groups(self, build: Builder, axes: Axes) -> dict[str, ir.Attribute]:
        handle = ChannelHandle.get(self._next_channel(), DEVICE_TO_DEVICE, build.context)
        groups = device_table(self._axes.groups(axes), build.context)
        return {"replica_groups": groups, "channel_handle": handle}

    def _next_channel(self) -> int:
        self._channel += 1
        return self._channel - 1


def copy_reducer(maker: ir.Operation, region: ir.Region) -> None:
    """Gives an all_reduce the region by which the partial results were made."""
    source = maker.clone()
    body = source.regions[0].blocks[0]
    own_constants(body, [op for op in captured(body) if "value" in op.attributes])
    for block in list(source.regions[0].blocks):
        block.append_to(region)
    source.erase()


def _axis_lists(op: ir.Operation, name: str) -> list[Axes]:
    return [axes_in(text) for text in _LISTS.findall(str(op.attributes[name]))]


class LocalView(Protocol):
    """A body of which all values above the op at hand are one device's parts."""

    shardings: ValueShardings
    offsets: DeviceOffsets
    collectives: CollectiveWriter

    def divided(self, value: ir.Value) -> Dims:
        """How a value, local or about to be, is divided; made by ops already passed."""
        ...

    def size(self, axes: Axes) -> int:
        """Into how many parts axes divide."""
        ...

    def whole_shape(self, value: ir.Value) -> list[int]:
        """The global shape of a value that is local already."""
        ...

    def moved(self, value: ir.Value) -> tuple[int, Axes, Moved] | None:
        """What a local value was put together from along a dimension; None for any other."""
        ...

    def note_moved(self, value: ir.Value, dim: int, axes: Axes, moved: Moved) -> None:
        """Keeps what a value was put together from, to be dropped where nobody uses it."""
        ...

    def part_type(self, value: ir.Value, dims: Dims) -> ir.Type:
        """The type of one device's part of a global value."""
        ...

    def replace(self, op: ir.Operation, value: ir.Value) -> None:
        """Puts a local value in the place of an op's one result, whose attributes still say how it
        is divided, and erases the op."""
        ...

    def like(self, new: ir.Value, old: ir.Value) -> None:
        """Says that a value is a part of a tensor of another one's shape, divided alike."""
        ...

    def stand_in(self, old: ir.Value, new: ir.Value) -> None:
        """Lets a value made from another one, divided alike, take its place everywhere else."""
        ...

    def erase(self, op: ir.Operation) -> None:
        """Erases an op, and what is known of its values."""
        ...

    def adopt(self, old: ir.Value, new: ir.Value) -> None:
        """Puts a value in the place of one that is divided alike."""
        ...
