"""Pairs of collectives that nothing orders, where two programs may choose differently.

Programs that are compiled apart may each schedule what is unordered as they like. Two collectives
that share two devices of different programs can then be issued in opposite order, and each device
waits in the one for the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    checked: set[Block] = set()
    for number, program in enumerate(programs):
        if program.block in checked:
            continue  # one file for several devices, under --strict
        checked.add(program.block)
        for block in reached_blocks_of(program.block):
            yield from _pairs(block, number, program_of)


def _pairs(block: Block, program: int, program_of: Mapping[int, int]) -> Iterator[Pair]:
    yield from _overlapping_iterations(block, program, program_of)
    if block.is_total:
        return
    classes: dict[frozenset[Rendezvous], list[int]] = {}
    for position, node in enumerate(block.nodes):
        classes.setdefault(footprint(node), []).append(position)
    listed = list(classes.items())
    for i, (one, first) in enumerate(listed):
        for other, second in listed[i:]:
            shared = _shared(one, other, program, program_of)
            if not shared:
                continue
            positions = sorted({*first, *second})
            pair = _first_unordered(block, positions, set(first), set(second))
            if pair is not None:
                yield Pair(program, block, pair, shared)


def _overlapping_iterations(
    block: Block, program: int, program_of: Mapping[int, int]
) -> Iterator[Pair]:
    for position, node in enumerate(block.nodes):
        if not isinstance(node, Loop) or node.is_chained or not _repeats(node):
            continue
        meetings = footprint(node)
        shared = _shared(meetings, meetings, program, program_of)
        shared = shared or _own_transfer(meetings, program, program_of)
        if shared:
            yield Pair(program, block, (position, position), shared)


def _repeats(loop: Loop) -> bool:
    """Whether it has two iterations, or one and the condition once more."""
    if loop.trips.values is None:
        return True
    most = max(loop.trips.values.values(), default=0)
    return most > 1 or (most == 1 and bool(loop.condition.nodes))


def _own_transfer(
    meetings: frozenset[Rendezvous], program: int, program_of: Mapping[int, int]
) -> tuple[int, ...]:
    """Both ends of a transfer, a send and a recv of this program; else nothing."""
    for meeting in sorted(meetings, key=lambda r: r.members):
        ends = {program_of.get(device) for device in meeting.members}
        if meeting.issuers != meeting.members and ends == {program}:
            return meeting.members
    return ()


def _shared(
    one: frozenset[Rendezvous],
    other: frozenset[Rendezvous],
    program: int,
    program_of: Mapping[int, int],
) -> tuple[int, ...]:
    """Devices in a group of each, this program's and another's among them; else nothing."""
    of_device: dict[int, list[Rendezvous]] = {}
    for meeting in other:
        for device in meeting.members:
            of_device.setdefault(device, []).append(meeting)
    for meeting in sorted(one, key=lambda r: r.members):
        together: dict[Rendezvous, list[int]] = {}
        for device in meeting.members:
            for match in of_device.get(device, ()):
                together.setdefault(match, []).append(device)
        for devices in together.values():
            ours = [d for d in devices if program_of.get(d) == program]
            theirs = [d for d in devices if program_of.get(d, program) != program]
            if ours and theirs:
                return ours[0], theirs[0]
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
