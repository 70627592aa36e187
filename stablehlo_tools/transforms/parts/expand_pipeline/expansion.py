"""Writes what was planned."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.channels import next_channel
from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.expand_pipeline.layouts import StackOrder
from stablehlo_tools.transforms.parts.expand_pipeline.ordering import put_in_order
from stablehlo_tools.transforms.parts.expand_pipeline.phases import Phase
from stablehlo_tools.transforms.parts.expand_pipeline.planning import Pipelined, Plan
from stablehlo_tools.transforms.parts.expand_pipeline.region import Region
from stablehlo_tools.transforms.parts.expand_pipeline.stacks import Stacks
from stablehlo_tools.transforms.parts.expand_pipeline.state import How
from stablehlo_tools.transforms.parts.expand_pipeline.training import write_training
from stablehlo_tools.transforms.parts.expand_pipeline.writing import write_pipeline


class Expansion:
    """Puts the pipelines of a plan into its module.

    `exchanges` are the permutes that put stacks into another order.
    """

    def __init__(self, module: ir.Module, plan: Plan, orders: Sequence[StackOrder] = ()) -> None:
        self._module = module
        self._plan = plan
        self._orders = {order.chunks.trips: order for order in orders}
        self._channel = next_channel(module) - 1
        self._stacks: dict[int, Stacks] = {}
        self.exchanges: list[ir.Operation] = []

    def run(self) -> None:
        """Rewrites the module; the plan's loops are gone afterwards."""
        graph, orders = self._plan.cut.trial.dims.graph, tuple(self._orders.values())
        put_in_order(self._module, graph, self._plan.axis, orders)
        for each in self._plan.pipelines:
            self._write(each)
        for stacks in self._stacks.values():
            found = stacks.finish(self._channel)
            self._channel += len(found)
            self.exchanges += found

    def _write(self, each: Pipelined) -> None:
        work, plan = each.work, self._plan
        anchor = work.loop.op if isinstance(work, Phase) else work.backward.loop.op
        region = Region(plan.axis, anchor, self._channel)
        how = How(each.chunks, self._stacks_for(each), plan.options.skip, plan.axis.name)
        if isinstance(work, Phase):
            write_pipeline(work, each.schedule.directions[0], region, how)
        else:
            write_training(work, each.schedule, region, how)
        self._channel = region.channel

    def _stacks_for(self, each: Pipelined) -> Stacks:
        """One for all loops over as many layers, so that what one leaves another takes as it is."""
        trips = each.chunks.trips
        if trips not in self._stacks:
            ordered = self._orders[trips].rows if trips in self._orders else frozenset[int]()
            axis, parts = self._plan.axis, self._plan.microbatches
            self._stacks[trips] = Stacks(axis, each.chunks, parts, ordered)
        return self._stacks[trips]
