"""Merges several collectives of a block into one.

Operands that differ only in one dimension, along which no data is exchanged, are concatenated along
it:

    %a = "stablehlo.all_gather"(%x) {all_gather_dim = 0}       // tensor<4x2xf32>, 8 devices
    %b = "stablehlo.all_gather"(%y) {all_gather_dim = 0}       // tensor<4x3xf32>
  ==>
    %xy = stablehlo.concatenate %x, %y, dim = 1
    %ab = "stablehlo.all_gather"(%xy) {all_gather_dim = 0}     // tensor<32x5xf32>
    %a = stablehlo.slice %ab [0:32, 0:2]
    %b = stablehlo.slice %ab [0:32, 2:5]

Others run along dimension 0, reshaped so that they can be concatenated, with each device's part
separate (see `merged_writing`). If %a were gathered along dimension 1:

    %xy = stablehlo.concatenate %x, %y, dim = 1
    %ab = "stablehlo.all_gather"(%xy) {all_gather_dim = 0}
    %parts = stablehlo.reshape %ab                             // tensor<8x4x5xf32>
    %a1 = stablehlo.slice %parts [0:8, 0:4, 0:2]
    %a2 = stablehlo.transpose %a1, dims = [1, 0, 2]
    %a = stablehlo.reshape %a2                                 // tensor<4x16xf32>
    %b1 = stablehlo.slice %parts [0:8, 0:4, 2:5]
    %b = stablehlo.reshape %b1                                 // tensor<32x3xf32>

Both forms read and write each operand and each result once more than before, unless a compiler
fuses the copies.

An all_reduce or all_gather may have several operands instead, without copies. XLA accepts that if
every device is a replica. It refuses it in a manual computation and if its partitioner runs
("Sharding is tuple-shaped but validation shape is not"). XLA:TPU splits such an all_gather again.
Hence the option `several_operands`. An all_to_all of several operands has another meaning in XLA
than in StableHLO, the parts of one operand, and gives other values.

Values are bitwise the same, except for sums and products of floats: a compiler may re-associate the
same elements of the same devices for a larger operand.

The merged op is written at the first of them, or after the last op that another one needs. Users of
results that are in between move after it, with their own users. Ops with effects keep their order,
so those after a moved one move too.

    %y = C(%x);  %z = f(%y);  %v = g(%u);  %w = C(%v)
  ==>
    %v = g(%u);  %y, %w = C(%x, %v);  %z = f(%y)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.collective_likeness import (
    CollectiveTraits,
    Groups,
    traits_of,
    why_not_alike,
    why_unfit,
)
from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.shardings import FreeAxes
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.values import in_block_order, key_of, producer
from stablehlo_tools.ir.walk import functions_by_name
from stablehlo_tools.transforms.parts.bucket_collectives.merged_writing import (
    SEVERAL_OPERANDS,
    write_merged,
)

_LEADS = "one of them feeds another (C9)"
_EFFECT_BETWEEN = "ops with effects between them would be reordered (C9)"


@dataclass(frozen=True)
class MergePlace:
    """The place to write a merged op, and the ops that move after it, in order."""

    point: ir.InsertionPoint
    moved: Sequence[ir.Operation]


def find_place(ops: Sequence[ir.Operation], effects: Effects) -> MergePlace | str:
    """Returns the place where one op can replace `ops`, of one block; or the reason why there is
    none."""
    block = ops[0].block
    first = in_block_order(ops)[0]
    read = [producer(value) for op in ops for value in op.operands]
    makers = [maker for maker in read if maker is not None and maker.block == block]
    later = in_block_order([op for op in makers if first.is_before_in_block(op)])
    if not later:
        leads = any(op == first for op in makers)
        return _LEADS if leads else MergePlace(ir.InsertionPoint(first), ())
    # Collects the ops up to the last needed one that must follow the merged op.
    reached = _Reached(ops, later[-1])
    if not reached.add_users([op for op in ops if reached.is_near(op)]):
        return _LEADS
    near = [op for op in effects.in_block(block) if reached.is_near(op)]
    while followers := reached.followers(near):
        reached.found.update({key_of(op): op for op in followers})
        if not reached.add_users(followers):
            return _EFFECT_BETWEEN
    return MergePlace(ir.InsertionPoint.after(later[-1]), in_block_order([*reached.found.values()]))


class _Reached:
    """The ops up to `last` that must follow some members, collected step by step."""

    def __init__(self, members: Sequence[ir.Operation], last: ir.Operation) -> None:
        self.members = {key_of(op) for op in members}
        self.last = last
        self.found: dict[ir.Value | ir.Operation, ir.Operation] = {}

    def is_near(self, op: ir.Operation) -> bool:
        """Returns True if an op is `last` or before it."""
        return op == self.last or op.is_before_in_block(self.last)

    def add_users(self, ops: Sequence[ir.Operation]) -> bool:
        """Adds all users of some ops, transitively; returns False if a member is among them."""
        pending = list(ops)
        while pending:
            op = pending.pop()
            for use in [use for result in op.results for use in result.uses]:
                user = use.owner.operation
                while user.block != op.block:  # go out to the op of this block that contains it
                    user = user.block.owner.operation
                key = key_of(user)
                if key in self.members:
                    return False
                if key not in self.found and self.is_near(user):
                    self.found[key] = user
                    pending.append(user)
        return True

    def followers(self, effects: Sequence[ir.Operation]) -> list[ir.Operation]:
        """Returns the ops with effects that are after the first one found, and not found yet."""
        taken = [key_of(op) in self.found for op in effects]
        behind = effects[taken.index(True) :] if True in taken else ()
        return [op for op in behind if key_of(op) not in self.found]


class Merger:
    """Merges collectives of one module, which must not be rewritten otherwise meanwhile.

    `several_operands`: an all_reduce or all_gather gets several operands if every device is a
    replica.
    """

    def __init__(
        self,
        module: ir.Module,
        collectives: Sequence[Collective] | None = None,
        *,
        several_operands: bool = True,
    ) -> None:
        listed = find_collectives(module) if collectives is None else collectives
        self.facts = ModuleFacts.from_module(module, listed)
        self._groups = Groups(self.facts)
        self._effects = Effects(functions_by_name(module))
        self._free_axes = FreeAxes(module, self.facts.meshes)
        self._several_operands = several_operands
        self._traits: dict[object, CollectiveTraits | str] = {}

    def traits(self, collective: Collective) -> CollectiveTraits | str:
        """Returns what a collective must share with others to be merged, or why it never can be.

        Raises a located ToolError for groups that the module does not have.
        """
        key = key_of(collective.op)
        if key not in self._traits:
            traits = traits_of(collective, self._groups)
            if isinstance(traits, CollectiveTraits):
                free = self._free_axes.around(collective.op)
                axis = "a mesh axis is left free around it (C10)" if free else None
                traits = why_unfit(collective, traits) or axis or traits
            self._traits[key] = traits
        return self._traits[key]

    def why_not(self, members: Sequence[Collective]) -> str | None:
        """Says why collectives cannot be merged now, with the constraint; None if they can.

        Raises a located ToolError for groups that the module does not have.
        """
        place = self._merge_place(members)
        return place if isinstance(place, str) else None

    def merge(self, members: Sequence[Collective]) -> ir.Operation:
        """Merges collectives, in the order given, and returns the merged op.

        Handles to them become invalid, all others stay valid. Raises a located ToolError with the
        reason if they cannot be merged, and then changes nothing.
        """
        place = self._merge_place(members)
        if isinstance(place, str):
            text = f"cannot merge these {len(members)} collectives: {place}"
            raise ToolError(text, members[0].op.location)
        if len(members) == 1:
            return members[0].op
        traits = self.traits(members[0])
        assert isinstance(traits, CollectiveTraits), "only like collectives have a place"
        merged, last = write_merged(
            members, traits.members, place.point, several=self._takes_several(members[0])
        )
        for member in members:
            del self._traits[key_of(member.op)]
            member.op.erase()
        for op in place.moved:
            op.move_after(last)
            last = op
        return merged

    def copied_bytes(self, member: Collective) -> int:
        """Returns the additional bytes read and written for a merged collective, if no copy is
        fused."""
        if self._takes_several(member):
            return 0
        return 2 * ((member.bytes_in or 0) + (member.bytes_out or 0))

    def _merge_place(self, members: Sequence[Collective]) -> MergePlace | str:
        """Returns the place where one op can replace `members`, or why there is none."""
        traits = [self.traits(member) for member in members]
        refused = next((reason for reason in traits if isinstance(reason, str)), None)
        if refused is not None:
            return refused
        judged = [each for each in traits if isinstance(each, CollectiveTraits)]
        reasons = (why_not_alike(judged[0], other) for other in judged[1:])
        unlike = next((reason for reason in reasons if reason), None)
        if unlike is not None:
            return unlike
        if any(member.op.block != members[0].op.block for member in members):
            return "they are in different blocks (C2)"
        return find_place([member.op for member in members], self._effects)

    def _takes_several(self, member: Collective) -> bool:
        """Returns True if the merged op has several operands: if it may, and XLA accepts it."""
        if not self._several_operands or member.kind not in SEVERAL_OPERANDS:
            return False
        return self.facts.grid.num_partitions == 1 and not self._free_axes.manual_computations
