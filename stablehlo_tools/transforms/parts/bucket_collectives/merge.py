"""Makes one collective of several of a block.

Operands that differ in one dimension only, along which nothing is exchanged, are joined along it:

    %a = "stablehlo.all_gather"(%x) {all_gather_dim = 0}       // tensor<4x2xf32>, 8 devices
    %b = "stablehlo.all_gather"(%y) {all_gather_dim = 0}       // tensor<4x3xf32>
  ==>
    %xy = stablehlo.concatenate %x, %y, dim = 1
    %ab = "stablehlo.all_gather"(%xy) {all_gather_dim = 0}     // tensor<32x5xf32>
    %a = stablehlo.slice %ab [0:32, 0:2]
    %b = stablehlo.slice %ab [0:32, 2:5]

Others run along dimension 0, in what shape they fit beside each other, and what a device gives or
takes is a part of its own (see `exchange`). Were %a gathered along dimension 1:

    %xy = stablehlo.concatenate %x, %y, dim = 1
    %ab = "stablehlo.all_gather"(%xy) {all_gather_dim = 0}
    %parts = stablehlo.reshape %ab                             // tensor<8x4x5xf32>
    %a1 = stablehlo.slice %parts [0:8, 0:4, 0:2]
    %a2 = stablehlo.transpose %a1, dims = [1, 0, 2]
    %a = stablehlo.reshape %a2                                 // tensor<4x16xf32>
    %b1 = stablehlo.slice %parts [0:8, 0:4, 2:5]
    %b = stablehlo.reshape %b1                                 // tensor<32x3xf32>

Both read and write each operand and each result once more than before, unless a compiler fuses
that with what is around it.

An all_reduce or all_gather may have several operands instead, and nothing is copied. XLA takes
that where every device is a replica. It refuses it in a manual computation and where its
partitioner runs ("Sharding is tuple-shaped but validation shape is not"), and XLA:TPU makes several
of such an all_gather again: hence `several_operands`. An all_to_all of several operands means
something else to XLA than to StableHLO, namely the parts of one, and gives other values.

Values are bitwise as before, but for sums and products of floats, which a compiler may take in
another order for a larger operand: of the same elements of the same devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.collective_likeness import (
    Groups,
    Traits,
    traits_of,
    why_not_alike,
    why_unfit,
)
from stablehlo_tools.analysis.collectives import (
    Collective,
    ModuleFacts,
    classify_communication,
    find_collectives,
)
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.free_axes import FreeAxes
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.ir.values import in_block_order, key_of
from stablehlo_tools.transforms.parts.bucket_collectives.placement import (
    Place,
    find_place,
)
from stablehlo_tools.transforms.parts.bucket_collectives.writing import (
    SEVERAL_OPERANDS,
    write_merged,
)


class Merger:
    """Merges collectives of one module, which nobody else rewrites meanwhile.

    `several_operands`: an all_reduce or all_gather has them where every device is a replica.
    """

    def __init__(
        self,
        module: ir.Module,
        collectives: Sequence[Collective] | None = None,
        *,
        several_operands: bool = True,
    ) -> None:
        listed = find_collectives(module) if collectives is None else collectives
        self.facts = ModuleFacts.of(module, listed)
        self._groups = Groups(self.facts)
        self._effects = Effects(functions_by_name(module))
        self._free_axes = FreeAxes(module, self.facts.meshes)
        self._several_operands = several_operands
        self._classify = classify_communication(module.context)
        self._traits: dict[object, Traits | str] = {}

    def traits(self, collective: Collective) -> Traits | str:
        """What a collective must share with those that it is merged with, or why it never is.

        Raises a located ToolError for groups that the module does not have.
        """
        key = key_of(collective.op)
        if key not in self._traits:
            found = traits_of(collective, self._groups)
            if isinstance(found, Traits):
                free = self._free_axes.around(collective.op)
                axis = "a mesh axis is left free around it (C10)" if free else None
                found = why_unfit(collective, found) or axis or found
            self._traits[key] = found
        return self._traits[key]

    def why_not(self, members: Sequence[Collective]) -> str | None:
        """Why these cannot become one, as things stand, with the constraint; None where they can.

        Raises a located ToolError for groups that the module does not have.
        """
        place = self._placed(members)
        return place if isinstance(place, str) else None

    def why_not_ops(self, ops: Sequence[ir.Operation]) -> str | None:
        """`why_not` of ops, some of which may be no collectives."""
        members = [self._classify(op) for op in ops]
        strangers = [op.name for op, found in zip(ops, members, strict=True) if found is None]
        if strangers:
            return f"{strangers[0]} is no collective (C1)"
        return self.why_not([member for member in members if member is not None])

    def merge_ops(self, ops: Sequence[ir.Operation]) -> ir.Operation:
        """`merge` of ops, in any order."""
        reason = self.why_not_ops(ops)
        if reason is not None:
            raise _refusal(len(ops), reason, ops[0])
        members = [self._classify(op) for op in in_block_order(ops)]
        return self.merge([member for member in members if member is not None])

    def merge(self, members: Sequence[Collective]) -> ir.Operation:
        """Merges collectives, in the order given, and returns the op that stands for them.

        Handles to them become invalid, all others stay. Raises a located ToolError with the
        reason where they cannot be merged, and then changes nothing.
        """
        place = self._placed(members)
        if isinstance(place, str):
            raise _refusal(len(members), place, members[0].op)
        if len(members) == 1:
            return members[0].op
        traits = self.traits(members[0])
        assert isinstance(traits, Traits), "what has a place is like others"
        merged, last = write_merged(
            members,
            traits.members,
            place.insertion_point(),
            several=self._takes_several(members[0]),
        )
        for member in members:
            del self._traits[key_of(member.op)]
            member.op.erase()
        for op in place.moved:
            op.move_after(last)
            last = op
        return merged

    def copied_bytes(self, member: Collective) -> int:
        """Bytes read and written more for a collective where it is merged, if nothing is fused."""
        if self._takes_several(member):
            return 0
        return 2 * ((member.bytes_in or 0) + (member.bytes_out or 0))

    def _placed(self, members: Sequence[Collective]) -> Place | str:
        """Where one op can stand for these, or why none can."""
        traits = [self.traits(member) for member in members]
        refused = next((found for found in traits if isinstance(found, str)), None)
        if refused is not None:
            return refused
        judged = [found for found in traits if isinstance(found, Traits)]
        reasons = (why_not_alike(judged[0], other) for other in judged[1:])
        unlike = next((reason for reason in reasons if reason), None)
        if unlike is not None:
            return unlike
        if any(member.op.block != members[0].op.block for member in members):
            return "they stand in several blocks (C2)"
        return find_place([member.op for member in members], self._effects)

    def _takes_several(self, member: Collective) -> bool:
        """Whether the merged op has several operands, where XLA understands it so."""
        if not self._several_operands or member.kind not in SEVERAL_OPERANDS:
            return False
        return self.facts.grid.num_partitions == 1 and not self._free_axes.manual_computations


def _refusal(count: int, reason: str, op: ir.Operation) -> ToolError:
    return ToolError(f"these {count} collectives cannot become one: {reason}", op.location)
