"""The values that replace the results of a layer loop, and their division over the ranks.

A pipeline returns its results whole on every rank. Without further sharding, a partitioner makes
each rank compute all of the ops after it: the head over the vocabulary, and its backward. So if a
result is multiplied after the pipeline, its samples are divided over the ranks, besides the axes
that divide the batch already. These axes stay the major ones, so that dividing sends nothing.

Constraints of the program on these samples after the pipeline then get the axis, too. Otherwise the
samples would be gathered again. Weights after the pipeline that its axis divides already divide
that work without this.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.dataflow import Node, dependences, solve
from stablehlo_tools.analysis.dimension_propagation.tilings import CONTRACTIONS
from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import (
    MeshAxes,
    ValueShardings,
    dimension_axes,
    open_dims,
    sharding_axes,
    tensor_sharding,
    with_axis,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import SHARDING_CONSTRAINT
from stablehlo_tools.ir.builder import Builder, constrain_sharding, element_of, shape_of
from stablehlo_tools.ir.values import has_uses, splat_of
from stablehlo_tools.transforms.parts.expand_pipeline.expansion_plan import (
    RANK_DIMENSION,
    ExpansionPlan,
    body_with,
)
from stablehlo_tools.transforms.parts.expand_pipeline.layer_phase import LayerPhase
from stablehlo_tools.transforms.parts.expand_pipeline.region import RankRegion
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import EmitContext, TickState


class Shares:
    """Divides the results of a plan's pipelines over the ranks."""

    def __init__(self, plan: ExpansionPlan) -> None:
        self._axis = plan.axis
        self._axes = MeshAxes(plan.axis.mesh)
        self._shardings = ValueShardings(self._axes, plan.axis.mesh_name)
        self._dims = plan.cut.trial.dims
        self._batch = self._axes_of_batch(plan)

    def divide(self, phase: LayerPhase, carry: int, value: ir.Value, build: Builder) -> ir.Value:
        """Returns `value`, which replaces a result of a layer loop, with a constraint that divides
        it over the ranks; unchanged if it should not be divided."""
        number = phase.node.results[carry]
        shape, layout = shape_of(value), self._dims.tilings.get(number)
        if layout is None or shape[layout.dim] % self._axes.size(self._batch):
            return value
        behind = self._stated_behind(phase.node, number)
        if behind is None:
            return value
        for op, sharding in behind.items():
            op.attributes["sharding"] = sharding
        dims = open_dims(len(shape), layout.dim, self._batch)
        sharding = tensor_sharding(self._axis.mesh_name, dims, value.type.context)
        return constrain_sharding(value, sharding, build.point, phase.loop.op.location)

    def _axes_of_batch(self, plan: ExpansionPlan) -> tuple[AxisRef, ...]:
        """Returns the axes that divide the samples of an argument, and that of the ranks as the
        minor one."""
        graph, rank = self._dims.graph, AxisRef(self._axis.name)
        of_arguments = (
            self._shardings.axes_by_dim(graph.values[number])[layout.dim]
            for number, layout in plan.cut.trial.seeds.items()
        )
        others = ([axis for axis in axes if axis.name != rank.name] for axes in of_arguments)
        return (*max(others, key=len, default=[]), rank)

    def _stated_behind(self, loop: Node, result: int) -> dict[ir.Operation, ir.Attribute] | None:
        """Returns the new shardings for constraints on samples after a loop, in its block. Returns
        None in three cases: samples are not multiplied there, a factor is divided over the ranks
        already, or the samples do not divide evenly."""
        tilings = self._dims.tilings
        samples, found = {result}, False
        stated: dict[ir.Operation, ir.Attribute] = {}
        for node in body_with(loop, self._dims.graph).nodes:
            if node.bodies or samples.isdisjoint(node.operands):
                continue
            samples.update(number for number in node.results if number in tilings)
            if node.name in CONTRACTIONS:
                found = True
                others = {number: True for number in node.operands if number not in tilings}
                # No factor may depend on a value that the axis of the ranks divides.
                above = solve(self._dims.graph, others, dependences, backward=True)
                values = (self._dims.graph.values[number] for number in above)
                lists = (axes for value in values for axes in self._shardings.axes_by_dim(value))
                if any(axis.name == self._axis.name for axes in lists for axis in axes):
                    return None
            elif node.name == SHARDING_CONSTRAINT and self._says_less(node):
                dimension = tilings[node.results[0]].dim
                sharding = with_axis(node.op.attributes["sharding"], dimension, self._axis.name)
                size = ir.RankedTensorType(node.op.results[0].type).shape[dimension]
                if size % self._axes.size(self._shardings.read(sharding)[dimension]):
                    return None
                stated[node.op] = sharding
        return stated if found else None

    def _says_less(self, constraint: Node) -> bool:
        """Returns True if a constraint closes the dimension of samples and does not use the ranks'
        axis."""
        layout = self._dims.tilings.get(constraint.results[0])
        sharding = constraint.op.attributes["sharding"]
        mesh, axes = sharding_axes(sharding)
        if layout is None or mesh != self._axis.mesh_name or self._axis.name in axes:
            return False
        _, is_open = dimension_axes(sharding)[layout.dim]
        return not is_open


class LoopResults:
    """Replaces the results of a layer loop."""

    def __init__(
        self,
        phase: LayerPhase,
        region: RankRegion,
        context: EmitContext,
        shares: Shares | None = None,
    ) -> None:
        self._phase = phase
        self._shares = shares
        self._region = region
        self._context = context
        self._order: list[tuple[str, int]] = []

    def inside(self, state: TickState) -> list[tuple[ir.Value, int | None]]:
        """Returns the results of the region, from the state after the last tick."""
        build, results = self._region.end, list[tuple[ir.Value, int | None]]()
        for carry, whole in state.finals.items():
            self._order.append(("flow", carry))
            # Only the last rank has the result; the others hold the identity of addition.
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
        """Replaces the results of the loop by the results of the region."""
        op, loop = self._phase.loop.op, self._phase.loop
        # No iteration changes these, so their results are their operands.
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
                value = build.convert(build.reshape(value, shape_of(before)), element_of(before))
                if self._shares is not None:
                    value = self._shares.divide(self._phase, carry, value, build)
            elif kind == "sum":
                value = build.convert(value, element_of(before))
                # Each rank accumulated from zero: count the initial value of the loop once.
                if splat_of(before) != 0:
                    value = build.same("add", before, value)
            else:
                rows = loop.writes[carry]
                layout = self._phase.dims.tilings.get(self._phase.body.arguments[carry])
                value = self._context.stacks.gather_stack(
                    build, build.convert(value, element_of(before)), rows, layout, before
                )
            self._stand_for(carry, value)

    def _stand_for(self, carry: int, value: ir.Value) -> None:
        op, graph = self._phase.loop.op, self._phase.dims.graph
        op.results[carry].replace_all_uses_with(value)
        graph.values[self._phase.node.results[carry]] = value
