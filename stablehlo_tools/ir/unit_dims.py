"""Rewrites ops on dimensions of size 1 to forms that stay valid at larger sizes.

Exporters simplify dimensions of size 1: they write a sum over one, or drop the index along it. If
each device has one row of many, the program for all devices has no such sum.

    %s = stablehlo.reduce %x applies add across dimensions = [1] : (4x1x8) -> 4x8
    %y = stablehlo.broadcast_in_dim %s, dims = [0, 2] : 4x8 -> 4x1x8
  ==>
    %y = stablehlo.reshape %x : 4x1x8 -> 4x1x8
"""

from __future__ import annotations

from collections.abc import Callable

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import (
    IndexedNumbers,
    gather_numbers,
    scatter_numbers,
)
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import BROADCAST, GATHER, REDUCE, RESHAPE, SCATTER
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.values import is_identity_of, maker_of
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.ir.walk import ops_where


def reshape_units(root: ir.Operation) -> None:
    """Replaces reductions of dimensions of size 1, and broadcasts that only add such, by reshapes.

    A dimension that is reduced and added again gives a single reshape.
    """
    without: set[ir.Value] = set()
    for op in ops_where(root, lambda op: op.name in (REDUCE, BROADCAST, RESHAPE)):
        source, result = op.operands[0], op.results[0]
        whole = maker_of(source).operands[0] if source in without else source
        build = Builder(ir.InsertionPoint(op), op.location)
        if op.name == REDUCE:
            kept = _kept_of_units(op)
            if kept is None:
                continue
            value = build.reshape(whole, [shape_of(source)[dim] for dim in kept])
            without.add(value)
            if value.type == result.type:
                result.replace_all_uses_with(value)
                continue
            op.operands[0] = value
            dims = [kept.index(dim) for dim in integers(op, "dimensions") if dim in kept]
            op.attributes["dimensions"] = build.integers(dims)
        elif whole != source if op.name == RESHAPE else _adds_units(op):
            result.replace_all_uses_with(build.reshape(whole, shape_of(result)))


def _kept_of_units(op: ir.Operation) -> list[int] | None:
    """Returns the dimensions except those of size 1 that a reduction reduces; None without any.

    Also None if it reduces several operands, or if the initial value is not the identity.
    """
    shape, reducer = shape_of(op.operands[0]), reducer_kind(Combining(op).combiner)
    units = [dim for dim in integers(op, "dimensions") if shape[dim] == 1]
    if not units or len(op.operands) != 2 or reducer is None:
        return None
    if not is_identity_of(reducer, op.operands[1]):
        return None
    return [dim for dim in range(len(shape)) if dim not in units]


def _adds_units(op: ir.Operation) -> bool:
    """Returns True if a broadcast only adds dimensions of size 1."""
    dims = integers(op, "broadcast_dimensions")
    before, after = shape_of(op.operands[0]), shape_of(op.results[0])
    added = [size for dim, size in enumerate(after) if dim not in dims]
    in_order = list(dims) == sorted(dims)
    return in_order and added == [1] * len(added) and before == [after[dim] for dim in dims]


def batch_units(root: ir.Operation) -> None:
    """Makes whole dimensions of size 1 of gathers and scatters batching dimensions, in place.

    Only if the op has others, as `jnp.take_along_axis` writes at larger sizes.
    """
    rewrite_rows(root, _batch_unit_dims)


def rewrite_rows(
    root: ir.Operation, change: Callable[[ir.Operation, IndexedNumbers], IndexedNumbers]
) -> None:
    """Sets the dimension numbers of gathers and of scatters into one tensor.

    `change` returns the numbers, and adapts the indices (operand 1) itself.
    """
    for op in ops_where(root, lambda op: op.name in (GATHER, SCATTER)):
        if op.name == GATHER:
            name, written = "dimension_numbers", bindings.GatherDimensionNumbers
            rows = gather_numbers(op)
        elif len(op.operands) == 3:
            name, written = "scatter_dimension_numbers", bindings.ScatterDimensionNumbers
            rows = scatter_numbers(op)
        else:
            continue
        found = change(op, rows)
        if found != rows:
            windows, omitted, operand, indices, index_map = map(list, found[:5])
            vector, context = found.index_vector, op.context
            op.attributes[name] = written.get(
                windows, omitted, operand, indices, index_map, vector, context=context
            )


def _batch_unit_dims(op: ir.Operation, rows: IndexedNumbers) -> IndexedNumbers:
    """Returns the numbers with dimensions of size 1 as batching dimensions; reshapes the indices,
    which are operand 1."""
    shape = shape_of(op.operands[0])
    if not rows.operand_batching:
        return rows
    build = Builder(ir.InsertionPoint(op), op.location)
    for dim, window in zip(rows.window_dims(len(shape)), rows.windows, strict=True):
        if shape[dim] != 1 or dim in rows.index_map:
            continue
        indices = shape_of(op.operands[1])
        own = rows.index_dims(len(indices))
        before = sum(1 for at in range(window) if at not in rows.windows)
        place = own[before] if before < len(own) else max(own, default=-1) + 1
        indices.insert(place, 1)
        op.operands[1] = build.reshape(op.operands[1], indices)
        moved = [at + (at >= place) for at in rows.indices_batching]
        pairs = sorted([*zip(rows.operand_batching, moved, strict=True), (dim, place)])
        rows = rows._replace(
            windows=tuple(at for at in rows.windows if at != window),
            operand_batching=tuple(pair[0] for pair in pairs),
            indices_batching=tuple(pair[1] for pair in pairs),
            index_vector=rows.index_vector + (rows.index_vector >= place),
        )
    return rows
