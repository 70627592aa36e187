"""How long the ops of a microbatch take, by the kernels that compilers make of them: what stages
are balanced by, and what schedules are timed by later."""

from __future__ import annotations

from stablehlo_tools.analysis.tasks.graph import TracedGraph, traced_task_graph
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.mpmd.staging.step import Step
from stablehlo_tools.overlap.task_graph import TaskGraph


def kernel_times(module: ir.Module, step: Step, clock: Clock) -> dict[int, float]:
    """Nanoseconds of each node of the body of the loop over microbatches, by index.

    A kernel of several ops counts at the last of them, where its result is read; a loop with all of
    its iterations. Raises ToolError.
    """
    whole = traced_task_graph(module, clock, "expand-mpmd")
    key = key_of(step.loop.op)
    loop = next(task for task, ops in enumerate(whole.ops) if key in map(key_of, ops))
    return _by_node(whole.bodies[loop], step)


def total_ns(graph: TaskGraph) -> float:
    """The time of all tasks, one after the other; of loops, of all iterations."""
    return sum(
        task.ns if task.loop is None else total_ns(task.loop.body) * (task.loop.trips or 1)
        for task in graph.tasks
    )


def _by_node(body: TracedGraph, step: Step) -> dict[int, float]:
    index_of = {key_of(node.op): node.index for node in step.flow.nodes}
    found: dict[int, float] = {}
    for number, (task, ops) in enumerate(zip(body.graph.tasks, body.ops, strict=True)):
        ns = task.ns
        if task.loop is not None:
            ns = total_ns(body.bodies[number].graph) * (task.loop.trips or 1)
        places = [index_of[key_of(op)] for op in ops if key_of(op) in index_of]
        if places:
            found[max(places)] = found.get(max(places), 0.0) + ns
    return found
