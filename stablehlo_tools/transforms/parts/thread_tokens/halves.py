"""Tells a recv and a send that are one transfer, whose order the chain leaves open.

    %y, %r = "stablehlo.recv"(%t) {pairs = [[0, 1], [1, 2]], channel = 1}
    %s = "stablehlo.send"(%x, %t) {pairs = [[0, 1], [1, 2]], channel = 1}

Where the pairs have no cycle, any device may do either first, even where each blocks until the
other side has come (`decompose-collective-permute` says why). Ordered, each device of a chain would
wait for the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.communication import Site
from stablehlo_tools.analysis.permute_cycles import find_cycles
from stablehlo_tools.analysis.rendezvous import is_host_transfer
from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.decompose_collective_permute.pairs import PAIRS, pairs_of

type Unit = tuple[Site, ...]  # one site, or the two halves of a transfer


def in_units(sites: Sequence[Site]) -> Iterator[Unit]:
    """The sites of a block in their order, neighbours that are one transfer together."""
    position = 0
    while position < len(sites):
        two = tuple(sites[position : position + 2])
        unit = two if _is_one_transfer(two) else two[:1]
        yield unit
        position += len(unit)


def _is_one_transfer(sites: Unit) -> bool:
    halves = [site.collective for site in sites if site.collective is not None]
    if sorted(half.kind for half in halves) != ["recv", "send"]:
        return False
    one, other = halves
    if one.channel_id != other.channel_id or _token(one.op) != _token(other.op):
        return False
    return _is_acyclic(one) and _is_acyclic(other) and set(pairs_of(one)) == set(pairs_of(other))


def _is_acyclic(transfer: Collective) -> bool:
    if PAIRS not in transfer.inner.attributes or is_host_transfer(transfer):
        return False
    pairs = pairs_of(transfer)
    ends = [set(side) for side in zip(*pairs, strict=True)]
    return bool(pairs) and all(len(e) == len(pairs) for e in ends) and not find_cycles(pairs)


def _token(op: ir.Operation) -> ir.Value | None:
    return next((v for v in op.operands if bindings.TokenType.isinstance(v.type)), None)
