"""Divides the state of an optimizer, and its update, over a mesh axis on which they are repeated.

In plain data parallelism every device has all of the optimizer's state and makes the same update of
it. With this pass each has a part (ZeRO-1): gradients are reduce-scattered to those who update
them, and the new parameters are gathered.

    func @main(%w: {whole}, %m: {whole}, %batch: {sharded over "data"}) -> ({whole}, {whole}) {
      %g = …                                            // summed over "data"
      %m1 = stablehlo.add %m, %g
      %w1 = stablehlo.subtract %w, %m1
      return %w1, %m1
    }
  ==>                                                   // axis=data
    func @main(%w: {whole}, %m: {"data" in dimension 0}, %batch) -> ({whole}, {"data" in dim. 0}) {
      %m1 = stablehlo.add %m, %g                        // of the rows that a device has
      %w1 = stablehlo.subtract %w, %m1
      %w2 = sdy.sharding_constraint %w1 <{"data" in dimension 0}>
      return %w2, %m1
    }

It says where things are, and nothing else: `partition` makes the collectives of it. The state's
arrays are the same for all devices together, in a checkpoint too; only which device keeps which
part of them has changed, as the shardings of the `Exported` say.

An argument is state if the program gives it back changed, by elementwise ops and reductions, and
nothing that multiplies matrices, gathers or loops depends on it: the moments of Adam and Lion, the
rows and columns of Adafactor. What a product depends on (the momentum of Muon, the statistics of
Shampoo) stays as it is: its update is no sum of the updates of parts.

Preconditions:
  P1  The program is written for all devices, with shardings, as jax.jit exports it.
  P2  `axis` is an axis of its mesh, of at least two devices; without, the one that divides most of
      what is given beside state and parameters is taken, and there is one.
  P3  Some state is whole along it, and has a dimension that it divides.

Guarantees: values as before where the update is elementwise and a reduce_scatter adds up what an
all_reduce does, in the same order; sums over the elements of a gradient (a global norm, the means
of Adafactor) are re-associated. Calls are inlined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import Axes, MeshAxes, ValueShardings
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, ToolError, note, to_place
from stablehlo_tools.dialect.names import BROADCAST, SHARDING_CONSTRAINT
from stablehlo_tools.dialect.traits import ELEMENTWISE, Trait, ops_with, ops_with_any
from stablehlo_tools.ir.builder import constrained, shape_of
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.equal_branches import fold_equal_branches
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import CONSTANTS, is_float, maker_of, producer, stand_in
from stablehlo_tools.ir.walk import entry_function, terminator, values_used_outside
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.passes.road import Milestone, Stage, When
from stablehlo_tools.transforms.parts.partition.border import state_border
from stablehlo_tools.transforms.parts.partition.preparation import import_shardings, one_mesh

_HEAVY = ops_with_any(Trait.CONTRACTION | Trait.LOOP | Trait.BRANCH | Trait.OPAQUE) | ops_with(
    Trait.INDEXED
)
_ON_THE_WAY = ELEMENTWISE | {SHARDING_CONSTRAINT}
_FILLED = CONSTANTS | {BROADCAST}  # a rate, a scale: the same for all elements
_ALIASED = "tf.aliasing_output"  # on an argument: which result lies in its memory
_GIB = 2.0**30


@dataclass(frozen=True)
class State:
    """An argument that is state, the result that it comes back as, and the new sharding of both."""

    argument: int
    result: int
    axes: tuple[Axes, ...]
    dim: int


@dataclass(frozen=True)
class ShardOptimizerPass(Pass):
    """The optimizer's state and update divided over a mesh axis on which they are repeated.

    `axis`: the mesh axis; without, the one over which the batch is divided. `explain`: a note for
    each argument that is divided, with bytes before and after, and for state that stays whole.
    """

    name: ClassVar[str] = "shard-optimizer"
    milestone: ClassVar[Milestone | None] = Milestone(Stage.STATE, when=When.TOO_LARGE)
    axis: str = ""
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites a copy of the module, and takes it over."""
        main = entry_function(module)
        if left_to_the_partitioner(module) is None:
            raise ToolError(
                "shard-optimizer: the program leaves no collectives to a partitioner: this pass "
                "comes before partition (P1)",
                main.location,
            )
        draft = copy_module(module)
        import_shardings(draft)
        inline_all_calls(draft)
        fold_equal_branches(draft)
        step = _Step(draft)
        axis = step.axis_named(self.axis)
        divided, whole = step.divided(axis)
        if not divided:
            raise ToolError(
                f"shard-optimizer: no state of an optimizer is whole along {axis!r}, with a "
                "dimension that it divides (P3)",
                main.location,
            )
        step.write(divided)
        take_over(module, draft)
        if self.explain:
            diagnostics.collected += step.notes(divided, whole, axis)


class _Step:
    """A training step for all devices, without calls."""

    def __init__(self, module: ir.Module) -> None:
        self._main = entry_function(module)
        self._block: ir.Block = self._main.regions[0].blocks[0]
        self._arguments: list[ir.Value] = list(self._block.arguments)
        self._returned: list[ir.Value] = list(terminator(self._block).operands)
        mesh = one_mesh(module, self._main)
        assert mesh is not None, "a partitioner has work to do"
        self._mesh = mesh.mesh
        self._shardings = ValueShardings(MeshAxes(mesh.mesh), mesh.name)
        self._results_of: dict[ir.Value, list[int]] = {}
        for number, value in enumerate(self._returned):
            self._results_of.setdefault(value, []).append(number)
        self._made: dict[int, list[int]] = {}  # by argument, what is found once
        self._steering = self._before_heavy()
        self._state = dict(self._states())

    def axis_named(self, name: str) -> str:
        """The axis to divide over."""
        sizes = dict(self._mesh.axes)
        if name:
            if sizes.get(name, 1) < 2:
                listed = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
                raise ToolError(
                    f"shard-optimizer: {name!r} is no axis of at least two devices of the mesh "
                    f"({listed}) (P2)",
                    self._main.location,
                )
            return name
        found: dict[str, float] = {}
        for number, value in enumerate(self._arguments):
            if number not in self._state and not self._is_parameter(number):
                for axis in self._axes(value):
                    found[axis] = found.get(axis, 0.0) + bytes_of(value)
        if not found:
            raise ToolError(
                "shard-optimizer: no axis of the mesh divides a batch: name one by `axis` (P2)",
                self._main.location,
            )
        return max(found, key=lambda axis: (found[axis], axis))

    def divided(self, axis: str) -> tuple[list[State], list[int]]:
        """The state that can be divided over an axis, and the arguments that have no dimension for
        it. What is divided over it already is neither."""
        divided: list[State] = []
        whole: list[int] = []
        for argument, result in sorted(self._state.items()):
            value = self._arguments[argument]
            if axis in self._axes(value):
                continue
            placed = self._placed(value, axis)
            if placed is None:
                whole.append(argument)
            else:
                divided.append(State(argument, result, *placed))
        return divided, whole

    def write(self, divided: Sequence[State]) -> None:
        """States the shardings, and those of the parameters that come of the state."""
        stated: dict[tuple[str, int], ir.Attribute] = {}
        for state in divided:
            attribute = self._attribute(state.axes)
            stated["arg_attrs", state.argument] = attribute
            stated["res_attrs", state.result] = attribute
        parameters = self._parameters()
        for number, axes in self._updated(divided).items():
            argument = parameters.get(number)
            dims = ((),) * len(axes) if argument is None else self._of(self._arguments[argument])
            stated.setdefault(("res_attrs", number), self._attribute(dims))
            self._constrain(number, axes)
        for value, axes in self._gradients(divided).items():
            self._divide(value, axes)
        state_border(self._main, stated)

    def notes(self, divided: Sequence[State], whole: Sequence[int], axis: str) -> list[Diagnostic]:
        """What is divided, and what is not."""
        size = dict(self._mesh.axes)[axis]
        before = sum(self._local_bytes(self._arguments[each.argument]) for each in divided) * size
        location = self._main.location
        notes = [
            note(
                f"shard-optimizer: {len(divided)} arguments that are state are divided over "
                f"{axis!r}: {before / _GIB:.3g} GiB become {before / size / _GIB:.3g} GiB a device",
                location,
            )
        ]
        for state in divided:
            value = self._arguments[state.argument]
            notes.append(note(f"{_leaf(value)}: dimension {state.dim}", value.location))
        for argument in whole:
            value = self._arguments[argument]
            text = f"{_leaf(value)} stays whole: no dimension is divided by {axis!r}"
            notes.append(note(text, value.location))
        return notes

    def _before_heavy(self) -> set[ir.Value]:
        """What a product, a gather, a loop or a call of a library depends on."""
        steering: set[ir.Value] = set()
        for view in reversed(list(self._block.operations)):
            op = view.operation
            if op.name in _HEAVY or any(result in steering for result in op.results):
                steering.update(values_used_outside(op))
        return steering

    def _states(self) -> Iterator[tuple[int, int]]:
        """The arguments that are state, each with the result that it comes back as."""
        taken: set[int] = set()
        for number, value in enumerate(self._arguments):
            type_ = value.type
            if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
                continue
            if not type_.rank or not is_float(type_) or value in self._steering:
                continue
            result = self._comes_back_as(number, taken)
            if result is not None:
                taken.add(result)
                yield number, result

    def _comes_back_as(self, argument: int, taken: set[int]) -> int | None:
        """The result that an argument is given back as: the one that it shares memory with, or else
        the one that fewest elementwise ops make of it."""
        value = self._arguments[argument]
        reached = [n for n in self._made_of(argument) if n not in taken]
        aliased = self._aliased(argument)
        if aliased is not None:
            return aliased if aliased in reached else None
        return next((n for n in reached if self._returned[n].type == value.type), None)

    def _aliased(self, argument: int) -> int | None:
        if "arg_attrs" not in self._main.attributes:
            return None
        entry = ir.DictAttr(ir.ArrayAttr(self._main.attributes["arg_attrs"])[argument])
        found = next((each.attr for each in entry if each.name == _ALIASED), None)
        return None if found is None else ir.IntegerAttr(found).value

    def _made_of(self, argument: int) -> list[int]:
        """The results that elementwise ops make of an argument, the nearest first."""
        if argument not in self._made:
            self._made[argument] = self._followed(self._arguments[argument])
        return self._made[argument]

    def _followed(self, value: ir.Value) -> list[int]:
        shape = shape_of(value)
        layer, seen = [value], {value}
        found: list[int] = []
        while layer:
            found += sorted(n for each in layer for n in self._results_of.get(each, ()))
            following: list[ir.Value] = []
            for each in layer:
                for use in each.uses:
                    op = use.owner.operation
                    if op.name not in _ON_THE_WAY or op.results[0] in seen:
                        continue
                    if shape_of(op.results[0]) == shape:
                        seen.add(op.results[0])
                        following.append(op.results[0])
            layer = following
        return list(dict.fromkeys(found))

    def _is_parameter(self, argument: int) -> bool:
        """Whether an argument is given back by elementwise ops, and the forward depends on it."""
        value = self._arguments[argument]
        if not isinstance(value.type, ir.RankedTensorType) or value not in self._steering:
            return False
        return is_float(value.type) and bool(self._made_of(argument))

    def _updated(self, divided: Sequence[State]) -> dict[int, tuple[Axes, ...]]:
        """The results beside the state that come of it elementwise: parameters, and where the state
        is that they are updated by."""
        of_state = set(self._state.values())
        updated: dict[int, tuple[Axes, ...]] = {}
        for state in divided:
            for number in self._made_of(state.argument):
                if number not in of_state:
                    updated.setdefault(number, state.axes)
        return updated

    def _parameters(self) -> dict[int, int]:
        """The argument that each result is the new value of, where that is a parameter."""
        of: dict[int, int] = {}
        for number in range(len(self._arguments)):
            if number not in self._state and self._is_parameter(number):
                for result in self._made_of(number):
                    of.setdefault(result, number)
        return of

    def _gradients(self, divided: Sequence[State]) -> dict[ir.Value, tuple[Axes, ...]]:
        """What state is updated by: values of its shape that no elementwise op makes of others."""
        found: dict[ir.Value, tuple[Axes, ...]] = {}
        for state in divided:
            shape = shape_of(self._arguments[state.argument])
            pending, seen = [self._returned[state.result]], set[ir.Value]()
            while pending:
                value = pending.pop()
                op = producer(value)
                if value in seen or op is None or shape_of(value) != shape:
                    continue
                seen.add(value)
                if op.name in _ON_THE_WAY:
                    pending += op.operands
                elif op.name not in _FILLED and is_float(value.type):
                    found.setdefault(value, state.axes)
        return found

    def _divide(self, value: ir.Value, axes: tuple[Axes, ...]) -> None:
        """Has all that use a value take parts of it."""
        behind = ir.InsertionPoint.after(maker_of(value))
        stand_in(value, constrained(value, self._attribute(axes), behind))

    def _constrain(self, result: int, axes: tuple[Axes, ...]) -> None:
        """Has a result made in parts, before it is gathered."""
        end = terminator(self._block)
        value = self._returned[result]
        place = end.location if producer(value) is None else value.location
        point = ir.InsertionPoint(end)
        end.operands[result] = constrained(value, self._attribute(axes), point, place)

    def _attribute(self, axes: Sequence[Axes]) -> ir.Attribute:
        return self._shardings.attribute(tuple(axes), self._main.context)

    def _placed(self, value: ir.Value, axis: str) -> tuple[tuple[Axes, ...], int] | None:
        """The sharding of a value with one more axis, and where that is: in the longest dimension
        that it divides, the first one only if there is no other, for it may be that of layers."""
        axes = self._of(value)
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

    def _of(self, value: ir.Value) -> tuple[Axes, ...]:
        return tuple(self._shardings.of(value))

    def _axes(self, value: ir.Value) -> set[str]:
        return {axis.name for dim in self._of(value) for axis in dim}

    def _local_bytes(self, value: ir.Value) -> float:
        """What a device has of an argument, as it is divided now."""
        parts = prod(self._shardings.axes.size(dim) for dim in self._of(value))
        return bytes_of(value) / parts


def _leaf(value: ir.Value) -> str:
    """The name of an argument, by its path in the call."""
    return to_place(value.location).name or str(value.type)
