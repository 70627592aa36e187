"""Pairs of collectives that nothing orders, where two programs may choose differently.

Programs that are compiled apart may each schedule what is unordered as they like. Two collectives
that share two devices of different programs can then be issued in opposite order, and each device
waits in the one for the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from stablehlo_tools.order.program import (
    Block,
    Issue,
    Loop,
    Node,
    Program,
    Rendezvous,
    footprint,
    reached_blocks_of,
)


@dataclass(frozen=True)
class Pair:
    """Two nodes of a block, or a loop and itself, that a program may issue in either order.

    `positions` in text order, equal for a loop whose iterations may overlap. `shared` are devices
    of different programs that take part in both, or the two ends of a transfer.
    """

    program: int
    block: Block
    positions: tuple[int, int]
    shared: tuple[int, ...]

    @property
    def nodes(self) -> tuple[Node, Node]:
        """The two nodes."""
        first, second = self.positions
        return self.block.nodes[first], self.block.nodes[second]


def hazardous_pairs(programs: Sequence[Program]) -> Iterator[Pair]:
    """Unordered pairs that share devices of two programs; for each kind of pair the first."""
    program_of = {d: i for i, program in enumerate(programs) for d in program.devices}
    owners: dict[Block, set[int]] = {}  # one file for several programs, under --strict
    for number, program in enumerate(programs):
        owners.setdefault(program.block, set()).add(number)
    for whole, numbers in owners.items():
        for block in reached_blocks_of(whole):
            yield from _pairs(block, numbers, program_of)


def _pairs(block: Block, owners: Set[int], program_of: Mapping[int, int]) -> Iterator[Pair]:
    yield from _overlapping_iterations(block, owners, program_of)
    if block.is_total:
        return
    classes: dict[frozenset[Rendezvous], list[int]] = {}
    for position, node in enumerate(block.nodes):
        classes.setdefault(footprint(node), []).append(position)
    listed = list(classes.items())
    for i, (one, first) in enumerate(listed):
        for other, second in listed[i:]:
            shared = _shared(one, other, owners, program_of)
            if not shared:
                continue
            positions = sorted({*first, *second})
            pair = _first_unordered(block, positions, set(first), set(second))
            if pair is not None:
                yield Pair(program_of[shared[0]], block, pair, shared)


def _overlapping_iterations(
    block: Block, owners: Set[int], program_of: Mapping[int, int]
) -> Iterator[Pair]:
    for position, node in enumerate(block.nodes):
        if not isinstance(node, Loop) or node.is_chained or not _repeats(node):
            continue
        meetings = footprint(node)
        shared = _shared(meetings, meetings, owners, program_of)
        shared = shared or _own_transfer(meetings, owners, program_of)
        if shared:
            yield Pair(program_of[shared[0]], block, (position, position), shared)


def _repeats(loop: Loop) -> bool:
    """Whether it has two iterations, or one and the condition once more."""
    if loop.trips.values is None:
        return True
    most = max(loop.trips.values.values(), default=0)
    return most > 1 or (most == 1 and bool(loop.condition.nodes))


def _own_transfer(
    meetings: frozenset[Rendezvous], owners: Set[int], program_of: Mapping[int, int]
) -> tuple[int, ...]:
    """Both ends of a transfer, a send and a recv of one of the owners; else nothing."""
    for meeting in sorted(meetings, key=lambda r: r.members):
        ends = {program_of[device] for device in meeting.members}
        if meeting.issuers != meeting.members and len(ends) == 1 and ends <= owners:
            return meeting.members
    return ()


def _shared(
    one: frozenset[Rendezvous],
    other: frozenset[Rendezvous],
    owners: Set[int],
    program_of: Mapping[int, int],
) -> tuple[int, ...]:
    """A device that issues both, and one of another program in the same groups; else nothing."""
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
    block: Block, positions: Sequence[int], first: set[int], second: set[int]
) -> tuple[int, int] | None:
    """The first pair, one of each class, that nothing orders.

    In a row of ordered neighbours all are ordered; but a loop or branch may issue nothing, so the
    order must reach past it.
    """
    for index, later in enumerate(positions):
        for earlier in reversed(positions[:index]):
            crosses = (earlier in first and later in second) or (
                earlier in second and later in first
            )
            if not block.ordered(earlier, later):
                if crosses:
                    return earlier, later
                continue
            if isinstance(block.nodes[earlier], Issue):
                break
    return None


def flipped(pair: Pair) -> list[int]:
    """An order of the block in which the later node of the pair comes before the earlier."""
    first, second = pair.positions
    before = pair.block.before
    needed = {second}
    for position in range(second - 1, first, -1):
        if any(before[later] >> position & 1 for later in needed):
            needed.add(position)
    count = len(pair.block.nodes)
    leading = [*range(first), *sorted(needed)]
    return [*leading, *(p for p in range(first, count) if p not in needed)]
