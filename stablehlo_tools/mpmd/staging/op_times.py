"""Estimates the times of ops: of each separately, and of the kernels that compilers make of
them."""

from __future__ import annotations

from collections.abc import Callable

from stablehlo_tools.analysis.collectives import Collective, classify_communication
from stablehlo_tools.analysis.loops import constant_trips
from stablehlo_tools.analysis.tasks.graph import traced_task_graph
from stablehlo_tools.analysis.tasks.op_work import bytes_of, op_work, short_name
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.kernels import KernelWork, WorkKind, kernel_ns
from stablehlo_tools.dialect.names import CASE, IF, WHILE
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.mpmd.staging.step import TrainingStep
from stablehlo_tools.overlap.task_graph import TaskGraph

_ENTERED = frozenset({WHILE, IF, CASE})
_PRODUCTS = frozenset({WorkKind.MATMUL, WorkKind.CONVOLUTION})


class Weigher:
    """Estimates the time of ops on one device."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._classify: Callable[[ir.Operation], Collective | None] | None = None

    def ns(self, op: ir.Operation) -> float:
        """Returns the nanoseconds of an op.

        A loop counts with all its iterations, a branch with the longest alternative.
        """
        if op.name in _ENTERED:
            trips = constant_trips(op) if op.name == WHILE else None
            bodies = [list(region.blocks[0].operations)[:-1] for region in op.regions]
            longest = max(sum(self.ns(view.operation) for view in body) for body in bodies)
            return longest * (1 if trips is None else trips)
        written = sum(bytes_of(result) for result in op.results)
        if self._classify is None:
            self._classify = classify_communication(op.context)
        if self._classify(op) is not None:  # its region only combines two numbers
            return written / self.hardware.memory_rate
        work = op_work(op, short_name(op))
        if work.known is not None and work.known.flops:
            return kernel_ns(work.known, self.hardware)
        if work.kind in _PRODUCTS and work.matmul is not None:
            return kernel_ns(
                KernelWork(work.kind, written, work.vector_flops, (work.matmul,), work.dtype),
                self.hardware,
            )
        return max(
            written / self.hardware.memory_rate, work.vector_flops / self.hardware.vector_flops
        )


def kernel_times(module: ir.Module, step: TrainingStep, clock: Clock) -> dict[int, float]:
    """Returns the nanoseconds of each node of the body of the loop over microbatches, by index.

    A kernel of several ops counts at the last of them, whose result is read. A loop counts with all
    its iterations. Raises ToolError.
    """
    whole = traced_task_graph(module, clock, "expand-mpmd")
    key = key_of(step.loop.op)
    loop = next(task for task, ops in enumerate(whole.ops) if key in map(key_of, ops))
    body = whole.bodies[loop]
    index_of = {key_of(node.op): node.index for node in step.flow.nodes}
    times: dict[int, float] = {}
    for number, (task, ops) in enumerate(zip(body.graph.tasks, body.ops, strict=True)):
        ns = task.ns
        if task.loop is not None:
            ns = total_ns(body.bodies[number].graph) * (task.loop.trips or 1)
        places = [index_of[key_of(op)] for op in ops if key_of(op) in index_of]
        if places:
            times[max(places)] = times.get(max(places), 0.0) + ns
    return times


def total_ns(graph: TaskGraph) -> float:
    """Returns the nanoseconds of all tasks in sequence. A loop counts with all its iterations."""
    return sum(
        task.ns if task.loop is None else total_ns(task.loop.body) * (task.loop.trips or 1)
        for task in graph.tasks
    )
