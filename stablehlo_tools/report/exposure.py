"""What an artifact's communication costs: the program as written, and as compilers schedule it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
from stablehlo_tools.analysis.partitioner_work import Annotation, left_to_the_partitioner
from stablehlo_tools.analysis.pipelines.reading import find_pipelines
from stablehlo_tools.analysis.tasks.graph import TracedGraph, traced_task_graph
from stablehlo_tools.analysis.tasks.op_work import BY_BYTES_ALONE
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware, load_hardware
from stablehlo_tools.cost.measured import MeasuredProfile
from stablehlo_tools.diagnostics import Diagnostic, ToolError, naming
from stablehlo_tools.hlo_input.text import HloText
from stablehlo_tools.overlap.task_graph import TaskGraph
from stablehlo_tools.report.document import ProgramReport
from stablehlo_tools.report.pipeline_document import PipelineReport
from stablehlo_tools.report.pipeline_rows import pipeline_report
from stablehlo_tools.report.pipeline_times import pipeline_times
from stablehlo_tools.report.programs import program_report
from stablehlo_tools.targets.xla_partitioner import partition_with_xla

AS_WRITTEN = "as-written"
TARGETS = (AS_WRITTEN, "gpu", "tpu")
PARTITIONING = "partition,create-reduce-scatter"
_COMPILED_FOR = {"gpu": "h100", "tpu": "tpu-v5e"}
_DEFAULT_HARDWARE = {"tpu": "tpu-v5e"}
_OTHERWISE = "h100"


@dataclass(frozen=True)
class Question:
    """How to time a program: on which device, whose schedules, and what is known of it."""

    hardware: Hardware
    targets: tuple[str, ...] = (AS_WRITTEN,)
    measured: MeasuredProfile | None = None
    timeout: float = 600.0  # seconds for each compiler
    with_timeline: bool = True


def hardware_for(artifact: Artifact, name: str | None, targets: Sequence[str] = ()) -> Hardware:
    """The named hardware; else that of the one compiler among the targets; else what the program
    was exported for: a TPU v5e or an H100."""
    if name is not None:
        return load_hardware(name)
    compilers = [target for target in targets if target in _COMPILED_FOR]
    if len(compilers) == 1:
        return load_hardware(_COMPILED_FOR[compilers[0]])
    platforms = artifact.exported.platforms if artifact.exported is not None else ()
    if artifact.hlo is not None and artifact.hlo.is_of_tpu:
        platforms = ("tpu",)
    found = [_DEFAULT_HARDWARE[p] for p in platforms if p in _DEFAULT_HARDWARE]
    return load_hardware(found[0] if found else _OTHERWISE)


def exposure(artifacts: Sequence[Artifact], question: Question) -> list[ProgramReport]:
    """A report for each artifact and each target, in the order asked for.

    A program that leaves its collectives to the compiler is partitioned first, to be timed as
    written; a note says so, or why they are not seen. Raises ToolError where a compiler refuses,
    and where a measured profile names nothing of the programs.
    """
    reports: list[ProgramReport] = []
    for artifact in artifacts:
        with naming(artifact.name):
            for target in question.targets:
                as_written = target == AS_WRITTEN
                reports.append(
                    _as_written(artifact, question)
                    if as_written
                    else _compiled(artifact, target, question)
                )
    if question.measured is not None:
        question.measured.check_used()
    return reports


def explicit_collectives(artifact: Artifact) -> tuple[Artifact, tuple[str, ...]]:
    """The artifact with its collectives in it, and what was done to get there.

    By `partition` for Shardy's shardings, by XLA's own partitioner for others and for what
    `partition` refuses. Where neither can, the artifact as it is, and the reason.
    """
    left = left_to_the_partitioner(artifact.module)
    if left is None:
        return artifact, ()
    why = ""
    if left.annotation is Annotation.SHARDY:
        try:
            return _partitioned(artifact)
        except ToolError as error:
            why = f"partition refused: {error.diagnostic.message}; "
    try:
        local = partition_with_xla(artifact.copy().module, left.partitions)
    except ToolError as error:
        return artifact, (
            f"NOT SEEN: the communication that the program leaves to a compiler, by "
            f"{left.annotation.value}: {why}{error.diagnostic.message}; --target gpu or tpu shows "
            "what a compiler makes of it",
        )
    return replace(artifact, module=local), (
        f"the program leaves its collectives to the compiler, by {left.annotation.value}: {why}it "
        "was partitioned by XLA:CPU's partitioner to be timed; another compiler may partition "
        "otherwise, which --target shows",
    )


def _partitioned(artifact: Artifact) -> tuple[Artifact, tuple[str, ...]]:
    from stablehlo_tools.api.transforming import run_pipeline
    from stablehlo_tools.passes.pipeline import Pipeline

    copy = artifact.copy()
    reported = run_pipeline(copy, Pipeline.parse(PARTITIONING))
    explicit = len(find_collectives(artifact.module))
    if explicit and len(find_collectives(copy.module)) == explicit:
        return copy, ()
    return copy, (
        f"the program leaves its collectives to the compiler: it was partitioned ({PARTITIONING}) "
        "to be timed; a compiler may partition otherwise, which --target shows",
        *(_one_line(diagnostic, artifact.name) for diagnostic in reported.collected),
    )


def _as_written(artifact: Artifact, question: Question) -> ProgramReport:
    if artifact.hlo is not None and artifact.is_scheduled:
        return _scheduled(artifact, artifact.hlo, question)
    explicit, notes = explicit_collectives(artifact)
    devices = ModuleFacts.of(explicit.module).grid.size
    clock = Clock(question.hardware, devices, question.measured)
    left_out: list[str] = []
    traced = traced_task_graph(explicit.module, clock, artifact.name, left_out)
    pipelines = _pipelines(explicit, traced)
    said = (*notes, *left_out)
    return _report(artifact, traced.graph, devices, "as written", question, said, pipelines)


def _pipelines(artifact: Artifact, traced: TracedGraph) -> tuple[PipelineReport, ...]:
    """The pipelines of a program whose collectives are explicit, with their times."""
    return tuple(
        pipeline_report(each, artifact.name, pipeline_times(each, traced))
        for each in find_pipelines(artifact.module)
    )


def _scheduled(artifact: Artifact, source: HloText, question: Question) -> ProgramReport:
    """A program that was read as scheduled HLO text, as that says it."""
    from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

    devices = ModuleFacts.of(artifact.module).grid.size
    graph = hlo_task_graph(source.text, question.hardware, devices, question.measured)
    notes = ["the text is scheduled: it is timed in its own order"]
    return _report(artifact, graph, devices, "as scheduled", question, notes)


def _compiled(artifact: Artifact, target: str, question: Question) -> ProgramReport:
    from stablehlo_tools.targets.compilation import compile_artifact
    from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

    compilation = compile_artifact(artifact, target, question.timeout)
    devices = compilation.topology.devices
    graph = hlo_task_graph(compilation.text, question.hardware, devices, question.measured)
    notes = [f"scheduled by {compilation.compiler} for {compilation.topology.describe()}"]
    if question.hardware.name != _COMPILED_FOR[target]:
        notes.append(f"and timed on another device: {question.hardware.title}")
    title = compilation.topology.target.title
    return _report(artifact, graph, devices, title, question, notes)


def _report(
    artifact: Artifact,
    graph: TaskGraph,
    devices: int,
    target: str,
    question: Question,
    notes: Sequence[str],
    pipelines: tuple[PipelineReport, ...] = (),
) -> ProgramReport:
    unknown = Counter(
        task.op
        for inner in graph.walk()
        for task in inner.tasks
        if task.ns and task.op.replace("-", "_") in BY_BYTES_ALONE
    )
    if unknown:
        listed = ", ".join(f"{count} {op}" for op, count in sorted(unknown.items()))
        notes = [*notes, f"timed by their bytes alone, whatever they compute: {listed}"]
    if question.measured is not None:
        notes = [
            *notes,
            f"times of {len(question.measured.used)} ops are measured: {question.measured.source}",
        ]
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


def _one_line(diagnostic: Diagnostic, name: str) -> str:
    return diagnostic.render(name).splitlines()[0]
