"""Divides the state and the update of an optimizer over a mesh axis on which they are repeated.

In plain data parallelism every device holds the whole state and computes the same update. With this
pass each device has a part (ZeRO-1, arXiv 1910.02054). Gradients are reduce-scattered to the
devices that update them, and the new parameters are gathered.

    func @main(%w: {whole}, %m: {whole}, %batch: {sharded over "data"}) -> ({whole}, {whole}) {
      %m1 = stablehlo.add %m, %g                        // %g: summed over "data"
      %w1 = stablehlo.subtract %w, %m1
      return %w1, %m1
    }
  ==>
    func @main(%w: {whole}, %m: {"data" in dimension 0}, %batch) -> ({whole}, {"data" in dim. 0}) {
      …                                                 // of a device's rows
      %w2 = sdy.sharding_constraint %w1 <{"data" in dimension 0}>
      return %w2, %m1
    }

The pass only writes shardings; `partition`, run later, writes the collectives. An argument is state
if the program returns it changed by elementwise ops and reductions, and no matrix product, gather
or loop depends on it.

Preconditions:
  P1  The program is written for all devices, with shardings, as jax.jit exports it.
  P2  `axis` is an axis of its mesh, of at least two devices. Without `axis`, some axis divides
      arguments other than state and parameters; the pass uses the one that divides most bytes.
  P3  Some state is whole along the axis, and has a dimension that the axis divides.

Guarantees: values are as before if the update is elementwise and a reduce_scatter adds in the same
order as an all_reduce. Sums over the elements of a gradient are re-associated. Calls are inlined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from stablehlo_tools.analysis.entry import aliased_results
from stablehlo_tools.analysis.optimizer_state import OptimizerState
from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
from stablehlo_tools.analysis.replica_groups import AxisRef, mesh_with
from stablehlo_tools.analysis.sharding_import import import_shardings
from stablehlo_tools.analysis.shardings import Dims
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import GIB, Diagnostic, Diagnostics, ToolError, note, to_place
from stablehlo_tools.ir.builder import constrain_sharding, shape_of
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.equal_branches import fold_equal_branches
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import maker_of, producer, stand_in
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, terminator
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage, When
from stablehlo_tools.transforms.parts.partition.border import state_border
from stablehlo_tools.transforms.parts.partition.partition_form import one_mesh


@dataclass(frozen=True)
class OptimizerArgument:
    """An argument that is state, the result with its new value, and the new sharding of both."""

    argument: int
    result: int
    axes: Dims
    dim: int


@dataclass(frozen=True)
class ShardOptimizerPass(Pass):
    """The optimizer's state and update are divided over a mesh axis on which they are repeated.

    `axis`: the mesh axis (default: the one over which the batch is divided). `explain`: a note for
    each argument that is divided, with bytes before and after, and for state that stays whole.
    """

    name: ClassVar[str] = "shard-optimizer"
    milestone: ClassVar[Milestone | None] = Milestone(RoadStage.STATE, when=When.TOO_LARGE)
    axis: str = ""
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites a copy of the module, and moves it into the module. Raises ToolError (P1, P2,
        P3)."""
        main = entry_function(module)
        if left_to_the_partitioner(module) is None:
            raise ToolError(
                "shard-optimizer: the program leaves no collectives to a partitioner: run "
                "shard-optimizer before partition (P1)",
                main.location,
            )
        draft = copy_module(module)
        import_shardings(draft)
        inline_all_calls(draft)
        fold_equal_branches(draft)
        step = _OptimizerStep(draft)
        axis = step.axis_named(self.axis)
        divided, whole = step.divisible_state(axis)
        if not divided:
            raise ToolError(
                f"shard-optimizer: no state of an optimizer is whole along {axis!r} and has "
                "a dimension that the axis divides (P3)",
                main.location,
            )
        step.write(divided)
        take_over(module, draft)
        if self.explain:
            diagnostics.collected += step.notes(divided, whole, axis)


class _OptimizerStep:
    """A training step for all devices, without calls."""

    def __init__(self, module: ir.Module) -> None:
        self._main = entry_function(module)
        self._block: ir.Block = Function(self._main).body
        self._state = OptimizerState(self._block, aliased_results(self._main))
        self._arguments = self._state.arguments
        shardings = one_mesh(module, self._main)
        assert shardings is not None, "a partitioner has work to do"
        self._mesh = shardings.axes.mesh
        self._shardings = shardings

    def axis_named(self, name: str) -> str:
        """Returns the axis to divide over: `name`, or the axis that divides most bytes of the
        batch. Raises ToolError if there is none (P2)."""
        if name:
            mesh_with(name, {"": self._mesh}, "shard-optimizer: axis", " (P2)", self._main.location)
            return name
        found: dict[str, float] = {}
        for number, value in enumerate(self._arguments):
            if number not in self._state.states and not self._state.is_parameter(number):
                for axis in self._axes(value):
                    found[axis] = found.get(axis, 0.0) + bytes_of(value)
        if not found:
            raise ToolError(
                "shard-optimizer: no axis of the mesh divides a batch: name one with `axis` (P2)",
                self._main.location,
            )
        return max(found, key=lambda axis: (found[axis], axis))

    def divisible_state(self, axis: str) -> tuple[list[OptimizerArgument], list[int]]:
        """Returns the state that can be divided over an axis, and the arguments that have no
        dimension for it. State that is already divided over the axis is in neither list."""
        divided: list[OptimizerArgument] = []
        whole: list[int] = []
        for argument, result in sorted(self._state.states.items()):
            value = self._arguments[argument]
            if axis in self._axes(value):
                continue
            placed = self._add_axis(value, axis)
            if placed is None:
                whole.append(argument)
            else:
                divided.append(OptimizerArgument(argument, result, *placed))
        return divided, whole

    def write(self, divided: Sequence[OptimizerArgument]) -> None:
        """Writes the shardings of the state, of its gradients, and of the parameters that are
        updated by it."""
        stated: dict[tuple[str, int], ir.Attribute] = {}
        updated: dict[int, Dims] = {}  # results made elementwise from state: the new parameters
        gradients: dict[ir.Value, Dims] = {}  # values that update the state
        of_state = set(self._state.states.values())
        context = self._main.context
        for state in divided:
            attribute = self._shardings.attribute(state.axes, context)
            stated["arg_attrs", state.argument] = attribute
            stated["res_attrs", state.result] = attribute
            for number in self._state.made_of(state.argument):
                if number not in of_state:
                    updated.setdefault(number, state.axes)
            for value in self._state.gradients(state.argument):
                gradients.setdefault(value, state.axes)
        parameters = self._state.parameters()
        for number, axes in updated.items():
            argument = parameters.get(number)
            # New parameters get the sharding of the old ones, which a gather restores.
            dims = ((),) * len(axes)
            if argument is not None:
                dims = self._shardings.axes_by_dim(self._arguments[argument])
            stated.setdefault(("res_attrs", number), self._shardings.attribute(dims, context))
            # The result is computed in parts before it is gathered.
            end = terminator(self._block)
            value = self._state.returned[number]
            place = end.location if producer(value) is None else value.location
            attribute, point = self._shardings.attribute(axes, context), ir.InsertionPoint(end)
            end.operands[number] = constrain_sharding(value, attribute, point, place)
        for value, axes in gradients.items():
            # All users of a gradient then read its parts.
            attribute = self._shardings.attribute(axes, context)
            behind = ir.InsertionPoint.after(maker_of(value))
            stand_in(value, constrain_sharding(value, attribute, behind))
        # Arguments and results have the same shardings, so a step can take the state of the last.
        state_border(self._main, stated)

    def notes(
        self, divided: Sequence[OptimizerArgument], whole: Sequence[int], axis: str
    ) -> list[Diagnostic]:
        """Returns notes for the state that is divided, and for state that stays whole."""
        size = dict(self._mesh.axes)[axis]
        arguments = [self._arguments[each.argument] for each in divided]
        # The bytes of an argument on one device, in its current sharding.
        before = size * sum(
            bytes_of(each) / prod(map(self._shardings.axes.size, self._shardings.axes_by_dim(each)))
            for each in arguments
        )
        notes = [
            note(
                f"shard-optimizer: {len(divided)} arguments that are state are divided over "
                f"{axis!r}: {before / GIB:.3g} GiB become {before / size / GIB:.3g} GiB a device",
                self._main.location,
            )
        ]
        for state in divided:
            value = self._arguments[state.argument]
            notes.append(note(f"{_leaf(value)}: dimension {state.dim}", value.location))
        for argument in whole:
            value = self._arguments[argument]
            text = f"{_leaf(value)} stays whole: {axis!r} divides none of its dimensions"
            notes.append(note(text, value.location))
        return notes

    def _add_axis(self, value: ir.Value, axis: str) -> tuple[Dims, int] | None:
        """Returns the sharding of a value with one more axis, and the dimension that the axis
        divides. Returns None if no dimension fits.

        It is the longest dimension that the axis divides. The first one is the last choice, because
        it may be that of layers.
        """
        axes = self._shardings.axes_by_dim(value)
        size = dict(self._mesh.axes)[axis]
        parts = [
            length // self._shardings.axes.size(dim)
            for length, dim in zip(shape_of(value), axes, strict=True)
        ]
        fitting = [dim for dim, part in enumerate(parts) if part % size == 0 and part >= size]
        if not fitting:
            return None
        best = max(fitting, key=lambda dim: (dim > 0, parts[dim], -dim))
        placed = [*axes]
        placed[best] = (*axes[best], AxisRef(axis))
        return tuple(placed), best

    def _axes(self, value: ir.Value) -> set[str]:
        return {axis.name for dim in self._shardings.axes_by_dim(value) for axis in dim}


def _leaf(value: ir.Value) -> str:
    """Returns the name of an argument, by its path in the call; its type if it has no name."""
    return to_place(value.location).name or str(value.type)
