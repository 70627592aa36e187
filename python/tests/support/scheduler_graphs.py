"""Random task graphs of the shapes that training has, and what makes a schedule of one legal.

`check` is written from the rules for overlap schedules, apart from the code it judges.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from task_graphs import Graph

from stablehlo_tools.overlap.task_graph import Communication, TaskGraph, TaskKind

_LATENCY = {"tp": 8.0, "dp": 15.0}


class ShapedGraph(Graph):
    """Appends collectives with their waits."""

    def collective(self, ns: float, *deps: int, kind: str, stream: str, size: float = 0) -> int:
        """A collective that is waited for at once; gives its wait."""
        sent = Communication(kind, stream, size, _LATENCY[stream])
        start = self._add(
            TaskKind.COLLECTIVE_START, deps, ns + _LATENCY[stream], size, communication=sent
        )
        return self.wait(start)


def layered(chance: random.Random, size: int) -> TaskGraph:
    """Layers of compute and tensor-parallel collectives, with work beside that is reduced."""
    graph = ShapedGraph()
    state = graph.input(size=8)
    beside: list[int] = []
    while len(graph.tasks) < size - 4:
        state = graph.compute(chance.randint(10, 60), state, size=chance.randint(1, 8))
        if chance.random() < 0.5:
            beside.append(graph.compute(chance.randint(10, 80), state, size=chance.randint(1, 4)))
        if chance.random() < 0.7:
            state = graph.collective(
                chance.randint(10, 80), state, kind="all_gather", stream="tp", size=4
            )
        if beside and chance.random() < 0.4:
            beside[-1] = graph.collective(
                chance.randint(10, 80), beside[-1], kind="reduce_scatter", stream="dp", size=2
            )
    graph.output(state, *beside)
    return graph.done()


def sharded_weights(chance: random.Random, size: int) -> TaskGraph:
    """Weights that are gathered, each for one layer (FSDP)."""
    graph = ShapedGraph()
    state = graph.input(size=8)
    layers = max(2, size // 5)
    weights = [graph.input(size=2, persistent=True) for _ in range(layers)]
    gathered = [
        graph.collective(chance.randint(15, 80), weight, kind="all_gather", stream="dp", size=16)
        for weight in weights
    ]
    for weight in gathered:
        state = graph.compute(chance.randint(20, 100), state, weight, size=8)
        if chance.random() < 0.3 and len(graph.tasks) < size - 3:
            state = graph.collective(
                chance.randint(10, 40), state, kind="all_gather", stream="tp", size=8
            )
    graph.output(state)
    return graph.done()


def backward_chain(chance: random.Random, size: int) -> TaskGraph:
    """A tensor-parallel chain of gradients, and weight gradients beside it that are reduced."""
    graph = ShapedGraph()
    state = graph.input(size=8)
    reduced: list[int] = []
    while len(graph.tasks) < size - 7:
        after = graph.compute(chance.randint(20, 60), state, size=8)
        gradient = graph.compute(chance.randint(20, 80), state, size=4)
        reduced.append(
            graph.collective(
                chance.randint(10, 60), gradient, kind="reduce_scatter", stream="dp", size=1
            )
        )
        kind = chance.choice(["all_gather", "reduce_scatter"])
        state = graph.collective(chance.randint(10, 60), after, kind=kind, stream="tp", size=8)
    graph.output(graph.compute(10, state, size=1), *reduced)
    return graph.done()


def tangled(chance: random.Random, size: int) -> TaskGraph:
    """Any dependences, some compute that takes no time, results that nobody reads."""
    graph = ShapedGraph()
    for _ in range(chance.randint(1, 3)):
        graph.input(size=chance.randint(0, 8), persistent=chance.random() < 0.3)
    while len(graph.tasks) < size - 1:
        values = [t.id for t in graph.tasks if t.kind is not TaskKind.COLLECTIVE_START]
        deps = chance.sample(values, min(len(values), chance.randint(1, 3)))
        if chance.random() < 0.55:
            ns = chance.choice([0, 5, 20, 50, 90])
            graph.compute(ns, *deps, size=chance.randint(0, 8))
            continue
        stream, kind = chance.choice(["tp", "dp"]), chance.choice(["all_gather", "all_reduce"])
        size_ = chance.randint(0, 8)
        graph.collective(chance.randint(0, 90), *deps, kind=kind, stream=stream, size=size_)
    users = graph.done().users()
    ends = [t.id for t in graph.tasks if not users[t.id] and chance.random() < 0.7]
    graph.output(*ends)
    return graph.done()


FAMILIES: dict[str, Callable[[random.Random, int], TaskGraph]] = {
    "layered": layered,
    "sharded_weights": sharded_weights,
    "backward_chain": backward_chain,
    "tangled": tangled,
}


def drawn(family: str, seed: int) -> TaskGraph:
    """A graph of 10 to 30 tasks."""
    chance = random.Random(f"{family} {seed}")
    return FAMILIES[family](chance, chance.randint(10, 30))


def check(graph: TaskGraph, order: Sequence[int], buckets: Sequence[Sequence[int]]) -> None:
    """Asserts that a schedule is a legal reordering of a graph."""
    assert sorted(order) == list(range(len(graph.tasks)))
    place = {task: position for position, task in enumerate(order)}
    for task in graph.tasks:
        needs = task.deps if task.start is None else (*task.deps, task.start)
        assert all(place[dep] < place[task.id] for dep in needs), f"task {task.id} runs too early"
    members = [start for bucket in buckets for start in bucket]
    assert len(members) == len(set(members)), "a start is in two buckets"
    for bucket in buckets:
        places = sorted(place[start] for start in bucket)
        assert places == list(range(places[0], places[0] + len(places))), "a bucket is torn apart"
        sent = [graph.tasks[start].communication for start in bucket]
        keys = {s and (s.kind, s.stream, s.groups, s.dtype, s.reduction) for s in sent}
        assert len(keys) == 1
        assert None not in keys, "a bucket holds what is no collective start"


def total_ns(graph: TaskGraph, order: Sequence[int], buckets: Sequence[Sequence[int]]) -> float:
    """How long a flat graph takes in an order."""
    bucket_of = {start: tuple(bucket) for bucket in buckets for start in bucket}
    clock = 0.0
    free: dict[str, float] = {}
    landed: dict[tuple[int, ...], float] = {}
    for task in (graph.tasks[i] for i in order):
        sent = task.communication
        if sent is not None:
            bucket = bucket_of.get(task.id, (task.id,))
            if bucket not in landed:
                ns = sum(graph.tasks[i].ns for i in bucket) - (len(bucket) - 1) * sent.latency_ns
                free[sent.stream] = max(clock, free.get(sent.stream, 0.0)) + ns
                landed[bucket] = free[sent.stream]
        elif task.start is not None:
            clock = max(clock, landed[bucket_of.get(task.start, (task.start,))])
        else:
            clock += task.ns
    return max([clock, *free.values()])


def peak_bytes(graph: TaskGraph, order: Sequence[int]) -> float:
    """The most bytes alive at any time in an order."""
    place = {task: position for position, task in enumerate(order)}
    end = len(order)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for task in graph.tasks:
        for storage in task.allocs:
            first[storage] = 0 if task.kind is TaskKind.INPUT else place[task.id]
        for storage in task.storages:
            last[storage] = max(last.get(storage, 0), place[task.id])
        held = task.deps if task.start is None else (*task.deps, *graph.tasks[task.start].deps)
        for dep in held:
            forever = task.kind is TaskKind.OUTPUT
            for storage in graph.tasks[dep].storages:
                last[storage] = max(last.get(storage, 0), end if forever else place[task.id])
        if task.persistent:
            last.update(dict.fromkeys(task.allocs, end))
    change = [0.0] * (end + 2)
    for storage, begin in first.items():
        change[begin] += graph.storages[storage]
        change[min(last.get(storage, begin), end) + 1] -= graph.storages[storage]
    inputs = [storage for t in graph.tasks if t.kind is TaskKind.INPUT for storage in t.allocs]
    alive, most = 0.0, sum(graph.storages[storage] for storage in inputs)
    for step in change[:end]:
        alive += step
        most = max(most, alive)
    return most


def most_in_flight(graph: TaskGraph, order: Sequence[int], buckets: Sequence[Sequence[int]]) -> int:
    """The most transfers of one stream, buckets as one, issued and not yet waited for."""
    transfer = {start: bucket[0] for bucket in buckets for start in bucket}
    flying: dict[str, set[int]] = {}
    most = 0
    for task in (graph.tasks[i] for i in order):
        sent = task.communication
        if sent is not None and transfer.get(task.id, task.id) == task.id:
            flying.setdefault(sent.stream, set()).add(task.id)
        if task.start is not None:
            started = graph.tasks[task.start].communication
            assert started is not None
            flying[started.stream].discard(transfer.get(task.start, task.start))
        most = max([most, *map(len, flying.values())])
    return most
