"""Writes collectives in the body of one device, and records which values are local.

`CollectiveWriter` lowers Shardy's collectives to StableHLO's on parts. `LocalBody` is the state of
the body that is being localized, for the rules for single ops (`local_ops`).

Replica groups are dense lists of partition ids, in the order of the axes: the member at position k
holds, or receives, part k.

A dimension that does not divide evenly is held in blocks of ceil(n / parts), with the last ones
padded. For fewer parts the blocks start at other elements, so the result of a collective is cut
again (`_held_as`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, permutations

from stablehlo_tools.analysis.captured_constants import captured_ops, own_constants
from stablehlo_tools.analysis.collectives import element_bits
from stablehlo_tools.analysis.shardings import (
    Axes,
    Dims,
    MeshAxes,
    ValueShardings,
    axes_in,
    rank_of,
)
from stablehlo_tools.bindings import ChannelHandle, ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.network_times import transfer_time
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.communication_kinds import refusal
from stablehlo_tools.dialect.names import ALL_REDUCE, REDUCE, REDUCE_SCATTER, SCATTER
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.builder import (
    DEVICE_TO_DEVICE,
    Builder,
    device_table,
    element_of,
    shape_of,
    write_reducer,
)
from stablehlo_tools.ir.values import producer, stand_in
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.transforms.parts.partition.halo import DimensionParts, HaloPiece
from stablehlo_tools.transforms.parts.partition.halo_writing import (
    DeviceGroup,
    MovedTarget,
    MoveWriter,
    resize_dim,
)

_LISTS = re.compile(r"\{([^{}]*)\}")
_EXCHANGES = re.compile(r"\{([^{}]*)\}\s*:\s*(\d+)\s*->\s*(\d+)")
WORTH = 0.99  # another order of all_gathers has to be faster than this share of the default's time
_ALL_SLICE = "sdy.all_slice"
_SIMPLE = 2  # ops of a reducer that compilers scatter, with its return
_SUM = 0  # the reduction_op of an sdy.all_reduce that sums


# The ops of Shardy that `CollectiveWriter` writes. sdy-reshard-to-collectives, which runs before,
# sees no values in parts of a sum, and its only reductions are all_reduces.
WRITTEN = ops_with(Trait.RESHARDING) - {
    "sdy.reduce_scatter",
    "sdy.replicated_to_unreduced",
    "sdy.sharded_to_unreduced",
}


def is_one_faster(
    one: DeviceTransfer, several: Iterable[DeviceTransfer], hardware: Hardware, devices: int
) -> bool:
    """Returns True if a collective is faster than several others, one after the other."""
    others = list(several)
    times = (transfer_time(transfer, hardware, devices).ns for transfer in others)
    return len(others) > 1 and transfer_time(one, hardware, devices).ns <= sum(times)


class CollectiveWriter:
    """Writes the collectives of one module, in the order that is fastest on the hardware."""

    def __init__(self, shardings: ValueShardings, devices: DeviceGroup, hardware: Hardware) -> None:
        self._hardware = hardware
        self._shardings = shardings
        self._axes: MeshAxes = shardings.axes
        self._devices = devices
        # The results of reduce_scatters, with the axes along which each dimension was scattered.
        self._scattered: dict[ir.Value, list[Axes]] = {}

    def write(self, op: ir.Operation, before: Dims) -> ir.Value:
        """Lowers a Shardy collective, and returns the new value. The operand is local already;
        `before` is its sharding."""
        build = Builder(ir.InsertionPoint(op), op.location)
        value, after = op.operands[0], self._shardings.axes_by_dim(op.results[0])
        whole = ir.RankedTensorType(op.results[0].type).shape if before else []
        name = op.name.removeprefix("sdy.")
        # An empty tensor has nothing to exchange.
        if 0 in whole:
            return build.reshape(value, self._shardings.local_shape(whole, after))
        if name == "all_gather":
            value = self.all_gather(build, value, _axis_lists(op, "gathering_axes"))
            return self._cut_anew(build, value, whole, after)
        if name == "all_slice":
            lists = _axis_lists(op, "slicing_axes")
            scattered = self._scattered.pop(value, [()] * len(lists))
            before = tuple((*one, *axes) for one, axes in zip(before, scattered, strict=True))
            lists = [() if cut else axes for axes, cut in zip(lists, scattered, strict=True)]
            return self.all_slice(build, value, lists, whole, before) if any(lists) else value
        if name == "all_to_all":
            return self._cut_anew(build, self._all_to_all(build, value, op, before), whole, after)
        if name == "collective_permute":
            return self._permute(build, value, before, after)
        assert name == "all_reduce", f"no lowering for {op.name}"
        return self._sum(build, op, whole, before)

    def all_gather(self, build: Builder, value: ir.Value, lists: Sequence[Axes]) -> ir.Value:
        """Gathers a value along the axes of each dimension."""
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
        """Returns the dimensions to gather, in order. Gathers over slow links come first if that
        saves time, because the parts are still small."""
        shape = shape_of(value)
        dims = [dim for dim, axes in enumerate(lists) if axes and shape[dim]]
        held = math.prod(shape) * element_bits(element_of(value)) / 8

        def time(order: Sequence[int]) -> float:
            size, total = held, 0.0
            for dim in order:
                size *= self._axes.size(lists[dim])
                transfer = self._transfer("all_gather", size, lists[dim])
                total += transfer_time(transfer, self._hardware, self._axes.mesh.size).ns
            return total

        times = {order: time(order) for order in permutations(dims)} if len(dims) > 1 else {}
        best = min(times, key=times.__getitem__, default=dims)
        return best if times and times[tuple(best)] < WORTH * times[tuple(dims)] else dims

    def all_slice(
        self,
        build: Builder,
        value: ir.Value,
        lists: Sequence[Axes],
        whole: Sequence[int] | None = None,
        before: Dims | None = None,
    ) -> ir.Value:
        """Returns a device's own part of a value, divided further along the axes of each dimension.

        The global value has the shape `whole` and is divided as `before`. By default it is whole on
        each device.
        """
        whole = shape_of(value) if whole is None else whole
        starts: list[ir.Value] = []
        sizes: list[int] = []
        for dim, (axes, size) in enumerate(zip(lists, whole, strict=True)):
            outer = () if before is None else before[dim]
            parts = self._axes.size(axes)
            block = -(-size // (parts * self._axes.size(outer)))
            value = self._held_as(build, value, dim, outer, (size, block * parts))
            starts.append(self._devices.start(axes, block) if axes else self._devices.zero())
            sizes.append(block)
        return build.dynamic_slice(value, starts, sizes)

    def _cut_anew(
        self, build: Builder, value: ir.Value, whole: Sequence[int], dims: Dims
    ) -> ir.Value:
        """Converts a value in blocks of any size to the block sizes of its sharding."""
        for dim, (axes, size) in enumerate(zip(dims, whole, strict=True)):
            block = -(-size // self._axes.size(axes))
            value = self._held_as(build, value, dim, axes, (size, block))
        return value

    def _held_as(
        self, build: Builder, value: ir.Value, dim: int, axes: Axes, sizes: tuple[int, int]
    ) -> ir.Value:
        """Converts a dimension of sizes[0] elements to blocks of sizes[1]. Elements move between
        devices if the blocks had other starts."""
        size, block = sizes
        held = shape_of(value)[dim]
        if held == block or not axes:
            return resize_dim(build, value, dim, block)
        parts = self._axes.size(axes)
        source, target = (DimensionParts.steps(size, length, parts) for length in (held, block))
        moved = MovedTarget((value,), (source,), (HaloPiece(0, 0, 0, size),), target)
        return MoveWriter(self._devices, build, moved, dim, axes).write()

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
        # A device that lacks its part gets it from a device that needs another part itself.
        held, wanted = self._blocks(before), self._blocks(after)
        unsettled = [device for device in range(len(held)) if held[device] != wanted[device]]
        if not unsettled:
            return value
        free: dict[tuple[int, ...], list[int]] = {}
        for device in unsettled:
            free.setdefault(held[device], []).append(device)
        sender = {device: free[wanted[device]].pop(0) for device in unsettled}
        pairs = [(sender.get(device, device), device) for device in range(len(held))]
        return build.permute(value, pairs, self._devices.next_channel())

    def _blocks(self, dims: Dims) -> list[tuple[int, ...]]:
        """Returns the part of a value that each device holds, as its index along each dimension."""
        positions = [self._axes.positions(axes) for axes in dims]
        return [tuple(int(p[device]) for p in positions) for device in range(self._axes.mesh.size)]

    def _sum(
        self, build: Builder, op: ir.Operation, whole: Sequence[int], before: Dims
    ) -> ir.Value:
        """Writes an sdy.all_reduce.

        If only an all_slice reads the sum, and its parts are equal, each device takes its own part
        by reduce_scatters.
        """
        axes, value = axes_in(str(op.attributes["reduction_axes"])), op.operands[0]
        users, reducing = [use.owner for use in op.results[0].uses], _reducing_op(op)
        scattered: list[Axes] = [()] * rank_of(value)
        is_simple = reducing is None or len(Combining(reducing).combiner.operations) <= _SIMPLE
        refused = refusal("reduce_scatter", str(element_of(value)))
        if is_simple and not refused and [user.name for user in users] == [_ALL_SLICE]:
            for dim, cut in enumerate(_axis_lists(users[0], "slicing_axes")):
                parts = self._axes.size((*before[dim], *cut))
                if set(cut) <= set(axes) and whole[dim] % parts == 0:
                    scattered[dim] = cut
        rest = tuple(axis for axis in axes if not any(axis in cut for cut in scattered))
        stages = [(cut, dim) for dim, cut in enumerate(scattered) if cut]
        stages += [(rest, None)] if rest else []
        held = math.prod(shape_of(value)) * element_bits(element_of(value)) / 8
        sizes = accumulate(
            stages, lambda size, stage: size / self._axes.size(stage[0]), initial=held
        )
        several = [
            self._transfer("all_reduce" if dim is None else "reduce_scatter", size, cut)
            for (cut, dim), size in zip(stages, sizes, strict=False)
        ]
        one, devices = self._transfer("all_reduce", held, axes), self._axes.mesh.size
        if is_one_faster(one, several, self._hardware, devices):
            stages = [(axes, None)]
        for cut, dim in stages:
            value = self._reduce(build, op, value, cut, dim)
        if stages[0][1] is not None:
            self._scattered[value] = scattered
        return value

    def _transfer(self, kind: str, size: float, axes: Axes) -> DeviceTransfer:
        return DeviceTransfer(kind, size, tuple(map(tuple, self._axes.groups(axes))))

    def _reduce(
        self, build: Builder, op: ir.Operation, value: ir.Value, axes: Axes, dim: int | None = None
    ) -> ir.Value:
        """Reduces a value over axes, with the reducer of an sdy.all_reduce. With `dim`, each device
        gets its part of that dimension."""
        attributes = self._groups(build, axes)
        attributes["use_global_device_ids"] = ir.UnitAttr.get(build.context)
        shape, kind = shape_of(value), ALL_REDUCE
        if dim is not None:
            kind, attributes["scatter_dimension"] = REDUCE_SCATTER, build.integer(dim)
            shape[dim] //= self._axes.size(axes)
        type_ = build.tensor(shape, element_of(value))
        made = build.create(kind, [value], [type_], attributes, regions=1)
        reducing = _reducing_op(op)
        if reducing is not None:
            # Appending a block to a region moves it, so take the block of a clone.
            source = reducing.clone()
            body = Combining(source).combiner
            own_constants(body, [op for op in captured_ops(body) if "value" in op.attributes])
            body.append_to(made.regions[0])
            source.erase()
        elif ir.IntegerAttr(op.attributes["reduction_op"]).value == _SUM:
            write_reducer("add", element_of(value), made.regions[0], op.location)
        else:
            raise ToolError(f"partition: {op.name} without a reduce must be a sum", op.location)
        return made.results[0]

    def _groups(self, build: Builder, axes: Axes) -> dict[str, ir.Attribute]:
        handle = ChannelHandle.get(self._devices.next_channel(), DEVICE_TO_DEVICE, build.context)
        groups = device_table(self._axes.groups(axes), build.context)
        return {"replica_groups": groups, "channel_handle": handle}


def _reducing_op(op: ir.Operation) -> ir.Operation | None:
    """Returns the op that made the partial results of an sdy.all_reduce, if it has a reducer."""
    maker = producer(op.operands[0])
    return maker if maker is not None and maker.name in (REDUCE, SCATTER) else None


def _axis_lists(op: ir.Operation, name: str) -> list[Axes]:
    return [axes_in(text) for text in _LISTS.findall(str(op.attributes[name]))]


class LocalBody:
    """A body that is localized op by op. All values above the current op are one device's parts.

    `shardings` has the division of each value; new channel handles start at `channel`.
    """

    def __init__(
        self, body: ir.Block, shardings: ValueShardings, channel: int, hardware: Hardware
    ) -> None:
        self.shardings = shardings
        self.devices = DeviceGroup(body, shardings.axes, body.owner.location, channel)
        self.collectives = CollectiveWriter(shardings, self.devices, hardware)
        self._body = body
        self._divided: dict[ir.Value, Dims] = {}
        self._whole: dict[ir.Value, list[int]] = {}  # global shapes of divided values
        self._moved: dict[ir.Value, tuple[int, Axes, MovedTarget]] = {}

    def sharding_of(self, value: ir.Value) -> Dims:
        """Returns the sharding of a value; () for each dimension if the value was not visited
        yet."""
        return self._divided.get(value, ((),) * rank_of(value))

    def size(self, axes: Axes) -> int:
        """Returns the number of parts into which axes divide."""
        return self.shardings.axes.size(axes)

    def whole_shape(self, value: ir.Value) -> list[int]:
        """Returns the global shape of a local value."""
        if value in self._whole:
            return self._whole[value]
        dims = self.sharding_of(value)
        return [n * self.size(axes) for n, axes in zip(shape_of(value), dims, strict=True)]

    def move_origin(self, value: ir.Value) -> tuple[int, Axes, MovedTarget] | None:
        """Returns the dimension, axes and pieces that a local value was put together from; None for
        any other value."""
        return self._moved.get(value)

    def note_moved(self, value: ir.Value, dim: int, axes: Axes, moved: MovedTarget) -> None:
        """Records the pieces that a value was put together from. `Localizer.run` erases it if it
        stays unused."""
        self._moved[value] = dim, axes, moved

    def localize(self, value: ir.Value) -> None:
        """Gives a value the type of one device's part."""
        dims = self.shardings.axes_by_dim(value)
        self._divided[value] = dims
        if any(dims):
            self._whole[value] = shape_of(value)
            value.set_type(self.part_type(value, dims))

    def part_type(self, value: ir.Value, dims: Dims) -> ir.Type:
        """Returns the type of one device's part of a global value."""
        whole = ir.RankedTensorType(value.type)
        shape = self.shardings.local_shape(whole.shape, dims)
        return ir.RankedTensorType.get(shape, whole.element_type, loc=self._body.owner.location)

    def replace(self, op: ir.Operation, value: ir.Value) -> None:
        """Replaces an op with one result by a local value, and erases the op. The value gets the
        sharding of the result."""
        old = op.results[0]
        self._divided[value] = self.shardings.axes_by_dim(old)
        if any(self._divided[value]):
            self._whole[value] = shape_of(old)
        old.replace_all_uses_with(value)
        self.erase(op)

    def stand_in(self, old: ir.Value, new: ir.Value) -> None:
        """Replaces a value, in all its other uses, by a value made from it with the same
        sharding."""
        self.like(new, old)
        stand_in(old, new)

    def adopt(self, old: ir.Value, new: ir.Value) -> None:
        """Replaces a value by another one with the same sharding."""
        self.like(new, old)
        old.replace_all_uses_with(new)

    def like(self, new: ir.Value, old: ir.Value) -> None:
        """Records that a new value has the global shape and the sharding of an old one."""
        self._divided[new] = self._divided[old]
        if old in self._whole:
            self._whole[new] = self._whole[old]

    def erase(self, op: ir.Operation) -> None:
        """Erases an op, and all records of its values."""
        self.forget(op)
        op.erase()

    def forget(self, op: ir.Operation) -> None:
        """Drops all records of the values of an op before it is erased. A later value may get the
        same address, and values are compared by address."""
        block_arguments = (
            a for region in op.regions for block in region.blocks for a in block.arguments
        )
        for value in (*op.results, *block_arguments):
            self._divided.pop(value, None)
            self._whole.pop(value, None)
            self._moved.pop(value, None)
