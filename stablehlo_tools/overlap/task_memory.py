"""Memory by liveness: the live storages at each task of an issue order.

A storage is live from the task that allocates it to its last use. The operands of a collective are
live until its wait; persistent inputs and returned values until the end. All inputs are live from
the start. A loop adds the peak of its body to the live bytes around it. The inputs of a body are
storages of the graph around it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.overlap.task_graph import Task, TaskGraph, TaskKind, TaskLoop


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """A task in a graph, within the loops `loops` (task ids, outermost first)."""

    loops: tuple[int, ...]
    task: int


@dataclass(frozen=True, slots=True)
class Holding:
    """A live storage, and the task that allocates it."""

    allocated_at: TaskPlace
    bytes: float


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Live bytes while each task of the order runs, and their peak.

    `alive` are the live storages at the peak, including those in loops, the largest first.
    """

    peak_bytes: float
    peak_at: TaskPlace | None
    live: Sequence[float]  # by position in the order
    alive: tuple[Holding, ...]


def memory_profile(
    graph: TaskGraph, order: Sequence[int] | None = None, *, in_loop: bool = False
) -> MemoryProfile:
    """The memory of a graph in an order; `in_loop` leaves out the inputs."""
    issue = range(len(graph.tasks)) if order is None else order
    size, tasks = graph.storages, graph.tasks
    last = last_uses(graph, issue)
    kept = kept_storages(tasks)
    dying: dict[int, list[int]] = defaultdict(list)
    for storage, position in last.items():
        if storage not in kept:
            dying[position].append(storage)
    inputs = [u for t in tasks if t.kind is TaskKind.INPUT for u in t.allocs]
    outside = frozenset(inputs) if in_loop else frozenset[int]()
    now = 0.0 if in_loop else sum(size[u] for u in inputs)
    peak, peak_position, inner = now, -1, None
    live: list[float] = []
    for position, i in enumerate(issue):
        task = tasks[i]
        if task.kind is not TaskKind.INPUT:
            now += sum(size[u] for u in task.allocs)
        loop = task.loop
        body = memory_profile(loop.body, loop.order, in_loop=True) if loop is not None else None
        here = now + (body.peak_bytes if body is not None else 0.0)
        live.append(here)
        if here > peak:
            peak, peak_position, inner = here, position, body
        # Freed after the task: its operands and its results are live at the same time.
        now -= sum(size[u] for u in dying[position] if u not in outside)
    held = _alive(graph, issue, last, kept, max(peak_position, 0), outside)
    at = TaskPlace((), issue[peak_position]) if peak_position >= 0 else None
    if at is not None and inner is not None and inner.peak_at is not None:
        for holding in inner.alive:
            place = holding.allocated_at
            place = TaskPlace((at.task, *place.loops), place.task)
            held.append(Holding(place, holding.bytes))
        at = TaskPlace((at.task, *inner.peak_at.loops), inner.peak_at.task)
    held.sort(key=lambda holding: -holding.bytes)
    return MemoryProfile(peak, at, live, tuple(held))


def peak_within(loop: TaskLoop) -> float:
    """Returns the peak bytes of a loop's body, without the storages outside it."""
    return memory_profile(loop.body, loop.order, in_loop=True).peak_bytes


def last_uses(
    graph: TaskGraph, order: Sequence[int], *, of_transfers: bool = True
) -> dict[int, int]:
    """Returns the position of the last use of each storage.

    A transfer reads its operands until its wait; without `of_transfers`, only at its start.
    """
    tasks = graph.tasks
    last: dict[int, int] = {}
    position = [0] * len(tasks)
    for k, i in enumerate(order):
        task = tasks[i]
        position[i] = k
        for dep in task.deps:
            for storage in tasks[dep].storages:
                last[storage] = k
        for storage in task.storages:
            # A result without readers is live only while its task runs.
            last.setdefault(storage, k)
    for task in tasks:
        if of_transfers and task.kind is TaskKind.WAIT and task.start is not None:
            for dep in tasks[task.start].deps:
                for storage in tasks[dep].storages:
                    last[storage] = max(last[storage], position[task.id])
    return last


def kept_storages(tasks: Sequence[Task]) -> set[int]:
    """Returns the storages that are never freed: persistent inputs and returned values."""
    kept = {u for t in tasks if t.kind is TaskKind.INPUT and t.persistent for u in t.allocs}
    for task in tasks:
        if task.kind is TaskKind.OUTPUT:
            kept.update(task.storages or (u for dep in task.deps for u in tasks[dep].storages))
    return kept


def _alive(
    graph: TaskGraph,
    order: Sequence[int],
    last: dict[int, int],
    kept: set[int],
    position: int,
    outside: frozenset[int],
) -> list[Holding]:
    """Returns the storages that are live while the task at a position runs."""
    first: dict[int, tuple[int, int]] = {}
    for k, i in enumerate(order):
        task = graph.tasks[i]
        since = 0 if task.kind is TaskKind.INPUT else k
        for storage in task.allocs:
            first.setdefault(storage, (since, i))
    return [
        Holding(TaskPlace((), task), graph.storages[storage])
        for storage, (since, task) in first.items()
        if storage not in outside
        and since <= position
        and (storage in kept or position <= last.get(storage, since))
    ]
