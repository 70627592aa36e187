"""Bounds that no order of the same tasks can beat: the busiest stream, and the critical path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.overlap.task_graph import (
    COMPUTE_STREAM,
    Loop,
    Task,
    TaskGraph,
    TaskKind,
)

_START = TaskKind.COLLECTIVE_START


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time of a graph: of its streams, and of its longest chain of dependences.

    `path` are the tasks of that chain, in order; a loop stands in it as one task.
    """

    streams: dict[str, float]
    critical_path_ns: float
    path: tuple[int, ...]

    @property
    def busiest(self) -> str:
        """The stream with the most work."""
        return max(self.streams, key=lambda stream: self.streams[stream])

    @property
    def ns(self) -> float:
        """No order of these tasks is faster than this."""
        return max(self.critical_path_ns, *self.streams.values())


def floor(graph: TaskGraph) -> Floor:
    """The bounds of a graph.

    A loop takes at least one passage through its body's longest chain, and at least as many times
    the chain from a carried value to its next as it has iterations.
    """
    return _Bounds().of(graph)


def stream_totals(graph: TaskGraph) -> dict[str, float]:
    """Nanoseconds of work on each stream, loops as often as they run."""
    totals: dict[str, float] = defaultdict(float, {COMPUTE_STREAM: 0.0})
    for task in graph.tasks:
        if task.loop is not None:
            for stream, ns in stream_totals(task.loop.body).items():
                totals[stream] += ns * iterations(task.loop)
        elif task.kind is _START and task.communication is not None:
            totals[task.communication.stream] += task.ns
        else:
            totals[COMPUTE_STREAM] += task.ns
    return dict(totals)


def iterations(loop: Loop) -> int:
    """How often a loop is taken to run: once where the count is not known."""
    return 1 if loop.trips is None else loop.trips


class _Bounds:
    """Works the bounds out, of each loop once."""

    def __init__(self) -> None:
        self._lengths: dict[int, float] = {}  # by the loop's id()
        self._within: dict[int, float] = {}

    def of(self, graph: TaskGraph) -> Floor:
        """The bounds of a graph."""
        finish, before = self._finishes(graph)
        ends = [
            max(finish[task.id], _begin(task, finish, before) + self._longest_within(task))
            for task in graph.tasks
        ]
        end = max(range(len(ends)), key=lambda i: ends[i], default=-1)
        longest = ends[end] if end >= 0 else 0.0
        path: list[int] = []
        while end >= 0:
            path.append(end)
            end = before[end]
        return Floor(stream_totals(graph), longest, tuple(reversed(path)))

    def _finishes(self, graph: TaskGraph) -> tuple[list[float], list[int]]:
        """When each task ends at the earliest, and which of its deps is the last to (-1: none).

        A loop ends without the transfers that it leaves in flight.
        """
        finish = [0.0] * len(graph.tasks)
        before = [-1] * len(graph.tasks)
        for task in graph.tasks:
            before[task.id] = max(task.deps, key=lambda dep: finish[dep], default=-1)
            finish[task.id] = self._length(task) + _begin(task, finish, before)
        return finish, before

    def _longest_within(self, task: Task) -> float:
        """The longest chain in a loop's body, transfers that nobody there waits for included."""
        loop = task.loop
        if loop is None or not iterations(loop):
            return 0.0
        if id(loop) not in self._within:
            self._within[id(loop)] = self.of(loop.body).critical_path_ns
        return self._within[id(loop)]

    def _length(self, task: Task) -> float:
        loop = task.loop
        if loop is None:
            return task.ns
        if id(loop) not in self._lengths:
            self._lengths[id(loop)] = self._loop_length(loop)
        return self._lengths[id(loop)]

    def _loop_length(self, loop: Loop) -> float:
        if not iterations(loop):
            return 0.0
        finish, _ = self._finishes(loop.body)
        once = max((finish[t.id] for t in loop.body.tasks if t.kind is not _START), default=0.0)
        return max(once, iterations(loop) * self._longest_carry(loop))

    def _longest_carry(self, loop: Loop) -> float:
        """The longest chain from a carried value to the same value of the next iteration."""
        tasks = loop.body.tasks
        lengths = [self._length(task) for task in tasks]
        longest = 0.0
        for source, target in loop.carries:
            reach: list[float | None] = [None] * len(tasks)
            reach[source] = 0.0
            for task in tasks[source + 1 : target + 1]:
                reached = [reach[dep] for dep in task.deps]
                known = [length for length in reached if length is not None]
                if known:
                    reach[task.id] = max(known) + lengths[task.id]
            longest = max(longest, reach[target] or 0.0)
        return longest


def _begin(task: Task, finish: Sequence[float], before: Sequence[int]) -> float:
    return finish[before[task.id]] if before[task.id] >= 0 else 0.0
