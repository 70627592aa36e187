"""How Shardy's attributes divide each value of a module over one mesh.

A tensor's sharding is, for each dimension, the axes that divide it, major first. Axes are kept in
canonical form: consecutive parts of one axis are joined, and an axis that is whole says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.replica_groups import (
    AxisRef,
    DeviceMesh,
    ProcessGroups,
    mesh_axes_groups,
)
from stablehlo_tools.analysis.shardings import manual_axes, sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, RESHARD, SHARDING_CONSTRAINT
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import FUNCTION

Axes = tuple[AxisRef, ...]
Dims = tuple[Axes, ...]

SHARDING = "sdy.sharding"
# Ops that say the sharding of their one result in an attribute of their own.
_OWN_ATTRIBUTE = {
    **dict.fromkeys((RESHARD, SHARDING_CONSTRAINT), "sharding"),
    **dict.fromkeys(ops_with(Trait.RESHARDING), "out_sharding"),
}

_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')


class MeshAxes:
    """The axes of one mesh: sizes, canonical form, and who holds which part."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._sizes = dict(mesh.axes)
        self._positions: dict[Axes, np.ndarray] = {}

    def size(self, axes: Iterable[AxisRef]) -> int:
        """Into how many parts the axes divide."""
        return math.prod(self._extent(axis) for axis in axes)

    def canonical(self, axes: Iterable[AxisRef]) -> Axes:
        """Axes of one part left out, neighbours that make one axis joined."""
        joined: list[tuple[str, int, int]] = []
        for axis in axes:
            extent = self._extent(axis)
            if joined:
                name, pre, size = joined[-1]
                if name == axis.name and pre * size == axis.pre_size:
                    joined[-1] = (name, pre, size * extent)
                    continue
            if extent > 1:
                joined.append((axis.name, axis.pre_size, extent))
        return tuple(self._normal(*part) for part in joined)

    def split(self, axes: Axes, factor: int) -> tuple[Axes, Axes] | None:
        """The first axes, as many as make `factor` parts or are all; and the rest.

        None where no part of an axis makes the factor whole.
        """
        taken: list[AxisRef] = []
        rest = list(axes)
        while rest and factor > 1:
            axis = rest.pop(0)
            extent = self._extent(axis)
            if factor % extent == 0:
                taken.append(axis)
                factor //= extent
                continue
            if extent % factor:
                return None
            taken.append(self._normal(axis.name, axis.pre_size, factor))
            remainder = self._normal(axis.name, axis.pre_size * factor, extent // factor)
            rest.insert(0, remainder)
            factor = 1
        return tuple(taken), tuple(rest)

    def groups(self, axes: Axes) -> ProcessGroups:
        """The devices that differ only along the axes, ordered by them, the first the slowest."""
        return mesh_axes_groups(self.mesh, axes)

    def positions(self, axes: Axes) -> np.ndarray:
        """Each device's number along the axes, indexed by device id."""
        if axes not in self._positions:
            table = np.zeros(self.mesh.size, dtype=np.int64)
            for group in self.groups(axes):
                for position, device in enumerate(group):
                    table[device] = position
            self._positions[axes] = table
        return self._positions[axes]

    def overlap(self, one: Iterable[AxisRef], other: Iterable[AxisRef]) -> bool:
        """Whether the two share a part of an axis."""
        return any(
            a.name == b.name
            and a.pre_size < b.pre_size * self._extent(b)
            and b.pre_size < a.pre_size * self._extent(a)
            for a in one
            for b in other
        )

    def _extent(self, axis: AxisRef) -> int:
        return self._sizes[axis.name] if axis.size is None else axis.size

    def _normal(self, name: str, pre_size: int, size: int) -> AxisRef:
        whole = pre_size == 1 and size == self._sizes[name]
        return AxisRef(name) if whole else AxisRef(name, pre_size, size)


class ValueShardings:
    """The sharding of every value of a module, as the attributes say it. No attribute: whole."""

    def __init__(self, axes: MeshAxes, mesh_name: str) -> None:
        self.axes = axes
        self.mesh_name = mesh_name
        self._read: dict[ir.Attribute, Dims] = {}
        self._unreduced: set[ir.Attribute] = set()

    def of(self, value: ir.Value) -> Dims:
        """The axes that divide each dimension of a value; none at all for a token."""
        attribute = self._attribute(value)
        if attribute is None:
            return ((),) * rank_of(value)
        sharding = self.read(attribute)
        op = producer(value)
        self.check_reduced(attribute, None if op is None else op.location)
        return sharding

    def check_reduced(self, attribute: ir.Attribute, location: ir.Location | None) -> None:
        """Raises a ToolError for a sharding, read before, that leaves sums of parts to be made."""
        if attribute in self._unreduced:
            raise ToolError(
                f"a value is left unreduced, {attribute}: partition needs it summed (P6)", location
            )

    def unreduced(self, value: ir.Value) -> Axes:
        """The axes along which each device holds a part only of the sum that a value is."""
        attribute = self._attribute(value)
        if attribute is None:
            return ()
        return self.unreduced_axes(attribute)

    def unreduced_axes(self, attribute: ir.Attribute) -> Axes:
        """The axes along which a sharding leaves parts of a sum."""
        return self.axes.canonical(
            map(_axis, bindings.TensorShardingAttr(attribute).unreduced_axes)
        )

    def read(self, attribute: ir.Attribute) -> Dims:
        """The sharding that an attribute stands for."""
        dims = self._read.get(attribute)
        if dims is None:
            sharding = bindings.TensorShardingAttr(attribute)
            if list(sharding.unreduced_axes):
                self._unreduced.add(attribute)
            dims = tuple(
                self.axes.canonical(map(_axis, bindings.SdyDimensionShardingAttr(dim).axes))
                for dim in sharding.dimension_shardings
            )
            self._read[attribute] = dims
        return dims

    def attribute(
        self, dims: Dims, context: ir.Context, unreduced: Axes = (), reduction: str = "sum"
    ) -> ir.Attribute:
        """The closed sharding attribute of axes for each dimension, and of those along which the
        devices hold parts of a sum, or of another reduction."""
        text = f"@{self.mesh_name}, [{', '.join(map(axes_text, dims))}]"
        if unreduced:
            text += f", unreduced={reduction if reduction != 'sum' else ''}{axes_text(unreduced)}"
        return ir.Attribute.parse(f"#sdy.sharding<{text}>", context)

    def per_value(self, shardings: Sequence[Dims], context: ir.Context) -> ir.Attribute:
        """The attribute that holds the shardings of several values."""
        each = [self.attribute(dims, context) for dims in shardings]
        return bindings.TensorShardingPerValueAttr.get(each, context)

    def even(self, size: int, axes: Axes) -> Axes:
        """The first axes, the last of them in part, that divide a dimension evenly: as XLA stores
        arguments and results."""
        kept: list[AxisRef] = []
        for axis in axes:
            extent = self.axes.size([axis])
            divided = math.gcd(size, extent)
            if divided > 1:
                kept.append(
                    axis if divided == extent else AxisRef(axis.name, axis.pre_size, divided)
                )
            if divided < extent:
                break
            size //= divided
        return self.axes.canonical(kept)

    def even_dims(self, value: ir.Value, dims: Dims) -> Dims:
        """The axes that divide each dimension of a value evenly."""
        if not any(dims):
            return dims
        shape = ir.RankedTensorType(value.type).shape
        return tuple(self.even(size, axes) for size, axes in zip(shape, dims, strict=True))

    def local_shape(self, shape: Sequence[int], dims: Dims) -> list[int]:
        """What one device holds of a shape. Raises ValueError where it does not divide."""
        local: list[int] = []
        for size, axes in zip(shape, dims, strict=True):
            parts = self.axes.size(axes)
            if size % parts:
                raise ValueError(f"a dimension of {size} does not divide by {parts}")
            local.append(size // parts)
        return local

    def _attribute(self, value: ir.Value) -> ir.Attribute | None:
        op = producer(value)
        if op is None:
            return self._of_argument(ir.BlockArgument(value))
        return result_sharding(op, ir.OpResult(value).result_number)

    def _of_argument(self, argument: ir.BlockArgument) -> ir.Attribute | None:
        parent, number = argument.owner.owner.operation, argument.arg_number
        if parent.name == "stablehlo.while":
            return result_sharding(parent, number)
        if parent.name == FUNCTION:
            return function_sharding(parent, "arg_attrs", number)
        if parent.name == MANUAL_COMPUTATION:
            whole = sharding_per_value(parent.attributes["in_shardings"])[number]
            return self.inside(parent, whole)
        return None

    def inside(self, computation: ir.Operation, attribute: ir.Attribute) -> ir.Attribute:
        """A sharding at the border of a manual computation, without the axes it divides itself."""
        manual = manual_axes(computation)
        kept = tuple(
            tuple(axis for axis in axes if axis.name not in manual) for axes in self.read(attribute)
        )
        return self.attribute(kept, computation.context)


def result_sharding(op: ir.Operation, number: int) -> ir.Attribute | None:
    """The attribute that says how an op's result is sharded; None where none does."""
    if op.name in _OWN_ATTRIBUTE:
        return op.attributes[_OWN_ATTRIBUTE[op.name]]
    name = "out_shardings" if op.name == MANUAL_COMPUTATION else SHARDING
    if name not in op.attributes:
        return None
    return sharding_per_value(op.attributes[name])[number]


def function_sharding(function: ir.Operation, list_name: str, number: int) -> ir.Attribute | None:
    """The sharding in a function's `arg_attrs` or `res_attrs`; None where it has none."""
    if list_name not in function.attributes:
        return None
    entry = ir.DictAttr(ir.ArrayAttr(function.attributes[list_name])[number])
    return next((e.attr for e in entry if e.name == SHARDING), None)


def rank_of(value: ir.Value) -> int:
    """The number of dimensions; none for what is no tensor."""
    return value.type.rank if isinstance(value.type, ir.RankedTensorType) else 0


def axis_text(axis: AxisRef) -> str:
    """An axis as Shardy writes it: `"x"` or `"x":(2)4`."""
    name = f'"{axis.name}"'
    return name if axis.size is None else f"{name}:({axis.pre_size}){axis.size}"


def axes_text(axes: Iterable[AxisRef]) -> str:
    """Axes as Shardy writes them: `{"x", "y":(2)4}`."""
    return "{" + ", ".join(map(axis_text, axes)) + "}"


def axes_in(text: str) -> Axes:
    """The axes that a piece of Shardy's text names, in order."""
    return tuple(
        AxisRef(name, int(pre), int(size)) if pre else AxisRef(name)
        for name, pre, size in _AXIS.findall(text)
    )


def _axis(attribute: ir.Attribute) -> AxisRef:
    axis = bindings.SdyAxisRefAttr(attribute)
    part = axis.sub_axis_info
    if part is None:
        return AxisRef(axis.name)
    part = bindings.SdySubAxisInfoAttr(part)
    return AxisRef(axis.name, part.pre_size, part.size)
