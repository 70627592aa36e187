"""One run of all programs: devices issue in a chosen order and wait at every rendezvous.

A device that reaches a collective waits until all its members have reached one with the same
signature and members; then they all continue. Once the order on each device is fixed, no device has
a choice. So the outcome does not depend on the speed of devices, and one run decides.

Loops that all their devices reach together are run once, separately: if one iteration ends, all do.
Only loops that do not match are stepped through, iteration by iteration. A loop or branch decided
at run time counts as one collective of all devices in it. These include devices of other programs
that surely decide identically. They continue if its inside ends by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.order.program import (
    CollectiveIssue,
    CollectiveSignature,
    CompiledOrder,
    Node,
    ProgramBlock,
    ProgramBranch,
    ProgramLoop,
    blocks_of,
    connected_components,
    decision_of,
    footprint,
    inner_blocks,
    issues_of,
)

# The order of a block's nodes, by program and block, if it is not the text order.
Choice = Mapping[tuple[int, ProgramBlock], Sequence[int]]
Members = tuple[int, ...]
_MOST_STEPS = 3_000_000


class LoopMismatchError(Exception):
    """Stepping through loops that do not match exceeds the limit of steps."""


@dataclass(frozen=True, eq=False)
class Arrival:
    """A device at a node. `members` is empty at a loop with known trips (see `_pass_loops`).

    `top` is the position, in the program's outermost block, of the node that contains this one.
    `iteration` counts, from 0, the iterations of the loops around it, the outermost first.
    """

    device: int
    program: int
    node: Node
    top: int
    members: Members = ()
    iteration: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Meeting:
    """One meeting of a run: the arrivals of all members."""

    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True)
class SimulationOutcome:
    """The meetings in a possible order, and the devices that still wait at the end.

    All other devices have issued all their collectives. The run ended well if no device waits.
    """

    meetings: tuple[Meeting, ...]
    waiting: dict[int, Arrival]

    @property
    def ended(self) -> bool:
        """True if every device issued all its collectives."""
        return not self.waiting


type _Stream = Generator[Arrival, bool]


@dataclass
class _OrderRun:
    """The state of one run over some devices."""

    streams: dict[int, _Stream]
    choice: Choice
    waiting: dict[int, Arrival] = field(default_factory=dict[int, Arrival])
    gathered: dict[object, list[Arrival]] = field(default_factory=dict[object, list[Arrival]])
    meetings: list[Meeting] = field(default_factory=list[Meeting])
    queue: deque[tuple[int, bool]] = field(default_factory=deque[tuple[int, bool]])

    def release(self, arrivals: Sequence[Arrival], *, skip: bool) -> None:
        """Lets devices continue: past their node or, without `skip`, into a loop."""
        for arrival in arrivals:
            del self.waiting[arrival.device]
            self.queue.append((arrival.device, skip))

    def meet(self, arrivals: Sequence[Arrival]) -> None:
        """Records a meeting and lets its members continue."""
        self.meetings.append(Meeting(tuple(arrivals)))
        self.release(arrivals, skip=True)


class Simulator:
    """Runs a set of programs, each on its devices."""

    def __init__(self, programs: Sequence[CompiledOrder]) -> None:
        self.programs = tuple(programs)
        self.program_of = {d: i for i, program in enumerate(programs) for d in program.devices}
        self._members: dict[Node, dict[int, Members]] = {}
        self._alike = _decided_alike(programs)
        self._alone: dict[object, bool] = {}
        self._steps = 0

    def run(self, choice: Choice | None = None) -> SimulationOutcome:
        """Runs every program to its end, or until all remaining devices wait.

        Raises LoopMismatchError if loops that do not match need too many steps.
        """
        self._steps = 0
        # These answers hold for one choice of orders.
        self._alone.clear()
        blocks = {d: self.programs[i].block for d, i in self.program_of.items()}
        return self._run(blocks, choice or {})

    def _run(self, blocks: Mapping[int, ProgramBlock], choice: Choice) -> SimulationOutcome:
        run = _OrderRun(
            {device: self._stream(device, block, choice) for device, block in blocks.items()},
            choice,
        )
        for device, stream in run.streams.items():
            self._record_arrival(run, device, next(stream, None))
        while True:
            while run.queue:
                device, skip = run.queue.popleft()
                try:
                    self._record_arrival(run, device, run.streams[device].send(skip))
                except StopIteration:
                    continue
            if not self._pass_loops(run, choice):
                return SimulationOutcome(tuple(run.meetings), dict(sorted(run.waiting.items())))

    def _record_arrival(self, run: _OrderRun, device: int, arrival: Arrival | None) -> None:
        """Records the node that a device has reached; None if it has ended."""
        if arrival is None:
            return
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise LoopMismatchError
        run.waiting[device] = arrival
        if not arrival.members:
            return
        node = arrival.node
        # Arrivals meet if this and the members are equal.
        if isinstance(node, CollectiveIssue):
            own: object = node.signature
        else:
            own = decision_of(node).symbols.get(arrival.device, (arrival.program, id(node)))
        key = (own, arrival.members)
        gathered = run.gathered.setdefault(key, [])
        gathered.append(arrival)
        if len(gathered) < len(arrival.members):
            return
        if isinstance(node, CollectiveIssue) or self._ends_alone(gathered, run.choice):
            del run.gathered[key]
            run.meet(gathered)

    def _ends_alone(self, arrivals: Sequence[Arrival], choice: Choice) -> bool:
        """Returns True if each block of a node decided at run time ends once all enter it."""
        key = tuple(sorted((arrival.device, id(arrival.node)) for arrival in arrivals))
        if key not in self._alone:
            inside = {arrival.device: inner_blocks(arrival.node) for arrival in arrivals}
            # Programs must have equally many branches to enter them pairwise.
            self._alone[key] = len({len(blocks) for blocks in inside.values()}) == 1 and all(
                self._run(dict(zip(inside, blocks, strict=True)), choice).ended
                for blocks in zip(*inside.values(), strict=True)
            )
        return self._alone[key]

    def _pass_loops(self, run: _OrderRun, choice: Choice) -> bool:
        """Runs each loop that all its devices have reached; called if no device can continue.

        If no loop is complete, all devices at loops step into them. Returns True if any device
        continues.
        """
        parked = {
            d: a
            for d, a in run.waiting.items()
            if isinstance(a.node, ProgramLoop) and not a.members
        }
        meetings = [
            meeting.members
            for arrival in parked.values()
            for block in inner_blocks(arrival.node)
            for meeting in block.rendezvous
            if arrival.device in meeting.issuers
        ]
        complete = [
            [parked[device] for device in component]
            for component in connected_components(meetings, parked)
            if all(device in parked for device in component)
        ]
        for arrivals in complete:
            if self._runs_alone(arrivals, choice):
                run.meet(arrivals)
            else:
                run.release(arrivals, skip=False)
        if not complete:
            run.release(list(parked.values()), skip=False)
        return bool(parked)

    def _runs_alone(self, arrivals: Sequence[Arrival], choice: Choice) -> bool:
        """Returns True if the devices' loops run equally often and an iteration ends by itself."""
        loops = {a.device: a.node for a in arrivals if isinstance(a.node, ProgramLoop)}
        trips: set[int] = set()
        for device, loop in loops.items():
            assert loop.trips.values is not None
            trips.add(loop.trips.values[device])
        if len(trips) > 1:
            return False
        key = tuple((device, id(loop)) for device, loop in sorted(loops.items()))
        if key not in self._alone:
            conditions = {device: loop.condition for device, loop in loops.items()}
            bodies = {device: loop.body for device, loop in loops.items()}
            self._alone[key] = (
                self._run(conditions, choice).ended and self._run(bodies, choice).ended
            )
        return self._alone[key]

    def _stream(
        self,
        device: int,
        block: ProgramBlock,
        choice: Choice,
        top: int | None = None,
        iteration: tuple[int, ...] = (),
    ) -> _Stream:
        """Yields the arrivals of a device in a block, in the chosen order.

        At a loop, a sent True skips the loop.
        """
        program = self.program_of[device]
        for position in choice.get((program, block)) or range(len(block.nodes)):
            node, outer = block.nodes[position], position if top is None else top
            if isinstance(node, CollectiveIssue):
                meeting = node.of_device.get(device)
                if meeting is not None:
                    yield Arrival(device, program, node, outer, meeting.members, iteration)
                continue
            members = self._members_of(node, device)
            # A loop or branch without a collective of this device never makes it wait.
            if not members:
                continue
            values = decision_of(node).values
            if values is None:
                symbol = decision_of(node).symbols.get(device)
                if symbol is not None:
                    members = self._alike[node, symbol][device]
                yield Arrival(device, program, node, outer, members, iteration)
            elif isinstance(node, ProgramBranch):
                branch = node.branches[values[device]]
                yield from self._stream(device, branch, choice, outer, iteration)
            elif not (yield Arrival(device, program, node, outer, (), iteration)):
                for count in range(values[device]):
                    inner = (*iteration, count)
                    yield from self._stream(device, node.condition, choice, outer, inner)
                    yield from self._stream(device, node.body, choice, outer, inner)
                # The condition runs once more than the body: its last run ends the loop.
                yield from self._stream(device, node.condition, choice, outer, iteration)

    def _members_of(self, node: Node, device: int) -> Members:
        """Returns the devices that a device meets in a loop or branch, directly or indirectly."""
        if node not in self._members:
            meetings = [meeting.members for meeting in footprint(node)]
            self._members[node] = {
                member: component
                for component in connected_components(meetings, ())
                for member in component
            }
        return self._members[node].get(device, ())


def _decided_alike(programs: Sequence[CompiledOrder]) -> dict[tuple[Node, str], dict[int, Members]]:
    """For each node and symbol, the devices that each device meets in identically decided nodes.

    Nodes are combined if they have one symbol and a collective with the same signature.
    """
    together: dict[str, list[_LoopClass]] = {}
    for block in dict.fromkeys(program.block for program in programs):
        for node in (node for inner in blocks_of(block) for node in inner.nodes):
            if isinstance(node, CollectiveIssue):
                continue
            inside = {i.signature for inner in inner_blocks(node) for i in issues_of(inner)}
            linked = {meeting.members for meeting in footprint(node)}
            for symbol in set(decision_of(node).symbols.values()):
                listed = together.setdefault(symbol, [])
                joined = _LoopClass([node], set(inside), set(linked))
                for other in [other for other in listed if not other.inside.isdisjoint(inside)]:
                    listed.remove(other)
                    joined.nodes += other.nodes
                    joined.inside |= other.inside
                    joined.linked |= other.linked
                listed.append(joined)
    members_at: dict[tuple[Node, str], dict[int, Members]] = {}
    for symbol, listed in together.items():
        for alike in listed:
            parts = connected_components(sorted(alike.linked), ())
            members = {device: part for part in parts for device in part}
            members_at.update(((node, symbol), members) for node in alike.nodes)
    return members_at


@dataclass(eq=False)
class _LoopClass:
    """Nodes decided identically, the signatures inside them, and the members those link."""

    nodes: list[Node]
    inside: set[CollectiveSignature]
    linked: set[Members]
