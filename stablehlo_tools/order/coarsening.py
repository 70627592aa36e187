"""Coarser programs, in which devices wait for more: if these end, the original programs end.

The converse does not hold: a deadlock of a coarser program proves nothing.

**Classes.** Devices of a program that behave identically are merged into one, so that the check
has fewer devices to cover:

    rank 0 on devices 0 to 63, rank 1 on 64 to 127, device i sends to device 64 + i
    ==>
    device 0 sends to device 64

Devices of a class run one program, issue the same collectives and decide identically. A collective
of the classes counts as one meeting of all their devices. If the merged programs end with some
order of meetings, each device can reach its own meetings in that order, so the originals end.

**Single steps.** Both ends of an acyclic transfer are merged into one step, in which all devices of
a chain meet:

    {recv on channel 1, send on channel 1} (pairs 0>1, 1>2)  ==>  one meeting of 0, 1 and 2

This needs every other collective of the program to come before both ends or after both. Then each
device does nothing else between them. If the pairs have no cycle, all devices get past both ends
once all have arrived, whichever end each issues first. A cycle of waits would have to turn round at
two devices that wait for each other, which are the two ends of one pair. So programs that end with
the one meeting also end with the two transfers.

The devices of a chain may run several programs. A program whose devices all have the same end of
the transfer (first or last in a chain) has a step that replaces only that end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from stablehlo_tools.order.program import (
    CollectiveIssue,
    CollectiveSignature,
    CompiledOrder,
    Decision,
    Node,
    ProgramBlock,
    Rendezvous,
    TextOrder,
    blocks_of,
    connected_components,
    decision_of,
    footprint,
    inner_blocks,
    issues_of,
    rebuilt,
    with_blocks,
)

_KIND = "transfer, both ends"


def by_classes(programs: Sequence[CompiledOrder]) -> tuple[CompiledOrder, ...] | None:
    """Returns the programs with one device for each class; None if that merges no devices.

    Also None if a transfer links devices of one class, or one class to several.
    """
    first = {d: members[0] for p in programs for members in _classes(p) for d in members}
    if all(device == kept for device, kept in first.items()):
        return None
    merged: list[CompiledOrder] = []
    for program in programs:
        issues = {issue: _merged_issue(issue, first) for issue in issues_of(program.block)}
        if None in issues.values():
            return None
        block = rebuilt(
            program.block,
            lambda issue, issues=issues: issues[issue] or issue,
            lambda decision: _of_first(decision, first),
        )
        devices = tuple(dict.fromkeys(first[device] for device in program.devices))
        merged.append(replace(program, devices=devices, block=block, dead=()))
    return tuple(merged)


def _classes(program: CompiledOrder) -> list[list[int]]:
    """Groups the devices of a program that issue the same collectives and decide identically."""
    told: dict[int, list[object]] = {device: [] for device in program.devices}
    for issue in issues_of(program.block):
        for device in program.devices:
            told[device].append(device in issue.of_device)
    for block in blocks_of(program.block):
        for node in block.nodes:
            if isinstance(node, CollectiveIssue):
                continue
            known = decision_of(node)
            for device in program.devices:
                value = None if known.values is None else known.values[device]
                told[device].append((known.classes[device], value, known.symbols.get(device)))
    alike: dict[tuple[object, ...], list[int]] = {}
    for device in program.devices:
        alike.setdefault(tuple(told[device]), []).append(device)
    return list(alike.values())


def _merged_issue(issue: CollectiveIssue, first: Mapping[int, int]) -> CollectiveIssue | None:
    """Returns the collective between classes; None if a transfer does not link pairs of classes."""
    if issue.transfer:
        meetings = dict.fromkeys(
            Rendezvous(_firsts(meeting.members, first), _firsts(meeting.issuers, first))
            for meeting in issue.rendezvous
        )
        links = tuple(dict.fromkeys(_firsts(pair, first) for pair in issue.groups))
        issuers = [device for meeting in meetings for device in meeting.issuers]
        if len(set(issuers)) < len(issuers) or any(one == other for one, other in links):
            return None
        if any(len(set(meeting.members)) < 2 for meeting in meetings):
            return None
        return replace(issue, rendezvous=tuple(meetings), groups=links)
    linked = [tuple({first.get(d, d) for d in meeting.members}) for meeting in issue.rendezvous]
    parts = connected_components(linked, ())
    return replace(issue, rendezvous=tuple(Rendezvous(part, part) for part in parts))


def _firsts(devices: Sequence[int], first: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(first.get(device, device) for device in devices)


def _of_first(decision: Decision, first: Mapping[int, int]) -> Decision:
    """Restricts a decision to the first device of each class."""
    kept = [device for device in decision.classes if first.get(device) == device]
    values = decision.values
    return replace(
        decision,
        classes={device: decision.classes[device] for device in kept},
        values=None if values is None else {device: values[device] for device in kept},
        symbols={d: decision.symbols[d] for d in kept if d in decision.symbols},
    )


def in_single_steps(programs: Sequence[CompiledOrder]) -> tuple[CompiledOrder, ...] | None:
    """Returns the programs with one meeting for each acyclic transfer; None if there are none."""
    merged: dict[
        ProgramBlock, ProgramBlock
    ] = {}  # programs that share a block share the merged one
    owners: dict[ProgramBlock, tuple[int, ...]] = {}
    for program in programs:
        owners[program.block] = (*owners.get(program.block, ()), *program.devices)
    result = tuple(
        replace(p, block=_merged_block(p.block, owners[p.block], merged)) for p in programs
    )
    if all(new.block is old.block for new, old in zip(result, programs, strict=True)):
        return None
    return result


def _merged_block(
    block: ProgramBlock, devices: Sequence[int], known: dict[ProgramBlock, ProgramBlock]
) -> ProgramBlock:
    if block not in known:
        nodes = list(block.nodes)
        for position, node in enumerate(block.nodes):
            if isinstance(node, CollectiveIssue):
                continue
            old = inner_blocks(node)
            new = [_merged_block(each, devices, known) for each in old]
            if any(one is not other for one, other in zip(new, old, strict=True)):
                nodes[position] = with_blocks(node, new)
        changed = any(one is not other for one, other in zip(nodes, block.nodes, strict=True))
        inside = replace(block, nodes=tuple(nodes)) if changed else block
        ends = dict(_ends(block, devices))
        known[block] = _without(inside, ends) if ends else inside
    return known[block]


def _ends(block: ProgramBlock, devices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the positions of the two ends of each transfer that can become one step of the block.

    The positions are equal if `devices` have only one end of the transfer.
    """
    waiting: dict[tuple[object, ...], int] = {}
    for position, node in enumerate(block.nodes):
        if not isinstance(node, CollectiveIssue) or not node.transfer or not node.links:
            continue
        # A graph has no cycle exactly if nodes - edges == components.
        linked = {device for pair in node.links for device in pair}
        if len(linked) - len(node.links) != len(connected_components(node.links, ())):
            continue
        # No device of the program has the other end of a transfer.
        place = 1 if node.transfer == "send" else 0
        if {pair[place] for pair in node.links}.isdisjoint(devices):
            yield position, position
            continue
        other = "recv" if node.transfer == "send" else "send"
        first = waiting.pop((node.signature, node.links, other), None)
        if first is None:
            waiting[node.signature, node.links, node.transfer] = position
        elif _stand_apart(block, first, position):
            yield first, position


def _stand_apart(block: ProgramBlock, first: int, second: int) -> bool:
    """Returns True if no other node that shares a device with the two can come between them."""
    devices = _devices(block.nodes[first]) | _devices(block.nodes[second])
    others = range(first + 1, second) if block.is_total else range(len(block.nodes))
    return all(
        _side(block, position, first) == _side(block, position, second) != 0
        or devices.isdisjoint(_devices(block.nodes[position]))
        for position in others
        if position not in (first, second)
    )


def _side(block: ProgramBlock, node: int, other: int) -> int:
    """Returns -1 if a node is forced before another, 1 if it is forced after it, else 0."""
    if not block.has_order(node, other):
        return 0
    return -1 if node < other else 1


def _devices(node: Node) -> frozenset[int]:
    return frozenset(device for meeting in footprint(node) for device in meeting.issuers)


def _without(block: ProgramBlock, ends: dict[int, int]) -> ProgramBlock:
    """Replaces each pair of ends by one node, at the position of the first end."""
    seconds = {second for first, second in ends.items() if first != second}
    kept = [position for position in range(len(block.nodes)) if position not in seconds]
    nodes = tuple(
        _step(block.nodes[p], block.nodes[ends[p]]) if p in ends else block.nodes[p] for p in kept
    )
    if block.is_total:
        return ProgramBlock(nodes, TextOrder(len(nodes)))
    before: list[int] = []
    for position in kept:
        forced = block.before[position] & block.before[ends.get(position, position)]
        places = (
            1 << place
            for place, earlier in enumerate(kept[: len(before)])
            if forced >> earlier & 1 and forced >> ends.get(earlier, earlier) & 1
        )
        before.append(sum(places))
    return ProgramBlock(nodes, before)


def _step(end: Node, other: Node) -> CollectiveIssue:
    """Returns one meeting for each chain that includes a device that issues one of the ends."""
    assert isinstance(end, CollectiveIssue)
    ours = _devices(end) | _devices(other)
    chains = [part for part in connected_components(end.links, ()) if not ours.isdisjoint(part)]
    details = f"{end.signature.details}, pairs {sorted(end.links)}"
    return replace(
        end,
        signature=CollectiveSignature(_KIND, end.signature.types, details),
        rendezvous=tuple(Rendezvous(chain, chain) for chain in chains),
        transfer="",
        groups=(),
    )
