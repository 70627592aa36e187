"""The loop of a pipeline as the devices of an axis run it, tick by tick.

A `LoopRegion` finds which values are shards, and which differ between ranks or ticks. It evaluates
the integers that control the loop on a rank in a tick: its counter, the index of a stage, entries
of tables. These decide which branch or slice a value is traced through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues, Values
from stablehlo_tools.analysis.loop_values import ControlValues
from stablehlo_tools.analysis.loops import count_trips, is_integer_scalar
from stablehlo_tools.analysis.replica_groups import AxisRef, mesh_axes_groups
from stablehlo_tools.analysis.shardings import axes_by_dimension, sharding_axes, sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ALL_REDUCE, MANUAL_COMPUTATION
from stablehlo_tools.dialect.traits import Trait, full_names, ops_with
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import ManualComputation
from stablehlo_tools.ir.walk import values_used
from stablehlo_tools.ir.while_loop import WhileLoop
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import Box

_MOST_TICKS = 1 << 14  # more are refused: each tick is traced
# Ops whose results differ between devices or ticks even if their operands do not.
_DIFFERING = ops_with(Trait.DEVICE_ID) | full_names("infeed recv rng")


def ticks_of(loop: ir.Operation, values: DeviceValues) -> int | str:
    """Returns the number of trips of a loop, or the reason why it is unknown."""

    def known(value: ir.Value) -> list[int] | None:
        integers = values.known_tensor(value) if is_integer_scalar(value.type) else None
        return None if integers is None else [int(n) for n in integers.ravel()]

    count = count_trips(loop, known)
    if isinstance(count, str):
        return count
    if len(set(count.trips)) > 1:
        return "devices run it different numbers of times"
    if count.trips[0] > _MOST_TICKS:
        return f"it runs {count.trips[0]} times, more than this pass traces"
    return count.trips[0]


def manual_around(loop: ir.Operation) -> ir.Operation | None:
    """Returns the manual computation whose body contains a loop; None if there is none."""
    owner = loop.block.owner.operation
    return owner if owner.name == MANUAL_COMPUTATION else None


def mesh_of(manual: ir.Operation) -> str:
    """Returns the name of the mesh that the shardings of a manual computation refer to; empty if
    none does."""
    names = ("in_shardings", "out_shardings")
    stated = [each for name in names for each in sharding_per_value(manual.attributes[name])]
    return sharding_axes(stated[0])[0] if stated else ""


@dataclass(frozen=True)
class Ranks:
    """The stages of a manual axis. `devices[r]` represents rank r; `rank_of` maps each device to
    its rank. Without an axis there is one rank for all devices."""

    axis: str
    devices: tuple[int, ...]
    rank_of: tuple[int, ...]

    @staticmethod
    def from_groups(axis: str, groups: Sequence[Sequence[int]], facts: ModuleFacts) -> Ranks:
        """Returns the ranks along an axis, from the `groups` of devices that differ only along
        it."""
        rank_of = {device: rank for group in groups for rank, device in enumerate(group)}
        return Ranks(axis, tuple(groups[0]), tuple(rank_of[d] for d in range(facts.grid.size)))

    @staticmethod
    def groups(axis: str, manual: ir.Operation, facts: ModuleFacts) -> Sequence[Sequence[int]]:
        """Returns the groups of devices that differ only along an axis of a manual computation's
        mesh; none if that mesh does not have the program's devices."""
        mesh = facts.meshes.get(mesh_of(manual))
        if mesh is None or mesh.size != facts.grid.size:
            return ()
        return mesh_axes_groups(mesh, [AxisRef(axis)])

    @staticmethod
    def single(facts: ModuleFacts) -> Ranks:
        """Returns one rank for all devices."""
        return Ranks("", (0,), (0,) * facts.grid.size)

    @property
    def count(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    def moves(self, groups: Sequence[Sequence[int]]) -> bool:
        """Returns True if groups of devices reach from one rank to another."""
        return any(len({self.rank_of[device] for device in group}) > 1 for group in groups)

    def is_whole(self, group: Sequence[int]) -> bool:
        """Returns True if a group has one device of every rank."""
        return sorted(self.rank_of[device] for device in group) == list(range(self.count))

    def is_in_order(self, group: Sequence[int]) -> bool:
        """Returns True if a group has one device of every rank, in the order of ranks."""
        return [self.rank_of[device] for device in group] == list(range(self.count))


class LoopRegion(WhileLoop):
    """A loop with a known number of trips, and the manual computation that contains it.

    Without one, the region is the loop alone.
    """

    def __init__(self, loop: ir.Operation, ticks: int, ranks: Ranks, values: DeviceValues) -> None:
        super().__init__(loop)
        self.ticks = ticks
        self.ranks = ranks
        self.facts = values.facts
        self.manual = manual_around(loop) if ranks.axis else None
        self._integers = ControlValues(loop, ticks, values.known_tensor)
        self._depths: dict[ir.Block, int] = {}
        # Values that depend on a carry which the loop changes.
        self._varying = {a for i, a in enumerate(self.arguments) if i not in self.invariant}
        _add_dependent(self.block, self._varying)
        self._by_rank = self._differing()

    def is_varying(self, op: ir.Operation) -> bool:
        """Returns True if the results of an op of the loop's body may differ between ticks."""
        return op.block != self.block or any(result in self._varying for result in op.results)

    def differs(self, value: ir.Value) -> bool:
        """Returns True if ranks may hold different values."""
        return value in self._by_rank

    def _differing(self) -> set[ir.Value]:
        """Returns the values that depend on a shard, on a device's number, or on the tick."""
        if self.manual is None:
            return set()
        block = ManualComputation(self.manual).body
        shards = (a for a in block.arguments if self.entering_dim(a) is not None)
        differing: set[ir.Value] = {*shards}
        _add_dependent(block, differing)
        # First what differs before the loop, then in it, by rank or by tick, then after it.
        pairs = zip(self.arguments, self.loop.operands, strict=True)
        differing.update(a for a, o in pairs if o in differing or a in self._varying)
        _add_dependent(self.block, differing)
        differing.update(self.loop.results)
        _add_dependent(block, differing)
        return differing

    def differing_around(self, alike: Collection[ir.Value] = ()) -> set[ir.Value]:
        """Returns the values of the manual computation that may differ between ranks. The arguments
        `alike` are assumed to be the same on all ranks; so are sums over all ranks."""
        assert self.manual is not None
        block = ManualComputation(self.manual).body
        shards = (a for a in block.arguments if self.entering_dim(a) is not None)
        differing: set[ir.Value] = {*self.loop.results, *(a for a in shards if a not in alike)}

        def is_joined(op: ir.Operation) -> bool:
            groups = self.groups(op) if op.name == ALL_REDUCE else None
            return groups is not None and all(map(self.ranks.is_whole, groups))

        _add_dependent(block, differing, is_joined)
        return differing

    def is_in_loop(self, op: ir.Operation) -> bool:
        """Returns True if an op is in the loop's body, or in a branch in it."""
        return self._depth(op.block) == 2

    def is_inside(self, op: ir.Operation) -> bool:
        """Returns True if an op is in the loop's body or the manual computation's."""
        return self._depth(op.block) >= (1 if self.manual is not None else 2)

    def _depth(self, block: ir.Block) -> int:
        """Returns 2 for a block in the loop, 1 in the manual computation, 0 outside."""
        if block not in self._depths:
            owner = block.owner.operation
            if block == self.block:
                depth = 2
            elif self.manual is not None and block == ManualComputation(self.manual).body:
                depth = 1
            elif owner.name in ("func.func", "builtin.module", MANUAL_COMPUTATION):
                depth = 0
            else:
                depth = self._depth(owner.block)
            self._depths[block] = depth
        return self._depths[block]

    def integers_at(self, value: ir.Value, rank: int, tick: int) -> Values | None:
        """Returns the integers of a value on a rank; None unless they are known and equal on all of
        its devices."""
        known = self._integers.value_at_tick(value, tick)
        # One row holds for all devices.
        if known is None or len(known) == 1:
            return None if known is None else known[0]
        own = known[self.ranks.devices[rank]]
        alike = all(
            (known[device] == own).all()
            for device, other in enumerate(self.ranks.rank_of)
            if other == rank
        )
        return own if alike else None

    def has_known_integers(self, value: ir.Value) -> bool:
        """Returns True if a value is known on every device in every tick."""
        return self._integers.value_at_tick(value, 0) is not None

    def steady_integers(self, value: ir.Value) -> Values | None:
        """Returns the integers of a value; None unless they are known and equal on all ranks in all
        ticks."""
        known = self._integers.constant(value)
        if known is None or any((own != known[0]).any() for own in known):
            return None
        return known[0]

    def groups(self, op: ir.Operation) -> Sequence[Sequence[int]] | None:
        """Returns the groups, or pairs, of devices of a collective; None if they are unknown."""
        return self.facts.groups(Collective(op, op, op.name.removeprefix("stablehlo.")))

    def unshard_box(self, value: ir.Value, rank: int, box: Box) -> Box:
        """Returns a rank's box as a box of the whole value from outside, the shards of all ranks
        joined."""
        dim = self.entering_dim(value)
        if dim is None:
            return box
        size = shape_of(value)[dim]
        return box.along(dim, box.starts[dim] + rank * size, box.sizes[dim])

    def mesh_axes(self) -> Sequence[tuple[str, int]]:
        """Returns the axes of the mesh of the manual computation, and their sizes."""
        assert self.manual is not None
        return self.facts.meshes[mesh_of(self.manual)].axes

    def entering_dim(self, value: ir.Value) -> int | None:
        """Returns the dimension of an argument of the manual computation that the axis divides;
        None if it divides none."""
        if self.manual is None or producer(value) is not None:
            return None
        if value.owner != ManualComputation(self.manual).body:
            return None
        number = ir.BlockArgument(value).arg_number
        return self._sharded_dim("in_shardings", number)

    def leaving_dim(self, result: int) -> int | None:
        """Returns the dimension of a result of the manual computation that the axis divides; None
        if it divides none."""
        return self._sharded_dim("out_shardings", result)

    def yielded_shard(self, result: int) -> ir.Value:
        """Returns the value that a rank yields as its shard of a result of the manual
        computation."""
        assert self.manual is not None
        return ManualComputation(self.manual).yield_of(result)

    def leaving_shape(self, result: int) -> list[int]:
        """Returns the shape of a result with the shards of all ranks joined. Other axes stay
        divided."""
        if self.manual is None:
            return shape_of(self.loop.results[result])
        shape, dim = shape_of(self.yielded_shard(result)), self.leaving_dim(result)
        if dim is not None:
            shape[dim] *= self.ranks.count
        return shape

    def sharding(self, name: str, number: int) -> ir.Attribute:
        """Returns the sharding of an operand or a result of the manual computation."""
        assert self.manual is not None
        return sharding_per_value(self.manual.attributes[name])[number]

    def _sharded_dim(self, name: str, number: int) -> int | None:
        axes = axes_by_dimension(self.sharding(name, number))
        return next((dim for dim, own in enumerate(axes) if self.ranks.axis in own), None)


def _add_dependent(
    block: ir.Block,
    values: set[ir.Value],
    is_joined: Callable[[ir.Operation], bool] = lambda _: False,
) -> None:
    """Adds the results of a block's ops that depend on `values`, and results that always differ."""
    for view in block.operations:
        op = view.operation
        if is_joined(op):
            continue
        if not values.isdisjoint(values_used(op)) or op.name in _DIFFERING:
            values.update(op.results)
