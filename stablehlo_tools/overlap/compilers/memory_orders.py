"""The order that XLA:GPU's scheduler starts from: of three, the one that needs the least memory.

Two orders put operands right before their users, in operand order or the most expensive first. The
third always runs the ready task that frees most bytes. All blocks of a program use the same one.
(xla/hlo/analysis/hlo_memory_scheduler.cc: post order, depth first, list)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush

from stablehlo_tools.overlap.task_graph import TaskGraph, TaskKind
from stablehlo_tools.overlap.task_memory import kept_storages, memory_profile, peak_within


def in_order_of_memory(graph: TaskGraph) -> Mapping[int, Sequence[int]]:
    """Returns the order with the least memory of the three.

    The result maps the `id` of the graph, and of each loop's body, to the order of its tasks.
    """
    freeing_most = _Ordered(lambda graph: _MemoryOrder(graph).order())
    post_order = _Ordered(lambda graph: _depth_first_order(graph, tuple))
    candidates = [freeing_most, _Ordered(_depth_first), post_order]
    peaks = [memory_profile(*each.order_graph(graph)).peak_bytes for each in candidates]
    return candidates[peaks.index(min(peaks))].orders


@dataclass
class _Ordered:
    """Puts blocks in one of the orders."""

    order: Callable[[TaskGraph], list[int]]
    orders: dict[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])

    def order_graph(self, graph: TaskGraph) -> tuple[TaskGraph, Sequence[int]]:
        """A graph whose loops have the order, and that of its own tasks."""
        tasks = list(graph.tasks)
        for number, task in enumerate(tasks):
            if task.loop is not None:
                body, order = self.order_graph(task.loop.body)
                loop = replace(task.loop, body=body, order=tuple(order))
                tasks[number] = replace(task, loop=loop)
        ordered = TaskGraph(tasks, graph.storages)
        self.orders[id(graph)] = self.order(ordered)
        return ordered, self.orders[id(graph)]


def _depth_first(graph: TaskGraph) -> list[int]:
    users = [len(users) - 1.0 for users in graph.users()]
    sizes = [sum(graph.storages[u] for u in task.allocs) for task in graph.tasks]
    for task in graph.tasks:
        users[task.id] += sum(users[dep] for dep in task.needs)
        sizes[task.id] += sum(sizes[dep] for dep in task.needs)
    return _depth_first_order(graph, partial(sorted, key=lambda dep: (-users[dep], -sizes[dep])))


def _depth_first_order(
    graph: TaskGraph, ordered: Callable[[Sequence[int]], Sequence[int]]
) -> list[int]:
    """Returns all tasks, operands before their users, visited from the end."""
    order: list[int] = []
    seen = [False] * len(graph.tasks)
    for root in reversed(graph.tasks):
        pending = [root.id]
        while pending:
            task = pending[-1]
            needs = () if seen[task] else ordered(graph.tasks[task].needs)
            before = [dep for dep in needs if not seen[dep]]
            if before:
                pending += reversed(before)
                continue
            pending.pop()
            if not seen[task]:
                seen[task] = True
                order.append(task)
    return order


class _MemoryOrder:
    """Places the ready task that frees the most bytes beyond those it allocates; of equals, the one
    with more users, then the one that became ready last."""

    def __init__(self, graph: TaskGraph) -> None:
        tasks = graph.tasks
        inputs = {u for task in tasks if task.kind is TaskKind.INPUT for u in task.allocs}
        read = (dict.fromkeys(u for d in task.deps for u in tasks[d].storages) for task in tasks)
        self._tasks = tasks
        self._uses = [tuple(u for u in of if u not in inputs) for of in read]
        self._sizes = graph.storages
        self._needs = [
            self._bytes(t.allocs) + (0.0 if t.loop is None else peak_within(t.loop)) for t in tasks
        ]
        self._users = graph.users()
        self._readers: dict[int, list[int]] = {}
        for task, of in enumerate(self._uses):
            for storage in of:
                self._readers.setdefault(storage, []).append(task)
        kept = kept_storages(tasks)
        self._unread = {u: len(of) + (u in kept) for u, of in self._readers.items()}
        self._left = [len(set(task.needs)) for task in tasks]
        self._ready: list[tuple[float, int, int, int]] = []
        self._newest = 0

    def order(self) -> list[int]:
        """All tasks."""
        for task, left in enumerate(self._left):
            if not left:
                self._put(task)
        order: list[int] = []
        placed = [False] * len(self._tasks)
        while self._ready:
            task = heappop(self._ready)[-1]
            if placed[task]:
                continue
            placed[task] = True
            order.append(task)
            for user in dict.fromkeys(self._users[task]):
                self._left[user] -= 1
                if not self._left[user]:
                    self._put(user)
            for storage in self._uses[task]:
                self._unread[storage] -= 1
                if self._unread[storage] == 1:
                    for reader in self._readers[storage]:
                        if not placed[reader] and not self._left[reader]:
                            self._put(reader)
        return order

    def _put(self, task: int) -> None:
        """Adds a ready task to the heap, ranked by the bytes that it would free now."""
        freed = self._bytes(u for u in self._uses[task] if self._unread[u] == 1)
        is_input = self._tasks[task].kind is TaskKind.INPUT
        first = float("-inf") if is_input else self._needs[task] - freed
        self._newest -= 1
        heappush(self._ready, (first, -len(self._users[task]), self._newest, task))

    def _bytes(self, storages: Iterable[int]) -> float:
        return sum(self._sizes[u] for u in storages)
