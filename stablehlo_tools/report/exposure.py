"""Computes the cost of an artifact's communication as a `ProgramReport`.

Programs are timed as written and as compilers schedule them. The tables of loops and kernels cover
all runs. The timeline has tasks on streams, with loops unrolled as far as the events fit.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
from stablehlo_tools.analysis.pipelines.pipeline_loops import find_pipelines
from stablehlo_tools.analysis.stated_trips import short_location
from stablehlo_tools.analysis.tasks.graph import traced_task_graph
from stablehlo_tools.analysis.tasks.mesh_axes import with_axes_of
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.accuracy import ACCURACY
from stablehlo_tools.cost.clock import Clock, MeasuredProfile
from stablehlo_tools.cost.hardware import Hardware, load_hardware
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.overlap.bounds import floor, floor_of_slots, iterations, stream_totals
from stablehlo_tools.overlap.collective_times import Path as LoopPath
from stablehlo_tools.overlap.collective_times import collective_numbers, collective_rows, graphs_of
from stablehlo_tools.overlap.task_graph import COMPUTE_STREAM, Task, TaskGraph, TaskKind
from stablehlo_tools.overlap.task_memory import MemoryProfile, memory_profile
from stablehlo_tools.overlap.task_simulator import GraphRun, LoopRun, Simulation, simulate
from stablehlo_tools.report.document import (
    Advised,
    Alive,
    Band,
    KernelRow,
    LoopRow,
    ProgramReport,
    TimelineDrawing,
    TimelineEvent,
)
from stablehlo_tools.report.phases import module_bands, peak_parts, phase_bands
from stablehlo_tools.report.pipeline_report import PipelineReport
from stablehlo_tools.report.pipeline_rows import pipeline_report, pipeline_times
from stablehlo_tools.targets.chips import DEFAULT_HARDWARE, target_of
from stablehlo_tools.targets.compiler_options import NO_OPTIONS, CompilerOptions
from stablehlo_tools.targets.xla_partitioner import partition_with_xla

_MOST_ALIVE = 25
AS_WRITTEN = "as-written"
# The pipeline closest to a compiler's own partitioner, which does not choose by cost.
AS_A_COMPILER = "partition{choices=shardy},create-reduce-scatter"
_MOST_EVENTS = 20_000  # beyond that, further iterations of a loop become one block
_MOST_KERNELS = 25
_MOST_LAYERS = 500


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
    """Computes the figures of a program whose tasks are timed for this hardware."""
    simulation = simulate(graph)
    memory = memory_profile(graph)
    bound = floor(graph)
    totals = stream_totals(graph)
    by_streams = max(bound.streams.values())
    graphs = dict(graphs_of(graph))
    held = [(each.bytes, each.allocated_at) for each in memory.alive[:_MOST_ALIVE] if each.bytes]
    allocated = [(graphs[place.loops].tasks[place.task], size) for size, place in held]
    transfers = (task.communication for inner in graph.walk() for task in inner.tasks)
    networks = {sent.stream for sent in transfers if sent is not None and sent.is_collective}

    def draw() -> TimelineDrawing:
        return TimelineDrawing(*timeline(graph, simulation), tuple(_curve(simulation, memory)))

    report = ProgramReport(
        name=name,
        target=target,
        hardware=hardware.title,
        devices=devices,
        total_ns=simulation.total_ns,
        compute_ns=simulation.compute_ns,
        communication_ns=sum(totals[stream] for stream in networks),
        exposed_ns=simulation.exposed_ns,
        contended_ns=simulate(graph, contended=True).total_ns,
        floor_ns=bound.ns,
        floor_is=(
            "critical path" if bound.critical_path_ns >= by_streams else f"stream {bound.busiest}"
        ),
        slot_floor_ns=None if hardware.is_torus else floor_of_slots(graph, 1, bound),
        critical_path_ns=bound.critical_path_ns,
        peak_bytes=memory.peak_bytes,
        capacity_bytes=hardware.memory_bytes,
        alive=tuple(Alive(_python_first(task), size, task.place) for task, size in allocated),
        peak_parts=peak_parts(graph, memory, graphs),
        streams=tuple(totals),
        collectives=collective_rows(graph, simulation),
        loops=loop_rows(graph, simulation),
        kernels=kernel_rows(graph),
        # Two loops on one source line, or copies of one, get a single note.
        notes=tuple(dict.fromkeys((*notes, *_notes(graph, simulation)))),
        pipelines=pipelines,
        draw=draw,
    )
    return report.with_timeline() if with_timeline else report


def _curve(simulation: Simulation, memory: MemoryProfile) -> Iterator[tuple[float, float]]:
    """Yields (ns, bytes alive from then on) at each change."""
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
                yield (
                    f"{task.place}: the number of iterations is unknown: one iteration is timed; "
                    f"state it by --trips {shlex.quote(short_location(task.place))}=N"
                )
    for task, folded in unsteady_loops(simulation.run):
        yield (
            f"{task.place}: this loop does not become steady: {folded} iterations are assumed to "
            "be like the last"
        )


@dataclass(frozen=True)
class Question:
    """How to time a program: device, targets, measured times and compiler options.

    Schedules are compiled for the device that times them, or for a stand-in. If the user named no
    device (`by_default`), a target that does not compile for it uses its own default.
    """

    hardware: Hardware
    targets: tuple[str, ...] = (AS_WRITTEN,)
    measured: MeasuredProfile | None = None
    timeout: float = 600.0  # seconds for each compiler
    options: CompilerOptions = NO_OPTIONS  # for each compiler
    with_timeline: bool = True
    by_default: bool = False

    def __post_init__(self) -> None:
        known = (AS_WRITTEN, *DEFAULT_HARDWARE)
        for target in self.targets:
            if target not in known:
                raise ToolError(
                    f"unknown target {target!r}; known: {', '.join(known)}",
                    hint=" or ".join(f'target="{name}"' for name in known),
                )

    def of_target(self, target: str) -> Question:
        """Returns the question for one compiler's schedule."""
        usual = load_hardware(DEFAULT_HARDWARE[target])
        strange = self.by_default and target_of(self.hardware) is not target_of(usual)
        return replace(self, hardware=usual) if strange else self


_GPUS = frozenset({"cuda", "rocm", "gpu"})  # jax.export's names of platforms


def hardware_for(artifact: Artifact, name: str | None, targets: Sequence[str] = ()) -> Hardware:
    """Returns the named hardware, else that of the only compiler among the targets.

    Otherwise it depends on the export's platforms: TPU v5e for TPUs without GPUs, else H100.
    """
    if name is not None:
        return load_hardware(name)
    compilers = [target for target in targets if target in DEFAULT_HARDWARE]
    if len(compilers) == 1:
        return load_hardware(DEFAULT_HARDWARE[compilers[0]])
    platforms = artifact.exported.platforms if artifact.exported is not None else ()
    if artifact.hlo is not None and artifact.hlo.is_of_tpu:
        platforms = ("tpu",)
    of_tpu = "tpu" in platforms and not _GPUS.intersection(platforms)
    return load_hardware(DEFAULT_HARDWARE["tpu" if of_tpu else "gpu"])


# Returns the advice for the given artifact, the one with explicit collectives, a clock, and a
# compiler's schedule, if any.
Advisor = Callable[[Artifact, Artifact, Clock, ProgramReport | None], Advised]


def exposure(
    artifacts: Sequence[Artifact], question: Question, advisor: Advisor | None = None
) -> list[ProgramReport]:
    """Returns a report for each artifact and target, in the given order.

    If a program leaves its collectives to the compiler, it is partitioned before it is timed as
    written. A note says so, or why partitioning failed. Raises ToolError if a compiler refuses it,
    or if a measured profile matches no op of the programs.
    """
    reports: list[ProgramReport] = []
    for artifact in artifacts:
        with naming(artifact.name):
            for target in question.targets:
                if target == AS_WRITTEN:
                    reports.append(_as_written(artifact, question, advisor))
                else:
                    reports.append(_compiled_report(artifact, target, question, advisor))
    if question.measured is not None:
        question.measured.check_used()
    return reports


def explicit_collectives(artifact: Artifact) -> tuple[Artifact, tuple[str, ...]]:
    """Returns the artifact with explicit collectives, and notes on how it was partitioned.

    Uses `partition`, or XLA's own partitioner if `partition` refuses. If both refuse, returns the
    artifact unchanged, with the reason.
    """
    left = left_to_the_partitioner(artifact.module)
    if left is None:
        return artifact, ()
    try:
        return partition_artifact(artifact)
    except ToolError as error:
        why = f"partition refused: {error.diagnostic.message}; "
    try:
        local = partition_with_xla(artifact.copy().module, left.partitions)
    except ToolError as error:
        return artifact, (
            "NOT INCLUDED: the communication that the program leaves to a compiler, by "
            f"{left.annotation.value}: {why}{error.diagnostic.message}; --target gpu or tpu shows "
            "it after compilation",
        )
    return replace(artifact, module=local), (
        f"the program leaves its collectives to the compiler, by {left.annotation.value}: "
        f"{why}for the times, XLA:CPU's partitioner divided it; another compiler may divide it "
        "differently, which --target shows",
    )


def partition_artifact(artifact: Artifact) -> tuple[Artifact, tuple[str, ...]]:
    """Partitions the artifact like a compiler; returns it with notes on that.

    Raises ToolError if `partition` refuses it.
    """
    from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline

    copy = artifact.copy()
    reported = run_pipeline(copy, Pipeline.parse(AS_A_COMPILER))
    explicit = len(find_collectives(artifact.module))
    if explicit and len(find_collectives(copy.module)) == explicit:
        return copy, ()
    return copy, (
        "the program leaves its collectives to the compiler: for the times, it was partitioned "
        f"({AS_A_COMPILER}); a compiler may partition differently, which --target shows",
        *(diagnostic.render(artifact.name).splitlines()[0] for diagnostic in reported.collected),
    )


def _as_written(artifact: Artifact, question: Question, advisor: Advisor | None) -> ProgramReport:
    if artifact.hlo is not None and artifact.is_scheduled:
        # Scheduled HLO text states its order.
        from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

        devices = ModuleFacts.from_module(artifact.module).grid.size
        graph = hlo_task_graph(artifact.hlo.text, question.hardware, devices, question.measured)
        notes = ["the text is scheduled, and timed in its own order"]
        return _report(artifact, graph, devices, "as scheduled", question, notes)
    explicit, notes = explicit_collectives(artifact)
    devices = ModuleFacts.from_module(explicit.module).grid.size
    clock = Clock(question.hardware, devices, question.measured)
    left_out: list[str] = []
    traced = traced_task_graph(explicit.module, clock, artifact.name, left_out)
    # Pipelines are found in the program with explicit collectives.
    pipelines = tuple(
        pipeline_report(each, explicit.name, pipeline_times(each, traced))
        for each in find_pipelines(explicit.module)
    )
    said = (*notes, *left_out)
    report = _report(artifact, traced.graph, devices, "as written", question, said, pipelines)
    if advisor is None:
        return report
    return replace(report, advised=advisor(artifact, explicit, clock, None))


def _compiled_report(
    artifact: Artifact, target: str, question: Question, advisor: Advisor | None
) -> ProgramReport:
    from stablehlo_tools.targets.compilation import compile_artifact
    from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

    question = question.of_target(target)
    compilation = compile_artifact(
        artifact, target, question.timeout, hardware=question.hardware, options=question.options
    )
    devices = compilation.topology.devices
    graph = hlo_task_graph(
        compilation.text,
        question.hardware,
        devices,
        question.measured,
        one_stream=question.options.one_stream,
    )
    graph = with_axes_of(graph, ModuleFacts.from_module(artifact.module, []).meshes)
    notes = [f"scheduled by {compilation.compiler} for {compilation.topology.describe()}"]
    if question.options.values:
        notes.append(f"compiled with {question.options}")
    if compilation.stand_in:
        notes.append(f"{compilation.stand_in}, and the schedule is timed on it")
    if compilation.foreign:
        notes.append(compilation.foreign)
    notes.append(ACCURACY)
    title = compilation.topology.target.title
    report = _report(artifact, graph, devices, title, question, notes)
    if advisor is None or artifact.is_scheduled:
        return report
    explicit, _ = explicit_collectives(artifact)
    clock = Clock(question.hardware, devices, question.measured)
    return replace(report, advised=advisor(artifact, explicit, clock, report))


def _report(
    artifact: Artifact,
    graph: TaskGraph,
    devices: int,
    target: str,
    question: Question,
    notes: Sequence[str],
    pipelines: tuple[PipelineReport, ...] = (),
) -> ProgramReport:
    unknown = Counter(t.by_bytes for inner in graph.walk() for t in inner.tasks if t.by_bytes)
    if unknown:
        listed = ", ".join(f"{count} {op}" for op, count in sorted(unknown.items()))
        notes = [*notes, f"timed by their bytes alone: {listed}"]
    if question.measured is not None:
        count, source = len(question.measured.used), question.measured.source
        notes = [*notes, f"times of {count} ops are measured: {source}"]
    return program_report(
        graph,
        question.hardware,
        devices,
        name=Path(artifact.name).name,
        target=target,
        notes=tuple(notes),
        pipelines=pipelines,
        with_timeline=question.with_timeline,
    )


def timeline(
    graph: TaskGraph, simulation: Simulation
) -> tuple[tuple[str, ...], tuple[TimelineEvent, ...], tuple[Band, ...]]:
    """Returns the names of the streams, the events in the order of their begin, and the bands."""
    drawing = _EventCollector(graph)
    drawing.draw(simulation.run, (), 0.0)
    drawing.tail(simulation.total_ns - simulation.tail_ns)
    events = sorted(drawing.events, key=lambda event: (event.begin, event.stream, event.end))
    layers = drawing.layers or module_bands(events)
    bands = (*phase_bands(events, simulation.total_ns), *layers)
    return tuple(drawing.streams), tuple(events), bands


def _python_first(task: Task) -> str:
    """Returns the name of a task, after the op in Python if a compiler has named the task."""
    is_named = (
        not task.op
        or task.communication is not None
        or task.op.replace("_", "-") in task.name.replace("_", "-")
    )
    return task.name if is_named or task.op == "fusion" else f"{task.op} ({task.name})"


def critical_tasks(graph: TaskGraph) -> set[tuple[LoopPath, int]]:
    """Returns the tasks of the longest dependence chain, with those in the bodies of its loops."""
    critical: set[tuple[LoopPath, int]] = set()
    for path, inner in graphs_of(graph):
        if path and (path[:-1], path[-1]) not in critical:
            continue
        critical.update((path, task) for task in floor(inner).path)
    return critical


class _EventCollector:
    """A collector of the events of runs, shifted to their time in the program."""

    def __init__(self, graph: TaskGraph) -> None:
        self.events: list[TimelineEvent] = []
        self.layers: list[Band] = []  # iterations of the outermost loops
        self.streams: dict[str, int] = {COMPUTE_STREAM: 0}
        self._numbers = collective_numbers(graph)
        self._critical = critical_tasks(graph)

    def draw(self, run: GraphRun, path: LoopPath, shift: float) -> None:
        """Adds the events of one run of a graph."""
        for task in run.graph.tasks:
            if task.kind is TaskKind.LOOP:
                end = shift + run.end[task.id]
                self._loop(run.loops[task.id], task, path, shift, end)
                continue
            begin, end = run.begin[task.id], run.end[task.id]
            if task.kind is TaskKind.WAIT:
                if end > begin:
                    self._add(COMPUTE_STREAM, begin, end, shift, task, "wait", path)
            elif task.kind is not TaskKind.COLLECTIVE_START and task.ns:
                self._add(COMPUTE_STREAM, begin, end, shift, task, "compute", path)
        for flight in run.all_flights():
            task = run.graph.tasks[flight.starts[0]]
            sent = task.communication
            kind = "collective" if sent is not None and sent.is_collective else "compute"
            self._add(flight.stream, flight.begin, flight.end, shift, task, kind, path)

    def tail(self, clock: float) -> None:
        """Adds waits of the compute stream after all compute has ended, as in the exposed time."""
        late = [event for event in self.events if event.end > clock and event.stream > 0]
        for event in sorted(late, key=lambda event: event.end):
            if event.end > clock:
                self.events.append(replace(event, stream=0, begin=clock, kind="wait"))
                clock = event.end

    def _loop(
        self, loop: LoopRun, task: Task, path: LoopPath, shift: float, run_end: float
    ) -> None:
        """Adds the iterations; those that were not simulated as copies of one, or as a block."""
        inside = (*path, task.id)
        if not path and len(loop.iterations) + loop.folded <= _MOST_LAYERS:
            begins = [min(each.begin, default=loop.begin) + shift for each in loop.iterations]
            at = max(1, len(begins) - 1)  # the folded ones are copies of the last but one
            begins[at:at] = [begins[at - 1] + k * loop.period for k in range(1, loop.folded + 1)]
            ends = [*begins[1:], run_end]
            for number, (begin, end) in enumerate(zip(begins, ends, strict=True), 1):
                self.layers.append(Band(begin, end, str(number), 1))
        representative = max(0, len(loop.iterations) - 2)
        for number, iteration in enumerate(loop.iterations):
            self.draw(iteration, inside, shift)
            if number != representative or not loop.folded:
                continue
            needed = loop.folded * self._size(iteration)
            if len(self.events) + needed <= _MOST_EVENTS:
                for repeat in range(1, loop.folded + 1):
                    self.draw(iteration, inside, shift + repeat * loop.period)
            else:
                begin = max(iteration.end, default=loop.begin)
                end = begin + loop.folded * loop.period
                self._add(COMPUTE_STREAM, begin, end, shift, task, "loop", path, loop.folded)

    def _size(self, run: GraphRun) -> int:
        return len(run.graph.tasks) + sum(
            (1 + loop.folded) * self._size(iteration)
            for loop in run.loops.values()
            for iteration in loop.iterations
        )

    def _add(
        self,
        stream: str,
        begin: float,
        end: float,
        shift: float,
        task: Task,
        kind: str,
        path: LoopPath,
        folded: int = 0,
    ) -> None:
        start = task.start if task.kind is TaskKind.WAIT else task.id
        self.events.append(
            TimelineEvent(
                stream=self.streams.setdefault(stream, len(self.streams)),
                begin=begin + shift,
                end=end + shift,
                label=_python_first(task),
                op=task.op,
                place=task.place,
                kind=kind,
                collective=self._numbers.get((path, -1 if start is None else start), -1),
                folded=folded,
                critical=(path, task.id) in self._critical,
            )
        )


def loop_rows(graph: TaskGraph, simulation: Simulation) -> tuple[LoopRow, ...]:
    """Returns one row for each loop, outer loops first, with the time of all its runs."""
    rows: list[LoopRow] = []

    def visit(inner: TaskGraph, runs: list[tuple[GraphRun, int]], depth: int) -> None:
        for task in inner.tasks:
            if task.loop is None:
                continue
            timed = [(run, weight) for run, weight in runs if task.id in run.loops]
            here = [(run.loops[task.id], weight) for run, weight in timed]
            total = sum(weight * (run.end[task.id] - run.begin[task.id]) for run, weight in timed)
            period = here[0][0].period if here else 0.0
            rows.append(LoopRow(task.name, task.loop.trips, total, period, depth, task.place))
            inside = [
                (iteration, weight * count)
                for loop, weight in here
                for iteration, count in loop.weighted_iterations()
            ]
            visit(task.loop.body, inside, depth + 1)

    visit(graph, [(simulation.run, 1)], 0)
    return tuple(rows)


def kernel_rows(graph: TaskGraph) -> tuple[KernelRow, ...]:
    """Returns the kernels with the longest total time, grouped by name and place."""
    kernels: dict[tuple[str, str], tuple[int, float]] = {}

    def add(inner: TaskGraph, runs: int) -> None:
        for task in inner.tasks:
            if task.loop is not None:
                add(task.loop.body, runs * iterations(task.loop))
            elif task.kind is TaskKind.COMPUTE and task.ns:
                key = _python_first(task), task.place
                times, ns = kernels.get(key, (0, 0.0))
                kernels[key] = times + runs, ns + runs * task.ns

    add(graph, 1)
    rows = [KernelRow(name, times, ns, place) for (name, place), (times, ns) in kernels.items()]
    return tuple(sorted(rows, key=lambda row: -row.ns)[:_MOST_KERNELS])


def unsteady_loops(run: GraphRun) -> Iterator[tuple[Task, int]]:
    """Yields the extrapolated loops that are not steady, with the number of left-out iterations."""
    for number, loop in run.loops.items():
        if loop.folded and not loop.steady:
            yield run.graph.tasks[number], loop.folded
        for iteration in loop.iterations[-1:]:
            yield from unsteady_loops(iteration)
