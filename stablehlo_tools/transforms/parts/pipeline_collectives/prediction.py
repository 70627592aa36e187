"""What a program takes, and needs, with some of its loops held to a schedule.

A loop that is to be held takes what its body takes scheduled by itself, with one collective in
flight at a time; all else what it takes in the order in which it is written, for that is nearer to
what XLA:GPU makes of it than any plan. XLA:TPU schedules well: there every loop counts as held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.tasks.graph import TracedGraph, traced_task_graph
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.overlap.bounds import iterations
from stablehlo_tools.overlap.memory import memory_profile
from stablehlo_tools.overlap.scheduling.scheduler import Limits, schedule
from stablehlo_tools.overlap.simulator import simulate
from stablehlo_tools.overlap.task_graph import TaskGraph, TaskKind
from stablehlo_tools.transforms.parts.pipeline_collectives.holding import is_worth_holding

_LIMITS = Limits(at_once=1, buckets=False)


@dataclass(frozen=True)
class Prediction:
    """Time and memory of one run on a device; `holds`: fences are worth it in each loop that is to
    be held."""

    ns: float
    peak_bytes: float
    holds: bool


def predict(module: ir.Module, hardware: Hardware, held: str | None) -> Prediction:
    """Predicts a run; `held` is the attribute of the loops that are held, None if all are.

    Raises ToolError for a program that cannot be timed.
    """
    clock = Clock(hardware, ModuleFacts.of(module).grid.size)
    traced = traced_task_graph(module, clock, "")
    reading = _Reading(held)
    ns = reading.nanoseconds(traced, in_loop=False, scheduled=held is None)
    return Prediction(ns, memory_profile(traced.graph).peak_bytes, reading.holds)


class _Reading:
    """Times a program, inner loops first."""

    def __init__(self, held: str | None) -> None:
        self._held = held
        self.holds = True

    def nanoseconds(self, traced: TracedGraph, *, in_loop: bool, scheduled: bool) -> float:
        """The ns of a graph, each loop a task of what its body takes."""
        tasks = list(traced.graph.tasks)
        for number, body in traced.bodies.items():
            loop = tasks[number].loop
            assert loop is not None, "a task with a body is a loop"
            is_held = any(self._held in op.attributes for op in traced.ops[number] if self._held)
            inside = self.nanoseconds(body, in_loop=True, scheduled=is_held or not self._held)
            ns = iterations(loop) * inside
            tasks[number] = replace(tasks[number], kind=TaskKind.COMPUTE, loop=None, ns=ns)
        flat = TaskGraph(tasks, traced.graph.storages)
        if not scheduled:
            return simulate(flat).total_ns
        plan = schedule(flat, _LIMITS, in_loop=in_loop)
        if self._held and not is_worth_holding(flat, plan):
            self.holds = False
        return plan.total_ns
