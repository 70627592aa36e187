"""Lower bounds on the time of any order of the same tasks, and the compute that could hide each.

Compute is independent of a collective if it is neither an ancestor of its start nor a descendant of
its waits. Tasks that depend on each other only through a loop's carries count as independent within
one iteration.

A collective could start an iteration earlier if the previous iteration computes its inputs early:
slices of invariant operands by a counter, the gathers of FSDP. It could end an iteration later if
the next iteration uses its result late or never: gradients that are only stacked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stablehlo_tools.overlap.task_graph import COMPUTE_STREAM, Task, TaskGraph, TaskKind, TaskLoop

_CHUNK = 8192  # collectives at a time: bounds the memory
_BITS_OF_BYTE = np.unpackbits(
    np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
).astype(float)


@dataclass(frozen=True, slots=True)
class Independence:
    """The ns of compute that feeds a collective, of compute that needs it, and of the rest."""

    before_ns: float
    after_ns: float
    free_ns: float


def independence(graph: TaskGraph, loop_ns: Mapping[int, float]) -> dict[int, Independence]:
    """For each collective start of this graph, loop bodies left out.

    `loop_ns` is the compute within each loop task.
    """
    starts = [task.id for task in graph.tasks if task.kind is TaskKind.COLLECTIVE_START]
    ns = np.array(
        [t.ns if t.kind is TaskKind.COMPUTE else loop_ns.get(t.id, 0.0) for t in graph.tasks]
    )
    total = float(ns.sum())
    by_start: dict[int, Independence] = {}
    users = graph.users()
    for begin in range(0, len(starts), _CHUNK):
        chunk = starts[begin : begin + _CHUNK]
        after = _reachable_ns(graph.tasks, chunk, [t.deps for t in graph.tasks], ns)
        before = _reachable_ns(graph.tasks[::-1], chunk, users, ns)
        for index, start in enumerate(chunk):
            feeds, needs = float(before[index]), float(after[index])
            by_start[start] = Independence(feeds, needs, max(0.0, total - feeds - needs))
    return by_start


def potentially_hidden(graph: TaskGraph) -> set[int]:
    """Returns the collective starts of a flat graph that some compute does not depend on.

    The definition is PyTorch's (`compute_potential_hidden_collectives` of its FX overlap scheduler,
    2.13). It includes compute that a collective itself depends on.
    """
    around = independence(graph, {})
    return {start for start, ns in around.items() if ns.before_ns + ns.free_ns > 0}


def _reachable_ns(
    tasks: Sequence[Task], starts: Sequence[int], sources: Sequence[Sequence[int]], ns: np.ndarray
) -> np.ndarray:
    """Returns the time of all compute that is reachable from each start, in ns.

    Visits `tasks` in the given order; `sources[i]` are the tasks from which task i is reached.
    """
    words = -(-len(starts) // 64)
    # A bit for each start: one pass over the tasks serves all starts of a chunk.
    bits = np.zeros((len(tasks), words), dtype=np.uint64)
    for index, start in enumerate(starts):
        bits[start, index // 64] = np.uint64(1 << index % 64)
    for task in tasks:
        row = bits[task.id]
        for source in sources[task.id]:
            np.bitwise_or(row, bits[source], out=row)
    # The sum of ns over the rows in which each bit is set.
    #
    # Byte by byte: the rows are first summed by the value of the byte, then by its bits.
    timed = np.flatnonzero(ns)
    weights = ns[timed]
    columns = np.ascontiguousarray(bits[timed].view(np.uint8).T)
    by_value = np.stack([np.bincount(c, weights, minlength=256) for c in columns])
    return ((by_value @ _BITS_OF_BYTE).ravel())[: len(starts)]


_SMALL = 0.05  # share of the iteration's work that counts as early or late


def could_go_ahead(loop: TaskLoop) -> set[int]:
    """Returns the starts of the body whose operands the previous iteration computes early."""
    tasks = loop.body.tasks
    carries = [(result, argument) for argument, result in loop.carries]
    return _movable(loop.body, range(len(tasks)), [task.deps for task in tasks], carries)


def could_end_late(loop: TaskLoop) -> set[int]:
    """Returns the starts of the body whose results the next iteration uses late or never."""
    backwards = range(len(loop.body.tasks) - 1, -1, -1)
    return _movable(loop.body, backwards, loop.body.users(), loop.carries)


def _movable(
    body: TaskGraph,
    order: Sequence[int],
    sources: Sequence[Sequence[int]],
    carries: Iterable[tuple[int, int]],
) -> set[int]:
    """Returns the collective starts that depend on little work in this and the adjacent iteration.

    `order` has each task after its `sources`. A pair of `carries` is a task of the adjacent
    iteration and the task of this one that depends on it.
    """
    # The longest chain of compute and collectives that leads to each task, without the task itself.
    work = [0.0] * len(body.tasks)
    finish = [0.0] * len(body.tasks)
    for i in order:
        work[i] = max((finish[source] for source in sources[i]), default=0.0)
        loop = body.tasks[i].loop
        own = body.tasks[i].ns if loop is None else iterations(loop) * _total(loop.body)
        finish[i] = work[i] + own
    limit = _SMALL * _total(body)
    bound = {near for far, near in carries if work[far] > limit}
    for i in order:
        if i not in bound and any(source in bound for source in sources[i]):
            bound.add(i)
    return {s for s in _starts(body) if s not in bound and work[s] <= limit}


def _starts(body: TaskGraph) -> Iterable[int]:
    return (t.id for t in body.tasks if t.kind is TaskKind.COLLECTIVE_START)


def _total(body: TaskGraph) -> float:
    return stream_totals(body)[COMPUTE_STREAM]


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time of a graph, by its streams and by its longest chain of dependences.

    `path` are the tasks of that chain, in order; a loop is one task.
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
        """The lower bound in ns: no order of these tasks is faster."""
        return max(self.critical_path_ns, *self.streams.values())


def floor(graph: TaskGraph) -> Floor:
    """Returns the bounds of a graph.

    A loop lasts at least as long as the longest chain of its body. It also lasts at least
    iterations * the chain from a carried value to its next.
    """
    return _Bounds().graph_floor(graph)


def floor_of_slots(graph: TaskGraph, slots: int, known: Floor | None = None) -> float:
    """Returns a lower bound in ns for a scheduler with `slots` slots per communication domain.

    At most so many collectives of a domain are then in flight at the same time. `known` is the
    graph's floor, if it was computed already.
    """
    totals = _domain_totals(graph)
    return max((known or floor(graph)).ns, max(totals.values(), default=0.0) / slots)


def _domain_totals(graph: TaskGraph) -> dict[str, float]:
    """Returns the ns of the collectives of each communication domain, over all iterations."""
    totals: dict[str, float] = defaultdict(float)
    for task in graph.tasks:
        if task.loop is not None:
            for domain, ns in _domain_totals(task.loop.body).items():
                totals[domain] += ns * iterations(task.loop)
        elif task.communication is not None and task.communication.is_collective:
            totals[task.communication.domain] += task.ns
    return totals


def stream_totals(graph: TaskGraph) -> dict[str, float]:
    """Returns the ns of work on each stream, over all iterations."""
    totals: dict[str, float] = defaultdict(float, {COMPUTE_STREAM: 0.0})
    for task in graph.tasks:
        if task.loop is not None:
            for stream, ns in stream_totals(task.loop.body).items():
                totals[stream] += ns * iterations(task.loop)
        elif task.kind is TaskKind.COLLECTIVE_START and task.communication is not None:
            totals[task.communication.stream] += task.ns
        else:
            totals[COMPUTE_STREAM] += task.ns
    return dict(totals)


def iterations(loop: TaskLoop) -> int:
    """Returns the number of iterations of a loop; 1 if it is not known."""
    return 1 if loop.trips is None else loop.trips


class _Bounds:
    """Computes the bounds, for each loop only once."""

    def __init__(self) -> None:
        self._lengths: dict[int, float] = {}  # by the loop's id()
        self._within: dict[int, float] = {}

    def graph_floor(self, graph: TaskGraph) -> Floor:
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
        """Returns the earliest end of each task, and its dependence that ends last (-1: none).

        The end of a loop does not include the transfers that it leaves in flight.
        """
        finish = [0.0] * len(graph.tasks)
        before = [-1] * len(graph.tasks)
        for task in graph.tasks:
            before[task.id] = max(task.deps, key=lambda dep: finish[dep], default=-1)
            finish[task.id] = self._length(task) + _begin(task, finish, before)
        return finish, before

    def _longest_within(self, task: Task) -> float:
        """Returns the longest chain in a loop's body, including transfers without a wait there."""
        loop = task.loop
        if loop is None or not iterations(loop):
            return 0.0
        if id(loop) not in self._within:
            self._within[id(loop)] = self.graph_floor(loop.body).critical_path_ns
        return self._within[id(loop)]

    def _length(self, task: Task) -> float:
        loop = task.loop
        if loop is None:
            return task.ns
        if not iterations(loop):
            return 0.0
        if id(loop) not in self._lengths:
            finish, _ = self._finishes(loop.body)
            # A transfer may outlast the loop, so starts do not bound its end.
            starts = set(_starts(loop.body))
            once = max((end for i, end in enumerate(finish) if i not in starts), default=0.0)
            each = self._longest_carry(loop)
            self._lengths[id(loop)] = max(once, iterations(loop) * each)
        return self._lengths[id(loop)]

    def _longest_carry(self, loop: TaskLoop) -> float:
        """The longest chain from a carried value to the same value of the next iteration."""
        tasks = loop.body.tasks
        lengths = [self._length(task) for task in tasks]
        longest = 0.0
        for source, target in loop.carries:
            reach: list[float | None] = [None] * len(tasks)
            reach[source] = 0.0
            # Tasks are in issue order: a chain from source to target stays between them.
            for task in tasks[source + 1 : target + 1]:
                reached = [reach[dep] for dep in task.deps]
                known = [length for length in reached if length is not None]
                if known:
                    reach[task.id] = max(known) + lengths[task.id]
            longest = max(longest, reach[target] or 0.0)
        return longest


def _begin(task: Task, finish: Sequence[float], before: Sequence[int]) -> float:
    return finish[before[task.id]] if before[task.id] >= 0 else 0.0
