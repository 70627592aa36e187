"""Takes both ends of an acyclic transfer for one step, in which all devices of a chain meet.

    {recv on channel 1, send on channel 1} (pairs 0>1, 1>2)  ==>  one meeting of 0, 1 and 2

Where everything else that a program issues beside the two comes before both or after both, each
device does nothing else between them. And where the pairs have no cycle, whichever of the two each
device begins with, all get to the end once all have come to it: a wait that closes would have to
turn round at two devices that wait for each other, and those are at the two ends of one pair. So
what ends with the one meeting, in which everyone waits for more, ends with the two transfers.

The devices of a chain may run several programs. One whose devices all have the same end of the
transfer, the first of a chain or the last, has a step of that end alone.
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
    owners: dict[Block, tuple[int, ...]] = {}
    for program in programs:
        owners[program.block] = (*owners.get(program.block, ()), *program.devices)
    result = tuple(replace(p, block=_merged(p.block, owners[p.block], merged)) for p in programs)
    if all(new.block is old.block for new, old in zip(result, programs, strict=True)):
        return None
    return result


def _merged(block: Block, devices: Sequence[int], known: dict[Block, Block]) -> Block:
    if block not in known:
        nodes = [_with_merged_inside(node, devices, known) for node in block.nodes]
        changed = any(new is not old for new, old in zip(nodes, block.nodes, strict=True))
        inside = replace(block, nodes=tuple(nodes)) if changed else block
        ends = dict(_ends(block, devices))
        known[block] = _without(inside, ends) if ends else inside
    return known[block]


def _with_merged_inside(node: Node, devices: Sequence[int], known: dict[Block, Block]) -> Node:
    inner = [_merged(each, devices, known) for each in inner_blocks(node)]
    if all(new is old for new, old in zip(inner, inner_blocks(node), strict=True)):
        return node
    if isinstance(node, Loop):
        return replace(node, condition=inner[0], body=inner[1])
    assert not isinstance(node, Issue)
    return replace(node, branches=tuple(inner))


def _ends(block: Block, devices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The positions of the two ends of each transfer that is one step of the block.

    Twice the same for a transfer of which the devices have one end.
    """
    waiting: dict[tuple[object, ...], int] = {}
    for position, node in enumerate(block.nodes):
        if not isinstance(node, Issue) or not node.transfer or not _has_no_cycle(node):
            continue
        if _is_alone(node, devices):
            yield position, position
            continue
        other = "recv" if node.transfer == "send" else "send"
        first = waiting.pop((node.signature, node.links, other), None)
        if first is None:
            waiting[node.signature, node.links, node.transfer] = position
        elif _stand_apart(block, first, position):
            yield first, position


def _is_alone(end: Issue, devices: Sequence[int]) -> bool:
    """Whether none of the devices, which run the program, has the other end of a transfer."""
    place = 1 if end.transfer == "send" else 0
    return {pair[place] for pair in end.links}.isdisjoint(devices)


def _has_no_cycle(transfer: Issue) -> bool:
    """Whether the pairs, taken without direction, link their devices in one way only."""
    pairs = transfer.links
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
    seconds = {second for first, second in ends.items() if first != second}
    kept = [position for position in range(len(block.nodes)) if position not in seconds]
    nodes = tuple(
        _step(block.nodes[p], block.nodes[ends[p]]) if p in ends else block.nodes[p] for p in kept
    )
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


def _step(end: Node, other: Node) -> Issue:
    """The one meeting of each chain that a device of ours is in, named after one of its ends."""
    assert isinstance(end, Issue)
    ours = _devices(end) | _devices(other)
    chains = [part for part in connected(end.links, ()) if not ours.isdisjoint(part)]
    details = f"{end.signature.details}, pairs {sorted(end.links)}"
    return replace(
        end,
        signature=Signature(_KIND, end.signature.types, details),
        rendezvous=tuple(Rendezvous(chain, chain) for chain in chains),
        transfer="",
        groups=(),
    )
