"""Ops of MHLO that speak of memory, in StableHLO's words, which speak of values.

XLA's converter from HLO writes them. A copy is its operand. A bitcast reads the bytes of a tensor
in one layout as those of another tensor in another layout: a transpose to the order in which the
elements lie, a reshape, and a transpose back.

    mhlo.bitcast %x {source_layout = [0, 1], result_layout = [1, 0]} : 2x3 -> 3x2
  ==>
    stablehlo.transpose %x, dims = [1, 0]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.walk import ops_where

_COPY, _BITCAST = "mhlo.copy", "mhlo.bitcast"


def write_as_values(module: ir.Module) -> None:
    """Rewrites the copies and bitcasts of a module; those that change element types stay."""
    listed = ops_where(module.operation, lambda op: op.name in (_COPY, _BITCAST) and _is_plain(op))
    for op in listed:
        value = op.operands[0] if op.name == _COPY else reread(op)
        op.results[0].replace_all_uses_with(value)
        op.erase()


def _is_plain(op: ir.Operation) -> bool:
    types = [value.type for value in (op.operands[0], op.results[0])]
    if not all(
        isinstance(type_, ir.RankedTensorType) and type_.has_static_shape for type_ in types
    ):
        return False
    return element_of(op.operands[0]) == element_of(op.results[0])


def reread(op: ir.Operation) -> ir.Value:
    """What a bitcast gives, from the most to the least major dimension and back."""
    value, wanted = op.operands[0], shape_of(op.results[0])
    build = Builder(ir.InsertionPoint(op), op.location)
    lying = _transposed(build, value, major_first(op, "source_layout", len(shape_of(value))))
    order = major_first(op, "result_layout", len(wanted))
    shape = [wanted[dimension] for dimension in order]
    read = lying if shape_of(lying) == shape else build.reshape(lying, shape)
    return _transposed(build, read, [order.index(d) for d in range(len(order))])


def major_first(op: ir.Operation, name: str, rank: int) -> list[int]:
    """The dimensions of a layout, which lists the most minor first; by default it is the last."""
    layout = op.attributes.get(name)
    if layout is None:
        return list(range(rank))
    return [int(d) for d in np.array(ir.DenseElementsAttr(layout)).ravel()][::-1]


def _transposed(build: Builder, value: ir.Value, order: Sequence[int]) -> ir.Value:
    if list(order) == sorted(order):
        return value
    shape = shape_of(value)
    type_ = build.tensor([shape[d] for d in order], element_of(value))
    return build.op("transpose", [value], type_, permutation=build.integers(order))
