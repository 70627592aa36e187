"""Optimizes an `Exported` or an artifact: the pipeline that makes it fastest on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from stablehlo_tools.analysis.stated_trips import state_trips
from stablehlo_tools.artifacts.artifact import Artifact, from_exported
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.optimization import optimum_report
from stablehlo_tools.optimization.figures import Figures
from stablehlo_tools.optimization.optimizer import OptimizationRequest, Optimum
from stablehlo_tools.optimization.optimizer import optimize as find_optimum
from stablehlo_tools.targets.chips import target_of
from stablehlo_tools.targets.compiler_options import CompilerOptions, Value

if TYPE_CHECKING:
    from jax.export import Exported


@dataclass(frozen=True)
class Explanation:
    """The candidates and their times, the proof, and what remains; prints as text."""

    optimum: Optimum

    def __str__(self) -> str:
        return optimum_report.to_text(self.optimum)

    def to_json(self) -> dict[str, Any]:
        """The object that `stablehlo-tools optimize --json` prints."""
        return optimum_report.to_json(self.optimum)

    def to_html(self) -> str:
        """The page that `stablehlo-tools optimize --report` writes."""
        return optimum_report.page(self.optimum, version("stablehlo-tools"))


@dataclass(frozen=True)
class Optimized[Program]:
    """The fastest form of a program that was found and proven.

    `exported` has the type of the given program. `pipeline` makes it from the given one (with
    `transform`, or `opt -p`); it is "" if nothing is faster, and the program is then unchanged.
    `before` and `after` are the two as the target's compiler schedules them: `total_ns` and
    `exposed_ns` of one run, `peak_bytes` of a device.
    """

    exported: Program
    pipeline: str
    before: Figures
    after: Figures
    report: Explanation


def _target(target: str | None, hardware: str | None) -> str:
    """Returns the target, else the hardware's. Raises ToolError without one."""
    if target is not None:
        return target
    found = target_of(load_hardware(hardware)) if hardware is not None else None
    if found is None:
        raise ToolError(
            "optimize: it is not known where the step will run",
            hint='target="gpu" or target="tpu", or hardware="h100", "tpu-v5p", …',
        )
    return found.value


def optimize[Program: (Exported, Artifact)](
    exported: Program,
    target: str | None = None,
    hardware: str | None = None,
    memory_limit: float | None = None,
    budget: float | None = None,
    candidates: int | None = None,
    pipeline_axis: str | None = None,
    compiler_options: Mapping[str, Value] | None = None,
    option_trials: bool = True,
    trips: Mapping[str, int] | None = None,
    executor: Executor | None = None,
) -> Optimized[Program]:
    """Searches for the pipeline that makes a program fastest; the given one does not change.

    `target`, "gpu" or "tpu": whose compiler decides; no device is needed. Give it, or a `hardware`
    that has a compiler: the name or the file of a profile, by default the target's usual one.
    `memory_limit`: GiB of a device, by default all that it has. `budget`: seconds of search, 600 by
    default; `candidates`: instead of it, how many to compile, for the same answer on any machine.
    `pipeline_axis`: a mesh axis that a pipeline over layers may use. `compiler_options`: options
    for the export and all candidates, as for jax.jit; `option_trials`: whether others are tried for
    the answer. `trips`: the number of iterations of loops that the program does not state, by
    location, as in {"solver.py:30": 40}; the answer keeps them. `executor`: whose workers compile,
    such as `distributed.Client(address).get_executor()`; they need this package with its extra
    `aot`, in the same version. Results are cached, so a second run is instant.
    Raises ToolError if the compiler is missing or refuses the unchanged program.
    """
    request = OptimizationRequest(
        target=_target(target, hardware),
        hardware=hardware,
        memory_limit=memory_limit,
        budget=budget,
        candidates=candidates,
        pipeline_axis=pipeline_axis,
        options=CompilerOptions.from_values(compiler_options or {}),
        try_options=option_trials,
        executor=executor,
    )
    found: Any
    given = exported if isinstance(exported, Artifact) else from_exported(exported)
    if trips:
        given = given.copy()
        state_trips(given.module, given.name, trips)
    optimum = find_optimum(given, request)
    if not optimum.changed:
        found = exported
    else:
        is_artifact = isinstance(exported, Artifact)
        found = optimum.artifact if is_artifact else optimum.artifact.to_exported()
    return Optimized(found, optimum.pipeline, optimum.before, optimum.after, Explanation(optimum))
