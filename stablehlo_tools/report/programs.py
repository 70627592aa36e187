"""Times a task graph and puts all that people want to know of it into one `ProgramReport`."""

from __future__ import annotations

from collections.abc import Iterator

from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.overlap.bounds import floor, stream_totals
from stablehlo_tools.overlap.collective_times import collective_rows
from stablehlo_tools.overlap.memory import MemoryProfile, Place, memory_profile
from stablehlo_tools.overlap.simulator import Simulation, simulate
from stablehlo_tools.overlap.task_graph import Task, TaskGraph
from stablehlo_tools.report.document import Alive, ProgramReport
from stablehlo_tools.report.pipeline_document import PipelineReport
from stablehlo_tools.report.rows import kernel_rows, loop_rows, unsteady_loops
from stablehlo_tools.report.timeline import timeline

_MOST_ALIVE = 25


def program_report(
    graph: TaskGraph,
    hardware: Hardware,
    devices: int,
    *,
    name: str,
    target: str,
    notes: tuple[str, ...] = (),
    pipelines: tuple[PipelineReport, ...] = (),
    with_timeline: bool = True,
) -> ProgramReport:
    """The figures of a program whose tasks are timed for this hardware."""
    simulation = simulate(graph)
    memory = memory_profile(graph)
    bound = floor(graph)
    totals = stream_totals(graph)
    drawn = timeline(graph, simulation) if with_timeline else None
    by_streams = max(bound.streams.values())
    return ProgramReport(
        name=name,
        target=target,
        hardware=hardware.title,
        devices=devices,
        total_ns=simulation.total_ns,
        compute_ns=simulation.compute_ns,
        communication_ns=sum(totals[stream] for stream in _network_streams(graph)),
        exposed_ns=simulation.exposed_ns,
        floor_ns=bound.ns,
        floor_is=(
            "critical path" if bound.critical_path_ns >= by_streams else f"stream {bound.busiest}"
        ),
        critical_path_ns=bound.critical_path_ns,
        peak_bytes=memory.peak_bytes,
        capacity_bytes=hardware.memory_bytes,
        alive=tuple(_alive(graph, memory)),
        streams=drawn.streams if drawn is not None else tuple(totals),
        collectives=collective_rows(graph, simulation),
        loops=loop_rows(graph, simulation),
        kernels=kernel_rows(graph),
        notes=(*notes, *_notes(graph, simulation)),
        pipelines=pipelines,
        events=drawn.events if drawn is not None else (),
        memory=tuple(_curve(simulation, memory)) if with_timeline else (),
    )


def _network_streams(graph: TaskGraph) -> set[str]:
    return {
        task.communication.stream
        for inner in graph.walk()
        for task in inner.tasks
        if task.communication is not None and task.communication.is_collective
    }


def _alive(graph: TaskGraph, memory: MemoryProfile) -> Iterator[Alive]:
    for holding in memory.alive[:_MOST_ALIVE]:
        task = _task_at(graph, holding.allocated_at)
        if holding.bytes:
            yield Alive(task.name, holding.bytes, task.place)


def _task_at(graph: TaskGraph, place: Place) -> Task:
    for outer in place.loops:
        loop = graph.tasks[outer].loop
        assert loop is not None, "a place leads through loops"
        graph = loop.body
    return graph.tasks[place.task]


def _curve(simulation: Simulation, memory: MemoryProfile) -> Iterator[tuple[float, float]]:
    """What is alive from each moment on, where that changes."""
    run = simulation.run
    last = -1.0
    moment = 0.0
    for position, task in enumerate(run.order):
        moment = max(moment, run.begin[task])
        if memory.live[position] != last:
            last = memory.live[position]
            yield moment, last
    yield simulation.total_ns, max(last, 0.0)


def _notes(graph: TaskGraph, simulation: Simulation) -> Iterator[str]:
    for inner in graph.walk():
        for task in inner.tasks:
            if task.loop is not None and task.loop.trips is None:
                yield f"{task.place}: how often this loop runs is not known: one iteration is timed"
    for task, folded in unsteady_loops(simulation.run):
        yield (
            f"{task.place}: this loop does not become steady: {folded} iterations are "
            "taken to be like the last"
        )
