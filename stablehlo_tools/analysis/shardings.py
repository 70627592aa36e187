"""Shardings: the mesh axes that divide each value of a module, and Shardy's rules for each op.

A tensor's sharding has, for each dimension, the axes that divide it, major first. Axes are in
canonical form: consecutive parts of one axis are joined, and a whole axis has no part.

`sdy-populate-op-sharding-rules` writes a rule on each op that it knows. A rule names factors. Each
dimension of each operand and result is one factor or, for a reshape, several, major first. A factor
is passed through, reduced over, or has to be whole on every device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.replica_groups import (
    AxisRef,
    DeviceMesh,
    ProcessGroups,
    mesh_axes_groups,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, RESHARD, SHARDING_CONSTRAINT
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.values import maker_of, producer
from stablehlo_tools.ir.walk import FUNCTION, ops_named

Axes = tuple[AxisRef, ...]
Dims = tuple[Axes, ...]

# Text to clean up after an axis is removed: trailing commas, priorities of {}, empty lists.
_LEFT = (
    (re.compile(r", \}"), "}"),
    (re.compile(r"\{\}p\d+"), "{}"),
    (re.compile(r", (?:replicated|unreduced)=\{\}"), ""),
)


def sharding_axes(attribute: ir.Attribute) -> tuple[str, tuple[str, ...]]:
    """Returns the mesh of a tensor's sharding, and the axes that divide it, by name.

    The mesh is "" if it is inlined. A sub-axis counts as its axis.
    """
    mesh = bindings.TensorShardingAttr(attribute).mesh_or_ref
    name = mesh.value if isinstance(mesh, ir.FlatSymbolRefAttr) else ""
    axes = [axis for own in axes_by_dimension(attribute) for axis in own]
    return name, tuple(dict.fromkeys(axes))


def axes_by_dimension(attribute: ir.Attribute) -> list[list[str]]:
    """Returns the axes by which a tensor's sharding divides each dimension, major to minor. A
    sub-axis counts as its axis."""
    return [[axis.name for axis in axes] for axes, _ in dimension_axes(attribute)]


def sharding_per_value(attribute: ir.Attribute) -> list[ir.Attribute]:
    """Returns the shardings in an attribute such as `in_shardings`."""
    return list(bindings.TensorShardingPerValueAttr(attribute).shardings)


def dimension_axes(attribute: ir.Attribute) -> list[tuple[Axes, bool]]:
    """Returns, for each dimension of a tensor's sharding, its axes, and True if it is open to
    others."""
    listed = bindings.TensorShardingAttr(attribute).dimension_shardings
    dims = (bindings.SdyDimensionShardingAttr(dim) for dim in listed)
    return [(tuple(map(_axis, dim.axes)), not dim.is_closed) for dim in dims]


def tensor_sharding(
    mesh: str, dims: Iterable[tuple[Axes, bool]], context: ir.Context
) -> ir.Attribute:
    """Returns a tensor's sharding. `dims` has the axes of each dimension, and True if it is open to
    others."""
    words = [[*map(axis_text, axes), *(["?"] if is_open else [])] for axes, is_open in dims]
    listed = ", ".join("{" + ", ".join(each) + "}" for each in words)
    return ir.Attribute.parse(f"#sdy.sharding<@{mesh}, [{listed}]>", context)


def open_dims(rank: int, dim: int | None = None, axes: Axes = ()) -> list[tuple[Axes, bool]]:
    """Returns open dimensions; the axes divide dimension `dim`, if given."""
    return [(axes if each == dim else (), True) for each in range(rank)]


def manual_axes(computation: ir.Operation) -> frozenset[str]:
    """Returns the manual axes of a manual computation."""
    return frozenset(re.findall(r'"([^"]*)"', str(computation.attributes["manual_axes"])))


def without_axis(attribute: ir.Attribute, axis: str) -> ir.Attribute:
    """Returns a tensor's sharding without an axis. The sharding has to name a mesh of the module;
    it keeps only the axes of dimensions."""
    dims = [
        (tuple(each for each in axes if each.name != axis), is_open)
        for axes, is_open in dimension_axes(attribute)
    ]
    return tensor_sharding(sharding_axes(attribute)[0], dims, attribute.context)


def drop_axis(attribute: ir.Attribute, axis: str) -> ir.Attribute:
    """Returns a sharding, of one value or several, without the axis and its parts."""
    text = re.sub(rf'"{re.escape(axis)}"(?::\(\d+\)\d+)?(?:, )?', "", str(attribute))
    for left, meant in _LEFT:
        text = left.sub(meant, text)
    return ir.Attribute.parse(text, attribute.context)


def with_axis(attribute: ir.Attribute, dimension: int, axis: str) -> ir.Attribute:
    """Returns a tensor's sharding with one more axis, as the minor-most axis of a dimension."""
    sharding, context = bindings.TensorShardingAttr(attribute), attribute.context
    dims = list(sharding.dimension_shardings)
    held = bindings.SdyDimensionShardingAttr(dims[dimension])
    axes = [*held.axes, bindings.SdyAxisRefAttr.get(axis, context=context)]
    dims[dimension] = bindings.SdyDimensionShardingAttr.get(axes, held.is_closed, context=context)
    return bindings.TensorShardingAttr.get(sharding.mesh_or_ref, dims, context=context)


class FreeAxes:
    """Finds out if ops have free axes around them."""

    def __init__(self, module: ir.Module, meshes: dict[str, DeviceMesh]) -> None:
        self._module = module
        self._meshes = meshes

    def around(self, op: ir.Operation) -> bool:
        """Returns True if a mesh axis of several devices may be free around an op.

        An op outside of manual computations may be in a function that any of them calls. So it has
        free axes if any manual computation does.
        """
        manual: set[str] = set()
        parent = op.parent
        while parent is not None:
            if parent.name == MANUAL_COMPUTATION:
                manual |= manual_axes(parent)
            parent = parent.parent
        return self._leaves_free(manual) if manual else self._anywhere

    @cached_property
    def manual_computations(self) -> list[ir.Operation]:
        """The manual computations of the module."""
        return ops_named(self._module.operation, {MANUAL_COMPUTATION})

    @cached_property
    def _anywhere(self) -> bool:
        return any(self._leaves_free(set(manual_axes(op))) for op in self.manual_computations)

    def _leaves_free(self, manual: set[str]) -> bool:
        meshes = [mesh for mesh in self._meshes.values() if manual & {n for n, _ in mesh.axes}]
        free = [n for mesh in meshes for n, size in mesh.axes if size > 1 and n not in manual]
        return not meshes or bool(free)


SHARDING = "sdy.sharding"
# Ops with one result whose sharding has an attribute of another name.
_OWN_ATTRIBUTE = {
    **dict.fromkeys((RESHARD, SHARDING_CONSTRAINT), "sharding"),
    **dict.fromkeys(ops_with(Trait.RESHARDING), "out_sharding"),
}

_UNREDUCED = re.compile(r", unreduced=\w*\{[^}]*\}")
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')


class MeshAxes:
    """The axes of one mesh: sizes, canonical form, and the position of each device."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._sizes = dict(mesh.axes)
        self._positions: dict[Axes, np.ndarray] = {}

    def size(self, axes: Iterable[AxisRef]) -> int:
        """Returns the number of parts into which the axes divide."""
        return math.prod(self._extent(axis) for axis in axes)

    def canonical(self, axes: Iterable[AxisRef]) -> Axes:
        """Returns the axes without those of size 1, and with adjacent parts of one axis joined."""
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
        """Returns the leading axes, as many as make `factor` parts (or all of them), and the rest.

        Returns None if the axis at the boundary cannot be split there.
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
            rest.insert(0, self._normal(axis.name, axis.pre_size * factor, extent // factor))
            factor = 1
        return tuple(taken), tuple(rest)

    def groups(self, axes: Axes) -> ProcessGroups:
        """Returns the groups of devices that differ only along the axes. In a group, the first axis
        varies slowest."""
        return mesh_axes_groups(self.mesh, axes)

    def positions(self, axes: Axes) -> np.ndarray:
        """Returns each device's position along the axes, indexed by device id."""
        if axes not in self._positions:
            table = np.zeros(self.mesh.size, dtype=np.int64)
            for group in self.groups(axes):
                for position, device in enumerate(group):
                    table[device] = position
            self._positions[axes] = table
        return self._positions[axes]

    def overlap(self, one: Iterable[AxisRef], other: Iterable[AxisRef]) -> bool:
        """Returns True if the two share a part of an axis."""
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
    """The sharding of every value of a module, by its attributes. Values without one are whole."""

    def __init__(self, axes: MeshAxes, mesh_name: str) -> None:
        self.axes = axes
        self.mesh_name = mesh_name
        self._read: dict[ir.Attribute, Dims] = {}
        self._unreduced: set[ir.Attribute] = set()

    def axes_by_dim(self, value: ir.Value) -> Dims:
        """Returns the axes that divide each dimension of a value; () for a token. Raises a located
        ToolError for a value in parts of a sum (P6)."""
        attribute = self._attribute(value)
        if attribute is None:
            return ((),) * rank_of(value)
        sharding = self.read(attribute)
        if attribute in self._unreduced:
            op = producer(value)
            raise ToolError(
                f"a value is left unreduced, {attribute}: partition needs it reduced (P6)",
                None if op is None else op.location,
            )
        return sharding

    def partial_sum_axes(self, value: ir.Value) -> Axes:
        """Returns the axes along which each device holds only a part of the sum that a value is."""
        attribute = self._attribute(value)
        return () if attribute is None else self.unreduced_axes(attribute)

    def unreduced_axes(self, attribute: ir.Attribute) -> Axes:
        """Returns the unreduced axes of a sharding, along which devices hold parts of a sum."""
        axes = bindings.TensorShardingAttr(attribute).unreduced_axes
        return self.axes.canonical(map(_axis, axes))

    def read(self, attribute: ir.Attribute) -> Dims:
        """Returns the axes of each dimension in an attribute."""
        dims = self._read.get(attribute)
        if dims is None:
            if list(bindings.TensorShardingAttr(attribute).unreduced_axes):
                self._unreduced.add(attribute)
            dims = tuple(self.axes.canonical(axes) for axes, _ in dimension_axes(attribute))
            self._read[attribute] = dims
        return dims

    def attribute(
        self, dims: Dims, context: ir.Context, unreduced: Axes = (), reduction: str = "sum"
    ) -> ir.Attribute:
        """Returns the closed sharding attribute with these axes for each dimension. Along
        `unreduced`, devices hold parts of a sum, or of another reduction."""
        text = f"@{self.mesh_name}, [{', '.join(map(axes_text, dims))}]"
        if unreduced:
            text += f", unreduced={reduction if reduction != 'sum' else ''}{axes_text(unreduced)}"
        return ir.Attribute.parse(f"#sdy.sharding<{text}>", context)

    def per_value(self, shardings: Sequence[Dims], context: ir.Context) -> ir.Attribute:
        """Returns the attribute with the shardings of several values."""
        each = [self.attribute(dims, context) for dims in shardings]
        return bindings.TensorShardingPerValueAttr.get(each, context)

    def state(self, value: ir.Value, dims: Dims) -> ir.Value:
        """States the sharding of the value of an op with one result, and returns the value."""
        op = maker_of(value)
        op.attributes[SHARDING] = self.per_value([dims], op.context)
        return value

    def at_border(self, function: ir.Operation, list_name: str, number: int, rank: int) -> Dims:
        """Returns the sharding in a function's `arg_attrs` or `res_attrs`; a whole one if it has
        none."""
        attribute = function_sharding(function, list_name, number)
        return ((),) * rank if attribute is None else self.read(attribute)

    def even_axes(self, size: int, axes: Axes) -> Axes:
        """Returns the leading axes that divide a dimension evenly, with a part of the last one, as
        XLA stores arguments and results."""
        kept: list[AxisRef] = []
        for axis in axes:
            extent = self.axes.size([axis])
            divided = math.gcd(size, extent)
            if divided > 1:
                part = AxisRef(axis.name, axis.pre_size, divided)
                kept.append(axis if divided == extent else part)
            if divided < extent:
                break
            size //= divided
        return self.axes.canonical(kept)

    def even_dims(self, value: ir.Value, dims: Dims) -> Dims:
        """Returns the axes that divide each dimension of a value evenly."""
        if not any(dims):
            return dims
        shape = ir.RankedTensorType(value.type).shape
        return tuple(self.even_axes(size, axes) for size, axes in zip(shape, dims, strict=True))

    def local_shape(self, shape: Sequence[int], dims: Dims) -> list[int]:
        """Returns the shape on one device. If a dimension does not divide evenly, its last blocks
        are padded."""
        return [-(-size // self.axes.size(axes)) for size, axes in zip(shape, dims, strict=True)]

    def _attribute(self, value: ir.Value) -> ir.Attribute | None:
        op = producer(value)
        if op is None:
            argument = ir.BlockArgument(value)
            parent, number = argument.owner.owner.operation, argument.arg_number
            if parent.name == "stablehlo.while":
                return result_sharding(parent, number)
            if parent.name == FUNCTION:
                return function_sharding(parent, "arg_attrs", number)
            if parent.name == MANUAL_COMPUTATION:
                whole = sharding_per_value(parent.attributes["in_shardings"])[number]
                return self.inside(parent, whole)
            return None
        return result_sharding(op, ir.OpResult(value).result_number)

    def inside(self, computation: ir.Operation, attribute: ir.Attribute) -> ir.Attribute:
        """Returns a sharding at the border of a manual computation without its manual axes."""
        manual = manual_axes(computation)
        kept = tuple(
            tuple(axis for axis in axes if axis.name not in manual) for axes in self.read(attribute)
        )
        return self.attribute(kept, computation.context)


def result_sharding(op: ir.Operation, number: int) -> ir.Attribute | None:
    """Returns the sharding attribute of an op's result; None if it has none."""
    if op.name in _OWN_ATTRIBUTE:
        return op.attributes[_OWN_ATTRIBUTE[op.name]]
    name = "out_shardings" if op.name == MANUAL_COMPUTATION else SHARDING
    return sharding_per_value(op.attributes[name])[number] if name in op.attributes else None


def function_sharding(function: ir.Operation, list_name: str, number: int) -> ir.Attribute | None:
    """Returns the sharding in a function's `arg_attrs` or `res_attrs`; None if it has none."""
    if list_name not in function.attributes:
        return None
    entry = ir.DictAttr(ir.ArrayAttr(function.attributes[list_name])[number])
    return next((e.attr for e in entry if e.name == SHARDING), None)


def without_parts(attribute: ir.Attribute) -> ir.Attribute:
    """Returns the shardings in an attribute without unreduced axes, as those of whole values."""
    text = str(attribute)
    whole = _UNREDUCED.sub("", text)
    return attribute if whole == text else ir.Attribute.parse(whole, attribute.context)


def rank_of(value: ir.Value) -> int:
    """Returns the number of dimensions; 0 if the value is not a tensor."""
    return value.type.rank if isinstance(value.type, ir.RankedTensorType) else 0


def axis_text(axis: AxisRef) -> str:
    """Returns an axis in Shardy's form: `"x"` or `"x":(2)4`."""
    name = f'"{axis.name}"'
    return name if axis.size is None else f"{name}:({axis.pre_size}){axis.size}"


def axes_text(axes: Iterable[AxisRef]) -> str:
    """Returns axes in Shardy's form: `{"x", "y":(2)4}`."""
    return "{" + ", ".join(map(axis_text, axes)) + "}"


def axes_in(text: str) -> Axes:
    """Returns the axes in a piece of Shardy's text, in order."""
    return tuple(
        AxisRef(name, int(pre), int(size)) if pre else AxisRef(name)
        for name, pre, size in _AXIS.findall(text)
    )


def _axis(attribute: ir.Attribute) -> AxisRef:
    axis = bindings.SdyAxisRefAttr(attribute)
    if axis.sub_axis_info is None:
        return AxisRef(axis.name)
    part = bindings.SdySubAxisInfoAttr(axis.sub_axis_info)
    return AxisRef(axis.name, part.pre_size, part.size)


RULE = "sdy.sharding_rule"

Factors = tuple[int, ...]


@dataclass(frozen=True)
class ShardingRule:
    """The factors of an op's tensors, operands first and then results.

    `tensors[t][d]` are the factors of dimension d of tensor t; `sizes[f]` is the size of a factor.
    `reduced` factors leave partial results, `whole` ones cannot be divided.
    """

    tensors: tuple[tuple[Factors, ...], ...]
    operands: int
    sizes: Factors
    reduced: frozenset[int]
    whole: frozenset[int]

    def factors_of(self, tensor: int) -> set[int]:
        """Returns the factors that a tensor has in some dimension."""
        return {factor for factors in self.tensors[tensor] for factor in factors}


def rule_of(op: ir.Operation) -> ShardingRule | None:
    """Returns the rule that Shardy wrote on an op; None if it has none, or a custom one."""
    attribute = op.attributes.get(RULE)
    return None if attribute is None else _decode_rule(attribute)


@lru_cache(maxsize=4096)
def _decode_rule(attribute: ir.Attribute) -> ShardingRule | None:
    rule = bindings.OpShardingRuleAttr(attribute)
    if rule.is_custom:
        return None
    operands = [_mapping(mapping) for mapping in rule.operand_mappings]
    results = [_mapping(mapping) for mapping in rule.result_mappings]
    return ShardingRule(
        tensors=(*operands, *results),
        operands=len(operands),
        sizes=tuple(rule.factor_sizes),
        reduced=frozenset(rule.reduction_factors),
        whole=frozenset(rule.need_replication_factors) | frozenset(rule.permutation_factors),
    )


def _mapping(attribute: ir.Attribute) -> tuple[Factors, ...]:
    return tuple(
        tuple(bindings.DimMappingAttr(dim).factor_indices)
        for dim in bindings.TensorMappingAttr(attribute).dim_mappings
    )


def project(rule: ShardingRule, tensor: int, dims: Dims, axes: MeshAxes) -> dict[int, Axes] | None:
    """Returns the axes on each factor of a tensor; None if an axis straddles factors unevenly."""
    axes_of: dict[int, Axes] = {}
    for factors, divided in zip(rule.tensors[tensor], dims, strict=True):
        if len(factors) == 1:
            axes_of[factors[0]] = divided
            continue
        rest = divided
        for factor in factors:
            parts = axes.split(rest, rule.sizes[factor])
            if parts is None:
                return None
            axes_of[factor], rest = parts
            if rest and axes.size(axes_of[factor]) < rule.sizes[factor]:
                return None
        if rest:
            return None
    return axes_of


def assemble(rule: ShardingRule, tensor: int, factors: dict[int, Axes], axes: MeshAxes) -> Dims:
    """Returns the sharding of a tensor from the axes on factors, as the inverse of `project`. In a
    dimension, axes after a factor that is not fully divided are dropped."""
    dims: list[Axes] = []
    for listed in rule.tensors[tensor]:
        joined: list[Axes] = []
        for factor in listed:
            joined.append(factors.get(factor, ()))
            if axes.size(joined[-1]) < rule.sizes[factor]:
                break
        dims.append(axes.canonical(axis for part in joined for axis in part))
    return tuple(dims)
