"""Reduces that start from their reducer's identity, with the initial value combined afterwards.

    %s = stablehlo.reduce(%x init: %five) applies stablehlo.add
==>
    %r = stablehlo.reduce(%x init: %identity) applies stablehlo.add
    %s = stablehlo.add %r, %five

Devices can then reduce their parts. A reduce from another value would also be computed wrongly:
partitioning writes concatenations, and XLA's simplifier splits a reduce of a concatenation into a
reduce for each piece, each of which counts the initial value. Windows are pieces, too. Around the
operand of a window XLA:CPU puts nothing, where a partitioned one gets the initial value as padding.
"""

from __future__ import annotations

from stablehlo_tools.analysis.reducers import starts_idempotent
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import static_shapes
from stablehlo_tools.dialect.names import REDUCE
from stablehlo_tools.dialect.reducers import complex_identity, identity_of, reducer_kinds
from stablehlo_tools.dialect.traits import Trait, ops_with, short_names
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import is_identity_of, stand_in
from stablehlo_tools.ir.walk import ops_named
from stablehlo_tools.transforms.parts.partition.needs import REDUCE_WINDOW

_IDEMPOTENT = short_names(ops_with(Trait.IDEMPOTENT))


def reduce_from_identities(module: ir.Module) -> None:
    """Rewrites reduces and windows whose initial values may count once only, in place."""
    for op in ops_named(module.operation, {REDUCE, REDUCE_WINDOW}):
        kinds = reducer_kinds(op.regions[0].blocks[0])
        if kinds is None or static_shapes(op.results) is None or _may_start_twice(op, kinds):
            continue
        for number, kind in enumerate(kinds):
            _combine_afterwards(op, number, kind)


def _may_start_twice(op: ir.Operation, kinds: list[str]) -> bool:
    """Returns True if the initial values may count any number of times."""
    return _IDEMPOTENT.issuperset(kinds) if op.name == REDUCE_WINDOW else starts_idempotent(op)


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
