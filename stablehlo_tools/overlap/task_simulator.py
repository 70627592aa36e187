"""Event simulation of a task graph: one compute stream, and the streams of its collectives.

Tasks are issued in the graph's order. Compute and views run one after the other. A collective start
appends its transfer to its stream's queue; a wait blocks the compute stream until the transfer is
done. The starts of a bucket are consecutive and run as one transfer: the latency counts once, the
rest is added. A wait for any of them waits for all. A loop's body is simulated iteration by
iteration until an iteration changes the device exactly as the previous one did. The remaining
iterations are only counted (`LoopRun.folded`).

A stream runs its transfers one after the other in issue order. A link carries the first transfers
of several streams at the same time and divides its bandwidth equally among them. A transfer that
crosses several links moves at the pace of its slowest. The latency of a transfer occupies no link.

`contended`: transfers in flight use compute units and memory bandwidth (`cost.contention`), which
slows down kernels as long as both run.

On flat graphs this is the model of the referee for overlap schedules, with identical figures.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.cost.contention import NONE, Contention, slowdown, together
from stablehlo_tools.cost.transfer_sizes import ways
from stablehlo_tools.overlap.bounds import iterations
from stablehlo_tools.overlap.task_graph import Communication, Task, TaskGraph, TaskKind

_MOST_ITERATIONS = 64  # to simulate per loop; a loop that is not steady by then is extrapolated
_SAME = 1e-9  # relative
_LATENCY = ": latency"  # suffix of a stream's name for the latency of its current transfer
_NOT_YET = float("inf")


@dataclass(slots=True, eq=False)
class CollectiveFlight:
    """One collective, or one bucket of them, from its issue to its end.

    `hidden` has the ns for which each compute task ran, or compute waited for another transfer,
    during the flight; the keys are displayed names. `stall` is the ns of compute's waits for this
    flight. The part of them in which an earlier transfer of the same stream was in flight counts as
    `exposed` of that transfer.
    """

    starts: tuple[int, ...]  # tasks
    stream: str
    ns: float
    latency_ns: float
    ways: tuple[str, ...] = ()  # of links
    contention: Contention = NONE
    begin: float = _NOT_YET
    end: float = _NOT_YET
    stall: float = 0.0
    exposed: float = 0.0
    hidden: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(slots=True)
class GraphRun:
    """One passage through a graph. Times are ns from the start of the program, by task id."""

    graph: TaskGraph
    order: Sequence[int]
    begin: list[float]
    end: list[float]
    flights: dict[int, CollectiveFlight] = field(
        default_factory=dict[int, CollectiveFlight]
    )  # by start
    loops: dict[int, LoopRun] = field(default_factory=dict[int, "LoopRun"])  # by task

    def all_flights(self) -> Iterator[CollectiveFlight]:
        """Yields each flight of this passage once, without those of loops."""
        return iter({id(flight): flight for flight in self.flights.values()}.values())

    def shift(self, delta: float, grown: Mapping[str, float]) -> None:
        """Adds `delta` to all times, and to a stream's flights also its entry in `grown`."""
        self.begin = [time + delta for time in self.begin]
        self.end = [time + delta for time in self.end]
        for flight in self.all_flights():
            flight.begin += delta + grown.get(flight.stream, 0.0)
            flight.end += delta + grown.get(flight.stream, 0.0)
        for loop in self.loops.values():
            loop.begin += delta
            for iteration in loop.iterations:
                iteration.shift(delta, grown)


@dataclass(slots=True)
class LoopRun:
    """The simulated iterations of a loop.

    `folded` more iterations equal the last but one, each in `period` ns; they precede the last.
    """

    iterations: list[GraphRun]
    begin: float
    folded: int = 0
    period: float = 0.0
    steady: bool = True

    def weighted_iterations(self) -> Iterator[tuple[GraphRun, int]]:
        """Yields each simulated iteration with the number of iterations that it represents."""
        representative = max(0, len(self.iterations) - 2)
        for number, iteration in enumerate(self.iterations):
            yield iteration, 1 + (self.folded if number == representative else 0)


@dataclass(frozen=True, slots=True)
class Simulation:
    """The times of a program. `tail_ns` is the time for which transfers outlast compute."""

    run: GraphRun
    total_ns: float
    compute_ns: float
    tail_ns: float

    @property
    def exposed_ns(self) -> float:
        """The time in which the device does not compute."""
        return self.total_ns - self.compute_ns


def simulate(
    graph: TaskGraph,
    order: Sequence[int] | None = None,
    buckets: Sequence[Sequence[int]] = (),
    *,
    contended: bool = False,
) -> Simulation:
    """Times a graph in an order that respects its dependences.

    `order` holds every task id once (default: the graph's order). `buckets` are lists of collective
    starts that are consecutive in it. Loop bodies use the order and the buckets of their `Loop`.
    `contended`: collectives slow down the compute beside them. Raises ValueError if the order does
    not hold each task exactly once.
    """
    issue = range(len(graph.tasks)) if order is None else order
    if order is not None and sorted(order) != list(range(len(graph.tasks))):
        raise ValueError("the order must hold every task exactly once")
    users: dict[str, set[str]] = {}
    for inner in graph.walk():
        for task in inner.tasks:
            if task.communication is not None:
                for link in task.communication.links:
                    for way in ways(link):
                        users.setdefault(way, set()).add(task.communication.stream)
    device = _Device(
        _Streams({way: frozenset(streams) for way, streams in users.items()}), contended
    )
    run = device.passage(graph, issue, _bucket_of(buckets), {})
    done = device.streams.drain()
    total = max(device.clock, done)
    # Adds the time after the end of compute to the stall of the flights that are still running.
    clock = device.clock
    late = [flight for flight in _every_flight(run) if flight.end > clock]
    for flight in sorted(late, key=lambda flight: flight.end):
        flight.stall += flight.end - clock
        flight.exposed += flight.end - clock
        clock = flight.end
    return Simulation(run, total, device.busy, total - device.clock)


def _bucket_of(buckets: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Returns the bucket of each start that is in one."""
    return {start: tuple(bucket) for bucket in buckets for start in bucket}


class _Device:
    """The compute stream's clock, and the communication streams."""

    def __init__(self, streams: _Streams, contended: bool) -> None:
        self.streams = streams
        self._slows = contended  # True if transfers in flight slow compute down
        self.clock = 0.0
        self.busy = 0.0

    def passage(
        self,
        graph: TaskGraph,
        order: Sequence[int],
        bucket_of: Mapping[int, tuple[int, ...]],
        before: Mapping[int, CollectiveFlight],
    ) -> GraphRun:
        """Simulates one passage through a graph; `before` are the previous iteration's flights."""
        tasks = graph.tasks
        run = GraphRun(graph, order, [self.clock] * len(tasks), [self.clock] * len(tasks))
        begin, end, flights = run.begin, run.end, run.flights
        for i in order:
            task = tasks[i]
            kind = task.kind
            begin[i] = self.clock
            if kind is TaskKind.COLLECTIVE_START:
                if i not in flights:
                    self._issue(tasks, bucket_of.get(i, (i,)), flights)
            elif kind is TaskKind.WAIT:
                self._wait(task, flights, before)
            elif kind is TaskKind.LOOP:
                run.loops[i] = self._loop(task)
            elif task.ns:
                since, ns = self.clock, self._beside(task) if self._slows else task.ns
                self.clock += ns
                self.busy += ns
                self.streams.hide(task.name or task.op, since, self.clock)
            end[i] = self.clock
        return run

    def _beside(self, task: Task) -> float:
        """Returns the ns of a kernel that starts now, slowed down by the transfers in flight."""
        left, now = task.ns, self.clock
        while True:
            taken, change = self.streams.contention_at(now)
            slower = slowdown(*task.shares, taken)
            if left * slower <= change - now:
                return now + left * slower - self.clock
            left -= (change - now) / slower
            now = change

    def _issue(
        self, tasks: Sequence[Task], bucket: tuple[int, ...], flights: dict[int, CollectiveFlight]
    ) -> None:
        first = _communication(tasks[bucket[0]])
        latency = first.latency_ns
        ns = latency + sum(tasks[i].ns - latency for i in bucket)
        taken = tuple(way for link in first.links for way in ways(link))
        flight = CollectiveFlight(bucket, first.stream, ns, latency, taken, first.contention)
        # A wait for any member finds the flight of the whole bucket.
        flights.update(dict.fromkeys(bucket, flight))
        self.streams.issue(flight, self.clock)

    def _wait(
        self,
        task: Task,
        flights: Mapping[int, CollectiveFlight],
        before: Mapping[int, CollectiveFlight],
    ) -> None:
        assert task.start is not None, "a wait has a start"
        flight = flights.get(task.start) or before.get(task.start)
        if flight is None:
            return  # of a start before the loop, in the first iteration
        late = max(0.0, self.streams.end_of(flight, self.clock) - self.clock)
        if late:
            name = f"the {task.name or 'wait'}"
            self.streams.stall(flight, name, self.clock, self.clock + late)
        self.clock += late

    def _loop(self, task: Task) -> LoopRun:
        loop = task.loop
        assert loop is not None, "a loop has a body"
        result = LoopRun([], self.clock)
        trips = iterations(loop)
        effects: list[_IterationEffect] = []
        # The streams that the body waits for, and the latency parts of their backlog.
        streams = {
            _communication(inner.tasks[task.start]).stream
            for inner in loop.body.walk()
            for task in inner.tasks
            if task.start is not None
        }
        waited = frozenset(streams | {f"{stream}{_LATENCY}" for stream in streams})
        backlog = self.streams.backlog(self.clock)
        while len(result.iterations) < trips:
            begin, busy = self.clock, self.busy
            before = result.iterations[-1].flights if result.iterations else {}
            carried = {start: before[start] for start in loop.carried if start in before}
            order = range(len(loop.body.tasks)) if loop.order is None else loop.order
            result.iterations.append(
                self.passage(loop.body, order, _bucket_of(loop.buckets), carried)
            )
            now = self.streams.backlog(self.clock)
            grown = {stream: ns - backlog.get(stream, 0.0) for stream, ns in now.items()}
            effects.append(_IterationEffect(self.clock - begin, self.busy - busy, grown))
            backlog = now
            result.period = effects[-1].ns
            result.steady = len(effects) > 1 and self._goes_on(effects[-2], effects[-1], waited)
            if result.steady or len(effects) == _MOST_ITERATIONS:
                self._fold(result, trips - len(effects), effects[-1])
                break
        return result

    def _goes_on(
        self, last: _IterationEffect, now: _IterationEffect, waited: frozenset[str]
    ) -> bool:
        """Returns True if two iterations changed the device equally, so that further ones will.

        The backlog of a stream may keep growing or shrinking only if the loop has no wait for it
        and no other stream shares its links.
        """
        scale = _SAME * max(now.ns, *now.grown.values(), 1.0)
        return abs(now.ns - last.ns) <= scale and all(
            abs(grown - last.grown.get(stream, 0.0)) <= scale
            and (
                abs(grown) <= scale
                or (stream not in waited and not self.streams.shares_links(stream))
            )
            for stream, grown in now.grown.items()
        )

    def _fold(self, result: LoopRun, folded: int, effect: _IterationEffect) -> None:
        """Skips `folded` iterations: delays the last iteration and everything after it."""
        if not folded:
            return
        result.folded = folded
        delta = folded * effect.ns
        grown = {stream: folded * ns for stream, ns in effect.grown.items()}
        result.iterations[-1].shift(delta, grown)
        self.streams.shift(self.clock, delta, grown)
        self.clock += delta
        self.busy += folded * effect.busy


@dataclass(frozen=True, slots=True)
class _IterationEffect:
    """The time of an iteration, its compute, and the growth of each stream's backlog, in ns."""

    ns: float
    busy: float
    grown: Mapping[str, float]


def _communication(task: Task) -> Communication:
    assert task.communication is not None, "a collective start says what it sends"
    return task.communication


def _every_flight(run: GraphRun) -> Iterator[CollectiveFlight]:
    """Yields the flights of a run, without those of iterations that represent several."""
    yield from run.all_flights()
    for loop in run.loops.values():
        for iteration, weight in loop.weighted_iterations():
            if weight == 1:
                yield from _every_flight(iteration)


class _Streams:
    """The communication streams of one device.

    `users` maps each link to the streams that use it. A link with one stream is never shared, so
    the end of a transfer on it is known at its issue.
    """

    def __init__(self, users: Mapping[str, frozenset[str]]) -> None:
        self._contended = {s for streams in users.values() if len(streams) > 1 for s in streams}
        self._free: dict[str, float] = {}
        self._now = 0.0
        self._heads: dict[str, _Head] = {}
        self._queues: dict[str, deque[CollectiveFlight]] = {}
        self._open: dict[str, deque[CollectiveFlight]] = {}  # not known to be over, in issue order

    def issue(self, flight: CollectiveFlight, clock: float) -> None:
        """Appends a flight to its stream's queue."""
        stream = flight.stream
        self._open.setdefault(stream, deque()).append(flight)
        if stream not in self._contended:
            flight.begin = max(clock, self._free.get(stream, 0.0))
            flight.end = self._free[stream] = flight.begin + flight.ns
            return
        self._advance(clock)
        self._queues.setdefault(stream, deque()).append(flight)
        if stream not in self._heads:
            self._next(stream)

    def end_of(self, flight: CollectiveFlight, clock: float) -> float:
        """Returns the time at which a flight ends if no other is issued before."""
        if flight.end == _NOT_YET:
            self._advance(clock)
            while flight.end == _NOT_YET:
                self._step(_NOT_YET)
        return flight.end

    def stall(self, flight: CollectiveFlight, name: str, begin: float, end: float) -> None:
        """Records that the compute stream waited for a flight in this interval.

        Earlier flights on its stream are exposed meanwhile; flights on other streams are hidden.
        """
        flight.stall += end - begin
        in_flight = self.hide(name, begin, end, flight.stream)
        flight.exposed += end - begin - in_flight

    def hide(self, name: str, begin: float, end: float, stalled: str | None = None) -> float:
        """Records the task `name` as running during the flights of this interval.

        Flights on `stalled`, the stream that the compute stream waits for, are exposed instead.
        Returns the ns for which they are.
        """
        exposed = 0.0
        if self._contended:
            self._advance(end)
        for stream, queue in self._open.items():
            while queue and queue[0].end <= begin:
                queue.popleft()
            for flight in queue:
                if flight.begin >= end:
                    break
                overlap = min(end, flight.end) - max(begin, flight.begin)
                if overlap > 0 and stream == stalled:
                    flight.exposed += overlap
                    exposed += overlap
                elif overlap > 0:
                    flight.hidden[name] = flight.hidden.get(name, 0.0) + overlap
        return exposed

    def contention_at(self, clock: float) -> tuple[Contention, float]:
        """Returns the share of the device that transfers in flight use, and when it changes."""
        change = _NOT_YET
        if self._contended:
            self._advance(clock)
            change = min((then for _, then in self._changes()), default=_NOT_YET)
        flying: list[Contention] = []
        for queue in self._open.values():
            for flight in queue:
                if flight.begin <= clock < flight.end:
                    flying.append(flight.contention)
                for then in (flight.begin, flight.end):
                    if clock < then < change:
                        change = then
        return (together(flying) if flying else NONE), change

    def drain(self) -> float:
        """Runs all transfers to their ends; returns the end of the last."""
        while self._heads:
            self._step(_NOT_YET)
        return max([0.0, *self._free.values()])

    def shares_links(self, stream: str) -> bool:
        """Returns True if another stream uses a link of this one."""
        return stream.removesuffix(_LATENCY) in self._contended

    def backlog(self, clock: float) -> dict[str, float]:
        """Returns the ns from `clock` on for which a new transfer would wait, by stream."""
        if self._contended:
            self._advance(clock)
        backlog = {stream: max(0.0, free - clock) for stream, free in self._free.items()}
        for stream, head in self._heads.items():
            waiting = sum(flight.ns for flight in self._queues[stream])
            backlog[f"{stream}{_LATENCY}"] = max(0.0, head.ready - clock)
            backlog[stream] = head.left + waiting
        return backlog

    def shift(self, clock: float, delta: float, grown: Mapping[str, float]) -> None:
        """Adds `delta` to the times of transfers in flight at `clock`, for skipped iterations.

        `grown` is the growth of each stream's backlog in that time.
        """
        for stream, free in self._free.items():
            if free > clock:
                self._free[stream] = free + delta + grown.get(stream, 0.0)
        self._now += delta
        for stream, head in self._heads.items():
            head.ready += delta
            head.left = max(0.0, head.left + grown.get(stream, 0.0))

    def _next(self, stream: str) -> None:
        """Starts the next transfer of a stream."""
        queue = self._queues[stream]
        if not queue:
            self._heads.pop(stream, None)
            return
        flight = queue.popleft()
        flight.begin = max(self._now, self._free.get(stream, 0.0))
        ready = flight.begin + flight.latency_ns
        self._heads[stream] = _Head(flight, ready, flight.ns - flight.latency_ns)

    def _advance(self, to: float) -> None:
        while self._now < to and self._heads:
            self._step(to)
        self._now = max(self._now, to)

    def _step(self, limit: float) -> None:
        """Advances to the next change of any head, or to the limit."""
        now = self._now
        heads = list(self._heads.items())
        changes = self._changes()
        then = self._now = min(limit, *(change for _, change in changes))
        for (stream, head), (pace, change) in zip(heads, changes, strict=True):
            if pace and change <= then:
                head.flight.end = self._free[stream] = then
                self._next(stream)
            elif pace:
                head.left -= (then - now) * pace

    def _changes(self) -> list[tuple[float, float]]:
        """Returns each head's pace, 0 during its latency, and the time of its next change."""
        now = self._now
        heads = self._heads.values()
        # A transfer in its latency occupies no link.
        moving = [head for head in heads if head.ready <= now]
        load = Counter(way for head in moving for way in head.flight.ways)
        paces = [
            1.0 / max([1, *(load[way] for way in head.flight.ways)]) if head.ready <= now else 0.0
            for head in heads
        ]
        return [
            (pace, now + head.left / pace if pace else head.ready)
            for head, pace in zip(heads, paces, strict=True)
        ]


@dataclass(slots=True)
class _Head:
    """The transfer at the head of a stream: its latency ends at `ready`, then `left` ns remain."""

    flight: CollectiveFlight
    ready: float
    left: float
