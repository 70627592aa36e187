"""Cycles of waits through three or more devices, where no two programs share two devices.

Take the meetings of one run that ended well. At each of its devices, one meeting can come before
another if it did, or if nothing orders the two. A cycle of such steps is a deadlock, if the orders
it asks of each program can be had together; a run in those orders tells.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from stablehlo_tools.order.components import connected
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
from stablehlo_tools.order.simulation import Choice, Meeting, Simulator

_MOST_WORK = 2_000_000

# A meeting, and whether the way to it has left the order of the program that it started in.
type _State = tuple[int, bool]
type _Origin = tuple[_State, int] | None


class TooManyError(Exception):
    """There are too many orders to look through."""


@dataclass(frozen=True)
class Step:
    """At one device, the first meeting comes before the second."""

    device: int
    program: int
    first: int
    second: int
    tops: tuple[int, int]


@dataclass
class _Calendar:
    """Who meets when in the run: for each device its meetings in order, and their positions."""

    meetings: Sequence[Meeting]
    of_device: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    position: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    top: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])

    def __post_init__(self) -> None:
        for number, meeting in enumerate(self.meetings):
            for arrival in meeting.arrivals:
                listed = self.of_device[arrival.device]
                self.position[arrival.device, number] = len(listed)
                self.top[arrival.device, number] = arrival.top
                listed.append(number)


def find_cycles(simulator: Simulator, meetings: Sequence[Meeting]) -> Iterator[list[Step]]:
    """Cycles of steps with at least one against the run, shortest from each start first.

    Raises TooManyError where the search would take too long.
    """
    if all(program.block.is_total for program in simulator.programs):
        return
    search = _Search(simulator, _Calendar(meetings))
    for device in sorted(search.calendar.of_device):
        yield from search.cycles_from(device)


def constrained(block: Block, steps: Sequence[tuple[int, int]]) -> list[int] | None:
    """An order of the block's nodes with the steps' pairs in order; None where there is none."""
    count = len(block.nodes)
    needed = list(block.before)
    for first, second in steps:
        needed[second] |= 1 << first
    order: list[int] = []
    done = 0
    while len(order) < count:
        free = (i for i in range(count) if not done >> i & 1 and needed[i] & ~done == 0)
        chosen = next(free, None)
        if chosen is None:
            return None
        order.append(chosen)
        done |= 1 << chosen
    return order


def choice_for(simulator: Simulator, cycle: Sequence[Step]) -> Choice | None:
    """The orders that a cycle asks for, program by program; None if they cannot be had."""
    wanted: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for step in cycle:
        if step.tops[0] != step.tops[1]:
            wanted[step.program].append(step.tops)
    choice: dict[tuple[int, Block], Sequence[int]] = {}
    for program, steps in wanted.items():
        block = simulator.programs[program].block
        order = constrained(block, steps)
        if order is None:
            return None
        choice[program, block] = order
    return choice


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
    return all(m.issuers == m.members and own.issuperset(m.members) for m in footprint(node))


def _linked(
    first: Node, second: Node, own: Set[int], groups: Sequence[tuple[int, ...]], apart: Set[int]
) -> bool:
    one, other = footprint(first), footprint(second)
    both = {d for m in one for d in m.issuers} & {d for m in other for d in m.issuers}
    for device in sorted(both & own):
        part = _parts_without(groups, device)
        ends = [
            {part[d] for m in side if device in m.issuers for d in m.members if d != device}
            for side in (one, other)
        ]
        if ends[0] & ends[1] & {part[d] for d in apart if d != device}:
            return True
    return False


def _parts_without(meetings: Sequence[tuple[int, ...]], device: int) -> dict[int, int]:
    """The component of each other device when one is taken away."""
    rest = [tuple(d for d in members if d != device) for members in dict.fromkeys(meetings)]
    listed = connected([members for members in rest if members], ())
    return {d: number for number, members in enumerate(listed) for d in members}


class _Search:
    def __init__(self, simulator: Simulator, calendar: _Calendar) -> None:
        self.simulator = simulator
        self.calendar = calendar
        self.work = 0
        self.everything = [tuple(a.device for a in m.arrivals) for m in calendar.meetings]
        self.following = {d: self._following(d) for d in calendar.of_device}

    def cycles_from(self, device: int) -> Iterator[list[Step]]:
        """Cycles whose step against the run is at this device."""
        if self._block(device).is_total:
            return
        part = _parts_without(self.everything, device)
        listed = self.calendar.of_device[device]
        for place, first in enumerate(listed):
            linked = self._ends(first, device, part)
            later = [
                listed[position]
                for position in range(place + 1, len(listed))
                if self.following[device][position] >> place & 1
                and linked & self._ends(listed[position], device, part)
            ]
            if not later:
                continue
            reached = self._search(device, first, None)
            for second in later:
                if (second, True) not in reached:
                    continue
                came_from = self._search(device, first, second)
                if (second, True) in came_from:
                    yield self._cycle(device, first, second, came_from)

    def _search(self, device: int, first: int, second: int | None) -> dict[_State, _Origin]:
        """Breadth first from a meeting over all devices but one; what was reached, and from where.

        A cycle within one program cannot be, as all its devices go in one order; so a state says
        whether the way has left the program's order. With the second meeting given, no step
        is taken that contradicts its coming before the first.
        """
        calendar, program = self.calendar, self.simulator.program_of[device]
        start = first, self._leaves(first, program)
        came_from: dict[_State, _Origin] = {start: None}
        unseen = {
            left: {d: (1 << len(listed)) - 1 for d, listed in calendar.of_device.items()}
            for left in (False, True)
        }
        barred = {} if second is None else self._barred(device, first, second)
        queue = deque([start])
        while queue:
            meeting, left = queue.popleft()
            for member in self.everything[meeting]:
                if member == device:
                    continue
                gone = left or self.simulator.program_of[member] != program
                place = calendar.position[member, meeting]
                after, before = barred.get(member, (0, 0))
                open_ = self.following[member][place] & unseen[gone][member]
                if after >> place & 1:
                    open_ &= ~before
                for position in _bits(open_):
                    following = calendar.of_device[member][position]
                    state = following, gone or self._leaves(following, program)
                    for other in self.everything[following]:
                        spent = ~(1 << calendar.position[other, following])
                        unseen[gone][other] &= spent
                        unseen[state[1]][other] &= spent
                    if state not in came_from:
                        came_from[state] = (meeting, left), member
                        queue.append(state)
                self.work += 1
                if self.work > _MOST_WORK:
                    raise TooManyError
        return came_from

    def _leaves(self, meeting: int, program: int) -> bool:
        """Whether the meeting has two places in the program's order: both ends of a transfer."""
        arrivals = self.calendar.meetings[meeting].arrivals
        return len({a.top for a in arrivals if a.program == program}) > 1

    def _barred(self, device: int, first: int, second: int) -> dict[int, tuple[int, int]]:
        """For each device of the program: the places not before `first`, not after `second`."""
        block, top = self._block(device), self.calendar.top
        one, other = top[device, first], top[device, second]
        result: dict[int, tuple[int, int]] = {}
        for member in self.simulator.programs[self.simulator.program_of[device]].devices:
            after = before = 0
            for place, meeting in enumerate(self.calendar.of_device.get(member, ())):
                here = top[member, meeting]
                if here == one or block.before[here] >> one & 1:
                    after |= 1 << place
                if here == other or block.before[other] >> here & 1:
                    before |= 1 << place
            result[member] = after, before
        return result

    def _following(self, device: int) -> list[int]:
        """For each place of a device, the places that can come after it: bits."""
        block = self._block(device)
        tops = [self.calendar.top[device, m] for m in self.calendar.of_device[device]]
        everything = (1 << len(tops)) - 1
        result = [everything & -(2 << place) for place in range(len(tops))]
        if block.is_total:
            return result
        places: defaultdict[int, int] = defaultdict(int)
        for place, top in enumerate(tops):
            places[top] |= 1 << place
        free = {
            top: sum(bits for t, bits in places.items() if t != top and not block.ordered(t, top))
            for top in places
        }
        return [bits | free[top] for bits, top in zip(result, tops, strict=True)]

    def _cycle(
        self, device: int, first: int, last: int, came_from: dict[_State, _Origin]
    ) -> list[Step]:
        steps: list[Step] = []
        state = last, True
        while (origin := came_from[state]) is not None:
            steps.append(self._step(origin[1], origin[0][0], state[0]))
            state = origin[0]
        return [self._step(device, last, first), *reversed(steps)]

    def _step(self, device: int, first: int, second: int) -> Step:
        tops = self.calendar.top[device, first], self.calendar.top[device, second]
        return Step(device, self.simulator.program_of[device], first, second, tops)

    def _ends(self, meeting: int, device: int, part: dict[int, int]) -> set[int]:
        return {part[d] for d in self.everything[meeting] if d != device}

    def _block(self, device: int) -> Block:
        return self.simulator.programs[self.simulator.program_of[device]].block


def _bits(number: int) -> Iterator[int]:
    """The positions of the bits that are set."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
