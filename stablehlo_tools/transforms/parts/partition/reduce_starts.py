"""Reduces that start from their reducer's identity, with the initial value combined afterwards.

    %s = stablehlo.reduce(%x init: %five) applies stablehlo.add
==>
    %r = stablehlo.reduce(%x init: %identity) applies stablehlo.add
    %s = stablehlo.add %r, %five

Devices can then reduce their parts. XLA would compute another reduce wrongly: its simplifier splits
a reduce of a concatenation, which partitioning writes, and counts the initial value in each piece.
Around windows XLA:CPU puts nothing, where partitioning pads with the initial value.
"""

from __future__ import annotations

from stablehlo_tools.analysis.reducers import starts_idempotent
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import static_shapes
from stablehlo_tools.dialect.names import REDUCE
from stablehlo_tools.dialect.reducers import (
    IDEMPOTENT,
    complex_identity,
    identity_of,
    reducer_kinds,
)
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import is_identity_of, stand_in
from stablehlo_tools.ir.walk import ops_named
from stablehlo_tools.transforms.parts.partition.needs import REDUCE_WINDOW


def reduce_from_identities(module: ir.Module) -> None:
    """Rewrites reduces and windows whose initial values may count once only, in place."""
    for op in ops_named(module.operation, {REDUCE, REDUCE_WINDOW}):
        kinds = reducer_kinds(op.regions[0].blocks[0])
        if kinds is None or static_shapes(op.results) is None:
            continue
        # Initial values that may count any number of times stay.
        if IDEMPOTENT.issuperset(kinds) if op.name == REDUCE_WINDOW else starts_idempotent(op):
            continue
        for number, kind in enumerate(kinds):
            _combine_afterwards(op, number, kind)


def _combine_afterwards(op: ir.Operation, number: int, kind: str) -> None:
    """Starts one of the results from the identity, if there is one to write."""
    position = len(op.results) + number
    start, result = op.operands[position], op.results[number]
    element = element_of(start)
    is_complex = isinstance(element, ir.ComplexType)
    identity = complex_identity(kind) if is_complex else identity_of(kind, element)
    if identity is None or is_identity_of(kind, start):
        return
    op.operands[position] = Builder(ir.InsertionPoint(op), op.location).splat(identity, [], element)
    build = Builder(ir.InsertionPoint.after(op), op.location)
    spread = build.broadcast(start, shape_of(result), [])
    stand_in(result, build.same(kind, result, spread))
