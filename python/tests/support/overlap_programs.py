"""What the tests of `schedule-overlap` ask of programs: schedules, totals, peaks."""

from __future__ import annotations

import re
from pathlib import Path

from tree import LIT_TESTS

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.tasks.graph import module_task_graph
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.overlap.task_graph import TaskGraph
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.passes.pipeline import Pipeline

PROFILE = str(LIT_TESTS / "Inputs" / "slow.toml")


def fenced(program: Artifact, options: str = "", *, hardware: str = PROFILE) -> Artifact:
    """The program after `schedule-overlap`; the one given stays as it is."""
    after = program.copy()
    pipeline = Pipeline.parse(f"schedule-overlap{{hardware={hardware} {options}}}")
    pipeline.run(after.module, Diagnostics(), None)
    return after


def with_profile(folder: Path, *, vector: str) -> str:
    """The slow profile with another vector unit, in TFLOP/s; its path."""
    text = Path(PROFILE).read_text()
    path = folder / "profile.toml"
    path.write_text(
        re.sub(r"(?m)^vector = { value = [\d.]+", f"vector = {{ value = {vector}", text)
    )
    return str(path)


def task_graph(program: Artifact, hardware: str) -> TaskGraph:
    """The program as written."""
    module = program.module
    with module.context:
        clock = Clock(load_hardware(hardware), ModuleFacts.from_module(module).grid.size)
        return module_task_graph(module, clock, "")


def total(program: Artifact, hardware: str) -> float:
    """The ns that a program takes as it is written."""
    return simulate(task_graph(program, hardware)).total_ns


def peak(program: Artifact, hardware: str) -> float:
    """The bytes that a program needs as it is written."""
    return memory_profile(task_graph(program, hardware)).peak_bytes
