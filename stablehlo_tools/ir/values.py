"""Small questions about values and the ops around them."""

from __future__ import annotations

from stablehlo_tools.bindings import ir


def producer(value: ir.Value) -> ir.Operation | None:
    """The op that a value is a result of; None for an argument of a block."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def key_of(op: ir.Operation) -> ir.Value | ir.Operation:
    """What stands for an op in a set: its own hash takes as long as it has operands."""
    return op.results[0] if len(op.results) else op


def is_float(kind: ir.Type) -> bool:
    """Whether a type is that of a tensor of real or complex floats."""
    if not isinstance(kind, ir.RankedTensorType):
        return False
    return isinstance(kind.element_type, ir.FloatType | ir.ComplexType)
