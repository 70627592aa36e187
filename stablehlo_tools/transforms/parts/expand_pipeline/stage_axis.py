"""Leaves the axis of the stages out of the manual computations in layers.

`jax.shard_map` over a whole mesh is manual over the axis of the stages, too, although all its
devices compute the same. A rank of a pipeline computes alone, so the axis has to go:

    %y, %r = sdy.manual_computation(%x) in_shardings=[[{"data"}, {}]]
        out_shardings=[[{"data"}, {}], [{"stage", "data"}, {}]] manual_axes={"stage", "data"} {
      %g = "stablehlo.all_reduce"(%h) …          // over "stage", where all have the same
    }                                            // %r : tensor<16x64xf32>, a residual
  ==>
    %y, %r = sdy.manual_computation(%x) … [{"data"}, {}]] manual_axes={"data"} {
      %g = stablehlo.multiply %h, 2
    }                                            // %r : tensor<8x64xf32>

A residual is a value as each device has it: forward and backward pass it on, through the loops
over layers, without looking at it. It is stacked along its first dimension over all manual axes. So
it gets shorter here, and the ops that pass it on are written for the shorter one (`scaling.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, Graph, Propagation
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, OpTiling
from stablehlo_tools.analysis.replica_groups import AxisRef, DeviceMesh, mesh_axes_groups
from stablehlo_tools.analysis.shardings import (
    axes_by_dimension,
    drop_axis,
    manual_axes,
    sharding_axes,
    sharding_per_value,
    tensor_sharding,
)
from stablehlo_tools.bindings import TensorShardingPerValueAttr, ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, PARTITION_ID, WHILE
from stablehlo_tools.ir.builder import Builder, element_of
from stablehlo_tools.ir.carriers import append, append_arguments
from stablehlo_tools.ir.cleanup import erase_unused
from stablehlo_tools.ir.clone import emptied_clone
from stablehlo_tools.ir.views import Function, ManualComputation
from stablehlo_tools.ir.walk import enclosing, entry_function, ops_named, terminator
from stablehlo_tools.transforms.parts.axis_crossings import (
    AcrossAxis,
    CrossingError,
    Crossings,
    MeshAxis,
    Reshapings,
    crossings_of,
)
from stablehlo_tools.transforms.parts.axis_removal import AxisRemoval
from stablehlo_tools.transforms.parts.block_rewriter import BlockRewriter, part_type
from stablehlo_tools.transforms.parts.scaling import NotScaledError, Scaling, untiled_ops


def drop_stage_axis(module: ir.Module, stages: str, asks: str, rule: str) -> None:
    """Leaves the axis `stages` out of the manual computations of a module without calls, in place.

    Computations outside of loops do not change if their devices differ along the axis. Raises a
    located ToolError of the pass `asks`, with its `rule`, if one in a loop differs.
    """
    facts = ModuleFacts.from_module(module)
    block = Function(entry_function(module)).body
    graph = Graph.from_block(block)
    over = [
        node
        for node in graph.nodes
        if node.name == MANUAL_COMPUTATION and stages in manual_axes(node.op)
    ]
    mesh = next((mesh for mesh in facts.meshes.values() if stages in dict(mesh.axes)), None)
    # One that contains the loop over layers stays: it is not in a layer.
    if mesh is None or all(enclosing(node.op, WHILE) is None for node in over):
        return
    axis, known = MeshAxis(stages, mesh), DeviceValues(module, facts)
    bodies: dict[Node, _LayerBody] = {}
    for node in over:
        if (
            f'"{stages}":('
            in f"{node.op.attributes['in_shardings']}{node.op.attributes['out_shardings']}"
        ):
            raise _refusal(asks, stages, rule, node.op, "it divides a value by a part of the axis")
        try:
            bodies[node] = _LayerBody.from_node(node, axis, facts, known)
        except CrossingError as error:
            if enclosing(node.op, WHILE) is not None:
                raise _refusal(asks, stages, rule, error.op, str(error)) from None
    # Residuals are followed as if the devices along the axis were parts of a batch.
    dims = _Residuals(graph, axis, mesh, bodies).run({})
    # An op that adds up the devices along the axis, or combines them, needs all of them.
    joining = [
        node
        for node, step in dims.op_tilings.items()
        if node not in bodies and (step.combine is not None or step.chained)
    ]
    stopped = next(iter((*untiled_ops(dims), *joining)), None)
    returned = not dims.tilings.keys().isdisjoint(graph.root.returned)
    if stopped is not None or returned or dims.meetings:
        op = terminator(block) if stopped is None else stopped.op
        raise _refusal(asks, stages, rule, op, "it reads a value of each device from a shard_map")
    try:
        writer = _AxisDropping(dims, axis, mesh, bodies)
        end = terminator(block)
        values = writer.write_all(list(block.arguments), ir.InsertionPoint(end))
    except NotScaledError as error:
        why = "it makes a value of each device for a shard_map"
        raise _refusal(asks, stages, rule, error.op, why) from None
    # The new ops are after the old ones, and the block has the same arguments.
    for place, value in enumerate(values):
        end.operands[place] = value
    for node in reversed(graph.root.nodes):
        node.op.erase()
    erase_unused(module.body)


def _refusal(asks: str, stages: str, rule: str, op: ir.Operation, why: str) -> ToolError:
    return ToolError(
        f'{asks}: a layer is in a manual computation over "{stages}", whose devices must compute '
        f"the same to become ranks of a pipeline ({rule}), but {op.name}: {why}; leave that axis "
        "out of axis_names of jax.shard_map",
        op.location,
    )


@dataclass(frozen=True)
class _LayerBody:
    """The body of a manual computation, whose devices compute the same along the axis."""

    crossings: Crossings
    across: AcrossAxis

    @staticmethod
    def from_node(
        node: Node, axis: MeshAxis, facts: ModuleFacts, known: DeviceValues
    ) -> _LayerBody:
        """Raises CrossingError if the devices differ along the axis."""
        crossings = crossings_of(node.op, axis, facts)
        body = Graph.from_block(ManualComputation(node.op).body)
        across = AcrossAxis(
            body,
            crossings,
            {},
            lambda value: axis.is_same(known.known_tensor(value)),
            Reshapings({}),
        )
        # Raises for a value that depends on the place of the device, or is a term of a sum.
        for number in body.root.returned:
            across.shard(number)
        return _LayerBody(crossings, across)


class _Residuals(Propagation):
    """Follows residuals, as if the devices along the axis were parts of a batch."""

    def __init__(
        self, graph: Graph, axis: MeshAxis, mesh: DeviceMesh, bodies: Mapping[Node, _LayerBody]
    ) -> None:
        super().__init__(graph, axis.size)
        self._axis = axis
        self._sizes = dict(mesh.axes)
        self._bodies = bodies

    def visit(self, node: Node) -> None:
        """Follows residuals through one op."""
        if node not in self._bodies:
            super().visit(node)
            return
        taken = tuple(self._find_tilings(node.op, "in_shardings"))
        given = tuple(self._find_tilings(node.op, "out_shardings"))
        self.op_tilings[node] = OpTiling(taken, given)
        self._set(node, given, None)

    def _find_tilings(self, op: ir.Operation, side: str) -> Iterator[DimTiling | None]:
        """Yields the dimension of each value that the axis divides; None without one."""
        for sharding in sharding_per_value(op.attributes[side]):
            found: DimTiling | None = None
            for dim, axes in enumerate(axes_by_dimension(sharding)):
                if self._axis.name in axes:
                    # Axes before it divide the dimension into larger parts.
                    before = axes[: axes.index(self._axis.name)]
                    found = DimTiling(dim, prod(self._sizes[name] for name in before))
            yield found


class _AxisDropping(Scaling):
    """Writes a program with one device along the axis for each value of a device."""

    keeps_shardings = True

    def __init__(
        self, dims: BatchDims, axis: MeshAxis, mesh: DeviceMesh, bodies: Mapping[Node, _LayerBody]
    ) -> None:
        super().__init__(dims)
        self._mesh = mesh
        self._axis = axis
        self._bodies = bodies

    def write_op(self, node: Node, point: ir.InsertionPoint) -> None:
        """Writes an op; a manual computation without the axis."""
        body, step = self._bodies.get(node), self.dims.op_tilings.get(node)
        if body is None or step is None:
            super().write_op(node, point)
            return
        op, build = node.op, Builder(point, node.op.location)
        operands = [
            self.operand(number, tiling, build, op)
            for number, tiling in zip(node.operands, step.operands, strict=True)
        ]
        types = [
            part_type(result, tiling, self.dims.parts)
            for result, tiling in zip(op.results, step.results, strict=True)
        ]
        # The part of a device has the same shape, so the body changes only at collectives.
        copy = emptied_clone(op, operands, types, point, keep_shardings=True)
        for side in ("in_shardings", "out_shardings", "manual_axes"):
            copy.attributes[side] = drop_axis(copy.attributes[side], self._axis.name)
        inner = ManualComputation(op).body
        block = copy.regions[0].blocks.append(
            *(argument.type for argument in inner.arguments),
            arg_locs=[argument.location for argument in inner.arguments],
        )
        writer = AxisRemoval(body.crossings, body.across, self._axis.size)
        returned = writer.write_all(list(block.arguments), ir.InsertionPoint(block))
        end = terminator(inner)
        self.end_body(end, returned, Builder(ir.InsertionPoint(block), end.location))
        self.record(node, self._without_ids(copy))

    def inner_writer(self, dims: BatchDims, block: ir.Block) -> BlockRewriter:
        raise NotScaledError(block.owner.operation)

    def _without_ids(self, computation: ir.Operation) -> ir.Operation:
        """Returns a computation that reads the ids of its devices from an operand. XLA's
        partitioner knows no partition_id if an axis is left to it. The ids are those of the first
        device along that axis, where all compute the same."""
        reads = ops_named(computation, {PARTITION_ID})
        if not reads:
            return computation
        manual = manual_axes(computation)
        others = [AxisRef(name) for name, _ in self._mesh.axes if name not in manual]
        ids = [group[0] for group in mesh_axes_groups(self._mesh, others)]
        before = Builder(ir.InsertionPoint(computation), computation.location)
        table = before.constant(np.array(ids, np.int32))
        name = sharding_axes(sharding_per_value(computation.attributes["out_shardings"])[0])[0]
        axes = tuple(AxisRef(name) for name, _ in self._mesh.axes if name in manual)
        grown = append(computation, [table], [])
        shardings = sharding_per_value(grown.attributes["in_shardings"])
        shardings[-1] = tensor_sharding(name, [(axes, False)], grown.context)
        grown.attributes["in_shardings"] = TensorShardingPerValueAttr.get(shardings, grown.context)
        own = before.tensor([1], element_of(table))
        (row,) = append_arguments(ManualComputation(grown).body, [own])
        for op in ops_named(grown, {PARTITION_ID}):
            build = Builder(ir.InsertionPoint(op), op.location)
            number = build.convert(build.reshape(row, []), element_of(op.results[0]))
            op.results[0].replace_all_uses_with(number)
            op.erase()
        return grown

    def record(self, node: Node, copy: ir.Operation) -> None:
        """Notes the copy of an op; the shardings of a residual no longer name the axis."""
        super().record(node, copy)
        if not self.dims.tilings.keys().isdisjoint(node.results):
            for name in ("sharding", "sdy.sharding"):
                if name in copy.attributes:
                    copy.attributes[name] = drop_axis(copy.attributes[name], self._axis.name)
