"""Adds sharding constraints that keep the batch divided, if the program has none of its own.

If one axis divides weights and activations (FSDP), propagation chooses in each layer which of the
two to gather. In a loop over layers the program may not say that the batch stays divided: the user
forgot `with_sharding_constraint`, or a library dropped it on a CPU. This pass adds it, before
`partition` or any compiler's partitioner decides.

    %r = stablehlo.while(%h = %x) … do {
      %y = stablehlo.dot_general %h, %w                    // gathers %h, the whole batch, or %w?
    ==>
    %r = stablehlo.while(%h = %x) … do {
      %k = sdy.sharding_constraint %h <@mesh, [{"data"}, {?}]>
      %y = stablehlo.dot_general %k, %w                    // gathers %w

The batch is a dimension along which arguments are divided that the program does not return changed.
Integers come first. Carries that a loop changes get a constraint, if they are floats of two
dimensions or more; their other dimensions stay open.

Preconditions:
  P1  The program leaves its collectives to a partitioner.

Guarantees: a constraint places values and does not change them. The signature and the user's own
constraints stay, and a second run changes nothing. Calls are inlined if anything is constrained.
The program may not be faster; `optimize` tries it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.collectives import meshes_of
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, Graph
from stablehlo_tools.analysis.dimension_propagation.seeds import Seeds, try_seeds
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
from stablehlo_tools.analysis.sharding_import import import_shardings
from stablehlo_tools.analysis.shardings import (
    Axes,
    MeshAxes,
    ValueShardings,
    axes_text,
    open_dims,
    tensor_sharding,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError, note
from stablehlo_tools.dialect.names import DYNAMIC_UPDATE_SLICE, SHARDING_CONSTRAINT, WHILE
from stablehlo_tools.ir.builder import constrain_sharding, shape_of
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import is_float, producer, stand_in
from stablehlo_tools.ir.views import Function, While
from stablehlo_tools.ir.walk import entry_function, ops_named
from stablehlo_tools.ir.while_loop import WhileLoop
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage


@dataclass(frozen=True)
class Batch:
    """The batch dimension of each value, and the mesh axes that divide it."""

    dims: BatchDims
    axes: Axes
    mesh: str


@dataclass(frozen=True)
class BatchCarry:
    """A loop carry whose dimension `dim` is the batch."""

    loop: ir.Operation
    argument: ir.Value
    dim: int


@dataclass(frozen=True)
class ConstrainBatchPass(Pass):
    """Sharding constraints keep the batch divided, if the program has none of its own.

    `explain`: a note for each constraint.
    """

    name: ClassVar[str] = "constrain-batch"
    milestone: ClassVar[Milestone | None] = Milestone(RoadStage.CONSTRAINTS)
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place, if it constrains any value. Raises ToolError (P1)."""
        if left_to_the_partitioner(module) is None:
            raise ToolError(
                "constrain-batch: the program leaves no collectives to a partitioner: run "
                "constrain-batch before partition (P1)",
                entry_function(module).location,
            )
        copy = copy_module(module)
        import_shardings(copy)
        inline_all_calls(copy)
        batch = batch_of(copy)
        carries = [] if batch is None else batch_carries(copy, batch)
        if batch is None or not carries:
            return
        for carry in carries:
            constrain_carry(carry, batch)
        if self.explain:
            for carry in carries:
                shape = "x".join(map(str, shape_of(carry.argument)))
                text = (
                    f"constrain-batch: dimension {carry.dim} of the {shape} that this loop carries "
                    f"is the batch, and stays divided over {axes_text(batch.axes)}"
                )
                diagnostics.collected.append(note(text, carry.loop.location))
        take_over(module, copy)


def batch_of(module: ir.Module) -> Batch | None:
    """Returns the batch of a program for all devices, without calls; None if no argument has one.

    It is the dimension of divided arguments that the program does not return updated, as weights.
    Integers come first.
    """
    main = entry_function(module)
    meshes = {name: mesh for name, mesh in meshes_of(module).items() if mesh.size > 1}
    if not meshes:
        return None
    # `partition` needs one mesh, so the first one is the program's.
    name, mesh = next(iter(meshes.items()))
    shardings = ValueShardings(MeshAxes(mesh), name)
    graph = Graph.from_block(Function(main).body)
    data = [n for n in graph.root.arguments if n not in graph.weights]
    # Integers are tokens and labels, so samples; floats may be weights.
    for floats in (False, True):
        seeds: dict[Axes, Seeds] = {}
        for number in data:
            value = graph.values[number]
            if is_float(value.type) != floats or not isinstance(value.type, ir.RankedTensorType):
                continue
            for dim, axes in enumerate(shardings.axes_by_dim(value)):
                if axes and DimTiling(dim).fits(tuple(shape_of(value)), shardings.axes.size(axes)):
                    seeds.setdefault(axes, {})[number] = DimTiling(dim)
                    break
        if seeds:
            axes, chosen = max(seeds.items(), key=lambda pair: len(pair[1]))
            trial = try_seeds(graph, chosen, shardings.axes.size(axes), regroups=True)
            return Batch(trial.dims, axes, name)
    return None


def batch_carries(module: ir.Module, batch: Batch) -> list[BatchCarry]:
    """Returns the float carries of rank 2 or more that loops change and that have a batch
    dimension."""
    carries: list[BatchCarry] = []
    for op in ops_named(module.operation, {WHILE}):
        loop = WhileLoop(op)
        for number, argument in enumerate(loop.arguments):
            end = producer(loop.ends[number])
            stacked = end is not None and end.name == DYNAMIC_UPDATE_SLICE
            if number in loop.invariant or stacked or not is_float(argument.type):
                continue
            # The user's own constraint, or that of an earlier run, stays.
            if any(use.owner.operation.name == SHARDING_CONSTRAINT for use in argument.uses):
                continue
            tiling = batch.dims.tilings.get(batch.dims.graph.numbers.get(argument, -1))
            if tiling is not None and tiling.outer == 1 and len(shape_of(argument)) > 1:
                carries.append(BatchCarry(op, argument, tiling.dim))
    return carries


def constrain_carry(carry: BatchCarry, batch: Batch) -> None:
    """Constrains the batch of a carry to be divided, at the beginning of each iteration."""
    block = While(carry.loop).body
    constrain(carry.argument, carry.dim, batch, ir.InsertionPoint.at_block_begin(block))


def constrain(value: ir.Value, dim: int, batch: Batch, point: ir.InsertionPoint) -> None:
    """Constrains one dimension of a value to be divided as the batch is, for all of its users."""
    dims = open_dims(len(shape_of(value)))
    dims[dim] = (batch.axes, False)
    sharding = tensor_sharding(batch.mesh, dims, value.type.context)
    stand_in(value, constrain_sharding(value, sharding, point))
