"""What a compiler's schedule says of the loops of a program: times, bare gathers and memory.

Not a command: `loops.py` prints what is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.overlap.bounds import iterations
from stablehlo_tools.overlap.task_graph import Task, TaskGraph, TaskKind
from stablehlo_tools.overlap.task_simulator import GraphRun, simulate
from stablehlo_tools.targets.compilation import Memory, compile_artifact
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

SOMETHING = 20_000.0  # ns of compute between start and done: less hides nothing
TIMEOUT = 1800.0  # seconds, of one compilation
_GATHER = "all_gather"
_MIB = 2.0**20


@dataclass(frozen=True)
class Exposure:
    """A collective that is not hidden: the ns that the device waits for it in a whole run."""

    kind: str
    place: str
    bytes: float
    ns: float
    count: int
    in_loop: bool
    bare: bool  # hardly any compute between its start and its done

    def __str__(self) -> str:
        where = "in a loop" if self.in_loop else "outside loops"
        alone = ", nothing beside it" if self.bare else ""
        return (
            f"{self.ns / 1e6:.2f} ms {self.kind} of {self.bytes / _MIB:.1f} MiB, "
            f"{self.count} times {where}{alone}: {self.place}"
        )


@dataclass(frozen=True)
class Compiled:
    """What a compiled program takes; times in ns, memory in bytes on each device."""

    peak: float
    total: float | None = None  # None where schedules say nothing of times
    compute: float = 0.0
    exposed: float = 0.0
    exposed_in_loops: float = 0.0
    gathers: int = 0  # all_gathers in loop bodies
    bare: int = 0  # of them, those with nothing between start and done
    waits: tuple[Exposure, ...] = ()


def compiled(program: Artifact, target: str, hardware: str | None) -> Compiled:
    """What a compiler makes of a program; without a hardware profile, only its memory.

    Raises ToolError as `compile_artifact` does.
    """
    made = compile_artifact(program, target, TIMEOUT)
    peak = _peak(made.memory)
    if hardware is None:
        return Compiled(peak)
    graph = hlo_task_graph(made.text, load_hardware(hardware), made.topology.devices)
    simulation = simulate(graph)
    waits = list(_waits(simulation.run, in_loop=False))
    gathers = [alone for body in _bodies(graph) for alone in _gathers(body)]
    return Compiled(
        peak,
        simulation.total_ns,
        simulation.compute_ns,
        simulation.exposed_ns,
        sum(wait.ns for wait in waits if wait.in_loop),
        len(gathers),
        sum(gathers),
        tuple(sorted(waits, key=lambda wait: -wait.ns)),
    )


def _peak(memory: Memory) -> float:
    """As the compiler counts it, or else all that it keeps."""
    return memory.peak_bytes or memory.total_bytes


def _bodies(graph: TaskGraph) -> Iterator[TaskGraph]:
    bodies = graph.walk()
    next(bodies)
    return bodies


def _gathers(body: TaskGraph) -> Iterator[bool]:
    """For each gather of a loop's body, whether nothing stands between its start and its done."""
    for task in body.tasks:
        if _is_gather(task):
            yield _between(body, task) < SOMETHING


def _is_gather(task: Task) -> bool:
    is_start = task.kind is TaskKind.COLLECTIVE_START
    return is_start and task.communication is not None and task.communication.kind == _GATHER


def _between(body: TaskGraph, start: Task) -> float:
    """The ns of compute from a start to its wait, which may stand in the next iteration."""
    wait = next((task.id for task in body.tasks if task.start == start.id), None)
    if wait is None:
        return float("inf")
    if wait > start.id:
        return sum(map(_compute, body.tasks[start.id + 1 : wait]))
    return sum(map(_compute, [*body.tasks[start.id + 1 :], *body.tasks[:wait]]))


def _compute(task: Task) -> float:
    if task.loop is not None:
        return iterations(task.loop) * sum(map(_compute, task.loop.body.tasks))
    return task.ns if task.kind is TaskKind.COMPUTE else 0.0


def _waits(run: GraphRun, *, in_loop: bool, times: int = 1) -> Iterator[Exposure]:
    """The collectives of a run that the device waits for, those of loops put together."""
    for flight in run.all_flights():
        start = run.graph.tasks[flight.starts[0]]
        if flight.exposed > 0 and start.communication is not None:
            yield Exposure(
                start.communication.kind,
                start.place or start.name,
                start.communication.bytes,
                flight.exposed * times,
                times,
                in_loop,
                _between(run.graph, start) < SOMETHING,
            )
    for loop in run.loops.values():
        found: dict[tuple[str, str, float, bool], list[Exposure]] = {}
        for iteration, weight in loop.weighted_iterations():
            for wait in _waits(iteration, in_loop=True, times=times * weight):
                found.setdefault((wait.kind, wait.place, wait.bytes, wait.bare), []).append(wait)
        for alike in found.values():
            yield Exposure(
                alike[0].kind,
                alike[0].place,
                alike[0].bytes,
                sum(wait.ns for wait in alike),
                sum(wait.count for wait in alike),
                True,
                alike[0].bare,
            )
