"""A program to advise on: what it costs as a compiler orders it, and what it would cost otherwise.

As written, a program waits for each collective where its result is first read; compilers move the
ops, and advice must not claim what they do by themselves. So a program is timed here after the
overlap scheduler has ordered each block, with one collective in flight at a time, as XLA:GPU does,
and has joined those that are alike where that pays, as XLA's combiners do. On a torus, a TPU's,
all_reduce, reduce_scatter and all_to_all hold up compute, as XLA:TPU's do. Both sides of each
comparison are ordered so. No compiler is taken to move anything from one iteration of a loop to
another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.partitioner_work import Annotation, left_to_the_partitioner
from stablehlo_tools.analysis.tasks.graph import TracedGraph, traced_task_graph
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.transfers import Transfer
from stablehlo_tools.diagnostics import ToolError, to_place
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.overlap.bounds import iterations
from stablehlo_tools.overlap.memory import memory_profile
from stablehlo_tools.overlap.scheduling.scheduler import Limits, schedule
from stablehlo_tools.overlap.simulator import Run, Simulation, simulate
from stablehlo_tools.overlap.task_graph import Communication, Loop, Task, TaskGraph, TaskKind
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline
from stablehlo_tools.report.document import Advice
from stablehlo_tools.report.exposure import PARTITIONING, explicit_collectives

LEAST_SHARE = 0.01  # of the total, or of the device's memory
type Path = tuple[int, ...]  # the loops around a task, outermost first
_HELD_UP_ON_TPU = frozenset({"all_reduce", "reduce_scatter", "all_to_all"})


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of the program, and how it fares over all its runs, in ns."""

    path: Path
    task: int
    op: ir.Operation
    sent: Communication
    times: int
    each_ns: float
    exposed_ns: float

    @property
    def ns(self) -> float:
        """What all runs take."""
        return self.times * self.each_ns


class Program:
    """`given` is the program as it came, `explicit` with its collectives in it."""

    def __init__(
        self, given: Artifact, explicit: Artifact, clock: Clock, least: float = LEAST_SHARE
    ) -> None:
        self.given = given
        self.clock = clock
        self.least = least
        self.explicit = explicit.copy()
        inline_all_calls(self.explicit.module)
        self.facts = ModuleFacts.of(self.explicit.module)
        self.traced: TracedGraph = traced_task_graph(self.explicit.module, clock, given.name, [])

    @cached_property
    def simulation(self) -> Simulation:
        """A run of the program in the order that a compiler would give it."""
        return self._ordered(self.traced.graph)

    @property
    def total_ns(self) -> float:
        """What that run takes."""
        return self.simulation.total_ns

    @cached_property
    def peak_bytes(self) -> float:
        """The most memory alive at once, in the order of the text."""
        return memory_profile(self.traced.graph).peak_bytes

    @property
    def capacity(self) -> float:
        """The device's memory, in bytes."""
        return self.clock.hardware.memory_bytes

    def is_worth(self, ns: float) -> bool:
        """Whether so much is above the threshold."""
        return ns > 0 and ns >= self.least * self.total_ns

    def retimed_ns(self, ns: Mapping[tuple[Path, int], float], *, in_flight: int = 1) -> float:
        """The total if these tasks took so long, with so many collectives in flight at a time."""
        return self._ordered(_retimed(self.traced.graph, ns, ()), in_flight).total_ns

    def transfer_ns(self, collective: Collective, share: float) -> float:
        """What a run of a collective would take with this share of its bytes."""
        sent = collective.sent
        transfer = Transfer(sent.kind, sent.bytes * share, sent.groups)
        return self.clock.collective(transfer, ()).ns

    @cached_property
    def collectives(self) -> list[Collective]:
        """Every collective of the program, in its order."""
        exposed: dict[tuple[Path, int], float] = {}
        _exposed(self.simulation.run, 1, (), exposed)
        return list(_collectives(self.traced, (), 1, exposed))

    def place(self, op: ir.Operation) -> str:
        """Where an op is from."""
        return to_place(op.location).render(self.given.name)

    @cached_property
    def _partitioning(self) -> str | None:
        """What makes the collectives explicit; None where no pipeline does."""
        left = left_to_the_partitioner(self.given.module)
        if left is None:
            return ""
        return PARTITIONING if left.annotation is Annotation.SHARDY else None

    def pipeline(self, steps: str, *, before_partition: bool = False) -> str | None:
        """The pipeline for the artifact as it came that ends, or begins, with these steps."""
        if self._partitioning is None:
            return None
        ordered = (steps, self._partitioning) if before_partition else (self._partitioning, steps)
        return ",".join(filter(None, ordered))

    def after(self, steps: str) -> Program | None:
        """The program with its explicit collectives after these passes; None where refused."""
        copy = self.explicit.copy()
        try:
            run_pipeline(copy, Pipeline.parse(steps))
            return Program(self.given, copy, self.clock, self.least)
        except ToolError:
            return None

    def partitioned_after(self, edit: Callable[[ir.Module], object]) -> Program | None:
        """The program that is edited as it came, for all devices, and then partitioned; None where
        the edit or the partitioner refuses."""
        copy = self.given.copy()
        try:
            edit(copy.module)
            explicit, _ = explicit_collectives(copy)
            if left_to_the_partitioner(explicit.module) is not None:
                return None
            return Program(self.given, explicit, self.clock, self.least)
        except ToolError:
            return None

    def advice(
        self,
        cause_id: str,
        gain_ns: float,
        cause: str,
        place: str,
        remedy: str,
        *,
        pipeline: str | None = None,
        gain_bytes: float = 0.0,
    ) -> Advice:
        """An item, with its share of the total or of the device's memory, the larger."""
        of_time = gain_ns / self.total_ns if self.total_ns else 0.0
        share = max(of_time, gain_bytes / self.capacity, 0.0)
        return Advice(cause_id, gain_ns, gain_bytes, share, cause, place, remedy, pipeline)

    def _ordered(self, graph: TaskGraph, in_flight: int = 1) -> Simulation:
        if self.clock.hardware.is_torus:
            graph = _synchronous(graph)
        graph, order, buckets = _as_compiled(graph, in_flight, in_loop=False)
        return simulate(graph, order, buckets)


def _as_compiled(
    graph: TaskGraph, in_flight: int, *, in_loop: bool
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


def _synchronous(graph: TaskGraph) -> TaskGraph:
    """The graph with what XLA:TPU does not overlap as compute."""
    held = {
        t.id for t in graph.tasks if t.communication and t.communication.kind in _HELD_UP_ON_TPU
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


def _retimed(graph: TaskGraph, ns: Mapping[tuple[Path, int], float], path: Path) -> TaskGraph:
    """The graph with other times for the tasks named."""
    return _changed(
        graph,
        lambda task: _taking(task, ns[path, task.id]) if (path, task.id) in ns else task,
        lambda loop, body: _retimed(body, ns, (*path, loop)),
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


def _exposed(run: Run, times: int, path: Path, sums: dict[tuple[Path, int], float]) -> None:
    """Adds up how long the compute stream waits for each collective."""
    for flight in run.all_flights():
        for start in flight.starts:
            place = path, start
            sums[place] = sums.get(place, 0.0) + times * flight.exposed / len(flight.starts)
    for task, loop in run.loops.items():
        for iteration, count in loop.weighted():
            _exposed(iteration, times * count, (*path, task), sums)


def _collectives(
    traced: TracedGraph, path: Path, times: int, exposed: Mapping[tuple[Path, int], float]
) -> Iterator[Collective]:
    """Those of a graph; what is not in `exposed` ran as compute, all of it exposed."""
    for task in traced.graph.tasks:
        if task.loop is not None:
            runs = times * iterations(task.loop)
            yield from _collectives(traced.bodies[task.id], (*path, task.id), runs, exposed)
        elif task.communication is not None and task.communication.is_collective:
            op, sent = traced.ops[task.id][-1], task.communication
            late = exposed.get((path, task.id), times * task.ns)
            yield Collective(path, task.id, op, sent, times, task.ns, late)
