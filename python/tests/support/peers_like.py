"""Graphs like the overlap peers', of other sizes: more layers, one sequence a rank, other links.

A program of equal layers is written as runs of equal blocks: the inputs of each layer, its casts,
its forward part, its backward part. More layers are copies of a block in the middle of every run;
what a copy reads lies as many blocks away as for the block it is a copy of.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from tree import FIXTURES

from stablehlo_tools.overlap.graph_file import read_graph
from stablehlo_tools.overlap.task_graph import Task, TaskGraph, TaskKind

GRAPHS = FIXTURES / "overlap"
_COUNTS = (7, 8)  # blocks in a run, of a graph of eight layers
_SHORTEST = 3  # tasks in a block
_LONGEST = 400
_NEAR = 3  # blocks: what lies further away is the same for all layers


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks of `length` tasks, `count` of them, from task `begin` on; step -1: the last first."""

    begin: int
    length: int
    count: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class _Spot:
    """A place in a program: a task of a layer, or one that stands alone (`layer` None)."""

    run: int
    layer: int | None
    offset: int


def deeper(graph: TaskGraph, layers: int) -> TaskGraph:
    """The graph with so many layers more, all like the one in the middle."""
    return _Deeper(graph, layers).result()


def halved(graph: TaskGraph) -> TaskGraph:
    """The graph for half the sequences a rank: half the work and half of each activation.

    Weights, what is cast from them, their gradients and the transfers of stream `dp` stay.
    """
    weights = _of_weights(graph)
    sizes = list(graph.storages)
    for task in graph.tasks:
        if task.id not in weights and task.kind is not TaskKind.VIEW:
            for storage in task.allocs:
                sizes[storage] /= 2
    return TaskGraph([_halved(task, weights) for task in graph.tasks], sizes)


def linked(graph: TaskGraph, *, dp: float = 1, tp: float = 1, latency: float = 1) -> TaskGraph:
    """The graph with streams so many times as fast, and latencies so many times as long."""
    faster = {"dp": dp, "tp": tp}

    def change(task: Task) -> Task:
        sent = task.communication
        if sent is None:
            return task
        waits = sent.latency_ns * latency
        ns = waits + (task.ns - sent.latency_ns) / faster[sent.stream]
        return replace(task, ns=ns, communication=replace(sent, latency_ns=waits))

    return TaskGraph([change(task) for task in graph.tasks], graph.storages)


@dataclass(frozen=True, slots=True)
class Peer:
    """A graph like the peers', and what PyTorch's scheduler reaches on it, in ms."""

    kind: str
    layers: int
    pytorch_ms: float
    half: bool = False
    dp: float = 1.0
    tp: float = 1.0
    latency: float = 1.0

    def graph(self) -> TaskGraph:
        """The graph itself."""
        traced = min(self.layers, 8)
        graph = read_graph(GRAPHS / f"llama2d_{traced}_{self.kind}.json.gz")
        graph = deeper(graph, self.layers - traced) if self.layers > traced else graph
        graph = halved(graph) if self.half else graph
        return linked(graph, dp=self.dp, tp=self.tp, latency=self.latency)

    def __str__(self) -> str:
        links = [f"{name} x{getattr(self, name):g}" for name in ("dp", "tp", "latency")]
        links = [text for text in links if not text.endswith("x1")]
        return ", ".join([f"{self.kind} {self.layers}", *(["half"] if self.half else []), *links])


def peers() -> list[Peer]:
    """Graphs on which PyTorch's scheduler was run: 2 to 32 layers, two batches, several links.

    PyTorch 2.13, the least total of its FX overlap scheduler with and without bucketing and with
    FSDP's collectives bucketed before, at several memory settings, under `referee.py`'s rules with
    the peak within 1 GiB more than that of the graph's own order.
    """
    return [Peer(**row) for row in json.loads((GRAPHS / "pytorch_2_13.json").read_text())]


def _halved(task: Task, weights: set[int]) -> Task:
    sent = task.communication
    if sent is not None and sent.stream != "dp":
        ns = sent.latency_ns + (task.ns - sent.latency_ns) / 2
        return replace(task, ns=ns, communication=replace(sent, bytes=sent.bytes / 2))
    multiplies = task.op.split(".")[-2:-1] in (["mm"], ["bmm"], ["addmm"])
    keeps = sent is not None or (task.id in weights and not multiplies)
    return task if keeps else replace(task, ns=task.ns / 2)


def _of_weights(graph: TaskGraph) -> set[int]:
    """The tasks whose results are as large as weights: from those alone, or for stream `dp`."""
    found: set[int] = set()
    users = graph.users()
    for task in graph.tasks:
        reads = task.deps if task.kind is not TaskKind.INPUT else ()
        moved = bool(reads) and _moves(task) and all(dep in found for dep in reads)
        weight = task.persistent and all(_moves(graph.tasks[user]) for user in users[task.id])
        if moved or weight:
            found.add(task.id)
    for task in reversed(graph.tasks):
        sent = task.communication
        read_by = [graph.tasks[user] for user in users[task.id]]
        sends = sent is not None and sent.stream == "dp"
        if sends or (read_by and all(user.id in found and _moves(user) for user in read_by)):
            found.add(task.id)
    return found


def _moves(task: Task) -> bool:
    moving = (TaskKind.COLLECTIVE_START, TaskKind.WAIT, TaskKind.VIEW)
    return task.kind in moving or "convert" in task.op


class _Deeper:
    def __init__(self, graph: TaskGraph, more: int) -> None:
        self._tasks = graph.tasks
        self._sizes = graph.storages
        self._more = more
        self._runs = _oriented(graph.tasks, _find_runs(graph))
        self._spots = _spots(len(graph.tasks), self._runs)
        self._number = self._numbers()
        self._maker = {u: (t.id, k) for t in graph.tasks for k, u in enumerate(t.allocs)}
        self._storages: dict[tuple[int, int], int] = {}
        self._bytes: list[float] = []

    def result(self) -> TaskGraph:
        """The new graph."""
        tasks = [self._copy(spot, source) for spot, source in self._layout()]
        return TaskGraph(tasks, self._bytes)

    def _layout(self) -> list[tuple[_Spot, int]]:
        """Where each task of the new graph stands, and which task it is a copy of."""
        layout: list[tuple[_Spot, int]] = []
        task = 0
        while task < len(self._tasks):
            spot = self._spots[task]
            if spot.layer is None:
                layout.append((spot, task))
                task += 1
                continue
            run = self._runs[spot.run]
            for layer in range(run.count + self._more)[:: run.step]:
                block = self._source(layer, run)
                layout += [
                    (_Spot(spot.run, layer, offset), block + offset) for offset in range(run.length)
                ]
            task += run.length * run.count
        return layout

    def _source(self, layer: int, run: _Run) -> int:
        """The first task of the block that a layer is a copy of."""
        middle = run.count // 2
        source = min(layer, max(middle, layer - self._more))
        return run.begin + run.length * (source if run.step > 0 else run.count - 1 - source)

    def _numbers(self) -> dict[_Spot, int]:
        return {spot: number for number, (spot, _) in enumerate(self._layout())}

    def _moved(self, spot: _Spot, source: int, dep: int) -> int:
        """The new task that a copy of `source` at a spot reads where the original reads `dep`."""
        there, here = self._spots[dep], self._spots[source]
        if there.layer is None:
            return self._number[there]
        away = None if here.layer is None else there.layer - here.layer
        if spot.layer is not None and away is not None and abs(away) <= _NEAR:
            return self._number[replace(there, layer=spot.layer + away)]
        run = self._runs[there.run]
        layer = there.layer if there.layer < run.count // 2 else there.layer + self._more
        return self._number[replace(there, layer=layer)]

    def _copy(self, spot: _Spot, source: int) -> Task:
        task = self._tasks[source]
        number = self._number[spot]
        deps = [self._moved(spot, source, dep) for dep in task.deps]
        if task.kind is TaskKind.OUTPUT:
            deps += self._returned_by_copies(task)
        start = None if task.start is None else self._moved(spot, source, task.start)
        allocs = tuple(self._storage(number, k, self._sizes[u]) for k, u in enumerate(task.allocs))
        storages: list[int] = []
        for storage in task.storages:
            maker, k = self._maker[storage]
            owner = number if maker == source else self._moved(spot, source, maker)
            storages.append(self._storage(owner, k, self._sizes[storage]))
        return replace(
            task,
            id=number,
            deps=tuple(dict.fromkeys(deps)),
            start=start,
            allocs=allocs,
            storages=tuple(storages),
        )

    def _returned_by_copies(self, output: Task) -> list[int]:
        spots = [self._spots[dep] for dep in output.deps]
        return [
            self._number[replace(spot, layer=spot.layer + copy)]
            for spot in spots
            if spot.layer is not None and spot.layer == self._runs[spot.run].count // 2
            for copy in range(self._more)
        ]

    def _storage(self, task: int, number: int, size: float) -> int:
        known = self._storages.get((task, number))
        if known is None:
            known = self._storages[task, number] = len(self._bytes)
            self._bytes.append(size)
        return known


def _find_runs(graph: TaskGraph) -> list[_Run]:
    """The longest runs of equal blocks that do not overlap, in program order."""
    tasks = graph.tasks
    looks = [_look(task, graph.storages) for task in tasks]
    found: list[_Run] = []
    for length in range(_SHORTEST, _LONGEST):
        same = 0
        for task in range(len(looks) - length + 1):
            alike = task + length < len(looks) and looks[task] == looks[task + length]
            if alike:
                same += 1
                continue
            count = same // length + 1
            if count in _COUNTS:
                found.append(_Run(task - same, length, count))
            same = 0
    found.sort(key=lambda run: (-run.length * run.count, run.length))
    chosen: list[_Run] = []
    for run in found:
        if all(_end(run) <= other.begin or _end(other) <= run.begin for other in chosen):
            chosen.append(run)
    return sorted(chosen, key=lambda run: run.begin)


def _look(task: Task, sizes: Sequence[float]) -> Hashable:
    sent = task.communication
    stream = None if sent is None else (sent.stream, sent.kind, sent.bytes)
    op = "" if task.kind is TaskKind.INPUT else task.op
    made = tuple(sizes[u] for u in task.allocs)
    return (task.kind, op, task.ns, stream, len(task.deps), made)


def _end(run: _Run) -> int:
    return run.begin + run.length * run.count


def _oriented(tasks: Sequence[Task], runs: Sequence[_Run]) -> list[_Run]:
    """The runs, with the direction in which their blocks go through the layers.

    Two runs have the same if what later blocks of one read lies in later blocks of the other.
    """
    votes = _votes(tasks, runs)
    step = {0: 1}
    for _ in runs:
        for one, other in sorted(votes):
            if votes[one, other] and (one in step) != (other in step):
                known, new = (one, other) if one in step else (other, one)
                step[new] = step[known] * (1 if votes[one, other] > 0 else -1)
    return [replace(run, step=step.get(number, 1)) for number, run in enumerate(runs)]


def _votes(tasks: Sequence[Task], runs: Sequence[_Run]) -> Counter[tuple[int, int]]:
    spots = _spots(len(tasks), runs)
    votes: Counter[tuple[int, int]] = Counter()
    for task in tasks:
        spot = spots[task.id]
        after = task.id + (runs[spot.run].length if spot.layer is not None else len(tasks))
        if after >= len(tasks) or spots[after].run != spot.run:
            continue
        for dep, same in zip(task.deps, tasks[after].deps, strict=False):
            here, there = spots[dep], spots[same]
            if here.layer is None or there.layer is None or here.run == spot.run:
                continue
            if (here.run, here.offset) == (there.run, there.offset):
                votes[spot.run, here.run] += there.layer - here.layer
    return votes


def _spots(size: int, runs: Sequence[_Run]) -> list[_Spot]:
    spots = [_Spot(-1, None, task) for task in range(size)]
    for number, run in enumerate(runs):
        for task in range(run.begin, _end(run)):
            block, offset = divmod(task - run.begin, run.length)
            layer = block if run.step > 0 else run.count - 1 - block
            spots[task] = _Spot(number, layer, offset)
    return spots
