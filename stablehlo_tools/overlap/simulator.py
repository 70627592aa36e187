"""Event simulation of a task graph: one compute stream, and the streams of its collectives.

Tasks are issued in the graph's order. Compute and views run one after the other; a collective
start puts its transfer at the end of its stream's queue; a wait holds the compute stream until the
transfer is over. The starts of a bucket stand together and run as one transfer: latency once, the
rest added up; a wait for any of them waits for all. A loop's body is simulated iteration by
iteration until nothing changes any more from one to the next; the rest are not simulated but
counted (`LoopRun.folded`).

On flat graphs this is the model of the referee for overlap schedules: same figures, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.overlap.bounds import iterations
from stablehlo_tools.overlap.streams import LATENCY, Flight, Streams
from stablehlo_tools.overlap.task_graph import Communication, Loop, Task, TaskGraph, TaskKind

_MOST_ITERATIONS = 64  # simulated of one loop; a loop that is not steady by then is extrapolated
_SAME = 1e-9  # relative


@dataclass(slots=True)
class Run:
    """One passage through a graph. Times are ns from the start of the program, by task id."""

    graph: TaskGraph
    order: Sequence[int]
    begin: list[float]
    end: list[float]
    flights: dict[int, Flight] = field(default_factory=dict[int, Flight])  # by start
    loops: dict[int, LoopRun] = field(default_factory=dict[int, "LoopRun"])  # by task

    def all_flights(self) -> Iterator[Flight]:
        """Each flight of this passage once, those of loops left out."""
        return iter({id(flight): flight for flight in self.flights.values()}.values())

    def shift(self, delta: float, grown: Mapping[str, float]) -> None:
        """Moves everything that has a time by so much, the flights of a stream by what it grew."""
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
    """The iterations of a loop that were simulated.

    `folded` more ran like the last but one, each in `period` ns; they come before the last.
    """

    iterations: list[Run]
    begin: float
    folded: int = 0
    period: float = 0.0
    steady: bool = True

    def weighted(self) -> Iterator[tuple[Run, int]]:
        """Each simulated iteration with how many it stands for."""
        representative = max(0, len(self.iterations) - 2)
        for number, iteration in enumerate(self.iterations):
            yield iteration, 1 + (self.folded if number == representative else 0)


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a program takes. `tail_ns` is how long transfers outlast the compute stream."""

    run: Run
    total_ns: float
    compute_ns: float
    tail_ns: float

    @property
    def exposed_ns(self) -> float:
        """How long the device does not compute."""
        return self.total_ns - self.compute_ns


def simulate(
    graph: TaskGraph,
    order: Sequence[int] | None = None,
    buckets: Sequence[Sequence[int]] = (),
) -> Simulation:
    """Times a graph in an order that respects its dependences.

    `order` holds every task id once, the graph's own by default; `buckets` are lists of collective
    starts that stand together in it. Loop bodies run in their own order. Raises ValueError for an
    order that does not hold each task once.
    """
    issue = range(len(graph.tasks)) if order is None else order
    if order is not None and sorted(order) != list(range(len(graph.tasks))):
        raise ValueError("the order must hold every task exactly once")
    device = _Device(Streams(_users_of_links(graph)))
    run = device.passage(graph, issue, {start: tuple(b) for b in buckets for start in b}, {})
    done = device.streams.drain()
    total = max(device.clock, done)
    _blame_tail(run, device.clock)
    return Simulation(run, total, device.busy, total - device.clock)


class _Device:
    """The compute stream's clock, and the communication streams."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.clock = 0.0
        self.busy = 0.0

    def passage(
        self,
        graph: TaskGraph,
        order: Sequence[int],
        bucket_of: Mapping[int, tuple[int, ...]],
        before: Mapping[int, Flight],
    ) -> Run:
        """One passage through a graph; `before` are the flights of the iteration before."""
        tasks = graph.tasks
        run = Run(graph, order, [self.clock] * len(tasks), [self.clock] * len(tasks))
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
                self._compute(task)
            end[i] = self.clock
        return run

    def _compute(self, task: Task) -> None:
        begin = self.clock
        self.clock += task.ns
        self.busy += task.ns
        self.streams.hide(task.name or task.op, begin, self.clock)

    def _issue(
        self, tasks: Sequence[Task], bucket: tuple[int, ...], flights: dict[int, Flight]
    ) -> None:
        first = _communication(tasks[bucket[0]])
        latency = first.latency_ns
        ns = latency + sum(tasks[i].ns - latency for i in bucket)
        flight = Flight(bucket, first.stream, ns, latency, first.links)
        flights.update(dict.fromkeys(bucket, flight))
        self.streams.issue(flight, self.clock)

    def _wait(
        self, task: Task, flights: Mapping[int, Flight], before: Mapping[int, Flight]
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
        waited = _waited_streams(loop.body)
        backlog = self.streams.backlog(self.clock)
        while len(result.iterations) < trips:
            begin, busy = self.clock, self.busy
            result.iterations.append(self._iteration(loop, result))
            now = self.streams.backlog(self.clock)
            effects.append(
                _IterationEffect(self.clock - begin, self.busy - busy, _difference(now, backlog))
            )
            backlog = now
            result.period = effects[-1].ns
            result.steady = len(effects) > 1 and self._goes_on(effects[-2], effects[-1], waited)
            if result.steady or len(effects) == _MOST_ITERATIONS:
                self._fold(result, trips - len(effects), effects[-1])
                break
        return result

    def _iteration(self, loop: Loop, result: LoopRun) -> Run:
        before = result.iterations[-1].flights if result.iterations else {}
        carried = {start: before[start] for start in loop.carried if start in before}
        return self.passage(loop.body, range(len(loop.body.tasks)), {}, carried)

    def _goes_on(
        self, last: _IterationEffect, now: _IterationEffect, waited: frozenset[str]
    ) -> bool:
        """Whether two iterations changed the device alike, and further ones will.

        A backlog may go on growing or shrinking where nobody in the loop waits for it and no other
        stream shares its links.
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
        """Leaves out so many iterations: all that is at or after the last one comes later."""
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
    """What an iteration took, and by how much the backlog of each stream grew in it."""

    ns: float
    busy: float
    grown: Mapping[str, float]


def _waited_streams(body: TaskGraph) -> frozenset[str]:
    """The streams that the body waits for; also the parts of their backlog that are latency."""
    streams = {
        _communication(inner.tasks[task.start]).stream
        for inner in body.walk()
        for task in inner.tasks
        if task.start is not None
    }
    return frozenset(streams | {f"{stream}{LATENCY}" for stream in streams})


def _difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {stream: ns - before.get(stream, 0.0) for stream, ns in now.items()}


def _communication(task: Task) -> Communication:
    assert task.communication is not None, "a collective start says what it sends"
    return task.communication


def _users_of_links(graph: TaskGraph) -> dict[str, frozenset[str]]:
    users: dict[str, set[str]] = {}
    for inner in graph.walk():
        for task in inner.tasks:
            if task.communication is not None:
                for link in task.communication.links:
                    users.setdefault(link, set()).add(task.communication.stream)
    return {link: frozenset(streams) for link, streams in users.items()}


def _blame_tail(run: Run, clock: float) -> None:
    """Adds what outlasts the compute stream to the stall of the flights that do."""
    late = [flight for flight in _every_flight(run) if flight.end > clock]
    for flight in sorted(late, key=lambda flight: flight.end):
        flight.stall += flight.end - clock
        flight.exposed += flight.end - clock
        clock = flight.end


def _every_flight(run: Run) -> Iterator[Flight]:
    """Those that stand for themselves alone."""
    yield from run.all_flights()
    for loop in run.loops.values():
        for iteration, weight in loop.weighted():
            if weight == 1:
                yield from _every_flight(iteration)
