"""What compilers make of a task graph by themselves, which no advice may claim.

They move the ops of a block: each is given the overlap scheduler's order, with one collective in
flight at a time, as XLA:GPU has, and those that are alike joined where that pays, as XLA's
combiners do. On a torus, a TPU's, all_reduce, reduce_scatter and all_to_all hold up compute, as
XLA:TPU's do. What a loop only adds up, they reduce behind it; what is narrower before or after a
collective that moves it, they send so (`BY_ITSELF`; read back from the schedules that XLA:GPU and
XLA:TPU of jax 0.12 made of small programs of each kind). They move nothing else from one iteration
of a loop to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stablehlo_tools.cost.as_compiled import ON_COMPUTE_STREAM
from stablehlo_tools.overlap.scheduling.scheduler import Limits, schedule
from stablehlo_tools.overlap.simulator import Run, Simulation, simulate
from stablehlo_tools.overlap.task_graph import Loop, Task, TaskGraph, TaskKind

type Path = tuple[int, ...]  # the loops around a task, outermost first
type Place = tuple[Path, int]  # and the task


@dataclass(frozen=True, slots=True)
class ByItself:
    """The kinds of collectives of which a compiler does something by itself.

    `sunk` are those that it runs once behind a loop that adds them up, `narrowed_before` and
    `narrowed_after` those that it converts to the narrower type that values have before, or after.
    """

    sunk: frozenset[str]
    narrowed_before: frozenset[str]
    narrowed_after: frozenset[str]


_GPU = ByItself(
    frozenset({"all_reduce"}),
    frozenset({"all_gather", "all_to_all", "collective_permute"}),
    frozenset({"all_gather", "all_to_all", "collective_permute"}),
)
_TPU = ByItself(
    frozenset({"all_reduce", "reduce_scatter"}),
    frozenset({"all_gather", "collective_permute"}),
    frozenset({"all_gather", "all_to_all", "collective_permute"}),
)


def by_itself(*, is_torus: bool) -> ByItself:
    """What the compiler for a device does."""
    return _TPU if is_torus else _GPU


def simulate_as_compiled(graph: TaskGraph, in_flight: int, *, is_torus: bool) -> Simulation:
    """A run of a graph in the order that a compiler would give it."""
    graph, order, buckets = _as_compiled(_synchronous(graph) if is_torus else graph, in_flight)
    return simulate(graph, order, buckets)


def _as_compiled(
    graph: TaskGraph, in_flight: int, *, in_loop: bool = False
) -> tuple[TaskGraph, tuple[int, ...] | None, tuple[tuple[int, ...], ...]]:
    """The graph with the bodies of its loops scheduled; and its own order and buckets."""
    tasks = [
        task if task.loop is None else replace(task, loop=_loop_as_compiled(task.loop, in_flight))
        for task in graph.tasks
    ]
    graph = TaskGraph(tasks, graph.storages)
    if not any(task.communication is not None for task in tasks):
        return graph, None, ()
    scheduled = schedule(graph, Limits(at_once=in_flight), in_loop=in_loop)
    return graph, scheduled.order, scheduled.buckets


def _loop_as_compiled(loop: Loop, in_flight: int) -> Loop:
    body, order, buckets = _as_compiled(loop.body, in_flight, in_loop=True)
    return replace(loop, body=body, order=order, buckets=buckets)


def exposed_of(run: Run) -> dict[Place, float]:
    """How long the compute stream waits for each collective that ran beside it, in ns."""
    sums: dict[Place, float] = {}
    _add_exposed(run, 1, (), sums)
    return sums


def _add_exposed(run: Run, times: int, path: Path, sums: dict[Place, float]) -> None:
    for flight in run.all_flights():
        for start in flight.starts:
            each = times * flight.exposed / len(flight.starts)
            sums[path, start] = sums.get((path, start), 0.0) + each
    for task, loop in run.loops.items():
        for iteration, count in loop.weighted():
            _add_exposed(iteration, times * count, (*path, task), sums)


def _synchronous(graph: TaskGraph) -> TaskGraph:
    """The graph with what XLA:TPU does not overlap as compute."""
    held = {
        t.id for t in graph.tasks if t.communication and t.communication.kind in ON_COMPUTE_STREAM
    }
    return _changed(
        graph,
        lambda task: (
            replace(task, kind=TaskKind.COMPUTE, communication=None)
            if task.id in held
            else replace(task, kind=TaskKind.VIEW, start=None)
            if task.start in held
            else task
        ),
        lambda _, body: _synchronous(body),
    )


def retimed(graph: TaskGraph, ns: Mapping[Place, float], path: Path = ()) -> TaskGraph:
    """The graph with other times for some tasks."""
    return _changed(
        graph,
        lambda task: _taking(task, ns[path, task.id]) if (path, task.id) in ns else task,
        lambda loop, body: retimed(body, ns, (*path, loop)),
    )


def _changed(
    graph: TaskGraph,
    change: Callable[[Task], Task],
    change_body: Callable[[int, TaskGraph], TaskGraph],
) -> TaskGraph:
    """The graph with other tasks, and other bodies of its loops."""
    tasks = [
        change(task)
        if task.loop is None
        else replace(task, loop=replace(task.loop, body=change_body(task.id, task.loop.body)))
        for task in graph.tasks
    ]
    return TaskGraph(tasks, graph.storages)


def _taking(task: Task, ns: float) -> Task:
    sent = task.communication
    if sent is not None:
        sent = replace(sent, latency_ns=min(sent.latency_ns, ns))
    return replace(task, ns=ns, communication=sent)
