"""Leaves axes of manual computations to the partitioner.

    %y = sdy.manual_computation(%x, %w) in_shardings=[[{"data"}, {}], …] manual_axes={"data"} {
      %h = … : tensor<4x32xf32>                      // each device's samples
      %g = stablehlo.dot_general %h, %h …            // its term of the sum over samples
      %s = "stablehlo.all_reduce"(%g) …              // over "data"
    }
  ==>
    %c = sdy.sharding_constraint %x <[{"data", ?}, {?}]>
    %h = … : tensor<8x32xf32>                        // all samples
    %s = stablehlo.dot_general %h, %h …              // the sum

Residuals of jax.shard_map pass from the manual computation of the forward to that of the backward
as each device has them. So both are written without their axes together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import ModuleFacts, meshes_of
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.dimension_propagation.propagation import Graph, TilingOrigins
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import layer_loops
from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.analysis.shardings import (
    axes_by_dimension,
    manual_axes,
    sharding_axes,
    sharding_per_value,
    without_axis,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, SHARDING_CONSTRAINT
from stablehlo_tools.ir.builder import Builder, constrain_sharding
from stablehlo_tools.ir.cleanup import erase_unused
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.unit_dims import batch_units, reshape_units
from stablehlo_tools.ir.values import has_uses, in_block_order, producer, skip_constraints
from stablehlo_tools.ir.views import Function, ManualComputation
from stablehlo_tools.ir.walk import (
    enclosing,
    entry_function,
    functions_by_name,
    ops_named,
    terminator,
    values_used_outside,
)
from stablehlo_tools.transforms.parts.axis_crossings import (
    AcrossAxis,
    CrossingError,
    Crossings,
    MeshAxis,
    Reshaping,
    Reshapings,
    crossings_of,
)
from stablehlo_tools.transforms.parts.axis_removal import AxisRemoval
from stablehlo_tools.transforms.parts.scaling import NotScaledError, untiled_operands

_MINOR = "another axis divides the same dimension into smaller parts"
_MOST_CHOICES = 48  # choices of reshapes to try; each one is a walk through all ops


def free_axes(module: ir.Module, starts: Sequence[ir.Operation], kept: str = "") -> None:
    """Leaves the axes of manual computations to the partitioner, except `kept`, in place.

    It does the same for linked computations: those over the same axes that exchange values with
    them. Raises NotFreeError; the module must then be discarded.
    """
    together: dict[frozenset[str], list[ir.Operation]] = {}
    for op in starts:
        together.setdefault(manual_axes(op), []).append(op)
    for ops in together.values():
        # Linked computations exchange values as each device has them, so free them together.
        linked = _linked_computations(ops)
        for op in linked:
            batch_units(op)  # a dimension of size 1 does not show if it is divided
            reshape_units(op)
            for constraint in ops_named(op, {SHARDING_CONSTRAINT}):
                # Inside, a constraint names free axes only. Its other dimensions become open.
                sharding = constraint.attributes["sharding"]
                if any(axes_by_dimension(sharding)):
                    constraint.attributes["sharding"] = _open_dimensions(sharding)
                else:
                    constraint.results[0].replace_all_uses_with(constraint.operands[0])
        erase_unused(module.body)
        facts = ModuleFacts.from_module(module)
        group = [_ComputationAxes.from_op(op, facts, kept) for op in linked]
        # Linked computations are over the same axes, so the first has those of all.
        while group and group[0].axes:
            group = _without_one(group, facts, DeviceValues(module, facts))
        erase_unused(module.body)


def _without_one(
    group: Sequence[_ComputationAxes], facts: ModuleFacts, values: DeviceValues
) -> list[_ComputationAxes]:
    """Returns the computations without one of their axes. Raises NotFreeError.

    It tries the last axis of the mesh first, because that axis mostly divides dimensions into the
    smallest parts.
    """
    first: NotFreeError | None = None
    for name in reversed(group[0].axes):
        axis = MeshAxis(name, group[0].mesh)
        why = "it cannot be written for the parts of all devices at once"
        try:
            looks = [_Look.from_computation(each, axis, facts) for each in group]
            return _looked_at(looks, axis, values).write()
        except (CrossingError, NotScaledError) as error:
            why = str(error) if isinstance(error, CrossingError) else why
            first = first or NotFreeError(name, error.op, why)
            if why != _MINOR:  # _MINOR: another axis has to be freed first
                raise first from None
    assert first is not None
    raise first


def _open_dimensions(sharding: ir.Attribute) -> ir.Attribute:
    """Returns a sharding with every dimension open to more axes."""
    stated, context = bindings.TensorShardingAttr(sharding), sharding.context
    of_dim = bindings.SdyDimensionShardingAttr
    dims = [
        of_dim.get(list(of_dim(dim).axes), False, context=context)
        for dim in stated.dimension_shardings
    ]
    return bindings.TensorShardingAttr.get(stated.mesh_or_ref, dims, context=context)


def free_axes_of_layers(module: ir.Module, stages: str, asks: str, rule: str) -> None:
    """Leaves the axes of manual computations with a loop over layers to the partitioner, in place.

    Computations over the axis `stages` may be a pipeline already. They stay if their axes cannot be
    freed. Raises a located ToolError, with the pass `asks` and its `rule`, if the axes of other
    computations cannot be freed.
    """
    if all(stages not in dict(mesh.axes) for mesh in meshes_of(module).values()):
        return  # the caller reports the missing axis
    around = _around_layers(module)
    if any(stages in manual_axes(op) for op in around):
        # In a copy, because a failed attempt leaves the module half rewritten.
        copied = copy_module(module)
        try:
            free_axes(copied, [o for o in _around_layers(copied) if stages in manual_axes(o)])
        except NotFreeError:
            pass  # the pass that needs the loop reports that it is in a manual computation
        else:
            take_over(module, copied)
            around = _around_layers(module)
    try:
        free_axes(module, [op for op in around if stages not in manual_axes(op)])
    except NotFreeError as error:
        raise ToolError(
            f"{asks}: this loop over layers is in a manual computation whose axis "
            f'"{error.axis}" cannot be left to the partitioner ({rule}): {error.op.name}: {error}; '
            "leave that axis out of axis_names of jax.shard_map",
            error.op.location,
        ) from None


def _around_layers(module: ir.Module) -> list[ir.Operation]:
    """Returns the manual computations that contain a loop over layers."""
    effects = Effects(functions_by_name(module))
    loops = layer_loops(Function(entry_function(module)).body, effects)
    around = [enclosing(loop.op, MANUAL_COMPUTATION) for loop in loops if loop.flows]
    return [op for op in around if op is not None]


class NotFreeError(Exception):
    """The axis that cannot be left to the partitioner, the op that prevents it, and the reason."""

    def __init__(self, axis: str, op: ir.Operation, why: str) -> None:
        super().__init__(why)
        self.axis = axis
        self.op = op


def _linked_computations(starts: Iterable[ir.Operation]) -> list[ir.Operation]:
    """Returns manual computations and all that exchange values with them over the same axes, in the
    order of the text."""
    found, pending = list[ir.Operation](), list(starts)
    while pending:
        op = pending.pop()
        if op in found:
            continue
        found.append(op)
        next_ones = [producer(skip_constraints(value)) for value in op.operands]
        next_ones += [user for result in op.results for user in _users(result)]
        pending += [
            each
            for each in next_ones
            if each is not None
            and each.name == MANUAL_COMPUTATION
            and each.block == op.block
            and manual_axes(each) == manual_axes(op)
        ]
    return in_block_order(found)


def _users(value: ir.Value) -> list[ir.Operation]:
    """Returns the ops that use a value, through constraints on it."""
    users: list[ir.Operation] = []
    for use in value.uses:
        user = use.owner.operation
        users += _users(user.results[0]) if user.name == SHARDING_CONSTRAINT else [user]
    return users


def _erase_constraints(value: ir.Value) -> None:
    """Erases the constraints on a value; their results must be unused."""
    for op in [use.owner.operation for use in value.uses]:
        _erase_constraints(op.results[0])
        op.erase()


@dataclass(frozen=True)
class _ComputationAxes:
    """A manual computation, its axes that are still to be freed, and its original shardings.

    `axes` are in the order of the mesh. `entering` and `leaving` are the shardings of its operands
    and results over all axes that it had at first.
    """

    op: ir.Operation
    mesh: DeviceMesh
    axes: tuple[str, ...]
    entering: tuple[ir.Attribute, ...]
    leaving: tuple[ir.Attribute, ...]

    @staticmethod
    def from_op(op: ir.Operation, facts: ModuleFacts, kept: str) -> _ComputationAxes:
        entering = tuple(sharding_per_value(op.attributes["in_shardings"]))
        leaving = tuple(sharding_per_value(op.attributes["out_shardings"]))
        mesh = facts.meshes[sharding_axes((*entering, *leaving)[0])[0]]
        axes = tuple(name for name, _ in mesh.axes if name in manual_axes(op) - {kept})
        return _ComputationAxes(op, mesh, axes, entering, leaving)

    @property
    def block(self) -> ir.Block:
        """The block of its body."""
        return ManualComputation(self.op).body

    @cached_property
    def shardings(self) -> tuple[list[ir.Attribute], list[ir.Attribute]]:
        """The shardings of its operands and of its results over the axes that are left."""
        named = self.op.attributes
        return sharding_per_value(named["in_shardings"]), sharding_per_value(named["out_shardings"])


class _Divided(NamedTuple):
    """The dimension that an axis divides; `last` is True if it is the minor-most axis there."""

    dim: int
    last: bool

    @staticmethod
    def from_sharding(sharding: ir.Attribute, name: str) -> _Divided | None:
        axes = axes_by_dimension(sharding)
        dim = next((dim for dim, own in enumerate(axes) if name in own), None)
        return None if dim is None else _Divided(dim, axes[dim][-1] == name)


class _Look(NamedTuple):
    """A manual computation with its graph, and its collectives over the axis."""

    computation: _ComputationAxes
    graph: Graph
    crossings: Crossings

    @staticmethod
    def from_computation(
        computation: _ComputationAxes, axis: MeshAxis, facts: ModuleFacts
    ) -> _Look:
        """Builds the graph and finds the collectives. Raises CrossingError."""
        crossings = crossings_of(computation.op, axis, facts)
        return _Look(computation, Graph.from_block(computation.block), crossings)


def _looked_at(looks: Sequence[_Look], axis: MeshAxis, values: DeviceValues) -> _AxisFreeing:
    """Returns how to free an axis of manual computations, after trying the choices of reshapes.

    Raises CrossingError, that of the likeliest choices, if none of the first `_MOST_CHOICES`
    choices can be written.
    """
    first: CrossingError | None = None
    pending: list[dict[Reshaping, int]] = [{}]
    for tried in range(_MOST_CHOICES):
        if tried == len(pending):
            break
        reshapings = Reshapings(pending[tried])
        freeing = _AxisFreeing([look.computation for look in looks], axis, values, reshapings)
        try:
            for look in looks:
                freeing.look_at(look)
        except CrossingError as error:
            first = first or error
            pending += [each for each in reshapings.others() if each not in pending]
        else:
            return freeing
    assert first is not None
    raise first


class _AxisFreeing:
    """Removes one axis from linked manual computations."""

    def __init__(
        self,
        group: Sequence[_ComputationAxes],
        axis: MeshAxis,
        values: DeviceValues,
        reshapings: Reshapings,
    ) -> None:
        self._axis = axis
        self._reshapings = reshapings
        self._known = values
        self._group = group
        self._looked_at: list[tuple[Crossings, AcrossAxis]] = []
        # The shards of results that pass to other computations as each device has them.
        self._handed: dict[ir.Value, DimTiling | None] = {}
        self._whole: dict[ir.Value, ir.Value] = {}

    def look_at(self, look: _Look) -> None:
        """Finds the shards and terms of a manual computation across the axis. Those before it come
        first.

        Raises CrossingError.
        """
        computation, graph, crossings = look
        op = computation.op
        entering, leaving = (
            [_Divided.from_sharding(sharding, self._axis.name) for sharding in side]
            for side in computation.shardings
        )
        while True:
            # Look again if results of earlier computations are now passed on in shards.
            given = [
                self._entering_shard(operand, stated, op)
                for operand, stated in zip(op.operands, entering, strict=True)
            ]
            numbers = zip(graph.root.arguments, given, strict=True)
            shards = {number: shard for number, shard in numbers if shard is not None}
            across = AcrossAxis(
                graph,
                crossings,
                shards,
                lambda value: self._axis.is_same(self._known.known_tensor(value)),
                self._reshapings,
            )
            asked = self._requested_shards(across, op)
            if not asked:
                break
            self._handed.update(asked)
        for number, stated, result in zip(graph.root.returned, leaving, op.results, strict=True):
            if not has_uses(result):
                continue
            shard = across.shard(number)
            if (None if shard is None else _Divided(shard.dim, shard.outer == 1)) == stated:
                continue
            if not self._is_handed_on(computation, result):
                raise CrossingError(op, f"result {result.result_number} differs from its out_specs")
            self._handed[result] = shard
        self._looked_at.append((crossings, across))

    def _entering_shard(
        self, operand: ir.Value, stated: _Divided | None, op: ir.Operation
    ) -> DimTiling | None:
        source = skip_constraints(operand)
        if source in self._handed:
            return self._handed[source]
        if stated is None:
            return None
        if not stated.last:
            raise CrossingError(op, _MINOR)
        return DimTiling(stated.dim)

    def _requested_shards(self, across: AcrossAxis, op: ir.Operation) -> dict[ir.Value, DimTiling]:
        """Returns whole results of other computations that the body needs as a shard, with that
        shard. The computation that makes such a result then returns it in that shard."""
        dims = across.dims
        origins = TilingOrigins(dims.graph, dims.parts).find_origins(untiled_operands(dims))
        asked: dict[ir.Value, DimTiling] = {}
        for number, operand in zip(dims.graph.root.arguments, op.operands, strict=True):
            source = skip_constraints(operand)
            is_whole = source in self._handed and self._handed[source] is None
            if is_whole and number in origins and _users(source) == [op]:
                asked[source] = origins[number]
        return asked

    def _is_handed_on(self, computation: _ComputationAxes, result: ir.OpResult) -> bool:
        """Returns True if only others of the group use a result, with the sharding that it leaves
        with."""
        sharding = computation.shardings[1][result.result_number]
        others = {other.op: other for other in self._group}
        return all(
            user in others
            and all(
                others[user].shardings[0][number] == sharding
                for number, operand in enumerate(user.operands)
                if skip_constraints(operand) == result
            )
            for user in _users(result)
        )

    def write(self) -> list[_ComputationAxes]:
        """Writes all computations without the axis. Returns the computations with other axes left.
        Raises NotScaledError."""
        written = [
            self._write(computation, *looked_at)
            for computation, looked_at in zip(self._group, self._looked_at, strict=True)
        ]
        # Last first, because later computations use results of earlier ones.
        for computation in reversed(self._group):
            for result in computation.op.results:
                _erase_constraints(result)
            computation.op.erase()
        return [each for each in written if each is not None]

    def _write(
        self, computation: _ComputationAxes, crossings: Crossings, across: AcrossAxis
    ) -> _ComputationAxes | None:
        op, block = computation.op, computation.block
        writer = AxisRemoval(crossings, across, self._axis.size)
        writer.take(values_used_outside(op))
        last = len(computation.axes) == 1
        operands = [
            self._whole.get(skip_constraints(value))
            or (self._constrain_value(value, sharding, op) if last else value)
            for value, sharding in zip(op.operands, computation.entering, strict=True)
        ]
        if len(manual_axes(op)) == 1:
            values = self._write_body(computation, writer, operands, ir.InsertionPoint(op))
            self._leave(computation, values, constrain=True)
            return None
        types = [writer.type_in(argument, None) for argument in block.arguments]
        new = self._create_computation(computation, operands, writer)
        inner = new.op.regions[0].blocks.append(
            *types, arg_locs=[argument.location for argument in block.arguments]
        )
        point = ir.InsertionPoint(inner)
        values = self._write_body(computation, writer, list(inner.arguments), point)
        ir.Operation.create("sdy.return", operands=values, loc=op.location, ip=point)
        self._leave(computation, list(new.op.results), constrain=last)
        return new

    def _write_body(
        self,
        computation: _ComputationAxes,
        writer: AxisRemoval,
        operands: Sequence[ir.Value],
        point: ir.InsertionPoint,
    ) -> list[ir.Value]:
        """Writes a body for operands. Returns the values that it returns, in the shards of the
        results."""
        values, end = writer.write_all(operands, point), terminator(computation.block)
        writer.multiply_outside()
        returned = zip(computation.op.results, end.operands, values, strict=True)
        return [
            writer.shard(value, self._handed[result], end, point)
            if result in self._handed
            else whole
            for result, value, whole in returned
        ]

    def _leave(
        self, computation: _ComputationAxes, values: Sequence[ir.Value], *, constrain: bool
    ) -> None:
        """Replaces the results of a computation by values. With `constrain`, the values get
        constraints with the shardings of the results."""
        op = computation.op
        for result, value, sharding in zip(op.results, values, computation.leaving, strict=True):
            if result in self._handed:
                self._whole[result] = value
            elif has_uses(result):
                stated = self._constrain_value(value, sharding, op) if constrain else value
                result.replace_all_uses_with(stated)

    def _constrain_value(
        self, value: ir.Value, sharding: ir.Attribute, op: ir.Operation
    ) -> ir.Value:
        """Constrains a value to the sharding that it had at the border, open to more axes."""
        if not any(axes_by_dimension(sharding)):
            return value
        opened = _open_dimensions(sharding)
        return constrain_sharding(value, opened, ir.InsertionPoint(op), op.location)

    def _create_computation(
        self, computation: _ComputationAxes, operands: Sequence[ir.Value], writer: AxisRemoval
    ) -> _ComputationAxes:
        """Returns a manual computation without a body, over the axes that are left."""
        op, axes = computation.op, tuple(a for a in computation.axes if a != self._axis.name)
        manual = manual_axes(op) - {self._axis.name}
        entering, leaving = (
            [without_axis(each, self._axis.name) for each in side] for side in computation.shardings
        )
        returned = terminator(computation.block).operands
        build, sizes = Builder(ir.InsertionPoint(op), op.location), dict(computation.mesh.axes)
        types: list[ir.Type] = []  # global types, over the axes that are left
        for result, sharding, value in zip(op.results, leaving, returned, strict=True):
            inside = ir.RankedTensorType(writer.type_in(value, self._handed.get(result)))
            parts = [prod(map(sizes.__getitem__, axes)) for axes in axes_by_dimension(sharding)]
            shape = [size * count for size, count in zip(inside.shape, parts, strict=True)]
            types.append(build.tensor(shape, inside.element_type))
        new = build.manual_computation(operands, types, (entering, leaving), sorted(manual))
        return replace(computation, op=new, axes=axes)
