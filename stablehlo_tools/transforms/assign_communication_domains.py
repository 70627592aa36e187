"""Gives collectives within the fast link a slot and a stream of their own on XLA:GPU.

XLA:GPU keeps one collective in flight, over whichever link it runs. It counts collectives of the
communication domain `scale_up_fabric` separately, and runs them on another stream. One collective
over NVLink and one over InfiniBand are then in flight together.

    %g = "stablehlo.all_gather"(%x) {replica_groups = [[0, …, 7], [8, …, 15]]}
  ==>
    %g = "stablehlo.all_gather"(%x) {
      mhlo.frontend_attributes = {collective_communication_domain = "scale_up_fabric"},
      replica_groups = [[0, …, 7], [8, …, 15]]}

The parts that an all_to_all exchanges get a dimension of their own, because XLA refuses the
attribute on the reshape that it would add.

Preconditions:
  P1  Every communicating op is of a dialect that is understood.
  P2  Replica groups name processes and mesh axes that the module has, none of them twice.
  P3  No op has a token yet: thread-tokens comes after this pass.
  P4  `against` is xla or text.

Guarantees: the signature stays. Values are bitwise the same, because no computation changes.

Left unchanged: collectives of other kinds than all_gather, all_reduce, reduce_scatter, all_to_all
and collective_permute; collectives that leave the fast link; async pairs; collectives that a
frontend attribute steers; an all_to_all with several operands; collectives of constants, and
indices or updates of a gather or scatter, on which XLA refuses the attribute. All collectives stay
if the hardware has one kind of link or is a torus, if none leaves the fast link, if the program is
not partitioned, or, unless `against=text`, if XLA is not expected to be faster (`overlap.compilers`
decides).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.analysis.compiler_hazards import CollectiveSurroundings
from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
from stablehlo_tools.analysis.replica_groups import ProcessGroups
from stablehlo_tools.analysis.tasks.graph import is_faster
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware, Network, load_hardware
from stablehlo_tools.cost.switches import domain, filled_evenly
from stablehlo_tools.diagnostics import Diagnostics, ToolError, note
from stablehlo_tools.dialect.dimensions import integer
from stablehlo_tools.dialect.frontend_attributes import (
    SCALE_UP_FABRIC,
    set_communication_domain,
    steering,
)
from stablehlo_tools.dialect.names import GATHER, SCATTER
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage
from stablehlo_tools.transforms.parts.create_reduce_scatter.smaller_collectives import (
    collective_like,
)

_ALL_TO_ALL = "all_to_all"
# Ops for which XLA reshapes all operands but the first, and copies the producers' attributes.
_RESHAPING = frozenset({GATHER, SCATTER})
_KINDS = frozenset(
    {"all_gather", "all_reduce", "reduce_scatter", "collective_permute", _ALL_TO_ALL}
)


@dataclass(frozen=True)
class AssignCommunicationDomainsPass(Pass):
    """Collectives within the fast link get a slot and a stream of their own on XLA:GPU.

    `hardware`: the name or the file of the profile that says how far the fast link reaches; times
    are predicted for it. `against`: `xla` (the default) leaves a program unchanged if XLA is not
    expected to be faster with the slots; `text` changes every program, as a later pass may use the
    slots. `explain`: a note for each collective, and one if all stay unchanged.
    """

    name: ClassVar[str] = "assign-communication-domains"
    milestone: ClassVar[Milestone | None] = Milestone(RoadStage.LINKS, ("", "against=text"))
    hardware: str = "h100"
    against: str = "xla"
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        hardware = load_hardware(self.hardware)
        location = module.operation.location
        if self.against not in ("xla", "text"):
            raise ToolError(f"{self.name}: against is xla or text (P4)", location)
        refuse_tokens(module, self.name, "P3")
        draft, notes = copy_module(module), Diagnostics()
        left = self._rewrite(draft, hardware, notes)
        if left is None and self.against == "xla" and not is_faster(draft, module, hardware):
            left = "XLA is expected to be as fast by itself"
            notes = Diagnostics()
        if left is None:
            take_over(module, draft)
        else:
            said = f"{self.name}: all collectives stay unchanged: {left}"
            notes.collected.append(note(said, location))
        if self.explain:
            diagnostics.collected += notes.collected

    def _rewrite(self, module: ir.Module, hardware: Hardware, notes: Diagnostics) -> str | None:
        """Rewrites a module in place; says why it is left, None if a domain was assigned."""
        collectives = find_collectives(module)
        facts = ModuleFacts.from_module(module, collectives)
        grouped = [(collective, facts.groups(collective)) for collective in collectives]
        # The second slot pays only if collectives over two kinds of links run together.
        if hardware.is_torus or len(hardware.networks) < 2:
            return f"{hardware.title} has one kind of link"
        unwritten = left_to_the_partitioner(module)
        if unwritten is not None:
            return f"the compiler has yet to write the collectives; {unwritten.advice}"
        fast = filled_evenly(hardware.networks, facts.grid.size)[0]
        if all(_is_within(groups, fast) for _, groups in grouped if groups):
            return f"no collective leaves {fast.name}"
        surroundings = CollectiveSurroundings(())
        assigned = False
        for collective, groups in grouped:
            if not groups or max(map(len, groups)) < 2:
                continue
            location = collective.op.location
            why = _why_left(collective, groups, fast, surroundings)
            if why is None:
                # XLA refuses the attribute on other ops, also on those that it wrote itself.
                set_communication_domain(_written_apart(collective), SCALE_UP_FABRIC)
                assigned = True
            said = f"unchanged: {why}" if why else f"over {fast.name}, beside those that leave it"
            notes.collected.append(note(f"{self.name}: {collective.kind}: {said}", location))
        return None if assigned else f"no collective within {fast.name} can be in a domain"


def _is_within(groups: ProcessGroups, network: Network) -> bool:
    """Returns True if no group leaves a domain of a network."""
    return all(len({domain(network, device) for device in group}) < 2 for group in groups)


def _why_left(
    collective: Collective,
    groups: ProcessGroups,
    fast: Network,
    surroundings: CollectiveSurroundings,
) -> str | None:
    if collective.kind not in _KINDS:
        return "XLA:GPU has no slot for its kind"
    if not _is_within(groups, fast):
        return f"it leaves {fast.name}"
    if collective.is_async:
        return "it is asynchronous: the program places its start and its done"
    steered = steering(collective.op)
    if steered:
        return f"{steered[0][0]} steers it"
    # XLA replaces it by its result, and would copy the attribute to that.
    if surroundings.is_of_what_all_have(collective):
        return "XLA computes it without sending anything"
    if collective.kind == _ALL_TO_ALL:
        return "it has several operands" if len(collective.op.operands) > 1 else None
    uses = [use for value in collective.op.results for use in value.uses if use.operand_number]
    readers = [use.owner.operation.name for use in uses]
    reader = next((name for name in readers if name in _RESHAPING), None)
    return f"XLA reshapes it for the {reader} that reads it" if reader else None


def _written_apart(collective: Collective) -> ir.Operation:
    """Returns the op of a collective; rewrites an all_to_all to exchange parts along dimension 0.

    [.., n·a, .., b, ..] → [n, .., a, .., b, ..] → all_to_all → [n, .., a, .., b, ..]
    → [.., a, .., n·b, ..]
    """
    op = collective.op
    if collective.kind != _ALL_TO_ALL:
        return op
    split, concat, count = (
        integer(op, name) for name in ("split_dimension", "concat_dimension", "split_count")
    )
    build = Builder(ir.InsertionPoint(op), op.location)
    value = op.operands[0]
    # Split and joined along one dimension of their own, the parts need no reshape in XLA.
    shape = shape_of(value)
    apart = build.reshape(
        value, [*shape[:split], count, shape[split] // count, *shape[split + 1 :]]
    )
    others = [dim for dim in range(len(shape) + 1) if dim != split]
    apart = build.transpose(apart, [split, *others])
    zero = build.integer(0)
    sent = collective_like(
        op, op.name, apart, apart.type, {"split_dimension": zero, "concat_dimension": zero}
    )
    dims = list(range(1, len(shape) + 1))
    together = build.transpose(sent, [*dims[:concat], 0, *dims[concat:]])
    op.results[0].replace_all_uses_with(build.reshape(together, shape_of(op.results[0])))
    op.erase()
    return maker_of(sent)
