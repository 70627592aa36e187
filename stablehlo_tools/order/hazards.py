"""Unordered pairs of collectives that two programs may schedule in opposite order.

The compiler of each program may order its unordered collectives freely. If two collectives share
two devices of different programs, these devices can issue them in opposite order. Then each device
waits in one collective for the other device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from stablehlo_tools.order.program import (
    CollectiveIssue,
    CompiledOrder,
    Node,
    ProgramBlock,
    ProgramBranch,
    ProgramLoop,
    Rendezvous,
    decision_of,
    footprint,
    parts_without,
    reached_blocks,
    reached_blocks_of,
)


def nested_doubt(programs: Sequence[CompiledOrder]) -> tuple[int, ProgramBlock, int, int] | None:
    """Finds an unordered pair inside a loop or branch that a cycle of waits could pass through.

    Only groups are considered. The two must share a device and be linked through other devices, one
    of them of another program or an end of a transfer. All other pairs have one order.
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
                if block.has_order(first, second):
                    continue
                if _are_linked_apart(block.nodes[first], block.nodes[second], own, groups, apart):
                    return number, block, first, second
    return None


def _is_one_step(node: Node, program: CompiledOrder) -> bool:
    """Returns True if the node is one step of a run and its inside concerns no other program.

    A path that passes through its inside is then a path through the node as a whole.
    """
    if isinstance(node, CollectiveIssue):
        return True
    values = decision_of(node).values
    if isinstance(node, ProgramBranch) and values is not None:
        return False
    if values is not None and len({values[d] for d in program.devices}) > 1:
        return False
    own = set(program.devices)
    return all(
        m.issuers == m.members and own.issuperset(m.members)
        for m in footprint(node)
        if not own.isdisjoint(m.issuers)
    )


def _are_linked_apart(
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


@dataclass(frozen=True)
class HazardPair:
    """Two nodes of a block, or a loop and itself, that a program may issue in either order.

    `positions` are in text order, and equal for a loop whose iterations may overlap. `shared` are
    two devices of different programs that are members of both, or the two ends of a transfer.
    """

    program: int
    block: ProgramBlock
    positions: tuple[int, int]
    shared: tuple[int, ...]

    @property
    def nodes(self) -> tuple[Node, Node]:
        """The two nodes."""
        first, second = self.positions
        return self.block.nodes[first], self.block.nodes[second]


def hazardous_pairs(programs: Sequence[CompiledOrder]) -> Iterator[HazardPair]:
    """Yields unordered pairs that share devices of two programs; the first of each kind of pair."""
    program_of = {d: i for i, program in enumerate(programs) for d in program.devices}
    owners: dict[ProgramBlock, set[int]] = {}  # one file for several programs, under --strict
    for number, program in enumerate(programs):
        owners.setdefault(program.block, set()).add(number)
    for whole, numbers in owners.items():
        for block in reached_blocks_of(whole):
            yield from _pairs(block, numbers, program_of)


def _pairs(
    block: ProgramBlock, owners: Set[int], program_of: Mapping[int, int]
) -> Iterator[HazardPair]:
    yield from _overlapping_iterations(block, owners, program_of)
    if block.is_total:
        return
    classes: dict[frozenset[Rendezvous], list[int]] = {}
    for position, node in enumerate(block.nodes):
        classes.setdefault(footprint(node), []).append(position)
    listed = list(classes.items())
    for i, (one, first) in enumerate(listed):
        for other, second in listed[i:]:
            shared = _shared_devices(one, other, owners, program_of)
            if not shared:
                continue
            positions = sorted({*first, *second})
            pair = _first_unordered(block, positions, set(first), set(second))
            if pair is not None:
                yield HazardPair(program_of[shared[0]], block, pair, shared)


def _overlapping_iterations(
    block: ProgramBlock, owners: Set[int], program_of: Mapping[int, int]
) -> Iterator[HazardPair]:
    for position, node in enumerate(block.nodes):
        if not isinstance(node, ProgramLoop) or node.is_chained:
            continue
        # Iterations overlap if there are two, or if the condition, which runs once more, issues.
        trips = node.trips.values
        most = 2 if trips is None else max(trips.values(), default=0)
        if not most or (most == 1 and not node.condition.nodes):
            continue
        meetings = footprint(node)
        shared = _shared_devices(meetings, meetings, owners, program_of)
        shared = shared or _own_transfer(meetings, owners, program_of)
        if shared:
            yield HazardPair(program_of[shared[0]], block, (position, position), shared)


def _own_transfer(
    meetings: frozenset[Rendezvous], owners: Set[int], program_of: Mapping[int, int]
) -> tuple[int, ...]:
    """Returns both ends of a transfer whose send and recv are in one owner; else ()."""
    for meeting in sorted(meetings, key=lambda r: r.members):
        ends = {program_of[device] for device in meeting.members}
        if meeting.issuers != meeting.members and len(ends) == 1 and ends <= owners:
            return meeting.members
    return ()


def _shared_devices(
    one: frozenset[Rendezvous],
    other: frozenset[Rendezvous],
    owners: Set[int],
    program_of: Mapping[int, int],
) -> tuple[int, ...]:
    """Returns a device that issues both, and one of another program in the same groups; else ()."""
    of_device: dict[int, list[Rendezvous]] = {}
    for meeting in other:
        for device in meeting.members:
            of_device.setdefault(device, []).append(meeting)
    for meeting in sorted(one, key=lambda r: r.members):
        together: dict[Rendezvous, list[int]] = {}
        for device in meeting.members:
            for match in of_device.get(device, ()):
                together.setdefault(match, []).append(device)
        for match, devices in together.items():
            issuing = [d for d in devices if d in meeting.issuers and d in match.issuers]
            ours = next((d for d in issuing if program_of[d] in owners), None)
            if ours is None:
                continue
            theirs = next((d for d in devices if program_of[d] != program_of[ours]), None)
            if theirs is not None:
                return ours, theirs
    return ()


def _first_unordered(
    block: ProgramBlock, positions: Sequence[int], first: set[int], second: set[int]
) -> tuple[int, int] | None:
    """Returns the first unordered pair with one node of each class.

    The inner search stops at an ordered neighbour, because order is transitive. It continues past
    a loop or branch, which may issue no collective.
    """
    for index, later in enumerate(positions):
        for earlier in reversed(positions[:index]):
            crosses = (earlier in first and later in second) or (
                earlier in second and later in first
            )
            if not block.has_order(earlier, later):
                if crosses:
                    return earlier, later
                continue
            if isinstance(block.nodes[earlier], CollectiveIssue):
                break
    return None


def flip_pair(pair: HazardPair) -> list[int]:
    """Returns an order of the block in which the later node of the pair precedes the earlier."""
    first, second = pair.positions
    before = pair.block.before
    needed = {second}
    for position in range(second - 1, first, -1):
        if any(before[later] >> position & 1 for later in needed):
            needed.add(position)
    count = len(pair.block.nodes)
    leading = [*range(first), *sorted(needed)]
    return [*leading, *(p for p in range(first, count) if p not in needed)]
