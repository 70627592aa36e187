"""What can happen when programs run: every schedule, every decision, every interleaving.

Slow and obvious on purpose, and apart from what it judges: of stablehlo_tools.order it knows only
the data model. A schedule of a program is a linear extension of each of its blocks, and of the
unrolled iterations of each loop that is not chained. All devices of a program follow it. Loops are
written out. A device blocks in a collective until all members are at one of the same form; from
every state, every rendezvous that can happen next is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from stablehlo_tools.order.program import (
    CollectiveIssue,
    CompiledOrder,
    Decision,
    Node,
    ProgramBlock,
    ProgramBranch,
    ProgramLoop,
    Rendezvous,
    compiled_blocks,
    inner_blocks,
)

type Order = Sequence[int]
type Choice = Mapping[tuple[int, ProgramBlock], Order]
# What a device decides where nothing is known before the run, by node and class.
type Luck = Mapping[tuple[Node, int], int]
type Schedule = Mapping[ProgramBlock | ProgramLoop, Order]
type Sequences = dict[int, tuple[Step, ...]]

MOST_TRIPS = 2  # of a loop whose trip count is not known


class TooManyError(Exception):
    """There are more schedules than the caller wants to wait for."""


@dataclass(frozen=True)
class Step:
    """One collective that one device issues. `path` are the iterations of the loops around it."""

    device: int
    program: int
    issue: CollectiveIssue
    meeting: Rendezvous
    path: tuple[int, ...]

    @property
    def name(self) -> object:
        """The same in every schedule."""
        return self.device, self.program, self.issue, self.path


@dataclass
class Report:
    """What was found; `hang` tells the state that nothing leaves, by device."""

    hang: dict[int, Step] | None = None
    swap: tuple[Step, ...] | None = None
    states: int = 0
    runs: int = 0

    @property
    def is_good(self) -> bool:
        """Nobody hangs and no data is exchanged wrongly."""
        return self.hang is None and self.swap is None


def explore(programs: Sequence[CompiledOrder], most_runs: int = 3000) -> Report:
    """Tries everything, and stops at the first hang or swap. Raises TooManyError."""
    report = Report()
    for lucks in itertools.product(*(list(_lucks(program)) for program in programs)):
        written = [
            _distinct(number, program, luck, most_runs)
            for number, (program, luck) in enumerate(zip(programs, lucks, strict=True))
        ]
        if report.runs + prod(map(len, written)) > most_runs:
            raise TooManyError
        usual = _together([each[0] for each in written])  # the text order is the first
        partners = _partners(usual)
        for parts in itertools.product(*written):
            _run(_together(parts), partners, report)
            if not report.is_good:
                return report
    return report


def replay(programs: Sequence[CompiledOrder], choice: Choice) -> Report:
    """Runs one choice, programs that it does not name in text order, under every decision.

    A report of the first hang if there is one, else of the first swap.
    """
    report = Report()
    for lucks in itertools.product(*(list(_lucks(program)) for program in programs)):
        usual: Sequences = {}
        chosen: Sequences = {}
        for number, (program, luck) in enumerate(zip(programs, lucks, strict=True)):
            mine: dict[ProgramBlock | ProgramLoop, Order] = {
                block: order for (owner, block), order in choice.items() if owner == number
            }
            usual |= _write(number, program, luck, {})
            chosen |= _write(number, program, luck, mine)
        _run(chosen, _partners(usual), report)
        if report.hang is not None:
            break
    return report


def _lucks(program: CompiledOrder) -> Iterator[Luck]:
    """Every outcome of what is decided at run time: one for each node and class."""
    open_nodes = [n for n in _nodes(program.block) if _decision(n) and not _is_known(n)]
    keys: list[tuple[Node, int]] = []
    ranges: list[range] = []
    for node in open_nodes:
        decision = _decision(node)
        assert decision is not None
        for number in sorted({decision.classes[device] for device in program.devices}):
            keys.append((node, number))
            ways = len(node.branches) if isinstance(node, ProgramBranch) else MOST_TRIPS + 1
            ranges.append(range(ways))
    for outcome in itertools.product(*ranges):
        yield dict(zip(keys, outcome, strict=True))


def _nodes(block: ProgramBlock) -> Iterator[Node]:
    for node in block.nodes:
        yield node
        for inner in inner_blocks(node):
            yield from _nodes(inner)


def _decision(node: Node) -> Decision | None:
    if isinstance(node, CollectiveIssue):
        return None
    return node.trips if isinstance(node, ProgramLoop) else node.choice


def _is_known(node: Node) -> bool:
    decision = _decision(node)
    return decision is None or decision.values is not None


def _decided(node: ProgramLoop | ProgramBranch, device: int, luck: Luck) -> int:
    decision = _decision(node)
    assert decision is not None
    if decision.values is not None:
        return decision.values[device]
    return luck[node, decision.classes[device]]


def _most_trips(loop: ProgramLoop, program: CompiledOrder, luck: Luck) -> int:
    return max(_decided(loop, device, luck) for device in program.devices)


# Writing a program out: what each of its devices issues, for a schedule.


@dataclass
class _Writer:
    """Writes out a program. `reaches` says which devices get to where the writing is."""

    number: int
    program: CompiledOrder
    luck: Luck
    schedule: Schedule
    steps: dict[int, list[Step]] = field(default_factory=dict[int, list[Step]])

    def block(self, block: ProgramBlock, devices: Sequence[int], path: tuple[int, ...]) -> None:
        for position in self.schedule.get(block, range(len(block.nodes))):
            self.node(block.nodes[position], devices, path)

    def node(self, node: Node, devices: Sequence[int], path: tuple[int, ...]) -> None:
        if isinstance(node, CollectiveIssue):
            for device in devices:
                meeting = node.of_device.get(device)
                if meeting is not None:
                    self.steps[device].append(Step(device, self.number, node, meeting, path))
            return
        ways = {device: _decided(node, device, self.luck) for device in devices}
        if isinstance(node, ProgramBranch):
            for index, branch in enumerate(node.branches):
                self.block(branch, [d for d in devices if ways[d] == index], path)
        elif node in self.schedule:
            pieces = _pieces(node, _most_trips(node, self.program, self.luck))
            for index in self.schedule[node]:
                piece = pieces[index]
                inside = [d for d in devices if piece.iteration < ways[d] + piece.is_condition]
                self.node(piece.node, inside, (*path, piece.iteration))
        else:
            for iteration in range(max(ways.values(), default=0) + 1):
                inner = (*path, iteration)
                self.block(node.condition, [d for d in devices if iteration <= ways[d]], inner)
                self.block(node.body, [d for d in devices if iteration < ways[d]], inner)


@dataclass(frozen=True)
class _Piece:
    """A node of one iteration; `before` are the pieces that it comes after."""

    iteration: int
    node: Node
    is_condition: bool
    before: int


def _pieces(loop: ProgramLoop, trips: int) -> list[_Piece]:
    """The loop unrolled, iteration by iteration, the condition before the body in each."""
    pieces: list[_Piece] = []
    for iteration in range(trips + 1):
        start = len(pieces)
        for node, before in zip(loop.condition.nodes, loop.condition.before, strict=True):
            pieces.append(_Piece(iteration, node, True, before << start))
        middle = len(pieces)
        conditions = (1 << middle) - (1 << start)
        if iteration < trips:
            for node, before in zip(loop.body.nodes, loop.body.before, strict=True):
                pieces.append(_Piece(iteration, node, False, before << middle | conditions))
    return pieces


def _write(number: int, program: CompiledOrder, luck: Luck, schedule: Schedule) -> Sequences:
    steps: dict[int, list[Step]] = {device: [] for device in program.devices}
    writer = _Writer(number, program, luck, schedule, steps)
    writer.block(program.block, program.devices, ())
    return {device: tuple(listed) for device, listed in steps.items()}


def _distinct(number: int, program: CompiledOrder, luck: Luck, most: int) -> list[Sequences]:
    """What the devices issue, for every schedule; each outcome once, that of the text first."""
    options: list[list[tuple[ProgramBlock | ProgramLoop, tuple[int, ...]]]] = []
    overlapping: set[ProgramBlock] = set()
    for node in _nodes(program.block):
        if isinstance(node, ProgramLoop) and not node.is_chained:
            overlapping |= {node.condition, node.body}
            trips = _most_trips(node, program, luck)
            before = [piece.before for piece in _pieces(node, trips)]
            options.append([(node, order) for order in _extensions(before, most)])
    for block in dict.fromkeys(_blocks(program.block)):
        if block not in overlapping:
            options.append([(block, order) for order in _extensions(block.before, most)])
    if prod(map(len, options)) > most:
        raise TooManyError
    found: dict[object, Sequences] = {}
    for chosen in itertools.product(*options):
        written = _write(number, program, luck, dict(chosen))
        found.setdefault(tuple(sorted(written.items(), key=lambda item: item[0])), written)
    return list(found.values())


def _blocks(block: ProgramBlock) -> Iterator[ProgramBlock]:
    yield block
    for node in block.nodes:
        for inner in inner_blocks(node):
            yield from _blocks(inner)


def _extensions(before: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Every linear extension, the text order first. Raises TooManyError past `most`."""
    found: list[tuple[int, ...]] = []

    def extend(order: tuple[int, ...], done: int) -> None:
        if len(order) == len(before):
            found.append(order)
            if len(found) > most:
                raise TooManyError
        for position, needed in enumerate(before):
            if not done >> position & 1 and needed & ~done == 0:
                extend((*order, position), done | 1 << position)

    extend((), 0)
    return found


def _together(parts: Sequence[Sequences]) -> Sequences:
    return {device: steps for part in parts for device, steps in part.items()}


# Running: from every state, every rendezvous that can happen.


def _run(sequences: Sequences, partners: Mapping[object, object], report: Report) -> None:
    """Explores all interleavings; a hang or a swap goes into the report."""
    report.runs += 1
    devices = sorted(sequences)
    start = tuple(0 for _ in devices)
    seen = {start}
    pending = [start]
    while pending:
        state = pending.pop()
        report.states += 1
        current = {
            device: sequences[device][position]
            for device, position in zip(devices, state, strict=True)
            if position < len(sequences[device])
        }
        meetings = _possible(current)
        if current and not meetings:
            report.hang = current
            return
        for meeting in meetings:
            if _is_swapped(meeting, partners) and report.swap is None:
                report.swap = meeting
            moved = {step.device for step in meeting}
            following = tuple(
                position + (device in moved)
                for device, position in zip(devices, state, strict=True)
            )
            if following not in seen:
                seen.add(following)
                pending.append(following)


def _possible(current: Mapping[int, Step]) -> list[tuple[Step, ...]]:
    """The rendezvous that can happen when each device is at its step."""
    found: list[tuple[Step, ...]] = []
    for device, step in current.items():
        members = step.meeting.members
        if device != min(members) or len(set(members)) != len(members):
            continue
        there = [current.get(member) for member in members]
        if all(other is not None and _can_meet(step, other) for other in there):
            found.append(tuple(other for other in there if other is not None))
    return found


def _can_meet(one: Step, other: Step) -> bool:
    if one.device == other.device:
        return True
    if one.meeting.members != other.meeting.members:
        return False
    if one.issue.signature != other.issue.signature:
        return False
    if one.issue.transfer or other.issue.transfer:
        return {one.issue.transfer, other.issue.transfer} == {"send", "recv"}
    return one.program != other.program or one.issue is other.issue


def _is_swapped(meeting: Sequence[Step], partners: Mapping[object, object]) -> bool:
    """Whether devices meet that do not meet so in text order. No text order, no swap."""
    usual = partners.get(meeting[0].name)
    return bool(partners) and usual != frozenset(step.name for step in meeting)


def _partners(sequences: Sequences) -> dict[object, object]:
    """Who meets whom when all follow the text; nothing if that hangs."""
    position = dict.fromkeys(sequences, 0)
    found: dict[object, object] = {}
    while left := [d for d in sequences if position[d] < len(sequences[d])]:
        meetings = _possible({d: sequences[d][position[d]] for d in left})
        if not meetings:
            return {}
        for meeting in meetings:
            names = frozenset(step.name for step in meeting)
            for step in meeting:
                found[step.name] = names
                position[step.device] += 1
    return found


# XLA:GPU's communicators: opened before the start, by all that the text has, run or not.


def all_open(programs: Sequence[CompiledOrder], most: int = 300) -> bool:
    """Whether every device opens all its communicators, whatever the schedules. Raises TooMany."""
    written = [_opening(program, most) for program in programs]
    if prod(map(len, written)) > most:
        raise TooManyError
    for parts in itertools.product(*written):
        left = {device: list(listed) for part in parts for device, listed in part.items()}
        while left:
            ready = [
                key
                for key in {listed[0] for listed in left.values() if listed}
                if all(left.get(d, [None])[:1] == [key] for d in key[0])
            ]
            for key in ready:
                for device in key[0]:
                    left[device].pop(0)
            left = {device: listed for device, listed in left.items() if listed}
            if left and not ready:
                return False
    return True


type Opening = dict[int, list[tuple[tuple[int, ...], bool]]]


def _opening(program: CompiledOrder, most: int) -> list[Opening]:
    """What each device opens, in order, for every schedule of a program."""
    blocks = list(dict.fromkeys(_blocks(program.block)))
    options = [_extensions(block.before, most) for block in blocks]
    if prod(map(len, options)) > most:
        raise TooManyError
    found: list[Opening] = []
    for orders in itertools.product(*options):
        chosen = dict(zip(blocks, orders, strict=True))
        opened: Opening = {device: [] for device in program.devices}
        for issue in _in_text(program.block, chosen):
            for meeting in () if issue.transfer else issue.rendezvous:
                key = tuple(sorted(meeting.members)), issue.signature.kind == "collective_permute"
                for device in meeting.members if len(meeting.members) > 1 else ():
                    if key not in opened.get(device, [key]):
                        opened[device].append(key)
        for listed in opened.values():
            listed.sort(key=lambda key: -len(key[0]))
        if opened not in found:
            found.append(opened)
    return found


def _in_text(
    block: ProgramBlock, chosen: Mapping[ProgramBlock, Order]
) -> Iterator[CollectiveIssue]:
    for position in chosen[block]:
        node = block.nodes[position]
        if isinstance(node, CollectiveIssue):
            yield node
        for inner in compiled_blocks(node):
            yield from _in_text(inner, chosen)
