"""Writes send and recv in the place of permutes, on one token chain through the whole module.

The chain is what `thread-tokens` would put through these permutes, and through what conflicts
with them; a permute between its two barriers is then replaced:

    %x1, %t1 = stablehlo.optimization_barrier %x, %t0      %y, %r = "stablehlo.recv"(%t0)
    %y0 = "stablehlo.collective_permute"(%x1)         ==>  %s = "stablehlo.send"(%x, %t0)
    %y, %t2 = stablehlo.optimization_barrier %y0, %t1      %t2 = stablehlo.after_all %r, %s

The rest of the chain stays, without its marks: it is part of the program now, not for
`strip-tokens` to take out.

Other collectives conflict with a transfer where they could wait for it while it waits for them:
where they have two devices in common, in one connected group of each: the
one device can be in the first while the other is in the second. What conflicts with a transfer
joins its group, through which further ones may conflict. (XLA's decomposer draws the same line:
collectives along the other axes of a mesh stay free.)
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.permute_pairs import PAIRS
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.collectives import TRANSFERS
from stablehlo_tools.dialect.names import AFTER_ALL, RECV, SEND
from stablehlo_tools.ir.builder import DEVICE_TO_DEVICE, Builder
from stablehlo_tools.ir.token_chain import CARRIED, LINK
from stablehlo_tools.ir.values import key_of, maker_of
from stablehlo_tools.ir.walk import drop_attributes
from stablehlo_tools.transforms.thread_tokens import thread_collectives

_Groups = list[frozenset[int]]


def conflicting(
    transfers: Sequence[Collective], others: Sequence[Collective], facts: ModuleFacts
) -> list[Collective]:
    """Those of `others` that conflict with one of `transfers`, directly or through each other.

    Only collectives whose participants are known: the host never waits for a device's peers.
    """
    together: _Groups = []
    for transfer in transfers:
        together = _joined(together, _groups(transfer, facts))
    in_conflict: set[int] = set()
    waiting = {n: groups for n, c in enumerate(others) if (groups := _groups(c, facts))}
    while met := [n for n, groups in waiting.items() if _meet(together, groups)]:
        for n in met:
            together = _joined(together, waiting.pop(n))
        in_conflict.update(met)
    return [others[n] for n in sorted(in_conflict)]


def _groups(collective: Collective, facts: ModuleFacts) -> _Groups:
    """The connected groups of a collective's participants."""
    if collective.kind in TRANSFERS:
        return []
    return _joined([], [frozenset(group) for group in facts.groups(collective) or ()])


def _joined(groups: _Groups, more: Sequence[frozenset[int]]) -> _Groups:
    """The groups with more of them, those that have a device in common as one."""
    joined = list(groups)
    for group in more:
        touching = [g for g in joined if g & group]
        joined = [g for g in joined if not g & group]
        joined.append(group.union(*touching))
    return joined


def _meet(groups: _Groups, others: _Groups) -> bool:
    return any(len(group & other) > 1 for group in groups for other in others)


_FRONTEND = "mhlo.frontend_attributes"


def to_transfers(
    module: ir.Module, permutes: Sequence[Collective], ordered: Sequence[Collective], channel: int
) -> None:
    """Replaces the permutes by send and recv, on channels from `channel` on; `ordered` keep
    their place in the chain between them.

    Raises a located ToolError where no token can be led to one of them.
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
    shared = _attributes(permute, channel)
    received = build.create(RECV, [token], [permute.results[0].type, token.type], shared)
    sent = build.create(SEND, [data, token], [token.type], shared)
    joined = build.create(AFTER_ALL, [received.results[1], sent.results[0]], [token.type])
    after.results[0].replace_all_uses_with(received.results[0])
    after.results[1].replace_all_uses_with(joined.results[0])
    for op in (after, permute, before):
        op.erase()


def _attributes(permute: ir.Operation, channel: int) -> dict[str, ir.Attribute]:
    """What a send and its recv have in common; frontend attributes are kept.

    XLA reads the pairs as a frontend attribute of its own, which its import of StableHLO writes.
    """
    context = permute.context
    attributes = {
        "channel_handle": bindings.ChannelHandle.get(channel, DEVICE_TO_DEVICE, context),
        "is_host_transfer": ir.BoolAttr.get(False, context),
        PAIRS: permute.attributes[PAIRS],
    }
    if _FRONTEND in permute.attributes:
        attributes[_FRONTEND] = permute.attributes[_FRONTEND]
    return attributes
