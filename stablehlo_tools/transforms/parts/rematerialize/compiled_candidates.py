"""Finds the fastest program within a limit by compiling candidates.

The expected memory is off by a factor. This factor differs less between forms of one program than
between programs. So each compiled program tells which expected memory to aim for next. If that
makes no progress, the search bisects between the largest program known to fit and the smallest
known not to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from stablehlo_tools.artifacts.artifact import Artifact, ArtifactForm
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.compilation import bytes_refused, compile_artifact
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph
from stablehlo_tools.transforms.parts.rematerialize.memory_price import Tried

_MOST = 6  # programs that are compiled
_APART = 1.02  # ratio of bounds on the expected memory at which the search ends


@dataclass(frozen=True)
class CompiledRun:
    """The compiler's figures for a program.

    `ns`: of its schedule with contention, infinite if the compiler refuses the program for lack of
    memory. `peak_bytes`: the memory that a device must have.
    """

    ns: float
    peak_bytes: float

    def fits(self, limit: float) -> bool:
        """Returns True if the compiler accepts the program and it needs at most `limit` bytes."""
        return self.peak_bytes <= limit and math.isfinite(self.ns)


@dataclass(frozen=True)
class CompiledProgram:
    """A chosen program, and the compiler's figures for it."""

    tried: Tried
    run: CompiledRun

    @property
    def scale(self) -> float:
        """The ratio of the compiler's memory to the expected one."""
        return self.run.peak_bytes / max(self.tried.peak_bytes, 1.0)


def compiled_run(module: ir.Module, target: Target, hardware: Hardware) -> CompiledRun:
    """Compiles a program; the ns are infinite if the compiler refuses it for lack of memory.

    Raises ToolError if the compiler refuses it for another reason.
    """
    artifact = Artifact("the program", ArtifactForm.BYTECODE, module)
    try:
        compiled = compile_artifact(artifact, target, hardware=hardware, schedule_only=True)
    except ToolError as error:
        needed = bytes_refused(error)
        if needed is None:
            raise
        return CompiledRun(math.inf, needed)
    graph = hlo_task_graph(compiled.text, hardware, compiled.topology.devices)
    needed = max(memory_profile(graph).peak_bytes, compiled.memory.total_bytes)
    return CompiledRun(simulate(graph, contended=True).total_ns, needed)


def fastest_compiled(
    base: Tried,
    fastest: Callable[[float], Tried],
    compiled: Callable[[ir.Module], CompiledRun],
    safe: float,
) -> CompiledProgram:
    """Returns the fastest compiled program with at most `safe` peak bytes, or the smallest if none
    fits.

    `base`: the original program. `fastest`: chooses a program for a limit on expected bytes.
    `compiled`: runs the compiler.
    """
    known = [CompiledProgram(base, compiled(base.module))]
    enough, too_much = 0.0, math.inf  # of expected bytes
    while len(known) < _MOST:
        last = known[-1]
        aim = safe / last.scale
        if last.run.fits(safe):
            enough = max(enough, last.tried.peak_bytes)
            if aim <= _APART * enough:
                break
        else:
            too_much = min(too_much, last.tried.peak_bytes)
        if not enough < aim < too_much:
            if too_much <= _APART * enough or math.isinf(too_much):
                break
            aim = (enough + too_much) / 2
        tried = fastest(aim)
        # The aim leads to a program that was compiled already: the search has converged.
        if any(tried.same_as(each.tried) for each in known):
            break
        known.append(CompiledProgram(tried, compiled(tried.module)))
    fitting = [each for each in known if each.run.fits(safe)]
    if fitting:
        return min(fitting, key=lambda each: each.run.ns)
    return min(known, key=lambda each: (math.isinf(each.run.ns), each.run.peak_bytes))
