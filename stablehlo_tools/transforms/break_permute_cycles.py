"""Breaks the cycles of a collective_permute: two acyclic ones, and a select by the device's id.

A ring of blocking sends and receives can wait for itself; without the edge that closes it, it is
a chain that cannot. Those edges, one of each cycle, go into a permute of their own, in front.

    %y = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [1, 2], [2, 3], [3, 0]], channel = 1}
  ==>
    %b = "stablehlo.collective_permute"(%x) {pairs = [[3, 0]], channel = 2}
    %f = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [1, 2], [2, 3]], channel = 1}
    %id = stablehlo.partition_id
    %p = stablehlo.compare EQ, %id, 0
    %y = stablehlo.select %p, %b, %f

A cycle is cut at its longest edge, by the numbers of the devices. A device that sends to itself is
a cycle too: it keeps its operand, by another select. Where permutes count replicas (no channel),
so does the id. Whoever receives nothing gets zeros as before, out of the forward permute. Inside
`while`, `if`, `case`, calls and manual computations too; beside mesh axes that are left free, the
id is read in a manual computation over those.

Preconditions:
  P1  Every communicating op is of a dialect that is understood; mhlo and sdy collectives are
      lowered first.
  P2  Pairs name processes that the module has.
  P3  No op of a module with a cycle to break has a token: permutes are broken before they are
      ordered.
  P4  Where mesh axes are left free around a permute, its back edges lead to all devices that differ
      along those or to none, and it stands in the manual computation itself.
  P5  `min-bytes` is not negative.
  P6  Where some devices keep their own and no pair leads anywhere else, the type has a known size,
      so that zeros for the others can be written.

Guarantees: values bitwise as before, on every device; the signature as it was; a second run
changes nothing. The first permute's channel is new, the second's is the original's. (XLA:CPU
sends narrow floats as wider ones, and may change the bits of a NaN on the way; a device that keeps
its own keeps those too.)

Left as they are: permutes without a cycle, without elements or without users, in an async_start,
or smaller than `min-bytes`. `explain` says which rule it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.collectives import (
    Channels,
    Collective,
    ModuleFacts,
    find_collectives,
    stated_grid,
)
from stablehlo_tools.analysis.permute_pairs import (
    PAIRS,
    PERMUTE,
    Cut,
    Pair,
    check_min_bytes,
    cut_cycles,
    cycle_text,
    pairs_of,
    why_left,
)
from stablehlo_tools.analysis.replica_groups import GroupMode
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, Severity, ToolError, to_place
from stablehlo_tools.ir.builder import Builder, device_table
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.transforms.parts.break_permute_cycles.membership import Membership

_MOST_NAMED = 4  # cycles in a note


@dataclass(frozen=True)
class BreakPermuteCyclesPass(Pass):
    """A cyclic collective_permute becomes two acyclic ones and a select.

    `min-bytes`: permutes whose operand has fewer bytes stay. `explain`: a note for each permute
    that is broken, with its cycles, and for each cyclic one that is not.
    """

    name: ClassVar[str] = "break-permute-cycles"
    min_bytes: int = 0
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        check_min_bytes(self.min_bytes, self.name, "P5", module)
        facts = ModuleFacts.of(module)
        membership = Membership(module, facts)
        plans, notes = _plan(module, facts, membership, self.min_bytes)
        if plans:
            refuse_tokens(module, self.name, "P3")
            channels = Channels(module)
            for plan in plans:
                _apply(plan, membership, channels)
        if self.explain:
            diagnostics.collected += notes


@dataclass(frozen=True)
class _Plan:
    """A permute to break; `all_own` where every device of the module keeps its operand."""

    permute: Collective
    cut: Cut
    all_own: bool


def _plan(
    module: ir.Module, facts: ModuleFacts, membership: Membership, min_bytes: int
) -> tuple[list[_Plan], list[Diagnostic]]:
    """The permutes to break, and a note for each cyclic one."""
    plans: list[_Plan] = []
    notes: list[Diagnostic] = []
    for permute in find_collectives(module):
        if permute.kind != PERMUTE:
            continue
        facts.groups(permute)  # raises where the pairs name processes that there are not
        cut = cut_cycles(pairs_of(permute))
        if not cut.cycles:
            continue
        reason = why_left(permute, min_bytes)
        named = [cycle_text(cycle) for cycle in cut.cycles[:_MOST_NAMED]]
        if len(cut.cycles) > _MOST_NAMED:
            named.append(f"{len(cut.cycles) - _MOST_NAMED} more")
        what = f"{permute.kind} with the cycle{'s' * (len(named) > 1)} {', '.join(named)}"
        if reason is not None:
            text = f"{what} stays: {reason}"
        elif cut.back:
            edges = ", ".join(f"{source}>{target}" for source, target in cut.back)
            text = f"{what} is broken: {edges} in a permute of its own"
        else:
            text = f"{what} is broken: they keep their operand"
        notes.append(Diagnostic(Severity.NOTE, text, to_place(permute.op.location)))
        if reason is not None:
            continue
        all_own = len(cut.own) == _processes(module, facts, permute)
        if not all_own:
            membership.check(permute, cut.back_targets, "P4")
            membership.check(permute, frozenset(cut.own), "P4")
            _check_zeros(permute, cut)
        plans.append(_Plan(permute, cut, all_own))
    return plans, notes


def _processes(module: ir.Module, facts: ModuleFacts, permute: Collective) -> int | None:
    """How many ids there are, as the permute counts them; None where the module does not say."""
    if stated_grid(module) is None:
        return None
    is_replica = permute.group_mode is GroupMode.CROSS_REPLICA
    return facts.grid.num_replicas if is_replica else facts.grid.num_partitions


def _check_zeros(permute: Collective, cut: Cut) -> None:
    if cut.forward:
        return
    type_ = permute.op.results[0].type
    if not ir.ShapedType(type_).has_static_shape:
        raise ToolError(
            f"{permute.inner.name}: some devices send to themselves and others get zeros, which "
            f"cannot be written as {type_} (P6)",
            permute.op.location,
        )


def _apply(plan: _Plan, membership: Membership, channels: Channels) -> None:
    """Writes the acyclic permutes in front of the one they replace, and the selects."""
    permute, cut = plan.permute, plan.cut
    op, operand = permute.op, permute.op.operands[0]
    build = Builder(ir.InsertionPoint(op), op.location)
    value = operand
    if not plan.all_own:
        back = _permuted(permute, cut.back, channels) if cut.back else None
        value = _permuted(permute, cut.forward) if cut.forward else build.splat_like(0, operand)
        if back is not None:
            chosen = membership.predicate(permute, cut.back_targets)
            value = build.same("select", chosen, back, value)
        if cut.own:
            keeps = membership.predicate(permute, frozenset(cut.own))
            value = build.same("select", keeps, operand, value)
    op.results[0].replace_all_uses_with(value)
    op.erase()


def _permuted(
    permute: Collective, pairs: Sequence[Pair], channels: Channels | None = None
) -> ir.Value:
    """The permute with some of its pairs; with a new channel where it has one and `channels`."""
    copy = permute.op.clone(ip=ir.InsertionPoint(permute.op))
    copy.attributes[PAIRS] = device_table(pairs, copy.context)
    if channels is not None:
        channels.renew(copy)
    return copy.results[0]
