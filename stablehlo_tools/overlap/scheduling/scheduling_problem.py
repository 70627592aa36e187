"""A task graph in the scheduler's form: flat lists with one entry per task."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stablehlo_tools.overlap.task_graph import Communication, Task, TaskGraph, TaskKind, users_of
from stablehlo_tools.overlap.task_memory import kept_storages, peak_within
from stablehlo_tools.overlap.task_simulator import simulate

COMPUTE = -1  # the stream of every task except collectives


@dataclass(frozen=True, slots=True)
class OverlapProblem:
    """The scheduler's data on each task, by id.

    `ns` is the time on the task's stream. Compute and whole loops run on COMPUTE, transfers on the
    stream numbered in `stream`, in the communication domain numbered in `domain`. Collective starts
    with equal `bucket_keys` can be one collective. `reads` are the storages that a task needs until
    its end, `allocs` the ones it allocates. Storages in `kept` are never freed.
    """

    graph: TaskGraph
    ns: Sequence[float]
    stream: Sequence[int]
    domain: Sequence[int]
    latency: Sequence[float]
    bucket_keys: Sequence[Hashable]
    starts: Sequence[int | None]  # of waits
    deps: Sequence[tuple[int, ...]]
    users: Sequence[Sequence[int]]
    reads: Sequence[tuple[int, ...]]
    allocs: Sequence[tuple[int, ...]]
    within: Sequence[float]  # bytes alive inside a loop at its peak
    sizes: Sequence[float]  # bytes of each storage
    kept: frozenset[int]
    inputs: tuple[int, ...]
    before: tuple[int, ...]  # storages alive from the start
    streams: Sequence[str]  # their names

    @property
    def size(self) -> int:
        """The number of tasks."""
        return len(self.ns)


def problem_of(
    graph: TaskGraph,
    *,
    in_loop: bool = False,
    keep_compute: bool = False,
    compute_scale: float = 1.0,
) -> OverlapProblem:
    """Returns the scheduler's form of a graph; a loop becomes one task with its time alone.

    `in_loop`: the graph is a loop's body, whose inputs need no memory of their own. `keep_compute`
    makes each compute task depend on the previous one, except those that only prepare inputs of the
    program for collectives. `compute_scale` is a factor on the time of compute.
    """
    tasks = graph.tasks
    deps = [task.needs for task in tasks]
    if keep_compute:
        for before, after in pairwise(_main_compute(graph)):
            deps[after] = (*deps[after], before)
    deps = [tuple(dict.fromkeys(of)) for of in deps]
    streams: dict[str, int] = {}
    domains: dict[str, int] = {}
    ns: list[float] = []
    for task in tasks:
        time = task.ns
        if task.loop is not None:
            time = simulate(TaskGraph([Task(0, TaskKind.LOOP, loop=task.loop)])).total_ns
        ns.append(time * (compute_scale if task.communication is None else 1.0))
        if task.communication is not None:
            streams.setdefault(task.communication.stream, len(streams))
            domains.setdefault(task.communication.domain, len(domains))
    before = tuple(u for t in tasks if t.kind is TaskKind.INPUT for u in t.allocs)
    outside = frozenset(before if in_loop else ())
    return OverlapProblem(
        graph=graph,
        ns=ns,
        stream=[
            COMPUTE if t.communication is None else streams[t.communication.stream] for t in tasks
        ],
        domain=[0 if t.communication is None else domains[t.communication.domain] for t in tasks],
        latency=[0.0 if t.communication is None else t.communication.latency_ns for t in tasks],
        bucket_keys=[
            None if t.communication is None else bucket_key(t.communication) for t in tasks
        ],
        starts=[task.start for task in tasks],
        deps=deps,
        users=users_of(deps),
        reads=_reads(tasks),
        allocs=[() if task.kind is TaskKind.INPUT else task.allocs for task in tasks],
        within=[0.0 if t.loop is None else peak_within(t.loop) for t in tasks],
        sizes=[0.0 if u in outside else size for u, size in enumerate(graph.storages)],
        kept=frozenset(kept_storages(tasks)),
        inputs=tuple(task.id for task in tasks if task.kind is TaskKind.INPUT),
        before=before,
        streams=list(streams),
    )


def bucket_key(communication: Communication) -> Hashable:
    """Returns the key that is equal for collectives that can share a bucket."""
    return (
        communication.kind,
        communication.stream,
        communication.groups,
        communication.dtype,
        communication.reduction,
        communication.latency_ns,
        communication.domain,
    )


def _main_compute(graph: TaskGraph) -> list[int]:
    """Returns the compute that keeps the program's order.

    That is all compute except the tasks that only prepare inputs for collectives.
    """
    tasks = graph.tasks
    from_inputs = [False] * len(tasks)
    for task in tasks:
        ours = task.kind in (TaskKind.INPUT, TaskKind.COMPUTE, TaskKind.VIEW)
        from_inputs[task.id] = ours and all(from_inputs[dep] for dep in task.deps)
    prepares = list(from_inputs)
    users = graph.users()
    for task in reversed(tasks):
        to_starts = all(prepares[u] or tasks[u].communication is not None for u in users[task.id])
        prepares[task.id] = from_inputs[task.id] and bool(users[task.id]) and to_starts
    return [
        t.id
        for t in tasks
        if (t.ns or t.loop is not None) and t.communication is None and not prepares[t.id]
    ]


def _reads(tasks: Sequence[Task]) -> list[tuple[int, ...]]:
    """Returns the storages that each task uses; a wait uses the operands of its start."""
    reads: list[tuple[int, ...]] = []
    for task in tasks:
        read = {u: None for dep in task.deps for u in tasks[dep].storages}
        if task.start is not None:
            read |= {u: None for dep in tasks[task.start].deps for u in tasks[dep].storages}
        reads.append(tuple(read | dict.fromkeys(task.storages)))
    return reads
