"""Merges equal kinds of collectives into one, as XLA's combiners do before scheduling.

Collectives with the same kind, groups, reduction and element type are collected from the end of the
program, up to a number of bytes. A collective is left out if one already collected depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from stablehlo_tools.cost.transfer_sizes import DeviceTransfer, TransferTime
from stablehlo_tools.overlap.task_graph import Communication, Task, TaskGraph, TaskKind, users_of

type Limits = Mapping[str, float]  # bytes, by the kind that is combined


def combine_collectives(
    graph: TaskGraph, limits: Limits, time: Callable[[DeviceTransfer], TransferTime]
) -> TaskGraph:
    """Returns the graph with collectives combined and sorted; `time` returns the ns of one."""
    groups = _Combiner(graph, limits).groups()
    return _merge_groups(graph, groups, time) if groups else graph


type _Key = tuple[str, Hashable, str, str | None]  # the kind first


def _key(sent: Communication) -> _Key:
    # XLA combines all_gathers of different element types.
    dtype = "" if sent.kind == "all_gather" else sent.dtype
    return sent.kind, sent.groups, dtype, sent.reduction


class _Combiner:
    """Collects the groups of a graph. Sets of candidates (collectives that can be combined) are
    bits of an integer, by their place in the program."""

    def __init__(self, graph: TaskGraph, limits: Limits) -> None:
        self._limits = limits
        self._sent: dict[int, Communication] = {}  # by task
        by_key: dict[_Key, list[int]] = {}  # in program order
        for task in graph.tasks:
            sent = task.communication
            if sent is not None and sent.bytes <= limits.get(sent.kind, 0.0):
                by_key.setdefault(_key(sent), []).append(task.id)
                self._sent[task.id] = sent
        self._left = {key: starts for key, starts in by_key.items() if len(starts) > 1}
        starts = sorted(start for found in self._left.values() for start in found)
        self._bit = {start: 1 << place for place, start in enumerate(starts)}
        # The candidates that each candidate follows from.
        needs: list[int] = []
        for task in graph.tasks:
            found = 0
            for dep in task.needs:
                found |= needs[dep] | self._bit.get(dep, 0)
            needs.append(found)
        self._needs = {start: needs[start] for start in self._bit}

    def groups(self) -> list[list[int]]:
        """The starts of each collective that is made of several, in program order."""
        found: list[list[int]] = []
        for last in reversed(self._bit):
            left = self._left[_key(self._sent[last])]
            if not left or left[-1] != last:
                continue
            # Collects candidates that do not depend on each other, the last ones first, up to the
            # limit in bytes.
            limit = self._limits[self._sent[last].kind]
            taken: list[int] = []
            needed, members, size = 0, 0, 0.0
            for start in reversed(left):
                if needed & self._bit[start] or members & self._needs[start]:
                    continue
                size += self._sent[start].bytes
                if taken and size > limit:
                    break
                taken.append(start)
                needed |= self._needs[start]
                members |= self._bit[start]
            # Drops the dependences of the merged collectives: they are not considered again.
            for start in taken:
                del self._needs[start]
            left[:] = (start for start in left if start in self._needs)
            if len(taken) > 1:
                found.append(taken[::-1])
                # A task that depends on one of a group now depends on the inputs of all of it.
                for start, needs in self._needs.items():
                    if needs & members:
                        self._needs[start] = needs | needed
        return found


def _merge_groups(
    graph: TaskGraph,
    groups: Sequence[Sequence[int]],
    time: Callable[[DeviceTransfer], TransferTime],
) -> TaskGraph:
    """Returns the graph with each group replaced by its first member, with a single wait."""
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
    whole = {of[0].id: _holding_all(of) for of in waits.values()}
    for group in groups:
        members = [tasks[member] for member in group]
        parts = [task.communication for task in members if task.communication is not None]
        size = sum(part.bytes for part in parts)
        taken = time(DeviceTransfer(parts[0].kind, size, parts[0].groups))
        sent = replace(parts[0], bytes=size, latency_ns=taken.latency_ns)
        whole[group[0]] = replace(_holding_all(members), ns=taken.ns, communication=sent)
    new: list[Task] = []
    for task in tasks:
        if stands_for.get(task.id, task.id) != task.id:
            # An empty view keeps the ids of the other tasks.
            new.append(Task(task.id, TaskKind.VIEW))
            continue
        start = None if task.start is None else stands_for.get(task.start, task.start)
        new.append(replace(whole.get(task.id, task), deps=tuple(deps[task.id]), start=start))
    # The first member now reads the inputs of all, some of which follow it in the text.
    return _sort_tasks(new, graph.storages)


def _holding_all(tasks: Sequence[Task]) -> Task:
    """Returns the first of some tasks, with the storages of all."""
    return replace(
        tasks[0],
        storages=tuple(dict.fromkeys(u for task in tasks for u in task.storages)),
        allocs=tuple(dict.fromkeys(u for task in tasks for u in task.allocs)),
    )


def _sort_tasks(tasks: Sequence[Task], storages: Sequence[float]) -> TaskGraph:
    """Returns a graph of these tasks, sorted again by their dependences."""
    left = [len(task.needs) for task in tasks]
    users = users_of([task.needs for task in tasks])
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
