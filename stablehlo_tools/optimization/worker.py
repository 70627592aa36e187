"""The process that rewrites, compiles and proves candidates, each in a fork.

`python -m stablehlo_tools.optimization.worker` answers messages (`processes.child.serve`). Their
head names files, because modules are large and are in the store anyway.
"""

from __future__ import annotations

import gzip
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.export  # loaded once, before the forks, like all imports below

from stablehlo_tools import bindings
from stablehlo_tools.advice.advise import advise
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
from stablehlo_tools.analysis.tasks.graph import expected_run
from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware, load_hardware
from stablehlo_tools.diagnostics import ToolError, render_diagnostics
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.optimization.crew import ADVISE, EVALUATE, KEEP_LAYERS, PROVE, REWRITE
from stablehlo_tools.optimization.figures import NEVER, Figures
from stablehlo_tools.optimization.proof import prove
from stablehlo_tools.overlap.bounds import floor, iterations
from stablehlo_tools.overlap.task_graph import TaskGraph, TaskKind
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline
from stablehlo_tools.passes.registry import PASSES, find_pass
from stablehlo_tools.processes.activity import end_with_parent, trust_input
from stablehlo_tools.processes.child import serve
from stablehlo_tools.processes.forks import Answer, in_fork
from stablehlo_tools.report.exposure import partition_artifact
from stablehlo_tools.targets.chips import Target, chip_for
from stablehlo_tools.targets.compilation import Compilation, bytes_refused, compile_artifact
from stablehlo_tools.targets.compiler_options import CompilerOptions
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph
from stablehlo_tools.targets.preparation import prepare
from stablehlo_tools.targets.topologies import compiler_version, topology
from stablehlo_tools.transforms.parts.roll_layers.fewer_layers import LayeredProgram

assert jax.export
_FEW_OPS = 500  # a program with fewer ops compiles in seconds


def main() -> None:
    """Answers messages until the other side closes."""
    for name in PASSES:
        find_pass(name)
    end_with_parent(os.getppid())
    serve(_answer)


def _answer(head: dict[str, Any], _: bytes) -> Answer:
    jobs = {
        REWRITE: _rewrite,
        EVALUATE: _evaluate,
        PROVE: _prove,
        ADVISE: _advise,
        KEEP_LAYERS: _keep_layers,
    }
    work = jobs[head["job"]]
    return in_fork(lambda: work(head), head["doing"], head["seconds"])


def _rewrite(head: dict[str, Any]) -> Answer:
    """Runs passes; returns the module as bytecode, their warnings, and predicted time and memory.

    The predictions are of XLA's schedule, and None if the model has none, or if the passes change
    nothing. `whole`: it leaves its
    collectives to the compiler, so it is a program for all devices.
    """
    artifact = _load(head)
    pipeline = Pipeline.parse(head["passes"]) if head["passes"] else Pipeline(())
    before = bindings.write_bytecode(artifact.module)
    reported = run_pipeline(artifact, pipeline)
    after = bindings.write_bytecode(artifact.module)
    told = None
    if not pipeline.passes or after != before:
        with suppress(ToolError):
            told = expected_run(_explicit(artifact).module, load_hardware(head["hardware"]))
    answer = {
        "whole": left_to_the_partitioner(artifact.module) is not None,
        "predicted_ns": None if told is None else told.contended_ns,
        "predicted_bytes": None if told is None else told.peak_bytes,
        "said": render_diagnostics(reported.collected, artifact.name),
    }
    return answer, after


def _explicit(artifact: Artifact) -> Artifact:
    """Returns the program with explicit collectives. Raises ToolError if `partition` refuses it."""
    whole = left_to_the_partitioner(artifact.module) is not None
    return partition_artifact(artifact)[0] if whole else artifact


def _advise(head: dict[str, Any]) -> Answer:
    """Returns the pass pipelines that `inspect` advises, largest gain first."""
    artifact = _load(head)
    explicit = _explicit(artifact)
    devices = ModuleFacts.from_module(explicit.module).grid.size
    advised = advise(artifact, explicit, Clock(load_hardware(head["hardware"]), devices))
    return {"pipelines": [item.pipeline for item in advised.items if item.pipeline]}, b""


def _keep_layers(head: dict[str, Any]) -> Answer:
    """Returns the program with fewer layers as bytecode, and its `layers`: 0 if it has no twin."""
    module = _load(head).module
    operations = Function(entry_function(module)).body.operations
    if sum(1 for _ in operations) < _FEW_OPS:
        return {"layers": 0}, b""
    layered = LayeredProgram(module)
    kept = layered.keep(head["kept"]) if layered.count >= head["least"] else None
    if kept is None:
        return {"layers": 0}, b""
    return {"layers": layered.count}, bindings.write_bytecode(kept)


def _evaluate(head: dict[str, Any]) -> Answer:
    """Compiles a module; returns the figures of its schedule, and the schedule compressed."""
    artifact, hardware = _load(head), load_hardware(head["hardware"])
    options = CompilerOptions.parse(head["options"])
    try:
        compiled = compile_artifact(
            artifact,
            head["target"],
            head["seconds"],
            hardware=hardware,
            options=options,
            schedule_only=not head["with_code"],
        )
    except ToolError as error:
        needed = bytes_refused(error)
        if needed is None:
            raise
        return _unfitting(artifact, head["target"], hardware, needed), _compress_text("")
    return _figures(compiled, hardware), _compress_text(compiled.text)


def _prove(head: dict[str, Any]) -> Answer:
    """Proves a candidate against the export."""
    before, after = _load({**head, "module": None}), _load(head)
    export, candidate = (Figures(*fields) for fields in head["figures"])
    return prove(before, after, (export, candidate), head["limit"]).to_json(), b""


def _compress_text(text: str) -> bytes:
    return gzip.compress(text.encode(), compresslevel=3, mtime=0)


def _figures(compiled: Compilation, hardware: Hardware) -> dict[str, Any]:
    """Returns the figures of a schedule as plain data."""
    graph = hlo_task_graph(
        compiled.text, hardware, compiled.topology.devices, one_stream=compiled.options.one_stream
    )
    simulation = simulate(graph)
    return {
        "total_ns": simulation.total_ns,
        "contended_ns": simulate(graph, contended=True).total_ns,
        "exposed_ns": simulation.exposed_ns,
        "compute_ns": simulation.compute_ns,
        "work_ns": _work_ns(graph, hardware.launch_ns),
        "floor_ns": floor(graph).ns,
        "peak_bytes": memory_profile(graph).peak_bytes,
        "compiler_bytes": compiled.memory.total_bytes,
        "collectives": sum(event.issues for event in compiled.schedule.events),
        "same_order": compiled.order.same_order,
        "devices": compiled.topology.devices,
        "compiled_by": f"{compiled.compiler} for {compiled.topology.describe()}",
        "stand_in": "; ".join(compiled.remarks),
    }


def _unfitting(
    artifact: Artifact, target: str, hardware: Hardware, needed: float
) -> dict[str, Any]:
    """Returns the figures of a program that the compiler refuses for lack of memory."""
    devices = prepare(artifact, Target(target)).grid.size
    chip, stand_in = chip_for(Target(target), hardware)
    described = topology(Target(target), devices, chip).describe()
    return {
        **dict.fromkeys(
            ("total_ns", "contended_ns", "exposed_ns", "compute_ns", "work_ns", "floor_ns"), NEVER
        ),
        "peak_bytes": needed,
        "compiler_bytes": int(needed),
        "collectives": 0,
        "same_order": False,
        "devices": devices,
        "compiled_by": f"{compiler_version(Target(target))} for {described}",
        "stand_in": stand_in,
    }


def _work_ns(graph: TaskGraph, launch_ns: float, runs: int = 1) -> float:
    """Sums the time of kernels without their launches in ns, over all iterations of loops."""
    inside = sum(
        _work_ns(task.loop.body, launch_ns, runs * iterations(task.loop))
        for task in graph.tasks
        if task.loop is not None
    )
    return inside + runs * sum(
        max(0.0, task.ns - launch_ns) for task in graph.tasks if task.kind is TaskKind.COMPUTE
    )


def _load(head: dict[str, Any]) -> Artifact:
    """Returns the program to optimize, with the module of a candidate if `head` names one."""
    trust_input()  # this is a fork, which may end
    loaded = artifacts.parse(Path(head["artifact"]).read_bytes(), head["name"])
    if head["module"] is None:
        return loaded
    data = Path(head["module"]).read_bytes()
    return replace(loaded, module=bindings.parse_module(data, loaded.module.context))


if __name__ == "__main__":
    main()
