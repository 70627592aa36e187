"""Puts a pipeline in the place of a layer loop."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.constants import splat_of
from stablehlo_tools.ir.counted_loop import CountedLoop
from stablehlo_tools.ir.values import has_uses
from stablehlo_tools.schedules.lockstep import Direction
from stablehlo_tools.transforms.parts.expand_pipeline.chunks import RANK_DIMENSION
from stablehlo_tools.transforms.parts.expand_pipeline.phases import Phase
from stablehlo_tools.transforms.parts.expand_pipeline.region import Region
from stablehlo_tools.transforms.parts.expand_pipeline.state import How, State
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import PhaseWriter


def write_pipeline(phase: Phase, direction: Direction, region: Region, how: How) -> None:
    """Replaces the layer loop by a loop over the ticks of a schedule of one direction."""
    finals = [c for c in phase.flows if has_uses(phase.loop.op.results[c])]
    writer = PhaseWriter(phase, direction, region, how, finals)
    writer.bring_stacks()
    state = writer.initial()
    loop = CountedLoop(region.end, region.end.i32(writer.ticks), state.flat())
    state = state.like(loop.arguments)
    row = writer.row(loop.inside, loop.counter)
    state, out = writer.run(loop.inside, row, state, {}, {})
    state = writer.hand_on(loop.inside, row, state, out)
    state = state.like(loop.close(state.flat()))
    results = Results(phase, region, how)
    inside = results.inside(state)
    outer = region.close(inside)
    results.stand_in(Builder(ir.InsertionPoint(phase.loop.op), phase.loop.op.location), outer)
    phase.loop.op.erase()


class Results:
    """What stands for the results of a layer loop."""

    def __init__(self, phase: Phase, region: Region, how: How) -> None:
        self._phase = phase
        self._region = region
        self._how = how
        self._order: list[tuple[str, int]] = []

    def inside(self, state: State) -> list[tuple[ir.Value, int | None]]:
        """The results of the region, from the state behind the last tick."""
        build, found = self._region.end, list[tuple[ir.Value, int | None]]()
        for carry, whole in state.finals.items():
            self._order.append(("flow", carry))
            found.append((self._region.total(build, whole), None))
        for carry, total in state.sums.items():
            self._order.append(("sum", carry))
            found.append((self._region.total(build, total), None))
        for carry, store in state.stores.items():
            self._order.append(("stack", carry))
            shape = shape_of(store)
            shape.insert(RANK_DIMENSION, 1)
            found.append((build.reshape(store, shape), RANK_DIMENSION))
        return found

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
                value = build.convert(value, element_of(before))
            elif kind == "sum":
                value = build.convert(value, element_of(before))
                if splat_of(before) != 0:
                    value = build.same("add", before, value)
            else:
                rows = loop.writes[carry]
                layout = self._phase.dims.tilings.get(self._phase.body.arguments[carry])
                value = self._how.stacks.gathered(
                    build, build.convert(value, element_of(before)), rows, layout, before
                )
            self._stand_for(carry, value)

    def _stand_for(self, carry: int, value: ir.Value) -> None:
        op, graph = self._phase.loop.op, self._phase.dims.graph
        op.results[carry].replace_all_uses_with(value)
        graph.values[self._phase.node.results[carry]] = value
