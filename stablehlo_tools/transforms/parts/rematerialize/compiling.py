"""The fastest program within a limit by what a compiler says of it, not by what is expected.

What is expected of the memory is off by a factor that differs less between the forms of one program
than between programs. So each program that is compiled says for which expected memory the next one
has to be chosen; where that leads nowhere, what is known to fit and what is known not to are closed
in on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from stablehlo_tools.artifacts.artifact import Artifact, Form
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.memory import memory_profile
from stablehlo_tools.overlap.simulator import simulate
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.compilation import bytes_refused, compile_artifact
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph
from stablehlo_tools.transforms.parts.rematerialize.choosing import Tried

_MOST = 6  # programs that are compiled
_APART = 1.02  # expected memory that fits and that does not, nearer than which nothing is tried


@dataclass(frozen=True)
class Run:
    """What a compiler makes of a program: ns of its schedule with contention, infinite where it
    refuses the program for lack of memory, and the bytes that a device has to have."""

    ns: float
    peak_bytes: float

    def fits(self, limit: float) -> bool:
        """Whether the compiler takes it, and it needs no more than a number of bytes."""
        return self.peak_bytes <= limit and math.isfinite(self.ns)


@dataclass(frozen=True)
class Compiled:
    """A program that was chosen, and what the compiler makes of it."""

    tried: Tried
    run: Run

    @property
    def scale(self) -> float:
        """The compiler's memory to the expected one."""
        return self.run.peak_bytes / max(self.tried.peak_bytes, 1.0)


def compiled_run(module: ir.Module, target: Target, hardware: Hardware) -> Run:
    """Compiles a program. Raises ToolError where the compiler refuses it, but for its memory."""
    artifact = Artifact("the program", Form.BYTECODE, module)
    try:
        compiled = compile_artifact(artifact, target, hardware=hardware)
    except ToolError as error:
        needed = bytes_refused(error)
        if needed is None:
            raise
        return Run(math.inf, needed)
    graph = hlo_task_graph(compiled.text, hardware, compiled.topology.devices)
    needed = max(memory_profile(graph).peak_bytes, compiled.memory.total_bytes)
    return Run(simulate(graph, contended=True).total_ns, needed)


def fastest_compiled(
    base: Tried,
    fastest: Callable[[float], Tried],
    compiled: Callable[[ir.Module], Run],
    safe: float,
) -> Compiled:
    """The fastest of the programs that were compiled of which at most `safe` bytes are alive, the
    one that needs least where there is none.

    `base` is the program as it is, `fastest` what is chosen for a limit on what is expected,
    `compiled` asks the compiler.
    """
    known = [Compiled(base, compiled(base.module))]
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
        if any(tried.same_as(each.tried) for each in known):
            break
        known.append(Compiled(tried, compiled(tried.module)))
    fitting = [each for each in known if each.run.fits(safe)]
    if fitting:
        return min(fitting, key=lambda each: each.run.ns)
    return min(known, key=lambda each: (math.isinf(each.run.ns), each.run.peak_bytes))
