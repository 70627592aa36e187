"""Splits a collective_permute with cycles into two acyclic ones and a select by the device id.

A ring of blocking sends and receives can wait for itself. Without the edge that closes it, it is a
chain, which cannot. These edges, one of each cycle, go into a permute of their own, before the
other.

    %y = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [1, 2], [2, 3], [3, 0]], channel = 1}
  ==>
    %b = "stablehlo.collective_permute"(%x) {pairs = [[3, 0]], channel = 2}
    %f = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [1, 2], [2, 3]], channel = 1}
    %id = stablehlo.partition_id
    %p = stablehlo.compare EQ, %id, 0
    %y = stablehlo.select %p, %b, %f

A cycle is cut at its longest edge, by the numbers of the devices. A device that sends to itself is
a cycle, too: another select keeps its operand. Devices that receive nothing get zeros as before.
The pass also rewrites permutes inside `while`, `if`, `case`, calls and manual computations.

Preconditions:
  P1  Every communicating op is of a dialect that is understood; mhlo and sdy collectives are
      lowered first.
  P2  Pairs name processes that the module has.
  P3  No op of a module with a cycle to break has a token: permutes are broken before they are
      ordered.
  P4  If mesh axes are left free around a permute, its back edges lead to all devices that differ
      along those or to none, and it is in the manual computation itself.
  P5  `min-bytes` is not negative.
  P6  If some devices keep their own operand and no pair leads anywhere else, the type has a known
      size, so that zeros for the others can be written.

Guarantees: values are bitwise as before on every device; the signature stays; a second run changes
nothing. The first permute gets a new channel, the second keeps the original's.

Left unchanged: permutes without a cycle, without elements or without users, in an async_start, or
smaller than `min-bytes`. `explain` names the rule.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

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
    AcyclicParts,
    Pair,
    check_min_bytes,
    cut_cycles,
    cycle_text,
    pairs_of,
    why_left,
)
from stablehlo_tools.analysis.replica_groups import AxisRef, GroupMode, mesh_axes_groups
from stablehlo_tools.analysis.shardings import (
    FreeAxes,
    manual_axes,
    sharding_axes,
    sharding_per_value,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, Severity, ToolError, to_place
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.builder import Builder, device_table
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.walk import ops_around
from stablehlo_tools.passes.base import Pass

_MOST_NAMED = 4  # cycles in a note


@dataclass(frozen=True)
class BreakPermuteCyclesPass(Pass):
    """A cyclic collective_permute becomes two acyclic ones and a select.

    `min-bytes`: permutes with smaller operands stay (default: 0). `explain`: a note for each cyclic
    permute, with its cycles, and whether it is broken.
    """

    name: ClassVar[str] = "break-permute-cycles"
    min_bytes: int = 0
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        check_min_bytes(self.min_bytes, self.name, "P5", module)
        facts = ModuleFacts.from_module(module)
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
class _CycleBreak:
    """A permute to break; `all_own`: every device of the module keeps its operand."""

    permute: Collective
    cut: AcyclicParts
    all_own: bool


def _plan(
    module: ir.Module, facts: ModuleFacts, membership: Membership, min_bytes: int
) -> tuple[list[_CycleBreak], list[Diagnostic]]:
    """Returns the permutes to break, and a note for each cyclic one."""
    plans: list[_CycleBreak] = []
    notes: list[Diagnostic] = []
    for permute in find_collectives(module):
        if permute.kind != PERMUTE:
            continue
        facts.groups(permute)  # raises if the pairs name processes that do not exist
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
            text = f"{what} is broken: these devices keep their operand"
        notes.append(Diagnostic(Severity.NOTE, text, to_place(permute.op.location)))
        if reason is not None:
            continue
        # The number of ids, replicas or partitions; None if the module does not state it.
        processes, grid = None, facts.grid
        if stated_grid(module) is not None:
            is_replica = permute.group_mode is GroupMode.CROSS_REPLICA
            processes = grid.num_replicas if is_replica else grid.num_partitions
        all_own = len(cut.own) == processes
        if not all_own:
            membership.check(permute, cut.back_targets, "P4")
            membership.check(permute, frozenset(cut.own), "P4")
            type_ = permute.op.results[0].type
            if not cut.forward and not ir.ShapedType(type_).has_static_shape:
                raise ToolError(
                    f"{permute.inner.name}: some devices send to themselves and the others get "
                    f"zeros, which need a static shape, not {type_} (P6)",
                    permute.op.location,
                )
        plans.append(_CycleBreak(permute, cut, all_own))
    return plans, notes


def _apply(plan: _CycleBreak, membership: Membership, channels: Channels) -> None:
    """Writes the acyclic permutes and the selects before the permute, and erases it."""
    permute, cut = plan.permute, plan.cut
    op, operand = permute.op, permute.op.operands[0]
    build = Builder(ir.InsertionPoint(op), op.location)
    value = operand
    if not plan.all_own:
        back = _copy_permute(permute, cut.back, channels) if cut.back else None
        # Devices without a sender get zeros: from the forward permute, or written if there is none.
        value = _copy_permute(permute, cut.forward) if cut.forward else build.splat_like(0, operand)
        if back is not None:
            chosen = membership.predicate(permute, cut.back_targets)
            value = build.same("select", chosen, back, value)
        if cut.own:
            keeps = membership.predicate(permute, frozenset(cut.own))
            value = build.same("select", keeps, operand, value)
    op.results[0].replace_all_uses_with(value)
    op.erase()


def _copy_permute(
    permute: Collective, pairs: Sequence[Pair], channels: Channels | None = None
) -> ir.Value:
    """Copies a permute with some of its pairs; with a new channel if it has one and `channels` is
    given."""
    copy = permute.op.clone(ip=ir.InsertionPoint(permute.op))
    copy.attributes[PAIRS] = device_table(pairs, copy.context)
    if channels is not None:
        channels.renew(copy)
    return copy.results[0]


class Membership:
    """Writes predicates before a module's permutes: True if the device's id is in a set.

    If the set is one id, or the first ids, the predicate is one comparison. Otherwise it is a
    lookup in a table. The table's last entry belongs to no id in the set. `dynamic_slice` clamps,
    so all higher ids read this entry:

        %id = stablehlo.partition_id                          // ids 0 and 2
        %in = stablehlo.dynamic_slice [true, false, true, false], %id
    """

    def __init__(self, module: ir.Module, facts: ModuleFacts) -> None:
        self._facts = facts
        self._free = FreeAxes(module, facts.meshes)

    def check(self, permute: Collective, ids: Set[int], precondition: str) -> None:
        """Raises a located ToolError if a predicate for these ids cannot be written beside a
        permute.

        A value inside a manual computation is the same for all devices that differ only along free
        axes. So the predicate must be, too.
        """
        if not ids or not self._free.around(permute.op):
            return
        around = ops_around(permute.op, MANUAL_COMPUTATION)
        if not around:
            raise ToolError(
                f"{permute.inner.name} has a cycle and is in a called function, and the module's "
                "manual computations leave mesh axes free: inline the calls first "
                f"({precondition})",
                permute.op.location,
            )
        mesh, free = self._free_axes(around)
        for group in mesh_axes_groups(self._facts.meshes[mesh], [AxisRef(n) for n in free]):
            if len({i in ids for i in group}) > 1:
                raise ToolError(
                    f"{permute.inner.name}: its cycle would be cut for only some of the devices "
                    f"{', '.join(map(str, group))}, which differ only along free mesh axes around "
                    f"it, {', '.join(free)}: make all axes manual ({precondition})",
                    permute.op.location,
                )

    def predicate(self, permute: Collective, ids: Set[int]) -> ir.Value:
        """Writes the predicate that the device's id is one of `ids`, counted as the permute
        does."""
        build = Builder(ir.InsertionPoint(permute.op), permute.op.location)
        # Pairs of a permute without a channel count replicas.
        is_replica = permute.group_mode is GroupMode.CROSS_REPLICA
        if is_replica or not self._free.around(permute.op):
            return _contains(build, "replica_id" if is_replica else "partition_id", ids)
        # The id is a scalar only in a computation that is manual over the free axes, too.
        mesh, free = self._free_axes(ops_around(permute.op, MANUAL_COMPUTATION))
        sharding = ir.Attribute.parse(f"#sdy.sharding<@{mesh}, []>", build.context)
        boolean = build.tensor([], ir.IntegerType.get_signless(1, build.context))
        manual = build.manual_computation([], [boolean], ([], [sharding]), free)
        block = manual.regions[0].blocks.append()
        inside = Builder(ir.InsertionPoint(block), build.location)
        inside.create("sdy.return", [_contains(inside, "partition_id", ids)], [])
        return manual.results[0]

    def _free_axes(self, around: list[ir.Operation]) -> tuple[str, list[str]]:
        """Returns the mesh of the manual computations, and its axes that none of them uses."""
        taken = {axis for op in around for axis in manual_axes(op)}
        mesh = _mesh_name(around)
        return mesh, [name for name, _ in self._facts.meshes[mesh].axes if name not in taken]


def _mesh_name(around: list[ir.Operation]) -> str:
    for op in around:
        for name in ("in_shardings", "out_shardings"):
            for sharding in sharding_per_value(op.attributes[name]):
                if sharding_axes(sharding)[0]:
                    return sharding_axes(sharding)[0]
    raise ToolError(
        "sdy.manual_computation names no mesh of the module, which is needed to break a cycle "
        "inside it",
        around[0].location,
    )


def _contains(build: Builder, id_op: str, ids: Set[int]) -> ir.Value:
    unsigned = ir.IntegerType.get_unsigned(32, build.context)
    own = build.op(id_op, [], build.tensor([], unsigned))
    if len(ids) == 1:
        return build.compare("EQ", own, build.splat(min(ids), [], unsigned))
    if ids == set(range(len(ids))):
        return build.compare("LT", own, build.splat(len(ids), [], unsigned))
    table = build.constant(np.array([i in ids for i in range(max(ids) + 2)]))
    row = build.dynamic_slice(table, [own], [1])
    return build.reshape(row, [])
