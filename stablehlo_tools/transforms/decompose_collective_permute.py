"""Turns collective_permutes into send and recv, in an order that cannot deadlock.

    %a = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [1, 2], [2, 3]]}
    %b = "stablehlo.collective_permute"(%y) {pairs = [[3, 0]]}
  ==>
    %t = stablehlo.after_all
    %a, %r = "stablehlo.recv"(%t) {pairs = [[0, 1], [1, 2], [2, 3]], channel = 1}
    %s = "stablehlo.send"(%x, %t) {pairs = [[0, 1], [1, 2], [2, 3]], channel = 1}
    %u = stablehlo.after_all %r, %s
    %b, %v = "stablehlo.recv"(%u) {pairs = [[3, 0]], channel = 2}
    %w = "stablehlo.send"(%y, %u) {pairs = [[3, 0]], channel = 2}

The send and the recv of a permute are not ordered, so no device of a chain waits for the one
before it. Both halves of a permute come before both halves of the next, in program order, on one
token. It runs through `while`, `if`, `case`, calls and manual computations, and between barriers
through other collectives that share two devices with the chain. Collectives along other axes of a
mesh stay free.

With `validity`, a permute in a loop skips the transfers that no output of the program depends on.
In a pipeline of four stages and four microbatches, 9 of 21 transfers are skipped:

    %y = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [1, 2], [2, 3]]}
  ==>
    %n = <constant [0, 1, 2, 2, 3, 4, 5], at the loop's counter>
    %y = "stablehlo.case"(%n) ({ permute(%x) [[0, 1]] }, { permute(%x) [[0, 1], [1, 2]] },
         { permute(%x) [[0, 1], [1, 2], [2, 3]] }, { permute(%x) [[1, 2], [2, 3]] },
         { permute(%x) [[2, 3]] }, { zeros })

There are at most 8 different sets of edges; beyond that, some unneeded transfers run. Permutes stay
in loops with an unknown number of iterations, or with more than 10,000 in all.

Preconditions:
  P1  Every communicating op is of a dialect that is understood; mhlo and sdy collectives are
      lowered first.
  P2  Pairs name processes that the module has.
  P3  No op of a module with a permute to rewrite has a token: run the pass before `thread-tokens`.
  P4  No permute to decompose has a cycle: run `break-permute-cycles` before.
  P5  Its pairs count partitions: it has a channel.
  P6  Its tensor has a known size.
  P7  No mesh axis is left free around it: XLA's partitioner supports no send or recv.
  P8  `min-bytes` is not negative.
  P9  A token can reach each: it is in structured control flow, in functions that are not recursive,
      and the chained ops meet the preconditions of thread-tokens.

Guarantees: values are bitwise as before; the signature stays; a second run changes nothing. Each
send and its recv have a channel of their own; frontend attributes are kept.

Left unchanged: permutes without elements, without pairs or without users, in an async_start, or
smaller than `min-bytes`; all of them with `form=collective-permute`. `explain` names the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import (
    Collective,
    ModuleFacts,
    find_collectives,
    next_channel,
)
from stablehlo_tools.analysis.permute_pairs import (
    PAIRS,
    PERMUTE,
    check_min_bytes,
    cycle_text,
    find_cycles,
    pairs_of,
    why_left,
)
from stablehlo_tools.analysis.replica_groups import GroupMode
from stablehlo_tools.analysis.shardings import FreeAxes
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, Severity, ToolError, to_place
from stablehlo_tools.dialect.communication_kinds import TRANSFERS
from stablehlo_tools.dialect.frontend_attributes import FRONTEND_ATTRIBUTES
from stablehlo_tools.dialect.names import AFTER_ALL, RECV, SEND
from stablehlo_tools.ir.builder import DEVICE_TO_DEVICE, Builder
from stablehlo_tools.ir.token_chain import CARRIED, LINK, refuse_tokens
from stablehlo_tools.ir.values import key_of, maker_of
from stablehlo_tools.ir.walk import drop_attributes
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.transforms.parts.decompose_collective_permute.skipping import skip_unneeded
from stablehlo_tools.transforms.thread_tokens import thread_collectives

_PERMUTES = "collective-permute"
type _Groups = list[frozenset[int]]


@dataclass(frozen=True)
class DecomposeCollectivePermutePass(Pass):
    """Acyclic collective_permutes become send and recv on one token chain.

    `form`: `send-recv`, for XLA:GPU and for sets of several programs; `collective-permute` keeps
    the permutes, for XLA:CPU and XLA:TPU. `validity`: a branch on the loop's counter skips
    transfers that no output depends on; calls are inlined for that. `min-bytes`: permutes with
    smaller operands stay (default: 0). `explain`: a note for each permute, and for each other
    collective that is ordered with them.
    """

    name: ClassVar[str] = "decompose-collective-permute"
    form: Literal["send-recv", "collective-permute"] = "send-recv"
    validity: bool = False
    min_bytes: int = 0
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        check_min_bytes(self.min_bytes, self.name, "P8", module)
        # First: permutes in the branches that skip transfers are decomposed like others.
        if self.validity:
            notes = skip_unneeded(module, self.min_bytes, self.name)
            diagnostics.collected += notes if self.explain else []
        collectives = find_collectives(module)
        facts = ModuleFacts.from_module(module, collectives)
        reasons: dict[ir.Value | ir.Operation, str | None] = {}
        for permute in (c for c in collectives if c.kind == PERMUTE):
            facts.groups(permute)  # raises if the pairs name processes that do not exist
            why = f"form={_PERMUTES}"
            if self.form != _PERMUTES:
                why = why_left(permute, self.min_bytes) if pairs_of(permute) else "it has no pairs"
            reasons[key_of(permute.op)] = why
        chosen = [c for c in collectives if reasons.get(key_of(c.op), "other") is None]
        others = [c for c in collectives if reasons.get(key_of(c.op), "other") is not None]
        # A device that waits in another collective does not send, so these join the chain.
        ordered = conflicting(chosen, others, facts)
        channel = next_channel(module)
        if self.explain and not (self.validity and self.form == _PERMUTES):  # explained above
            diagnostics.collected += _collective_notes(collectives, reasons, ordered, channel)
        if chosen:
            refuse_tokens(module, self.name, "P3")
            free_axes = FreeAxes(module, facts.meshes)
            for permute in chosen:
                problem = _problem(permute, free_axes)
                if problem is not None:
                    raise ToolError(f"{permute.inner.name}: {problem}", permute.op.location)
            to_transfers(module, chosen, ordered, channel)


def _problem(permute: Collective, free_axes: FreeAxes) -> str | None:
    cycles = find_cycles(pairs_of(permute))
    if cycles:
        return (
            f"its pairs have the cycle {cycle_text(cycles[0])}, in which devices can wait for "
            "each other: run break-permute-cycles first (P4)"
        )
    if permute.group_mode is not GroupMode.CROSS_PARTITION:
        return (
            "its pairs count replicas, but those of send and recv count partitions: give it a "
            "channel, and the module several partitions (P5)"
        )
    type_ = permute.op.results[0].type
    if not ir.ShapedType(type_).has_static_shape:
        return f"{type_} has a dimension of unknown size, and a recv needs a static shape (P6)"
    if free_axes.around(permute.op):
        return (
            "mesh axes are left free around it, and XLA's partitioner supports no send or recv: "
            "make all axes manual, or run partition first (P7)"
        )
    return None


def _collective_notes(
    collectives: list[Collective],
    reasons: dict[ir.Value | ir.Operation, str | None],
    ordered: list[Collective],
    channel: int,
) -> list[Diagnostic]:
    """Returns a note for each permute and each ordered collective, in program order."""
    between = {key_of(collective.op) for collective in ordered}
    notes: list[Diagnostic] = []
    for collective in collectives:
        key, kind = key_of(collective.op), collective.kind
        said: list[str] = []
        if key in reasons and reasons[key] is None:
            said.append(f"{kind} became send and recv on channel {channel}")
            channel += 1
        elif key in reasons:
            said.append(f"{kind} stays: {reasons[key]}")
        if key in between:
            said.append(f"{kind} is ordered with the sends: it has devices in common with them")
        place = to_place(collective.op.location)
        notes += [Diagnostic(Severity.NOTE, text, place) for text in said]
    return notes


def conflicting(
    transfers: Sequence[Collective], others: Sequence[Collective], facts: ModuleFacts
) -> list[Collective]:
    """Returns those of `others` that conflict with one of `transfers`, directly or through each
    other.

    A collective and a transfer conflict if each could wait for the other. That needs two devices in
    common, in one connected group of each: one device can be in the first while the other is in the
    second. A conflicting collective joins the transfer's group, through which others may conflict.
    XLA's decomposer uses the same rule: collectives along the other axes of a mesh stay free. Only
    collectives with known participants count, because the host never waits for a device's peers.
    """
    together: _Groups = []
    for transfer in transfers:
        together = _join_groups(together, _groups(transfer, facts))
    in_conflict: set[int] = set()
    waiting = {n: groups for n, c in enumerate(others) if (groups := _groups(c, facts))}
    while met := [
        n
        for n, groups in waiting.items()
        if any(len(group & other) > 1 for group in together for other in groups)
    ]:
        for n in met:
            together = _join_groups(together, waiting.pop(n))
        in_conflict.update(met)
    return [others[n] for n in sorted(in_conflict)]


def _groups(collective: Collective, facts: ModuleFacts) -> _Groups:
    """Returns the connected groups of a collective's participants."""
    if collective.kind in TRANSFERS:
        return []
    return _join_groups([], [frozenset(group) for group in facts.groups(collective) or ()])


def _join_groups(groups: _Groups, more: Sequence[frozenset[int]]) -> _Groups:
    """Adds groups; joins those that have a device in common."""
    joined = list(groups)
    for group in more:
        touching = [g for g in joined if g & group]
        joined = [*(g for g in joined if not g & group), group.union(*touching)]
    return joined


def to_transfers(
    module: ir.Module, permutes: Sequence[Collective], ordered: Sequence[Collective], channel: int
) -> None:
    """Replaces the permutes by send and recv, on channels from `channel` on.

    `ordered` keep their place in the chain between them. The chain is the one that `thread-tokens`
    would write through these permutes and the collectives that conflict with them. A permute
    between its two barriers is then replaced:

        %x1, %t1 = stablehlo.optimization_barrier %x, %t0      %y, %r = "stablehlo.recv"(%t0)
        %y0 = "stablehlo.collective_permute"(%x1)         ==>  %s = "stablehlo.send"(%x, %t0)
        %y, %t2 = stablehlo.optimization_barrier %y0, %t1      %t2 = stablehlo.after_all %r, %s

    The rest of the chain stays, without its marks: it is part of the program now, so `strip-tokens`
    must not remove it.

    Raises a located ToolError if a token cannot reach one of them.
    """
    chained = {key_of(collective.op) for collective in (*permutes, *ordered)}
    thread_collectives(module, lambda collective: key_of(collective.op) in chained)
    for number, permute in enumerate(permutes, channel):
        _replace(permute.op, number)
    drop_attributes(module.operation, (LINK, CARRIED))


def _replace(permute: ir.Operation, channel: int) -> None:
    before = maker_of(permute.operands[0])
    (use,) = permute.results[0].uses
    after = use.owner.operation
    data, token = before.operands
    build = Builder(ir.InsertionPoint(permute), permute.location)
    # A send and its recv share these attributes. XLA's importer of StableHLO writes the pairs as a
    # frontend attribute, which XLA reads.
    shared = {
        "channel_handle": bindings.ChannelHandle.get(channel, DEVICE_TO_DEVICE, permute.context),
        "is_host_transfer": ir.BoolAttr.get(False, permute.context),
        PAIRS: permute.attributes[PAIRS],
    }
    if FRONTEND_ATTRIBUTES in permute.attributes:
        shared[FRONTEND_ATTRIBUTES] = permute.attributes[FRONTEND_ATTRIBUTES]
    received = build.create(RECV, [token], [permute.results[0].type, token.type], shared)
    sent = build.create(SEND, [data, token], [token.type], shared)
    joined = build.create(AFTER_ALL, [received.results[1], sent.results[0]], [token.type])
    after.results[0].replace_all_uses_with(received.results[0])
    after.results[1].replace_all_uses_with(joined.results[0])
    for op in (after, permute, before):
        op.erase()
