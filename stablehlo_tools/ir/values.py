"""Small questions about values and the ops around them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cmp_to_key

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import to_place


def producer(value: ir.Value) -> ir.Operation | None:
    """The op that a value is a result of; None for an argument of a block."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def unconstrained(value: ir.Value) -> ir.Value:
    """A value before sharding constraints were put on it, which leave it as it is."""
    op = producer(value)
    while op is not None and op.name == "sdy.sharding_constraint":
        value = op.operands[0]
        op = producer(value)
    return value


def maker_of(value: ir.Value) -> ir.Operation:
    """The op that a value is a result of, where it is known to be one."""
    op = producer(value)
    assert op is not None, "an argument of a block has no op that makes it"
    return op


def stand_in(value: ir.Value, replacement: ir.Value) -> None:
    """Lets a value made from another one take its place everywhere else."""
    value.replace_all_uses_except(replacement, [maker_of(replacement)])


def key_of(op: ir.Operation) -> ir.Value | ir.Operation:
    """What stands for an op in a set: its own hash takes as long as it has operands."""
    return op.results[0] if len(op.results) else op


def named(op: ir.Operation) -> str:
    """An op and where it is from, for a message."""
    place = to_place(op.location)
    name = op.name.removeprefix("stablehlo.")
    return f"{name} of {place.file}:{place.line}" if place.file else name


def is_float(type_: ir.Type) -> bool:
    """Whether a type is that of a tensor of real or complex floats."""
    if not isinstance(type_, ir.RankedTensorType):
        return False
    return isinstance(type_.element_type, ir.FloatType | ir.ComplexType)


def has_uses(value: ir.Value) -> bool:
    """Whether anything uses a value."""
    return next(iter(value.uses), None) is not None


def in_block_order(ops: Sequence[ir.Operation]) -> list[ir.Operation]:
    """Ops of one block, in the order of the block."""

    def compare(one: ir.Operation, other: ir.Operation) -> int:
        return -1 if one.is_before_in_block(other) else int(one != other)

    return sorted(ops, key=cmp_to_key(compare))
