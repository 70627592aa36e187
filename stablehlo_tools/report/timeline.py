"""From a simulation to what is drawn: tasks on streams, with loops unrolled as far as they fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.overlap.bounds import floor
from stablehlo_tools.overlap.collective_times import Path, collective_numbers, graphs_of
from stablehlo_tools.overlap.simulator import LoopRun, Run, Simulation
from stablehlo_tools.overlap.streams import Flight
from stablehlo_tools.overlap.task_graph import COMPUTE_STREAM, Task, TaskGraph, TaskKind
from stablehlo_tools.report.document import Event

_MOST_EVENTS = 20_000  # beyond so many, further iterations of a loop are drawn as one block


@dataclass(frozen=True)
class Timeline:
    """Events in the order of their begin, and the names of the streams they are on."""

    streams: tuple[str, ...]
    events: tuple[Event, ...]


def timeline(graph: TaskGraph, simulation: Simulation, most: int = _MOST_EVENTS) -> Timeline:
    """What is drawn of a program."""
    drawing = _Drawing(graph, most)
    drawing.draw(simulation.run, (), 0.0)
    drawing.tail(simulation.total_ns - simulation.tail_ns)
    events = sorted(drawing.events, key=lambda event: (event.begin, event.stream, event.end))
    return Timeline(tuple(drawing.streams), tuple(events))


def critical_tasks(graph: TaskGraph) -> set[tuple[Path, int]]:
    """The tasks of the longest chain of dependences, loops entered that stand in it."""
    found: set[tuple[Path, int]] = set()
    for path, inner in graphs_of(graph):
        if path and (path[:-1], path[-1]) not in found:
            continue
        found.update((path, task) for task in floor(inner).path)
    return found


class _Drawing:
    """Collects the events of runs, shifted to where they are drawn."""

    def __init__(self, graph: TaskGraph, most: int) -> None:
        self.events: list[Event] = []
        self.streams: dict[str, int] = {COMPUTE_STREAM: 0}
        self._most = most
        self._numbers = collective_numbers(graph)
        self._critical = critical_tasks(graph)
        self._counted: dict[int, int] = {}

    def draw(self, run: Run, path: Path, shift: float) -> None:
        """Draws one passage through a graph."""
        for task in run.graph.tasks:
            if task.kind is TaskKind.LOOP:
                self._loop(run.loops[task.id], task, path, shift)
            elif task.kind is TaskKind.WAIT:
                self._wait(run, task, path, shift)
            elif task.kind is not TaskKind.COLLECTIVE_START and task.ns:
                begin, end = run.begin[task.id], run.end[task.id]
                self._add(COMPUTE_STREAM, begin, end, shift, task, "compute", path)
        for flight in run.all_flights():
            self._flight(flight, run.graph.tasks, path, shift)

    def tail(self, clock: float) -> None:
        """Draws what the device waits for when all compute is over, as in the exposed time."""
        late = [event for event in self.events if event.end > clock and event.stream > 0]
        for event in sorted(late, key=lambda event: event.end):
            if event.end > clock:
                self.events.append(replace(event, stream=0, begin=clock, kind="wait"))
                clock = event.end

    def _wait(self, run: Run, task: Task, path: Path, shift: float) -> None:
        begin, end = run.begin[task.id], run.end[task.id]
        if end > begin:
            self._add(COMPUTE_STREAM, begin, end, shift, task, "wait", path)

    def _flight(self, flight: Flight, tasks: Sequence[Task], path: Path, shift: float) -> None:
        task = tasks[flight.starts[0]]
        sent = task.communication
        kind = "collective" if sent is not None and sent.is_collective else "compute"
        self._add(flight.stream, flight.begin, flight.end, shift, task, kind, path)

    def _loop(self, loop: LoopRun, task: Task, path: Path, shift: float) -> None:
        inside = (*path, task.id)
        for iteration, offset in self._iterations(loop):
            if offset is None:
                begin = max(iteration.end, default=loop.begin)
                end = begin + loop.folded * loop.period
                self._add(COMPUTE_STREAM, begin, end, shift, task, "loop", path, loop.folded)
            else:
                self.draw(iteration, inside, shift + offset)

    def _iterations(self, loop: LoopRun) -> Iterator[tuple[Run, float | None]]:
        """The iterations to draw with their offsets; None where a block stands for the rest."""
        representative = max(0, len(loop.iterations) - 2)
        for number, iteration in enumerate(loop.iterations):
            yield iteration, 0.0
            if number != representative or not loop.folded:
                continue
            needed = loop.folded * self._size(iteration)
            if len(self.events) + needed <= self._most:
                for repeat in range(1, loop.folded + 1):
                    yield iteration, repeat * loop.period
            else:
                yield iteration, None

    def _size(self, run: Run) -> int:
        own = len(run.graph.tasks)
        return own + sum(
            (1 + loop.folded) * self._size(iteration)
            for loop in run.loops.values()
            for iteration in loop.iterations
        )

    def _add(
        self,
        stream: str,
        begin: float,
        end: float,
        shift: float,
        task: Task,
        kind: str,
        path: Path,
        folded: int = 0,
    ) -> None:
        start = task.start if task.kind is TaskKind.WAIT else task.id
        self.events.append(
            Event(
                stream=self.streams.setdefault(stream, len(self.streams)),
                begin=begin + shift,
                end=end + shift,
                label=task.name,
                op=task.op,
                place=task.place,
                kind=kind,
                collective=self._numbers.get((path, -1 if start is None else start), -1),
                folded=folded,
                critical=(path, task.id) in self._critical,
            )
        )
