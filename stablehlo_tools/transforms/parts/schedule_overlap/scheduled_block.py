"""Plans the schedule of one block, as far as a compiler can be held to it, and writes it.

A task of the schedule represents ops of the block. If its ops are in nested regions, it represents
the op of the block around them. Ops of no task (constants, recomputed values, unused ops) come
right before the first op that needs them.

Fences hold a compiler to the schedule. A fence is one barrier at an anchor. The operands of the
collectives that begin there pass through it, so that none begins earlier. So do the results of
those that must have ended, which keeps their slot free for the next. Compute that was moved is
linked to the compute before it. The program's own dependences need no fence.

An anchor is a point in time of the block at which a barrier can be placed. XLA does not fuse across
a barrier, so an anchor is where a kernel begins or ends anyway. One kind is before a matrix
product, a convolution, a kernel call or a loop, on the operand that is ready last. The other is
after a reduction to a small result, on this result.

XLA may have fused the producer of the operand into the op. Then a barrier forces the operand to be
written and read. If that takes long compared with the op, there is no anchor. Attention scores,
which a product with the values reads, are an example.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.tasks.graph import TracedGraph
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import is_future
from stablehlo_tools.dialect.names import CONVOLUTION, CUSTOM_CALL, WHILE
from stablehlo_tools.ir.builder import barrier
from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.ir.walk import FUNCTION, terminator, values_used
from stablehlo_tools.overlap.scheduling.forward_pass import Moments
from stablehlo_tools.overlap.scheduling.scheduler import OverlapSchedule, ScheduleLimits, schedule
from stablehlo_tools.overlap.scheduling.scheduling_problem import OverlapProblem, problem_of
from stablehlo_tools.overlap.scheduling.timing import time_order

type Places = Mapping[ir.Value | ir.Operation, int]  # numbers of ops, by `key_of`
type _Takes = Callable[[ir.Operation], bool]
_BEFORE = frozenset({CONVOLUTION, CUSTOM_CALL, WHILE})
_DOT = "stablehlo.dot_general"
_REDUCE = "stablehlo.reduce"
_SMALLER = 16  # least ratio of a reduction's operand to its result for an anchor
_SHARE = 0.15  # of an op's time: the most that writing and reading an operand may take
_LEAST_NS = 20_000.0  # of a reduction: shorter ones are not anchors
_MOST_LOOKED_AT = 200  # dependents of a collective's result that are searched
_SLACK = 5_000.0  # ns: anchors closer to each other count as the same moment
_END = 0.05  # of the longest chain: collectives with shorter chains after them may end last


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The limits of a plan.

    `headroom`: bytes beyond the block's own order. `streams`: transfers in flight at a time (0: no
    limit). `reorder_compute`: compute may be reordered. `copy_rate`: bytes per ns that memory
    moves. `compute_overlap_multiplier`: factor on the time of compute that hides transfers.
    """

    headroom: float
    streams: int
    reorder_compute: bool
    copy_rate: float
    compute_overlap_multiplier: float = 1.0


@dataclass(frozen=True, slots=True)
class ScheduledBlock:
    """A block with its schedule, the order of its ops, and the fences that hold it."""

    plan: BlockPlan
    schedule: OverlapSchedule
    anchors: Sequence[Anchor]
    fences: Sequence[Fence]

    @property
    def location(self) -> ir.Location:
        """The location of the op that contains the block."""
        return self.plan.block.owner.operation.location

    @property
    def holds(self) -> bool:
        """True if a collective begins at a fence."""
        return any(fence.begins for fence in self.fences)

    @property
    def closed(self) -> float:
        """The share of the time above the floor that the schedule saves.

        It is (before - total) / (before - floor), with `before` the time of the program's own
        order.
        """
        before, floor = self.schedule.before_ns, self.schedule.floor_ns
        return (before - self.schedule.total_ns) / (before - floor) if before > floor else 0.0


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """All ops of a block but the terminator, in their new order.

    `ops`: the ops of each task in this block, in program order.
    """

    block: ir.Block
    order: Sequence[ir.Operation]
    ops: Sequence[Sequence[ir.Operation]]


@dataclass(frozen=True, slots=True)
class Anchor:
    """A point in time: before an op, on its operands of these numbers, or after it, on its
    result."""

    task: int
    op: ir.Operation
    place: int  # of the op in the block
    operands: tuple[int, ...]  # none: after it
    time: float  # ns

    @property
    def served_from(self) -> int:
        """The place of the first op that can read the results of a barrier here."""
        return self.place if self.operands else self.place + 1


@dataclass(frozen=True, slots=True)
class BlockFlight:
    """A collective of the block, with its begin and its time in ns.

    A `fixed` one is in a region of `op`, and begins with that op. `domain`: its communication
    domain.
    """

    op: ir.Operation
    begin: float
    ns: float
    fixed: bool = False
    domain: int = 0


@dataclass(frozen=True, slots=True)
class Fence:
    """A barrier at an anchor: the collectives that begin there, and values that must exist by
    then."""

    anchor: Anchor
    begins: list[ir.Operation] = field(default_factory=list[ir.Operation])
    awaits: list[ir.Value] = field(default_factory=list[ir.Value])


def schedule_block(
    traced: TracedGraph, effects: Effects, limits: PlanLimits, own_peak: float, *, in_loop: bool
) -> ScheduledBlock | None:
    """Schedules a block with collectives; returns None if it has none.

    `own_peak`: the bytes that its own order needs. Raises ToolError for a memory limit that no
    order meets.
    """
    graph = traced.graph
    if not any(task.communication is not None for task in graph.tasks):
        return None
    problem = problem_of(graph, in_loop=in_loop, keep_compute=not limits.reorder_compute)
    own = range(problem.size)
    before = plan_block(traced, own, effects)
    if before is None:
        return None
    possible = find_anchors(before, own, [0.0] * problem.size, problem.ns, limits.copy_rate)
    of_graph = ScheduleLimits(
        memory=own_peak + limits.headroom,
        at_once=limits.streams or None,
        buckets=False,
        reorder_compute=limits.reorder_compute,
        compute_overlap_multiplier=limits.compute_overlap_multiplier,
        moments=Moments(
            before=frozenset(anchor.task for anchor in possible if anchor.operands),
            behind=frozenset(anchor.task for anchor in possible if not anchor.operands),
        ),
    )
    new_schedule = schedule(graph, of_graph, in_loop=in_loop)
    plan = plan_block(traced, new_schedule.order, effects)
    assert plan is not None, "the same tasks are in the same block"
    begin = time_order(problem, new_schedule.order, ()).begin
    anchors = find_anchors(plan, new_schedule.order, begin, problem.ns, limits.copy_rate)
    fences = plan_fences(
        plan,
        anchors,
        _flights(traced, plan, new_schedule.order, begin, problem, in_loop=in_loop),
        unordered_neighbours(plan, anchors),
        one_slot=limits.streams == 1,
    )
    return ScheduledBlock(plan, new_schedule, anchors, fences)


def _flights(
    traced: TracedGraph,
    plan: BlockPlan,
    order: Sequence[int],
    begin: Sequence[float],
    problem: OverlapProblem,
    *,
    in_loop: bool,
) -> list[BlockFlight]:
    """Returns the collectives of a block that later ops wait for, in issue order.

    XLA combines the others, gradients that are summed at the end, and places them where there is
    room.
    """
    behind = [0.0] * problem.size
    for task in reversed(range(problem.size)):
        after = (behind[user] + problem.ns[user] for user in problem.users[task])
        behind[task] = max(after, default=0.0)
    longest = max((ns + rest for ns, rest in zip(problem.ns, behind, strict=True)), default=0.0)
    return [
        BlockFlight(
            op,
            begin[task],
            problem.ns[task],
            fixed=op not in traced.ops[task],
            domain=problem.domain[task],
        )
        for task in order
        if traced.graph.tasks[task].communication is not None
        and (in_loop or behind[task] >= _END * longest)
        for op in plan.ops[task]
    ]


def plan_block(traced: TracedGraph, order: Sequence[int], effects: Effects) -> BlockPlan | None:
    """Returns the plan of the block that contains most tasks of a graph; None if there is none."""
    counts = Counter(op.block for ops in traced.ops for op in ops[-1:])
    block = counts.most_common(1)[0][0] if counts else None
    if block is None:
        return None
    # The ops of each task; nested ones are represented by the op of this block around them.
    lifted: list[list[ir.Operation]] = []
    for ops in traced.ops:
        around = [each for op in ops if (each := _ancestor_in(op, block)) is not None]
        lifted.append(list({key_of(op): op for op in around}.values()))
    wanted = (op for task in order for op in lifted[task])
    return BlockPlan(block, _in_order(block, wanted, effects), lifted)


def _ancestor_in(op: ir.Operation, block: ir.Block) -> ir.Operation | None:
    current = op
    while current.block != block:
        parent = current.parent
        if parent is None or parent.name == FUNCTION:
            return None
        current = parent.operation
    return current


def _in_order(
    block: ir.Block, wanted: Iterable[ir.Operation], effects: Effects
) -> list[ir.Operation]:
    """Returns the ops of a block: the wanted ones in this order, each after all ops that it
    needs."""
    ops = [op.operation for op in block.operations][:-1]
    number = {key_of(op): i for i, op in enumerate(ops)}
    # For each op, the ops of the block whose results it or an op in its regions uses.
    needs: list[list[int]] = []
    for i, op in enumerate(ops):
        makers = (producer(value) for value in values_used(op))
        places = {number.get(key_of(maker), i) for maker in makers if maker is not None}
        needs.append(sorted(places - {i}))
    # Ops with effects keep their order.
    for before, after in pairwise(effects.in_block(block)):
        needs[number[key_of(after)]].append(number[key_of(before)])
    done = bytearray(len(ops))
    result: list[ir.Operation] = []
    for wished in (*(number[key_of(op)] for op in wanted), *range(len(ops))):
        stack = [wished]
        while stack:
            at = stack[-1]
            missing = [i for i in needs[at] if not done[i]]
            if missing and not done[at]:
                stack += reversed(missing)
                continue
            stack.pop()
            if not done[at]:
                done[at] = 1
                result.append(ops[at])
    return result


def find_anchors(
    plan: BlockPlan,
    order: Sequence[int],
    begin: Sequence[float],
    ns: Sequence[float],
    copy_rate: float,
) -> list[Anchor]:
    """Returns the anchors of a block in order; `begin` and `ns` are those of the tasks.

    `copy_rate`: bytes that memory reads or writes per ns.
    """
    places = {key_of(op): place for place, op in enumerate(plan.order)}
    # The task of each op of the block.
    task_of = {key_of(op): task for task in order for op in plan.ops[task]}
    levels: dict[ir.Value | ir.Operation, int] = {}  # how many anchors in a row lead to an op
    anchors: list[Anchor] = []
    for place, op in enumerate(plan.order):
        level = max((_of_maker(operand, levels, 0) for operand in op.operands), default=0)
        task = task_of.get(key_of(op))
        if task is not None and (op.name == _DOT or op.name in _BEFORE):
            # A barrier may force the compiler to write and read a value, which must not take long.
            ready = _ready_last(op, levels, places)
            numbers = [
                number
                for number in ready
                if not 2 * bytes_of(op.operands[number]) / copy_rate > _SHARE * ns[task]
            ]
            if numbers and ready[-1] in numbers:
                anchors.append(Anchor(task, op, place, tuple(numbers), begin[task]))
            level += 1
        elif op.name == _REDUCE and len(op.results) == 1:
            is_small = bytes_of(op.results[0]) * _SMALLER <= bytes_of(op.operands[0])
            if task is not None and is_small and ns[task] >= _LEAST_NS:
                anchors.append(Anchor(task, op, place, (), begin[task] + ns[task]))
        levels[key_of(op)] = level
    return anchors


def _of_maker(value: ir.Value, numbers: Places, default: int) -> int:
    """Returns the number of the op that produces a value; the default if it has none."""
    maker = producer(value)
    return default if maker is None else numbers.get(key_of(maker), default)


def _ready_last(op: ir.Operation, levels: Places, places: Places) -> list[int]:
    """Returns the numbers of the tensor operands that other anchors lead to, the last ready one
    last.

    Without such operands, the last ready one alone.
    """
    ranked = sorted(
        (_of_maker(operand, levels, 0), _of_maker(operand, places, -1), number)
        for number, operand in enumerate(op.operands)
        if isinstance(operand.type, ir.RankedTensorType) and not is_future(operand)
    )
    return [number for level, _, number in ranked if level] or [n for _, _, n in ranked[-1:]]


def unordered_neighbours(plan: BlockPlan, anchors: Sequence[Anchor]) -> list[tuple[Anchor, Anchor]]:
    """Returns pairs of successive anchors; the second does not depend on the first's result."""
    unordered: list[tuple[Anchor, Anchor]] = []
    for first, second in pairwise(anchors):
        between = {key_of(op) for op in plan.order[first.place : second.place + 1]}
        pending = [second.op]
        for op in pending:
            if key_of(op) == key_of(first.op):
                break
            for operand in op.operands:
                maker = producer(operand)
                if maker is not None and key_of(maker) in between:
                    between.discard(key_of(maker))
                    pending.append(maker)
        else:
            unordered.append((first, second))
    return unordered


def plan_fences(
    plan: BlockPlan,
    anchors: Sequence[Anchor],
    flights: Sequence[BlockFlight],
    moved: Sequence[tuple[Anchor, Anchor]],
    *,
    one_slot: bool,
) -> list[Fence]:
    """Plans the fences of a block, in order.

    `flights`: the collectives, in issue order. With `one_slot`, one must end before the next of its
    communication domain can begin. `moved`: pairs of anchors; the second must not run before the
    first.
    """
    at = _Anchored(plan, anchors, flights)
    fences: dict[Anchor, Fence] = {}

    def fence(anchor: Anchor) -> Fence:
        return fences.setdefault(anchor, Fence(anchor))

    last: dict[int, tuple[BlockFlight, int]] = {}  # by domain, the flight before, and its place
    for flight in flights:
        before, since = last.get(flight.domain, (None, -1))
        anchor = at.begin(flight)
        if one_slot and anchor is not None and anchor.place <= since:
            anchor = None
        if anchor is not None:
            fence(anchor).begins.append(flight.op)
            at.move(flight.op, anchor)
        where = anchor or at.itself(flight)
        if one_slot and before is not None and where.place > since:
            fence(where).awaits.extend(at.alive_behind(before.op, where.served_from))
        last[flight.domain] = flight, where.place
    for first, second in moved:
        if second in fences:
            fence(second).awaits.extend(at.alive_behind(first.op, second.served_from))
    return sorted(fences.values(), key=lambda each: each.anchor.place)


class _Anchored:
    """The places of a block's ops, and its anchors."""

    def __init__(
        self, plan: BlockPlan, anchors: Sequence[Anchor], flights: Sequence[BlockFlight]
    ) -> None:
        self._places = {key_of(op): place for place, op in enumerate(plan.order)}
        self._flights = {key_of(flight.op) for flight in flights}
        self._anchors = anchors
        self._times = [anchor.time for anchor in anchors]

    def begin(self, flight: BlockFlight) -> Anchor | None:
        """Returns the last anchor before a flight's begin, if it can begin there and is used
        later."""
        number = bisect_right(self._times, flight.begin + _SLACK) - 1
        if number < 0 or flight.fixed:
            return None
        anchor = self._anchors[number]
        uses = [use for result in flight.op.results for use in result.uses]
        users = [place_of(use.owner.operation, self._places) for use in uses]
        first = min((place for place in users if place is not None), default=len(self._places))
        made = (_of_maker(operand, self._places, -1) for operand in flight.op.operands)
        return anchor if anchor.place < first and all(at < anchor.place for at in made) else None

    def move(self, op: ir.Operation, anchor: Anchor) -> None:
        """Records that a collective moves to an anchor."""
        self._places[key_of(op)] = anchor.served_from

    def itself(self, flight: BlockFlight) -> Anchor:
        """Returns a collective as an anchor, for values that must exist before it begins."""
        place = self._places[key_of(flight.op)]
        return Anchor(-1, flight.op, place, (0,), flight.begin)

    def alive_behind(self, op: ir.Operation, place: int) -> list[ir.Value]:
        """Returns a tensor that depends on an op and is used at or after a place, in a list; or [].

        Empty if all its dependents are used up earlier, or do not exist yet. The future of an
        async_start stays in flight, and results of other collectives may come later.
        """
        pending = list(op.results)
        seen = set(pending)
        for value in pending:
            users = [use.owner.operation for use in value.uses]
            placed = zip(users, (place_of(user, self._places) for user in users), strict=True)
            before = [user for user, at in placed if at is not None and at < place]
            can_wait = isinstance(value.type, ir.RankedTensorType) and not is_future(value)
            if len(before) < len(users) and can_wait:
                return [value]
            for user in before:
                if key_of(user) not in self._flights:
                    fresh = [result for result in user.results if result not in seen]
                    seen.update(fresh)
                    pending += fresh
            if len(pending) > _MOST_LOOKED_AT:
                break
        return []


def place_of(op: ir.Operation, places: Places) -> int | None:
    """Returns the place of an op, or of the op of the block around it; None if there is none."""
    current: ir.Operation | None = op
    while current is not None:
        place = places.get(key_of(current))
        if place is not None:
            return place
        parent = current.parent
        current = None if parent is None else parent.operation
    return None


def write_block(block: ScheduledBlock) -> None:
    """Reorders a block by its schedule, and writes the fences that hold it."""
    end = terminator(block.plan.block)
    # The places of the plan count ops in the new order, so the ops move before any fence.
    for op in block.plan.order:
        op.move_before(end)
    writer = _FenceWriter(block.plan, block.anchors)
    for fence in block.fences:
        writer.write(fence)


class _FenceWriter:
    """Writes barriers into one block; places are those of the plan."""

    def __init__(self, plan: BlockPlan, anchors: Sequence[Anchor]) -> None:
        self._places = {key_of(op): place for place, op in enumerate(plan.order)}
        self._now: dict[ir.Value, ir.Value] = {}  # the barrier's result for each operand
        self._before = {key_of(a.op): a.place for a in anchors if a.operands}

    def write(self, fence: Fence) -> None:
        """Writes a barrier, if it holds anything."""
        anchor = fence.anchor
        through = [
            (value, takes)
            for value, takes in self._through(fence)
            if any(takes(use.owner.operation) for use in value.uses)
        ]
        values = list(dict.fromkeys(value for value, _ in through))
        if len(values) < 2:
            return
        behind = not anchor.operands
        point = ir.InsertionPoint.after(anchor.op) if behind else ir.InsertionPoint(anchor.op)
        written = barrier(values, point, anchor.op.location)
        for value, result in zip(values, written.results, strict=True):
            self._now[value] = result
            takers = [takes for other, takes in through if other == value]
            for op, number in [(use.owner.operation, use.operand_number) for use in value.uses]:
                if op != written and any(takes(op) for takes in takers):
                    # An op without results is its own key, which changes with its operands.
                    place = None if len(op.results) else self._places.pop(op, None)
                    op.operands[number] = result
                    if place is not None:
                        self._places[op] = place
        last = written
        for op in fence.begins:
            op.move_after(last)
            self._places[key_of(op)] = anchor.served_from
            last = op

    def _through(self, fence: Fence) -> list[tuple[ir.Value, _Takes]]:
        """Returns the operands of a barrier, each with a predicate for the users that read its
        result."""
        anchor = fence.anchor
        place, served_from, own = anchor.place, anchor.served_from, key_of(anchor.op)
        begun = {key_of(op) for op in fence.begins}

        def is_anchored(op: ir.Operation) -> bool:  # here or later
            return self._before.get(key_of(op), -1) >= place or key_of(op) == own

        def is_later(op: ir.Operation) -> bool:
            at = place_of(op, self._places)
            return at is None or at >= served_from  # None: the terminator

        through: list[tuple[ir.Value, _Takes]] = []
        if not anchor.operands:
            through.append((anchor.op.results[0], lambda op: True))
        through += [(anchor.op.operands[number], is_anchored) for number in anchor.operands]
        for op in fence.begins:
            through += [(operand, lambda op: key_of(op) in begun) for operand in op.operands]
        for awaited in fence.awaits:
            value = awaited
            # Earlier barriers may have replaced the value: this one reads the last replacement.
            while value in self._now:
                value = self._now[value]
            through.append((value, is_later))
        return through
