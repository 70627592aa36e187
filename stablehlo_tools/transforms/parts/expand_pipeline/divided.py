"""Stacks of layers that a program keeps divided over an axis of the mesh, and how that is said."""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.analysis.tensor_shardings import axes_in, axis_text, function_sharding
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.traits import ELEMENTWISE
from stablehlo_tools.ir.symbols import FUNCTION
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.expand_pipeline.region import Axis

_CONSTRAINT = "sdy.sharding_constraint"


def is_divided(value: ir.Value, axis: str) -> bool:
    """Whether dimension 0 of a value is divided over an axis, first of all.

    So it is where a constraint says so, or the sharding of an argument of the program, of the value
    itself or of what it is computed from element by element.
    """
    pending, seen = [value], {value}
    while pending:
        each = pending.pop()
        stated = _stated(each)
        if stated is not None:
            if divides(stated, axis):
                return True
            continue
        op = producer(each)
        if op is None or op.name not in ELEMENTWISE:
            continue
        sources = [one for one in op.operands if _same_shape(one, value) and one not in seen]
        seen.update(sources)
        pending += sources
    return False


def divides(sharding: ir.Attribute, axis: str) -> bool:
    """Whether a sharding divides dimension 0 over all of an axis, and only then over others."""
    dims = list(bindings.TensorShardingAttr(sharding).dimension_shardings)
    if not dims:
        return False
    axes = list(bindings.SdyDimensionShardingAttr(dims[0]).axes)
    if not axes:
        return False
    first = bindings.SdyAxisRefAttr(axes[0])
    return first.name == axis and first.sub_axis_info is None


def _stated(value: ir.Value) -> ir.Attribute | None:
    op = producer(value)
    if op is not None:
        return op.attributes["sharding"] if op.name == _CONSTRAINT else None
    argument = ir.BlockArgument(value)
    parent = argument.owner.owner.operation
    if parent.name != FUNCTION:
        return None
    return function_sharding(parent, "arg_attrs", argument.arg_number)


def _same_shape(one: ir.Value, other: ir.Value) -> bool:
    kinds = one.type, other.type
    if not all(isinstance(kind, ir.RankedTensorType) for kind in kinds):
        return False
    shapes = [ir.RankedTensorType(kind).shape for kind in kinds]
    return shapes[0] == shapes[1]


def divided_first(
    sharding: ir.Attribute | None, axis: Axis, rank: int, dimension: int, context: ir.Context
) -> ir.Attribute:
    """A sharding with a dimension divided over an axis before all others, and no other over it.

    Where there is none yet, the other dimensions are left open.
    """
    dims = [("", True)] * rank
    if sharding is not None:
        given = list(bindings.TensorShardingAttr(sharding).dimension_shardings)
        dims = [_axes(bindings.SdyDimensionShardingAttr(dim), axis.name) for dim in given]
    listed: list[str] = []
    for place, (axes, is_open) in enumerate(dims):
        first = f'"{axis.name}"' if place == dimension else ""
        rest = "?" if is_open and place != dimension else ""
        listed.append("{" + ", ".join(filter(None, (first, axes, rest))) + "}")
    text = f"#sdy.sharding<@{axis.mesh_name}, [{', '.join(listed)}]>"
    return ir.Attribute.parse(text, context)


def _axes(dim: bindings.SdyDimensionShardingAttr, without: str) -> tuple[str, bool]:
    found = [axis for axis in axes_in(str(dim)) if axis.name != without]
    return ", ".join(map(axis_text, found)), not dim.is_closed
