"""Pairs inside of loops and branches that nothing orders, judged by their groups alone."""

from __future__ import annotations

from collections.abc import Sequence, Set

from stablehlo_tools.order.components import parts_without
from stablehlo_tools.order.program import (
    Block,
    Branch,
    Issue,
    Node,
    Program,
    decision_of,
    footprint,
    reached_blocks,
    reached_blocks_of,
)


def nested_doubt(programs: Sequence[Program]) -> tuple[int, Block, int, int] | None:
    """An unordered pair inside of a loop or branch that a cycle could pass through, if any.

    Judged by the groups alone: the two must share a device and be linked by others besides it,
    one of them of another program, or an end of a transfer. All else goes in one order.
    """
    nested = [
        (number, block)
        for number, program in enumerate(programs)
        for node in program.block.nodes
        if not _is_one_step(node, program)
        for inner in reached_blocks(node)
        for block in reached_blocks_of(inner)
        if not block.is_total
    ]
    if not nested:
        return None
    everything = {m for program in programs for m in program.block.rendezvous}
    groups = sorted({m.members for m in everything})
    ends = {d for m in everything if m.issuers != m.members for d in m.members}
    for number, block in nested:
        own = frozenset(programs[number].devices)
        apart = ends | {d for members in groups for d in members if d not in own}
        for second in range(len(block.nodes)):
            for first in range(second):
                if block.ordered(first, second):
                    continue
                if _linked(block.nodes[first], block.nodes[second], own, groups, apart):
                    return number, block, first, second
    return None


def _is_one_step(node: Node, program: Program) -> bool:
    """Whether a run takes the node in one, and what is inside concerns no other program.

    A way through it that goes on elsewhere is then a way through the node as a whole.
    """
    if isinstance(node, Issue):
        return True
    values = decision_of(node).values
    if isinstance(node, Branch) and values is not None:
        return False
    if values is not None and len({values[d] for d in program.devices}) > 1:
        return False
    own = set(program.devices)
    return all(
        m.issuers == m.members and own.issuperset(m.members)
        for m in footprint(node)
        if not own.isdisjoint(m.issuers)
    )


def _linked(
    first: Node, second: Node, own: Set[int], groups: Sequence[tuple[int, ...]], apart: Set[int]
) -> bool:
    one, other = footprint(first), footprint(second)
    both = {d for m in one for d in m.issuers} & {d for m in other for d in m.issuers}
    for device in sorted(both & own):
        part = parts_without(groups, device)
        ends = [
            {part[d] for m in side if device in m.issuers for d in m.members if d != device}
            for side in (one, other)
        ]
        if ends[0] & ends[1] & {part[d] for d in apart if d != device}:
            return True
    return False
