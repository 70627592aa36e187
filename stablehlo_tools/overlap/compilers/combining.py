"""Collectives that are alike become one, as XLA's combiners make them before they schedule.

Those of one kind over the same groups, and of one reduction and element type, are collected from
the end of the program: a walk against the dependences that goes past no collective which it has
taken, so that none of them follows from another, until they reach a number of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from stablehlo_tools.cost.transfers import Transfer, TransferTime
from stablehlo_tools.overlap.task_graph import Communication, Task, TaskGraph, TaskKind

type Limits = Mapping[str, float]  # bytes, by the kind that is combined


def combined(
    graph: TaskGraph, limits: Limits, time: Callable[[Transfer], TransferTime]
) -> TaskGraph:
    """The graph with collectives combined, in an order of its dependences; `time` times one."""
    groups = _Combiner(graph, limits).groups()
    return _merged(graph, groups, time) if groups else graph


type _Key = tuple[str, Hashable, str, str | None]  # the kind first


def _key(sent: Communication) -> _Key:
    dtype = "" if sent.kind == "all_gather" else sent.dtype
    return sent.kind, sent.groups, dtype, sent.reduction


class _Combiner:
    """Collects the groups of a graph."""

    def __init__(self, graph: TaskGraph, limits: Limits) -> None:
        self._bytes: dict[int, float] = {}
        self._keys: dict[int, _Key] = {}
        self._limits = limits
        by_key: dict[_Key, list[int]] = {}
        for task in graph.tasks:
            sent = task.communication
            if sent is not None and sent.bytes <= limits.get(sent.kind, 0.0):
                by_key.setdefault(_key(sent), []).append(task.id)
                self._bytes[task.id] = sent.bytes
        for key, starts in by_key.items():
            if len(starts) > 1:
                self._keys.update(dict.fromkeys(starts, key))
        self._deps = [set(task.needs) for task in graph.tasks]
        self._users = [0] * len(self._deps)  # how many nodes use each
        for deps in self._deps:
            for dep in deps:
                self._users[dep] += 1
        self._node = list(range(len(self._deps)))  # by task, the node that it is part of

    def groups(self) -> list[list[int]]:
        """The starts of each collective that is made of several, in program order."""
        found: list[list[int]] = []
        left = set(self._keys)
        for start in sorted(left, reverse=True):
            if start not in left:
                continue
            group = self._collect(self._keys[start], left)
            left.difference_update(group or [start])
            if len(group) > 1:
                found.append(sorted(group))
                self._merge(found[-1])
        return found

    def _collect(self, key: _Key, left: set[int]) -> list[int]:
        """Collectives of a key that do not follow from each other, the last ones first."""
        limit = self._limits[key[0]]
        alike = sum(self._keys[node] == key for node in left)
        users = list(self._users)
        ready = [-n for n, count in enumerate(users) if not count and self._node[n] == n]
        heapify(ready)
        taken: list[int] = []
        size = 0.0
        while ready and len(taken) < alike:
            node = -heappop(ready)
            if node in left and self._keys[node] == key:
                size += self._bytes[node]
                if taken and size > limit:
                    break
                taken.append(node)
                continue
            for dep in self._deps[node]:
                users[dep] -= 1
                if not users[dep]:
                    heappush(ready, -dep)
        return taken

    def _merge(self, group: Sequence[int]) -> None:
        """Makes one node of a group: the dependences of all, and all of their users."""
        first, *others = group
        gone = set(others)
        joined = set[int]().union(*(self._deps[member] for member in group))
        for member in group:
            for dep in self._deps[member]:
                self._users[dep] -= 1
        for other in others:
            self._node[other] = first
            self._deps[other] = set()
            self._users[other] = 0
        self._deps[first] = joined
        for dep in joined:
            self._users[dep] += 1
        for deps in self._deps:
            if not gone.isdisjoint(deps):
                self._users[first] += first not in deps
                deps.difference_update(gone)
                deps.add(first)


def _merged(
    graph: TaskGraph, groups: Sequence[Sequence[int]], time: Callable[[Transfer], TransferTime]
) -> TaskGraph:
    """The graph with each group as its first member, waited for once."""
    tasks = graph.tasks
    stands_for = {member: group[0] for group in groups for member in group}
    waits: dict[int, list[Task]] = {}  # by the first member
    for task in tasks:
        if task.start is not None and task.start in stands_for:
            waits.setdefault(stands_for[task.start], []).append(task)
    stands_for |= {wait.id: of[0].id for of in waits.values() for wait in of}
    deps: list[dict[int, None]] = [{} for _ in tasks]
    for task in tasks:
        own = stands_for.get(task.id, task.id)
        deps[own].update(
            (stands_for.get(dep, dep), None) for dep in task.deps if stands_for.get(dep) != own
        )
    whole = {group[0]: _together([tasks[member] for member in group], time) for group in groups}
    whole |= {of[0].id: _holding_all(of) for of in waits.values()}
    new: list[Task] = []
    for task in tasks:
        if stands_for.get(task.id, task.id) != task.id:
            new.append(Task(task.id, TaskKind.VIEW))
            continue
        start = None if task.start is None else stands_for.get(task.start, task.start)
        new.append(replace(whole.get(task.id, task), deps=tuple(deps[task.id]), start=start))
    return _sorted(new, graph.storages)


def _together(tasks: Sequence[Task], time: Callable[[Transfer], TransferTime]) -> Task:
    sent = tasks[0].communication
    assert sent is not None, "a collective start says what it sends"
    size = sum(task.communication.bytes for task in tasks if task.communication is not None)
    taken = time(Transfer(sent.kind, size, sent.groups))
    sent = replace(sent, bytes=size, latency_ns=taken.latency_ns)
    whole = _holding_all(tasks)
    return replace(whole, ns=taken.ns, communication=sent)


def _holding_all(tasks: Sequence[Task]) -> Task:
    """The first of some tasks with the storages of all."""
    return replace(
        tasks[0],
        storages=tuple(dict.fromkeys(u for task in tasks for u in task.storages)),
        allocs=tuple(dict.fromkeys(u for task in tasks for u in task.allocs)),
    )


def _sorted(tasks: Sequence[Task], storages: Sequence[float]) -> TaskGraph:
    """A graph of tasks that no longer stand in the order of their dependences."""
    left = [len(task.needs) for task in tasks]
    users: list[list[int]] = [[] for _ in tasks]
    for task in tasks:
        for dep in task.needs:
            users[dep].append(task.id)
    ready = [number for number, count in enumerate(left) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        number = heappop(ready)
        order.append(number)
        for user in users[number]:
            left[user] -= 1
            if not left[user]:
                heappush(ready, user)
    assert len(order) == len(tasks), "none of a group follows from another"
    place = {number: at for at, number in enumerate(order)}
    return TaskGraph(
        [
            replace(
                tasks[number],
                id=at,
                deps=tuple(place[dep] for dep in tasks[number].deps),
                start=None if (start := tasks[number].start) is None else place[start],
            )
            for at, number in enumerate(order)
        ],
        storages,
    )
