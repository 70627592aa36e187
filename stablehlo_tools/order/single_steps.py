"""Takes both ends of an acyclic transfer for one step, in which all devices of a chain meet.

    {recv on channel 1, send on channel 1} (pairs 0>1, 1>2)  ==>  one meeting of 0, 1 and 2

Where everything else that a program issues beside the two comes before both or after both, each
device does nothing else between them. And where the pairs have no cycle, whichever of the two each
device begins with, all get to the end once all have come to it: a wait that closes would have to
turn round at two devices that wait for each other, and those are at the two ends of one pair. So
what ends with the one meeting, in which everyone waits for more, ends with the two transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stablehlo_tools.order.components import connected
from stablehlo_tools.order.program import (
    Block,
    Issue,
    Loop,
    Node,
    Program,
    Rendezvous,
    Signature,
    TextOrder,
    footprint,
    inner_blocks,
)

_KIND = "transfer, both ends"


def in_single_steps(programs: Sequence[Program]) -> tuple[Program, ...] | None:
    """The programs with one meeting for each such send and recv; None where there are none."""
    merged: dict[Block, Block] = {}  # one block for several programs stays one
    result = tuple(replace(p, block=_merged(p.block, merged)) for p in programs)
    if all(new.block is old.block for new, old in zip(result, programs, strict=True)):
        return None
    return result


def _merged(block: Block, known: dict[Block, Block]) -> Block:
    if block not in known:
        nodes = [_with_merged_inside(node, known) for node in block.nodes]
        changed = any(new is not old for new, old in zip(nodes, block.nodes, strict=True))
        inside = replace(block, nodes=tuple(nodes)) if changed else block
        ends = dict(_both_ends(block))
        known[block] = _without(inside, ends) if ends else inside
    return known[block]


def _with_merged_inside(node: Node, known: dict[Block, Block]) -> Node:
    inner = [_merged(each, known) for each in inner_blocks(node)]
    if all(new is old for new, old in zip(inner, inner_blocks(node), strict=True)):
        return node
    if isinstance(node, Loop):
        return replace(node, condition=inner[0], body=inner[1])
    assert not isinstance(node, Issue)
    return replace(node, branches=tuple(inner))


def _both_ends(block: Block) -> Iterator[tuple[int, int]]:
    """The positions of the two ends of each transfer that is one step of the block."""
    waiting: dict[tuple[object, ...], int] = {}
    for position, node in enumerate(block.nodes):
        if not isinstance(node, Issue) or not node.transfer or not _has_no_cycle(node):
            continue
        pairs = frozenset(meeting.members for meeting in node.rendezvous)
        other = "recv" if node.transfer == "send" else "send"
        first = waiting.pop((node.signature, pairs, other), None)
        if first is None:
            waiting[node.signature, pairs, node.transfer] = position
        elif _stand_apart(block, first, position):
            yield first, position


def _has_no_cycle(transfer: Issue) -> bool:
    """Whether the pairs, taken without direction, link their devices in one way only."""
    pairs = {meeting.members for meeting in transfer.rendezvous}
    devices = {device for pair in pairs for device in pair}
    # As many links fewer than devices as there are parts: a forest.
    return bool(pairs) and len(devices) - len(pairs) == len(connected(pairs, ()))


def _stand_apart(block: Block, first: int, second: int) -> bool:
    """Whether no other node that shares a device with them can come between the two."""
    devices = _devices(block.nodes[first]) | _devices(block.nodes[second])
    others = range(first + 1, second) if block.is_total else range(len(block.nodes))
    return all(
        _side(block, position, first) == _side(block, position, second) != 0
        or devices.isdisjoint(_devices(block.nodes[position]))
        for position in others
        if position not in (first, second)
    )


def _side(block: Block, node: int, other: int) -> int:
    """-1 where a node is forced before another, 1 where it is after it, else 0."""
    if not block.ordered(node, other):
        return 0
    return -1 if node < other else 1


def _devices(node: Node) -> frozenset[int]:
    return frozenset(device for meeting in footprint(node) for device in meeting.issuers)


def _without(block: Block, ends: dict[int, int]) -> Block:
    """The block with one node in the place of each pair of ends, by the position of the first."""
    seconds = set(ends.values())
    kept = [position for position in range(len(block.nodes)) if position not in seconds]
    nodes = tuple(_step(block.nodes[p]) if p in ends else block.nodes[p] for p in kept)
    if block.is_total:
        return Block(nodes, TextOrder(len(nodes)))
    before: list[int] = []
    for position in kept:
        forced = block.before[position] & block.before[ends.get(position, position)]
        places = (
            1 << place
            for place, earlier in enumerate(kept[: len(before)])
            if forced >> earlier & 1 and forced >> ends.get(earlier, earlier) & 1
        )
        before.append(sum(places))
    return Block(nodes, before)


def _step(end: Node) -> Issue:
    """The one meeting, named after one of its ends."""
    assert isinstance(end, Issue)
    parts = connected([meeting.members for meeting in end.rendezvous], ())
    signature = Signature(_KIND, end.signature.types, end.signature.details)
    return replace(
        end,
        signature=signature,
        rendezvous=tuple(Rendezvous(part, part) for part in parts),
        transfer="",
    )
