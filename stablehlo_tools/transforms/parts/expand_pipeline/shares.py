"""Which results of a pipeline are divided over its ranks, for what comes behind it.

A pipeline leaves its results whole on every rank, and unless something says otherwise a partitioner
lets each rank compute all of what comes behind: the head over the vocabulary, and its backward. So
the samples of a result that is multiplied behind the pipeline are divided over the ranks besides
the axes that divide the batch already. These stay the slowest, so that nothing is sent for it.

Weights behind the pipeline that its axis divides already divide that work by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.dataflow import Body, Node
from stablehlo_tools.analysis.dimension_propagation.tilings import CONTRACTIONS
from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import MeshAxes, ValueShardings, axis_text
from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.expand_pipeline.expansion_plan import Plan
from stablehlo_tools.transforms.parts.expand_pipeline.layer_phase import Phase


class Shares:
    """The shardings of what the pipelines of a plan give."""

    def __init__(self, plan: Plan) -> None:
        self._axis = plan.axis
        self._axes = MeshAxes(plan.axis.mesh)
        self._shardings = ValueShardings(self._axes, plan.axis.mesh_name)
        self._dims = plan.cut.trial.dims
        self._makers = {number: node for node in self._dims.graph.nodes for number in node.results}
        self._batch = self._axes_of_batch(plan)

    def of(self, phase: Phase, carry: int) -> ir.Attribute | None:
        """The sharding of a result of a layer loop that is divided; None where it is left alone."""
        number = phase.node.results[carry]
        value, layout = self._dims.graph.values[number], self._dims.tilings.get(number)
        if layout is None or not self._is_multiplied(phase.node, number):
            return None
        shape = ir.RankedTensorType(value.type).shape
        if shape[layout.dim] % self._axes.size(self._batch):
            return None
        dims = ["{?}"] * len(shape)
        dims[layout.dim] = "{" + ", ".join([*map(axis_text, self._batch), "?"]) + "}"
        text = f"#sdy.sharding<@{self._axis.mesh_name}, [{', '.join(dims)}]>"
        return ir.Attribute.parse(text, value.type.context)

    def _axes_of_batch(self, plan: Plan) -> tuple[AxisRef, ...]:
        """The axes that divide the samples of an argument, and that of the ranks, the fastest."""
        graph, rank = self._dims.graph, AxisRef(self._axis.name)
        of_arguments = (
            self._shardings.of(graph.values[number])[layout.dim]
            for number, layout in plan.cut.trial.seeds.items()
        )
        others = ([axis for axis in axes if axis.name != rank.name] for axes in of_arguments)
        return (*max(others, key=len, default=[]), rank)

    def _is_multiplied(self, loop: Node, result: int) -> bool:
        """Whether products of a result's samples stand behind a loop, in its block, and none of
        them is of something that the ranks have divided."""
        tilings = self._dims.tilings
        samples, found = {result}, False
        for node in self._block_of(loop).nodes:
            if node.bodies or samples.isdisjoint(node.operands):
                continue
            samples.update(number for number in node.results if number in tilings)
            if node.name in CONTRACTIONS:
                found = True
                others = [number for number in node.operands if number not in tilings]
                if self._rest_on_divided(others):
                    return False
        return found

    def _block_of(self, loop: Node) -> Body:
        bodies = [self._dims.graph.root]
        for body in bodies:  # which grows
            if loop in body.nodes:
                return body
            bodies += [inner for node in body.nodes for inner in node.bodies]
        raise AssertionError("a loop stands in a block")

    def _rest_on_divided(self, numbers: Sequence[int]) -> bool:
        """Whether values are made of something that the axis of the ranks divides."""
        pending, seen = list(numbers), set(numbers)
        while pending:
            number = pending.pop()
            stated = self._shardings.of(self._dims.graph.values[number])
            if any(axis.name == self._axis.name for axes in stated for axis in axes):
                return True
            maker = self._makers.get(number)
            new = () if maker is None else {*maker.inputs} - seen
            seen.update(new)
            pending += new
        return False
