"""Task graphs for tests: written by hand, drawn at random, legal orders of them, loops unrolled."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stablehlo_tools.overlap.task_graph import Communication, Task, TaskGraph, TaskKind, TaskLoop


class Graph:
    """Appends tasks one by one; each method gives the new task's id."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.storages: list[float] = []

    def done(self) -> TaskGraph:
        """The graph so far."""
        return TaskGraph(self.tasks, self.storages)

    def input(self, size: float = 0, *, persistent: bool = False) -> int:
        """A value that is there from the start."""
        return self._add(TaskKind.INPUT, (), 0.0, size, persistent=persistent)

    def compute(self, ns: float, *deps: int, size: float = 0, name: str = "") -> int:
        """A kernel."""
        return self._add(TaskKind.COMPUTE, deps, ns, size, name=name)

    def start(
        self,
        ns: float,
        *deps: int,
        stream: str = "net",
        latency: float = 0.0,
        links: tuple[str, ...] = (),
        size: float = 0,
    ) -> int:
        """The start of a collective."""
        sent = Communication("all_gather", stream, size, latency, links)
        return self._add(TaskKind.COLLECTIVE_START, deps, ns, size, communication=sent)

    def wait(self, start: int) -> int:
        """The wait for a start."""
        return self._append(
            Task(
                len(self.tasks),
                TaskKind.WAIT,
                deps=(start,),
                start=start,
                storages=self.tasks[start].storages if start < len(self.tasks) else (),
            )
        )

    def loop(
        self,
        body: TaskGraph,
        trips: int | None,
        *deps: int,
        carried: Sequence[int] = (),
        carries: Sequence[tuple[int, int]] = (),
        size: float = 0,
    ) -> int:
        """A loop."""
        loop = TaskLoop(body, trips, frozenset(carried), tuple(carries))
        return self._add(TaskKind.LOOP, deps, 0.0, size, loop=loop)

    def output(self, *deps: int) -> int:
        """What the program returns."""
        return self._append(Task(len(self.tasks), TaskKind.OUTPUT, deps=deps))

    def _add(
        self, kind: TaskKind, deps: tuple[int, ...], ns: float, size: float, **more: Any
    ) -> int:
        storage = (len(self.storages),)
        self.storages.append(size)
        number = len(self.tasks)
        return self._append(Task(number, kind, ns, deps, storages=storage, allocs=storage, **more))

    def _append(self, task: Task) -> int:
        self.tasks.append(task)
        return task.id


def unrolled(graph: TaskGraph) -> TaskGraph:
    """The same tasks with every loop written out; for timing alone: the storages are left out."""
    flat: list[Task] = []
    _unroll(graph, {}, flat)
    return TaskGraph(flat, ())


def _unroll(graph: TaskGraph, before: dict[int, int], flat: list[Task]) -> dict[int, int]:
    """Appends one passage; the ids of its starts. `before` are those of the iteration before."""
    place: dict[int, int] = {}
    for task in graph.tasks:
        if task.loop is not None:
            starts: dict[int, int] = {}
            for _ in range(task.loop.trips or 0):
                carried = {s: i for s, i in starts.items() if s in task.loop.carried}
                starts = _unroll(task.loop.body, carried, flat)
            continue
        start = place.get(task.start, before.get(task.start)) if task.start is not None else None
        if task.kind is TaskKind.WAIT and start is None:
            continue
        place[task.id] = len(flat)
        flat.append(replace(task, id=len(flat), deps=(), storages=(), allocs=(), start=start))
    return place


def random_graph(chance: random.Random, depth: int = 0, *, carried: bool = True) -> TaskGraph:
    """Compute, collectives on streams that may share links, and loops."""
    graph = Graph()
    graph.input(size=chance.choice([0, 64]))
    pending: list[int] = []
    streams = (("tp", ("A",)), ("dp", ("A", "B")), ("pp", ("C",)))
    for _ in range(chance.randint(2, 9)):
        roll = chance.random()
        last = len(graph.tasks) - 1
        deps = sorted({last, chance.randint(0, last)})
        deps = [d for d in deps if graph.tasks[d].kind is not TaskKind.COLLECTIVE_START]
        if roll < 0.4:
            graph.compute(chance.randint(1, 90), *deps, size=chance.choice([0, 32, 128]))
        elif roll < 0.7:
            stream, links = chance.choice(streams)
            ns = chance.randint(5, 120)
            latency = chance.randint(0, ns)
            pending.append(
                graph.start(ns, *deps, stream=stream, latency=latency, links=links, size=16)
            )
        elif roll < 0.85 and pending:
            graph.wait(pending.pop(chance.randrange(len(pending))))
        elif depth < 2:
            body = random_graph(chance, depth + 1)
            waits = {t.start for t in body.tasks}
            starts = [t.id for t in body.tasks if t.kind is TaskKind.COLLECTIVE_START]
            late = [s for s in starts if s not in waits] if carried else []
            grown = Graph()
            grown.tasks, grown.storages = list(body.tasks), list(body.storages)
            graph.loop(
                _waiting_first(grown.done(), late),
                chance.choice([0, 1, 2, 3, 7, 40]),
                *deps,
                carried=[s + len(late) for s in late],
            )
    if depth == 0 or chance.random() < 0.5:
        for start in pending:
            graph.wait(start)
    return graph.done()


def _waiting_first(body: TaskGraph, late: Sequence[int]) -> TaskGraph:
    """The body with waits in front for starts of the iteration before."""
    shift = len(late)
    waits = [Task(i, TaskKind.WAIT, start=start + shift) for i, start in enumerate(late)]
    moved = [
        replace(
            task,
            id=task.id + shift,
            deps=tuple(d + shift for d in task.deps),
            start=None if task.start is None else task.start + shift,
        )
        for task in body.tasks
    ]
    return TaskGraph([*waits, *moved], body.storages)


def legal_order(graph: TaskGraph, seed: int) -> list[int]:
    """A random order that respects the dependences and waits after starts."""
    chance = random.Random(seed)
    needs = [{*task.deps, *(() if task.start is None else (task.start,))} for task in graph.tasks]
    users: list[list[int]] = [[] for _ in graph.tasks]
    for task, needed in enumerate(needs):
        for dep in needed:
            users[dep].append(task)
    missing = [len(needed) for needed in needs]
    ready = [(chance.random(), task) for task, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, task = heapq.heappop(ready)
        order.append(task)
        for user in users[task]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (chance.random(), user))
    return order


def neighbouring_buckets(graph: TaskGraph, order: Sequence[int]) -> list[list[int]]:
    """Buckets of all starts of one kind that stand together in an order."""
    buckets: list[list[int]] = []
    last: object = None
    for task in (graph.tasks[i] for i in order):
        sent = task.communication
        key = (sent.stream, sent.kind, sent.dtype, sent.reduction) if sent else None
        if key is not None and key == last:
            buckets[-1].append(task.id)
        elif key is not None:
            buckets.append([task.id])
        last = key
    return [bucket for bucket in buckets if len(bucket) > 1]
