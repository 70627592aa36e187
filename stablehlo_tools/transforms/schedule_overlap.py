"""Orders a program's collectives and compute so that one hides the other, within memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.tasks.graph import TracedGraph, traced_task_graph
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.overlap.scheduling.forward import Moments
from stablehlo_tools.overlap.scheduling.problem import problem_of
from stablehlo_tools.overlap.scheduling.scheduler import Limits, schedule
from stablehlo_tools.overlap.scheduling.timing import time_order
from stablehlo_tools.passes import Pass
from stablehlo_tools.transforms.bucketing.placement import Effects
from stablehlo_tools.transforms.overlapping.anchors import find_anchors
from stablehlo_tools.transforms.overlapping.block_plan import plan_block
from stablehlo_tools.transforms.overlapping.fences import Flight, plan_fences
from stablehlo_tools.transforms.overlapping.moves import moved_pairs
from stablehlo_tools.transforms.overlapping.writing import write_fences, write_order

_GIB = 2**30


@dataclass(frozen=True)
class ScheduleOverlapPass(Pass):
    """x"""

    name: ClassVar[str] = "schedule-overlap"
    hardware: str = "h100"
    memory_limit: float = 0.0
    streams: int = 1
    no_compute_reorder: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        inline_all_calls(module)
        devices = ModuleFacts.of(module).grid.size
        hw = load_hardware(self.hardware)
        clock = Clock(hw, devices)
        object.__setattr__(self, '_rate', hw.memory_bandwidth*hw.memory_efficiency)
        traced = traced_task_graph(module, clock, "x")
        effects = Effects(functions_by_name(module))
        self._body(traced, effects, in_loop=False)

    def _body(self, traced: TracedGraph, effects: Effects, *, in_loop: bool) -> None:
        for body in traced.bodies.values():
            self._body(body, effects, in_loop=True)
        graph = traced.graph
        problem = problem_of(graph, in_loop=in_loop)
        from stablehlo_tools.overlap.scheduling.reserve import Plan

        plain = plan_block(traced, range(problem.size), effects)
        if plain is None:
            return
        zero = [0.0] * problem.size
        can = find_anchors(plain, range(problem.size), zero, problem.ns, self._rate)
        moments = Moments(
            before=frozenset(a.task for a in can if a.operands),
            behind=frozenset(a.task for a in can if not a.operands),
        )
        own = Plan(problem, range(problem.size)).peak
        limits = Limits(
            memory=own + _GIB,
            at_once=self.streams or None,
            buckets=False,
            moments=moments,
            reorder_compute=not self.no_compute_reorder,
        )
        found = schedule(graph, limits, in_loop=in_loop)
        plan = plan_block(traced, found.order, effects)
        if plan is None:
            return
        timing = time_order(problem, found.order, ())
        anchors = find_anchors(plan, found.order, timing.begin, problem.ns, self._rate)
        flights = [
            Flight(op, timing.begin[task], problem.ns[task])
            for task in found.order
            if graph.tasks[task].communication is not None
            for op in plan.ops[task]
        ]
        import os
        moved = moved_pairs(plan, anchors) if not os.environ.get("NOLINK") else []
        fences = plan_fences(plan, anchors, flights, moved, one_slot=self.streams == 1)
        write_order(plan)
        n = write_fences(plan, fences, anchors)
        print(in_loop, len(graph.tasks), "own %.1f -> %.1f floor %.1f" % (found.before_ns/1e6, found.total_ns/1e6, found.floor_ns/1e6), "anchors", len(anchors), "fences", n, "flights", len(flights), 'begins',sum(len(f.begins) for f in fences),'awaits',sum(len(f.awaits) for f in fences), "moved", len(moved))
