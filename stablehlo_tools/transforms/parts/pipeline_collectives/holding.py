"""Holds XLA:GPU to the plan: writes fences in the loops and a barrier after them.

XLA:GPU issues at once all collectives whose operands are ready, one after the other, and so hides
at most one of them. In the loop's new body a fence lets each begin with the compute that is to hide
it (see `schedule-overlap`). Ops after the loop that do not depend on it could begin before the last
iterations end, because these now run after the loop too. They would need memory meanwhile, so a
barrier holds them back.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.collectives import ModuleFacts, classify_communication
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.tasks.graph import TracedGraph, traced_task_graph
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.dialect.custom_calls import is_future
from stablehlo_tools.ir.builder import barrier
from stablehlo_tools.ir.values import has_uses, in_block_order, key_of, maker_of, producer, stand_in
from stablehlo_tools.ir.walk import functions_by_name
from stablehlo_tools.overlap.scheduling.scheduler import OverlapSchedule
from stablehlo_tools.overlap.task_graph import TaskGraph
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.transforms.parts.schedule_overlap.scheduled_block import (
    PlanLimits,
    schedule_block,
    write_block,
)

_LARGE = 2.0**20  # bytes: smaller collectives need not wait
_LEAST_NS = 10_000.0  # an iteration: fences that save less are not written
_LEAST_CLOSED = 0.85  # of the time that could be hidden: fences that hide less are not written
_HEADROOM = 2.0**28  # bytes by which a body's peak may grow


def hold_loop(module: ir.Module, loop: ir.Operation, hardware: Hardware) -> bool:
    """Orders a loop's body and fences its collectives; returns True if that was worth it."""
    clock = Clock(hardware, ModuleFacts.from_module(module).grid.size)
    traced = _body_of(traced_task_graph(module, clock, ""), loop)
    if traced is None:
        return False
    effects = Effects(functions_by_name(module))
    rate = hardware.memory_rate
    limits = PlanLimits(_HEADROOM, 1, True, rate)
    own = memory_profile(traced.graph, in_loop=True).peak_bytes
    block = schedule_block(traced, effects, limits, own, in_loop=True)
    if block is None or not block.holds:
        return False
    if not is_worth_holding(traced.graph, block.schedule):
        return False
    write_block(block)
    return True


def is_worth_holding(graph: TaskGraph, plan: OverlapSchedule) -> bool:
    """Returns True if a body with fences is faster than XLA:GPU's own schedule.

    The baseline runs one task after the other, because XLA:GPU does so with all but one of the
    collectives whose operands are ready.
    """
    alone = sum(task.ns for task in graph.tasks)
    saved = alone - plan.total_ns
    return saved >= max(_LEAST_NS, _LEAST_CLOSED * (alone - plan.floor_ns))


def keep_back(ends: Sequence[ir.Value]) -> None:
    """Makes large collectives after a pipelined loop wait for its last iterations.

    `ends` are the values that these compute. Collectives that depend on them wait anyway.
    """
    made = [value for value in ends if producer(value) is not None and has_uses(value)]
    made = [value for value in made if not is_future(value)]
    if not made:
        return
    anchor = in_block_order([maker_of(value) for value in made])[-1]
    last = next(value for value in made if maker_of(value) == anchor)
    operands = _waiting(anchor, made)
    if not operands:
        return
    values = [last, *operands]
    held_back = barrier(values, ir.InsertionPoint.after(anchor), anchor.location)
    first, *others = zip(values, held_back.results, strict=True)
    stand_in(*first)
    for value, held in others:
        for use in list(value.uses):
            user = use.owner.operation
            # Earlier readers keep the value: they must not wait for the loop.
            is_behind = user.block == anchor.block and held_back.is_before_in_block(user)
            if is_behind and key_of(user) != key_of(held_back):
                user.operands[use.operand_number] = held


def _waiting(anchor: ir.Operation, made: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns operands of large collectives after `anchor` that do not depend on `made`.

    Only operands that are available at `anchor`.
    """
    classify = classify_communication(anchor.context)
    follows = set(made)
    waiting: dict[ir.Value, None] = {}
    is_behind = False
    for view in anchor.block.operations:
        op = view.operation
        if any(operand in follows for operand in op.operands):
            follows.update(op.results)
        elif is_behind:
            collective = classify(op)
            if collective is not None and (collective.bytes_out or 0) >= _LARGE:
                for value in op.operands:
                    maker = producer(value)
                    is_in_block = maker is not None and maker.block == anchor.block
                    if maker is None or not is_in_block or maker.is_before_in_block(anchor):
                        waiting[value] = None
        is_behind = is_behind or op == anchor
    return list(waiting)


def _body_of(traced: TracedGraph, loop: ir.Operation) -> TracedGraph | None:
    """Returns the task graph of a loop's body, at any depth; None if the loop is not found."""
    for task, body in traced.bodies.items():
        if any(op == loop for op in traced.ops[task]):
            return body
        inner = _body_of(body, loop)
        if inner is not None:
            return inner
    return None
