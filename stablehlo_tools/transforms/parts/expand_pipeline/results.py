"""What stands for the results of a layer loop that became a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, constrained, element_of, shape_of
from stablehlo_tools.ir.values import has_uses, splat_of
from stablehlo_tools.transforms.parts.expand_pipeline.expansion_plan import RANK_DIMENSION
from stablehlo_tools.transforms.parts.expand_pipeline.layer_phase import Phase
from stablehlo_tools.transforms.parts.expand_pipeline.region import Region
from stablehlo_tools.transforms.parts.expand_pipeline.shares import Shares
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import EmitContext, State


class Results:
    """What stands for the results of a layer loop."""

    def __init__(
        self, phase: Phase, region: Region, context: EmitContext, shares: Shares | None = None
    ) -> None:
        self._phase = phase
        self._shares = shares
        self._region = region
        self._context = context
        self._order: list[tuple[str, int]] = []

    def inside(self, state: State) -> list[tuple[ir.Value, int | None]]:
        """The results of the region, from the state behind the last tick."""
        build, results = self._region.end, list[tuple[ir.Value, int | None]]()
        for carry, whole in state.finals.items():
            self._order.append(("flow", carry))
            results.append((self._region.total(build, whole), None))
        for carry, total in state.sums.items():
            self._order.append(("sum", carry))
            results.append((self._region.total(build, total), None))
        for carry, store in state.stores.items():
            self._order.append(("stack", carry))
            shape = shape_of(store)
            shape.insert(RANK_DIMENSION, 1)
            results.append((build.reshape(store, shape), RANK_DIMENSION))
        return results

    def stand_in(self, build: Builder, outer: Sequence[ir.Value]) -> None:
        """Lets the results of the region take the place of the loop's."""
        op, loop = self._phase.loop.op, self._phase.loop
        for carry in (*loop.constants, *loop.reads):
            if carry not in loop.writes:
                self._stand_for(carry, op.operands[carry])
        for carry, step in loop.counters.items():
            if has_uses(op.results[carry]):
                start = op.operands[carry]
                moved = build.splat_like(step * loop.trips, start)
                self._stand_for(carry, build.same("add", start, moved))
        for (kind, carry), result in zip(self._order, outer, strict=True):
            value = result
            before = op.operands[carry]
            if kind == "flow":
                value = build.reshape(value, shape_of(before))
                value = self._divided(carry, build.convert(value, element_of(before)), build)
            elif kind == "sum":
                value = build.convert(value, element_of(before))
                if splat_of(before) != 0:
                    value = build.same("add", before, value)
            else:
                rows = loop.writes[carry]
                layout = self._phase.dims.tilings.get(self._phase.body.arguments[carry])
                value = self._context.stacks.gathered(
                    build, build.convert(value, element_of(before)), rows, layout, before
                )
            self._stand_for(carry, value)

    def _divided(self, carry: int, value: ir.Value, build: Builder) -> ir.Value:
        """What a pipeline gives, as it is divided for what comes behind."""
        share = None if self._shares is None else self._shares.of(self._phase, carry)
        if share is None:
            return value
        for op, sharding in share.behind.items():
            op.attributes["sharding"] = sharding
        return constrained(value, share.sharding, build.point, self._phase.loop.op.location)

    def _stand_for(self, carry: int, value: ir.Value) -> None:
        op, graph = self._phase.loop.op, self._phase.dims.graph
        op.results[carry].replace_all_uses_with(value)
        graph.values[self._phase.node.results[carry]] = value
