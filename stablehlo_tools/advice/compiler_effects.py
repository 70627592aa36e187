"""Models the optimizations that compilers apply themselves, so that advice does not claim them.

Compilers reorder the ops of a block. Here each block gets the overlap scheduler's order, with one
collective in flight at a time, as on XLA:GPU. Collectives that can be combined are combined if that
is faster, as by XLA's combiners. On a torus (TPU), all_reduce, reduce_scatter and all_to_all block
compute, as on XLA:TPU. Compilers also sink reductions that a loop only accumulates. They narrow
collectives that only move values with a narrower type before or after (`ByItself`; read from the
schedules of XLA:GPU and XLA:TPU of jax 0.12 for small programs of each kind). They move nothing
else between the iterations of a loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stablehlo_tools.cost.emitted_collectives import ON_COMPUTE_STREAM
from stablehlo_tools.overlap.scheduling.scheduler import ScheduleLimits, schedule
from stablehlo_tools.overlap.task_graph import Task, TaskGraph, TaskKind, TaskLoop
from stablehlo_tools.overlap.task_simulator import GraphRun, Simulation, simulate

type Path = tuple[int, ...]  # the tasks of the loops around a task, outermost first
type Place = tuple[Path, int]  # and the task itself


@dataclass(frozen=True, slots=True)
class ByItself:
    """The kinds of collectives that a compiler optimizes without advice.

    It runs `sunk` once after a loop that accumulates them. It converts `narrowed_before` and
    `narrowed_after` to the narrower type of the values before or after the collective.
    """

    sunk: frozenset[str]
    narrowed_before: frozenset[str]
    narrowed_after: frozenset[str]


BY_GPU = ByItself(
    frozenset({"all_reduce"}),
    frozenset({"all_gather", "all_to_all", "collective_permute"}),
    frozenset({"all_gather", "all_to_all", "collective_permute"}),
)
BY_TPU = ByItself(
    frozenset({"all_reduce", "reduce_scatter"}),
    frozenset({"all_gather", "collective_permute"}),
    frozenset({"all_gather", "all_to_all", "collective_permute"}),
)


def simulate_as_compiled(graph: TaskGraph, in_flight: int, *, is_torus: bool) -> Simulation:
    """Simulates a graph in the order that a compiler would choose."""
    graph, order, buckets = _as_compiled(_synchronous(graph) if is_torus else graph, in_flight)
    return simulate(graph, order, buckets)


def _as_compiled(
    graph: TaskGraph, in_flight: int, *, in_loop: bool = False
) -> tuple[TaskGraph, tuple[int, ...] | None, tuple[tuple[int, ...], ...]]:
    """Returns the graph with scheduled loop bodies, its own order (or None) and its buckets."""

    def compile_loop(loop: TaskLoop) -> TaskLoop:
        body, order, buckets = _as_compiled(loop.body, in_flight, in_loop=True)
        return replace(loop, body=body, order=order, buckets=buckets)

    tasks = [
        task if task.loop is None else replace(task, loop=compile_loop(task.loop))
        for task in graph.tasks
    ]
    graph = TaskGraph(tasks, graph.storages)
    if not any(task.communication is not None for task in tasks):
        return graph, None, ()
    scheduled = schedule(graph, ScheduleLimits(at_once=in_flight), in_loop=in_loop)
    return graph, scheduled.order, scheduled.buckets


def exposed_of(run: GraphRun) -> dict[Place, float]:
    """Returns the time that the compute stream waits for each asynchronous collective, in ns."""
    sums: defaultdict[Place, float] = defaultdict(float)

    def add(run: GraphRun, times: int, path: Path) -> None:
        for flight in run.all_flights():
            for start in flight.starts:
                sums[path, start] += times * flight.exposed / len(flight.starts)
        for task, loop in run.loops.items():
            for iteration, count in loop.weighted_iterations():
                add(iteration, times * count, (*path, task))

    add(run, 1, ())
    return dict(sums)


def _synchronous(graph: TaskGraph) -> TaskGraph:
    """Returns the graph with the collectives that XLA:TPU does not overlap as compute tasks."""
    held = {
        t.id for t in graph.tasks if t.communication and t.communication.kind in ON_COMPUTE_STREAM
    }

    def change(task: Task) -> Task:
        if task.id in held:
            return replace(task, kind=TaskKind.COMPUTE, communication=None)
        is_wait = task.start in held
        return replace(task, kind=TaskKind.VIEW, start=None) if is_wait else task

    return _map_tasks(graph, change, lambda _, body: _synchronous(body))


def replace_task_times(graph: TaskGraph, ns: Mapping[Place, float], path: Path = ()) -> TaskGraph:
    """Returns the graph with other times (ns) for the tasks at some places."""

    def retime(task: Task) -> Task:
        if (path, task.id) not in ns:
            return task
        time, sent = ns[path, task.id], task.communication
        if sent is not None:
            sent = replace(sent, latency_ns=min(sent.latency_ns, time))
        return replace(task, ns=time, communication=sent)

    return _map_tasks(graph, retime, lambda loop, body: replace_task_times(body, ns, (*path, loop)))


def _map_tasks(
    graph: TaskGraph,
    change: Callable[[Task], Task],
    change_body: Callable[[int, TaskGraph], TaskGraph],
) -> TaskGraph:
    """Returns the graph with changed tasks and changed loop bodies."""
    tasks = [
        change(task)
        if task.loop is None
        else replace(task, loop=replace(task.loop, body=change_body(task.id, task.loop.body)))
        for task in graph.tasks
    ]
    return TaskGraph(tasks, graph.storages)
