"""Writes a plan: a loop over the ticks of a schedule in the place of each pipeline's loops.

A layer loop by itself becomes one loop over ticks (`_write_loop`). For 1F1B, forward loops,
backward loops and what stands between them become one (`training_writer`). Both write a manual
computation over the axis of the ranks, from whose results the values behind the loops are made
(`Results`).
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.collectives import next_channel
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.values import has_uses
from stablehlo_tools.ir.while_loop import CountedLoop
from stablehlo_tools.schedules.lockstep import Direction
from stablehlo_tools.transforms.parts.expand_pipeline.expansion_plan import Pipelined, Plan
from stablehlo_tools.transforms.parts.expand_pipeline.layer_phase import Phase
from stablehlo_tools.transforms.parts.expand_pipeline.region import Region
from stablehlo_tools.transforms.parts.expand_pipeline.results import Results, Shares
from stablehlo_tools.transforms.parts.expand_pipeline.slots import Ring, Sent
from stablehlo_tools.transforms.parts.expand_pipeline.stack_orders import StackOrder, put_in_order
from stablehlo_tools.transforms.parts.expand_pipeline.stacks import Stacks
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import (
    EmitContext,
    Given,
    PhaseWriter,
    State,
    mean_runs,
)
from stablehlo_tools.transforms.parts.expand_pipeline.training_writer import TrainingWriter


class PlanWriter:
    """Puts the pipelines of a plan into its module.

    `exchanges` are the permutes that put stacks into another order.
    """

    def __init__(self, module: ir.Module, plan: Plan, orders: Sequence[StackOrder] = ()) -> None:
        self._module = module
        self._plan = plan
        self._orders = {order.chunks.trips: order for order in orders}
        self._channel = next_channel(module) - 1
        self._stacks: dict[int, Stacks] = {}
        self._shares = Shares(plan)
        self.exchanges: list[ir.Operation] = []

    def run(self) -> None:
        """Rewrites the module; the plan's loops are gone afterwards."""
        if self._orders:
            graph = self._plan.cut.trial.dims.graph
            put_in_order(self._module, graph, self._plan.axis, tuple(self._orders.values()))
        for each in self._plan.pipelines:
            self._write(each)
        for stacks in self._stacks.values():
            permutes = stacks.finish(self._channel)
            self._channel += len(permutes)
            self.exchanges += permutes

    def _write(self, each: Pipelined) -> None:
        work, plan = each.work, self._plan
        region = Region(plan.axis, each.last.loop.op, self._channel)
        contexts: list[EmitContext] = []
        for chunks in each.chunks:
            # One for all loops over as many layers, so that what one leaves another takes as it is.
            trips = chunks.trips
            if trips not in self._stacks:
                ordered = self._orders[trips].rows if trips in self._orders else frozenset[int]()
                self._stacks[trips] = Stacks(plan.axis, chunks, plan.microbatches, ordered)
            stacks = self._stacks[trips]
            contexts.append(EmitContext(chunks, stacks, plan.options.skip, plan.axis.name))
        if isinstance(work, Phase):
            direction = each.schedule.directions[0]
            _write_loop(work, direction, region, contexts[0], self._shares)
        else:
            TrainingWriter(work, each.schedule, region, contexts, each.head).write()
        self._channel = region.channel


def _write_loop(
    phase: Phase, direction: Direction, region: Region, context: EmitContext, shares: Shares
) -> None:
    """Replaces the layer loop by a loop over the ticks of a schedule of one direction."""
    finals = [c for c in phase.flows if has_uses(phase.loop.op.results[c])]
    (trips,) = mean_runs([direction], [context.chunks], [False])
    writer = PhaseWriter(phase, direction, region, context, finals, trips)
    writer.bring_stacks()
    ring = Ring(region, direction.slots, -1 if phase.loop.reverse else 1, [writer.load])
    received, state = ring.initial(), writer.initial()
    ticks = region.end.i32(writer.ticks)
    loop = CountedLoop(region.end, ticks, [*received, *state.flat()])
    build, row = loop.inside, writer.row(loop.inside, loop.counter)
    received, state = _apart(state, loop.arguments)
    numbers = phase.node.results

    def arrived(at: Builder, carry: int) -> ir.Value:
        return ring.taken(at, received, 0, numbers[carry], row.source)

    state, out = writer.run(build, row, state, Given(arrived))
    behind = {numbers[carry]: value for carry, value in out.items()}
    after = ring.hand_on(build, received, [Sent(row.runs, 0, behind)], row.delivery)
    _, state = _apart(state, loop.close([*after, *state.flat()]))
    results = Results(phase, region, context, shares)
    inside = results.inside(state)
    outer = region.close(inside)
    results.stand_in(Builder(ir.InsertionPoint(phase.loop.op), phase.loop.op.location), outer)
    phase.loop.op.erase()


def _apart(state: State, values: Sequence[ir.Value]) -> tuple[list[ir.Value], State]:
    """What was received, and the state."""
    received = len(values) - len(state.flat())
    return list(values[:received]), state.like(values[received:])
