"""Cycles of waits through three or more devices, if no two programs share two devices.

The search starts from the meetings of one run that ended. At each device, a meeting can come before
another if it did so in the run, or if the two are unordered. A cycle of such steps is a deadlock if
one schedule of each program satisfies all its steps; a run in those schedules confirms it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stablehlo_tools.order.program import (
    CollectiveIssue,
    ProgramBlock,
    bit_positions,
    connected_components,
    parts_without,
)
from stablehlo_tools.order.simulation import Choice, Meeting, Simulator


@dataclass(frozen=True)
class WaitStep:
    """A step of a cycle: at a device, or in a program, the first meeting precedes the second."""

    device: int
    program: int
    first: int
    second: int
    tops: tuple[int, int]


def order_with_steps(block: ProgramBlock, steps: Sequence[tuple[int, int]]) -> list[int] | None:
    """Returns an order of the block's nodes with all pairs of `steps` in order, or None."""
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


def choice_for(simulator: Simulator, cycle: Sequence[WaitStep]) -> Choice | None:
    """Returns the order of each program that a cycle needs; None if a program has no such order."""
    wanted: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for step in cycle:
        if step.tops[0] != step.tops[1]:
            wanted[step.program].append(step.tops)
    choice: dict[tuple[int, ProgramBlock], Sequence[int]] = {}
    for program, steps in wanted.items():
        block = simulator.programs[program].block
        order = order_with_steps(block, steps)
        if order is None:
            return None
        choice[program, block] = order
    return choice


_MOST_WORK = 2_000_000

# A meeting; True if the path to it went back in the order of the starting program; and the place
# in that order by which the path reached the meeting, if the meeting has two.
type _State = tuple[int, bool, int | None]
# The previous state of a path, and the device of the step; None for steps in other programs.
type _Origin = tuple[_State, int | None] | None
# For each meeting that is reached: the last step to every meeting on the path.
type _Ways = dict[int, dict[int, WaitStep]]


class TooManyError(Exception):
    """The search for cycles exceeds its limit of work."""


def find_cycles(simulator: Simulator, meetings: Sequence[Meeting]) -> Iterator[list[WaitStep]]:
    """Yields cycles with at least one step against the run, the shortest of each start first.

    Raises TooManyError if the search would run too long.
    """
    if all(program.block.is_total for program in simulator.programs):
        return
    search = _CycleSearch(simulator, meetings)
    for device in sorted(search.of_device):
        yield from search.cycles_from(device)


@dataclass(frozen=True, eq=False)
class _MeetingRow:
    """Meetings, their positions in the program's block, and bits of the entries that can follow."""

    program: int
    devices: tuple[int, ...]
    entries: tuple[tuple[int, int], ...]
    following: tuple[int, ...]


class _CycleSearch:
    def __init__(self, simulator: Simulator, meetings: Sequence[Meeting]) -> None:
        self.simulator, self.meetings = simulator, meetings
        # For each device its meetings in order, and for each meeting there its position among them
        # and the position of its node in the program's outermost block.
        self.of_device: defaultdict[int, list[int]] = defaultdict(list)
        self.position: dict[tuple[int, int], int] = {}
        self.top: dict[tuple[int, int], int] = {}
        for number, meeting in enumerate(meetings):
            for arrival in meeting.arrivals:
                listed = self.of_device[arrival.device]
                self.position[arrival.device, number] = len(listed)
                self.top[arrival.device, number] = arrival.top
                listed.append(number)
        self.work = 0
        self.everything = [tuple(a.device for a in m.arrivals) for m in meetings]
        self._following_of: dict[int, list[int]] = {}
        self._excursions_of: dict[int, dict[int, _Ways]] = {}
        rows = [row for program in range(len(simulator.programs)) for row in self._rows(program)]
        self.rows_of: defaultdict[int, list[tuple[_MeetingRow, int]]] = defaultdict(list)
        for row in rows:
            for place, (meeting, _) in enumerate(row.entries):
                self.rows_of[meeting].append((row, place))

    def cycles_from(self, device: int) -> Iterator[list[WaitStep]]:
        """Yields cycles whose step against the run is at this device."""
        program = self.simulator.program_of[device]
        # A cycle needs a step against the run here, and a way back to an earlier meeting.
        if self._block(device).is_total or not self._turns_anywhere(program):
            return
        part = parts_without(self.everything, device)
        listed = self.of_device[device]
        for place, first in enumerate(listed):
            # A path cannot pass this device again: the two meetings must be linked without it.
            linked = self._ends(first, device, part)
            later = dict.fromkeys(
                listed[position]
                for position in range(place + 1, len(listed))
                if self._following(device)[position] >> place & 1
                and linked & self._ends(listed[position], device, part)
            )
            if not later:
                continue
            reached = self._search(device, first, None)
            # One search serves all `second` and bars no step. Only the ends that it reaches are
            # worth a search of their own, with the steps barred.
            ends = {s[0] for s in reached if s[0] in later and self._closes(s, device)}
            for second in (s for s in later if s in ends):
                came_from = self._search(device, first, second)
                closing = (s for s in came_from if s[0] == second and self._closes(s, device))
                state = next(closing, None)
                if state is not None:
                    yield self._cycle(device, first, state, came_from)

    def _search(self, device: int, first: int, second: int | None) -> dict[_State, _Origin]:
        """Searches breadth first from a meeting over all devices but one; returns predecessors.

        All devices of a program use one order. So a cycle must go through other programs to a
        meeting that may be earlier in that order; a state records if it has done so. If `second`
        is given, steps that contradict `second` before `first` are excluded.
        """
        program = self.simulator.program_of[device]
        members = set(self.simulator.programs[program].devices) - {device}
        start = self._state(first, False, device)
        came_from: dict[_State, _Origin] = {start: None}
        barred = {} if second is None else self._barred_places(device, first, second)
        # For each device the bits of its unseen places, for paths that went back and others.
        unseen = {
            turned: {d: (1 << len(own)) - 1 for d, own in self.of_device.items()}
            for turned in (False, True)
        }
        queue = deque([start])

        def reach(state: _State, origin: _State, member: int | None) -> None:
            if not self._has_two_places(state[0], program):
                for each in self.everything[state[0]]:
                    unseen[state[1]][each] &= ~(1 << self.position[each, state[0]])
            if state not in came_from:
                came_from[state] = origin, member
                queue.append(state)

        while queue:
            state = queue.popleft()
            meeting, turned, _ = state
            for member in self.everything[meeting]:
                if member not in members:
                    continue
                turns = turned or self._turns_within(state, member)
                place = self.position[member, meeting]
                after, before = barred.get(member, (0, 0))
                open_ = self._following(member)[place] & unseen[turns][member]
                if after >> place & 1:
                    open_ &= ~before
                self._work()
                listed = self.of_device[member]
                for at in bit_positions(open_):
                    reach(self._state(listed[at], turns, member), state, member)
            for following in self._excursions(program).get(meeting, ()):
                turns = turned or self._turns(meeting, following, program)
                reach((following, turns, None), state, None)
        return came_from

    def _state(self, meeting: int, turned: bool, device: int) -> _State:
        two = self._has_two_places(meeting, self.simulator.program_of[device])
        return meeting, turned, self.top[device, meeting] if two else None

    def _turns_within(self, state: _State, device: int) -> bool:
        """Returns True if a step at `device`, from a meeting with two places, may go back."""
        meeting, _, reached = state
        here = self.top[device, meeting]
        if reached is None or reached == here:
            return False
        return not self._block(device).before[here] >> reached & 1

    def _closes(self, state: _State, device: int) -> bool:
        return state[1] or self._turns_within(state, device)

    def _excursions(self, program: int) -> dict[int, _Ways]:
        """For each meeting shared with other programs, the meetings reachable through those."""
        if program not in self._excursions_of:
            inside = frozenset(self.simulator.programs[program].devices)
            self._excursions_of[program] = {
                meeting: self._ways_outside(meeting, program)
                for meeting, members in enumerate(self.everything)
                if not inside.isdisjoint(members) and not inside.issuperset(members)
            }
        return self._excursions_of[program]

    def _ways_outside(self, start: int, program: int) -> _Ways:
        """Searches breadth first through other programs for paths to this program's meetings."""
        steps: dict[int, WaitStep] = {}
        seen: dict[_MeetingRow, int] = {}
        queue = deque([start])
        while queue:
            meeting = queue.popleft()
            for row, place in self.rows_of[meeting]:
                if row.program == program:
                    continue
                self._work()
                open_ = row.following[place] & ~seen.get(row, 0)
                for other in bit_positions(open_):
                    following, top = row.entries[other]
                    if following in steps or following == start:
                        continue
                    tops = row.entries[place][1], top
                    device = row.devices[place]
                    steps[following] = WaitStep(device, row.program, meeting, following, tops)
                    queue.append(following)
                seen[row] = seen.get(row, 0) | open_
        return {meeting: steps for meeting in steps if self._tops(meeting, program)}

    def _rows(self, program: int) -> Iterator[_MeetingRow]:
        """Yields the meetings shared with other programs, a row for each connected set of devices.

        Devices are connected by the program's own meetings, so a path may lead from any meeting of
        a row to any other through these.
        """
        devices = set(self.simulator.programs[program].devices)
        inside: list[tuple[int, ...]] = []
        shared: list[int] = []
        for meeting, members in enumerate(self.everything):
            if devices.issuperset(members) and not self._has_two_places(meeting, program):
                inside.append(members)
            elif not devices.isdisjoint(members):
                shared.append(meeting)
        for part in connected_components(inside, devices):
            ends = {
                (meeting, self.top[device, meeting]): device
                for meeting in shared
                for device in self.everything[meeting]
                if device in part
            }
            entries = tuple(ends)
            following = tuple(self._after(program, entries))
            yield _MeetingRow(program, tuple(ends.values()), entries, following)

    def _after(self, program: int, entries: Sequence[tuple[int, int]]) -> Iterator[int]:
        """Yields, for each entry of a row, the bits of the entries that can come after it."""
        block = self.simulator.programs[program].block
        places: defaultdict[int, int] = defaultdict(int)
        for place, (_, top) in enumerate(entries):
            places[top] |= 1 << place
        later = {
            top: sum(b for t, b in places.items() if t != top and not block.before[top] >> t & 1)
            for top in places
        }
        for meeting, top in entries:
            same = 0
            if not isinstance(block.nodes[top], CollectiveIssue):
                listed = bit_positions(places[top])
                same = sum(1 << p for p in listed if self._may_follow(meeting, entries[p][0]))
            yield later[top] | same

    def _may_follow(self, first: int, second: int) -> bool:
        """Returns True if two meetings of one loop or branch can come in this order."""
        position = self.position
        shared = set(self.everything[first]) & set(self.everything[second])
        return first != second and all(
            position[device, first] < position[device, second] for device in shared
        )

    def _turns_anywhere(self, program: int) -> bool:
        return any(self._has_two_places(m, program) for m in range(len(self.everything))) or any(
            self._turns(source, target, program)
            for source, targets in self._excursions(program).items()
            for target in targets
        )

    def _turns(self, source: int, target: int, program: int) -> bool:
        """Returns True if the target may come before the source in the program's order."""
        block = self.simulator.programs[program].block
        sources, targets = self._tops(source, program), self._tops(target, program)
        return any(not block.before[t] >> s & 1 for s in sources for t in targets)

    def _has_two_places(self, meeting: int, program: int) -> bool:
        """Returns True if the program has the meeting twice, as both ends of a transfer."""
        return len(self._tops(meeting, program)) > 1

    def _tops(self, meeting: int, program: int) -> set[int]:
        arrivals = self.meetings[meeting].arrivals
        return {a.top for a in arrivals if a.program == program}

    def _work(self) -> None:
        self.work += 1
        if self.work > _MOST_WORK:
            raise TooManyError

    def _barred_places(self, device: int, first: int, second: int) -> dict[int, tuple[int, int]]:
        """For each device, the bits of places at or after `first`, and at or before `second`."""
        block, top = self._block(device), self.top
        one, other = top[device, first], top[device, second]
        result: dict[int, tuple[int, int]] = {}
        for member in self.simulator.programs[self.simulator.program_of[device]].devices:
            after = before = 0
            for place, meeting in enumerate(self.of_device.get(member, ())):
                here = top[member, meeting]
                if here == one or block.before[here] >> one & 1:
                    after |= 1 << place
                if here == other or block.before[other] >> here & 1:
                    before |= 1 << place
            result[member] = after, before
        return result

    def _following(self, device: int) -> list[int]:
        """Returns, for each place of a device, the bits of the places that can come after it."""
        if device in self._following_of:
            return self._following_of[device]
        block = self._block(device)
        tops = [self.top[device, m] for m in self.of_device[device]]
        everything = (1 << len(tops)) - 1
        result = [everything & -(2 << place) for place in range(len(tops))]
        if not block.is_total:
            places: defaultdict[int, int] = defaultdict(int)
            for place, top in enumerate(tops):
                places[top] |= 1 << place
            free = {
                top: sum(b for t, b in places.items() if t != top and not block.has_order(t, top))
                for top in places
            }
            result = [bits | free[top] for bits, top in zip(result, tops, strict=True)]
        self._following_of[device] = result
        return result

    def _cycle(
        self, device: int, first: int, last: _State, came_from: dict[_State, _Origin]
    ) -> list[WaitStep]:
        program = self.simulator.program_of[device]
        steps: list[WaitStep] = []
        state = last
        while (origin := came_from[state]) is not None:
            (meeting, _, _), member = origin
            if member is not None:
                steps.append(self._step(member, meeting, state[0]))
            else:
                way, at = self._excursions(program)[meeting][state[0]], state[0]
                while at != meeting:
                    steps.append(way[at])
                    at = way[at].first
            state = origin[0]
        return [self._step(device, last[0], first), *reversed(steps)]

    def _step(self, device: int, first: int, second: int) -> WaitStep:
        tops = self.top[device, first], self.top[device, second]
        return WaitStep(device, self.simulator.program_of[device], first, second, tops)

    def _ends(self, meeting: int, device: int, part: dict[int, int]) -> set[int]:
        return {part[d] for d in self.everything[meeting] if d != device}

    def _block(self, device: int) -> ProgramBlock:
        return self.simulator.programs[self.simulator.program_of[device]].block
