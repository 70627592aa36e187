"""A schedule for the ops of one block: planned for what a compiler can be held to.

A task of the schedule stands for ops of the block, or of regions inside ops of it: then for the
op of the block around them. Ops that no task stands for (constants, what each reader makes anew,
what nobody uses) come right before the first op that needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.tasks.graph import TracedGraph
from stablehlo_tools.bindings import ir
from stablehlo_tools.overlap.scheduling.forward import Moments
from stablehlo_tools.overlap.scheduling.problem import Problem, problem_of
from stablehlo_tools.overlap.scheduling.scheduler import Limits, Schedule, schedule
from stablehlo_tools.overlap.scheduling.timing import time_order
from stablehlo_tools.transforms.parts.schedule_overlap.fences import (
    Anchor,
    BlockPlan,
    Fence,
    Flight,
    find_anchors,
    plan_block,
    plan_fences,
    unordered_neighbours,
)

_END = 0.05  # of the longest chain: what so little hangs on may end last


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a plan may use: bytes more than the block's own order needs, how many transfers at a
    time (0: no limit), whether compute may be reordered, and the bytes a ns that memory moves."""

    headroom: float
    streams: int
    reorder_compute: bool
    copy_rate: float


@dataclass(frozen=True, slots=True)
class ScheduledBlock:
    """A block with its schedule, the order of its ops, and the fences that hold it."""

    plan: BlockPlan
    schedule: Schedule
    anchors: Sequence[Anchor]
    fences: Sequence[Fence]

    @property
    def location(self) -> ir.Location:
        """Of the op that the block is part of."""
        owner = self.plan.block.owner
        return owner.operation.location

    @property
    def holds(self) -> bool:
        """Whether a collective begins at a fence."""
        return any(fence.begins for fence in self.fences)

    @property
    def closed(self) -> float:
        """The share that it hides of what the program's own order takes above the floor."""
        before, floor = self.schedule.before_ns, self.schedule.floor_ns
        return (before - self.schedule.total_ns) / (before - floor) if before > floor else 0.0


def schedule_block(
    traced: TracedGraph, effects: Effects, limits: PlanLimits, own_peak: float, *, in_loop: bool
) -> ScheduledBlock | None:
    """The schedule of a block with collectives; None where there are none.

    `own_peak` is what its own order needs, in bytes. Raises ToolError for a memory limit that no
    order meets.
    """
    graph = traced.graph
    if not any(task.communication is not None for task in graph.tasks):
        return None
    problem = problem_of(graph, in_loop=in_loop, keep_compute=not limits.reorder_compute)
    own = range(problem.size)
    before = plan_block(traced, own, effects)
    if before is None:
        return None
    possible = find_anchors(before, own, [0.0] * problem.size, problem.ns, limits.copy_rate)
    of_graph = Limits(
        memory=own_peak + limits.headroom,
        at_once=limits.streams or None,
        buckets=False,
        reorder_compute=limits.reorder_compute,
        moments=Moments(
            before=frozenset(anchor.task for anchor in possible if anchor.operands),
            behind=frozenset(anchor.task for anchor in possible if not anchor.operands),
        ),
    )
    new_schedule = schedule(graph, of_graph, in_loop=in_loop)
    plan = plan_block(traced, new_schedule.order, effects)
    assert plan is not None, "the same tasks stand in the same block"
    begin = time_order(problem, new_schedule.order, ()).begin
    anchors = find_anchors(plan, new_schedule.order, begin, problem.ns, limits.copy_rate)
    fences = plan_fences(
        plan,
        anchors,
        _flights(traced, plan, new_schedule.order, begin, problem, in_loop=in_loop),
        unordered_neighbours(plan, anchors),
        one_slot=limits.streams == 1,
    )
    return ScheduledBlock(plan, new_schedule, anchors, fences)


def _flights(
    traced: TracedGraph,
    plan: BlockPlan,
    order: Sequence[int],
    begin: Sequence[float],
    problem: Problem,
    *,
    in_loop: bool,
) -> list[Flight]:
    """The collectives of a block that something hangs on, in issue order.

    The others, gradients that are summed at the end, XLA combines and puts where there is room.
    """
    behind = [0.0] * problem.size
    for task in reversed(range(problem.size)):
        after = (behind[user] + problem.ns[user] for user in problem.users[task])
        behind[task] = max(after, default=0.0)
    longest = max((ns + rest for ns, rest in zip(problem.ns, behind, strict=True)), default=0.0)
    return [
        Flight(op, begin[task], problem.ns[task], fixed=op not in traced.ops[task])
        for task in order
        if traced.graph.tasks[task].communication is not None
        and (in_loop or behind[task] >= _END * longest)
        for op in plan.ops[task]
    ]
