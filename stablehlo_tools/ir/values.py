"""Values: which op makes them and who uses them, and of constants, what they are.

The bindings have no attribute for complex elements and fail to hand one out; constants of them are
read and copied as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cmp_to_key

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import to_place
from stablehlo_tools.dialect.names import RESHAPE, SHARDING_CONSTRAINT
from stablehlo_tools.dialect.reducers import complex_identity, identity_of
from stablehlo_tools.ir.builder import element_of

CONSTANTS = frozenset({"stablehlo.constant", "sdy.constant"})
_SPREADING = frozenset({"stablehlo.broadcast_in_dim", "stablehlo.reshape"})
_COMPLEX = re.compile(r"dense<\(([-+.e\d]+),([-+.e\d]+)\)>")
_VALUE = re.compile(r"value = (dense<.*>) : tensor<")


def producer(value: ir.Value) -> ir.Operation | None:
    """The op that a value is a result of; None for an argument of a block."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def unconstrained(value: ir.Value) -> ir.Value:
    """A value before sharding constraints were put on it, which leave it as it is."""
    return _before(SHARDING_CONSTRAINT, value)


def before_reshapes(value: ir.Value) -> ir.Value:
    """The tensor that a value is after any number of reshapes in a row."""
    return _before(RESHAPE, value)


def _before(name: str, value: ir.Value) -> ir.Value:
    """What ops of one kind, in a row, have made a value of."""
    op = producer(value)
    while op is not None and op.name == name:
        value = op.operands[0]
        op = producer(value)
    return value


def maker_of(value: ir.Value) -> ir.Operation:
    """The op that a value is a result of, where it is known to be one."""
    op = producer(value)
    assert op is not None, "an argument of a block has no op that makes it"
    return op


_MADE_OF_CONSTANTS = frozenset({*_SPREADING, "stablehlo.iota"})


def is_spread_constant(value: ir.Value) -> bool:
    """Whether a value is a constant, or what broadcasts, reshapes and counts make of constants."""
    op = producer(value)
    if op is None:
        return False
    if op.name in CONSTANTS:
        return True
    return op.name in _MADE_OF_CONSTANTS and all(map(is_spread_constant, op.operands))


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


def value_of(op: ir.Operation) -> ir.Attribute | None:
    """A constant's value; None where it has complex elements."""
    return op.attributes["value"] if _is_readable(op) else None


def value_text(op: ir.Operation) -> str:
    """A constant's value and type as they are printed."""
    value = value_of(op)
    return str(value) if value else f"{_complex_text(op)} : {op.results[0].type}"


def splat_of(value: ir.Value) -> float | int | complex | None:
    """The number that every element of a value is; None where they differ or are not constant."""
    op = producer(value)
    while op is not None and op.name in _SPREADING:
        op = producer(op.operands[0])
    if op is None or op.name not in CONSTANTS:
        return None
    if not _is_readable(op):
        parts = _COMPLEX.fullmatch(_complex_text(op))
        return None if parts is None else complex(*map(float, parts.groups()))
    splat = splat_element(op)
    known = isinstance(splat, ir.FloatAttr | ir.IntegerAttr | ir.BoolAttr)
    return splat.value if known else None


def splat_element(op: ir.Operation) -> ir.Attribute | None:
    """The element that all of a constant's are; None where they differ or cannot be handed out."""
    attribute = value_of(op)
    if not isinstance(attribute, ir.DenseElementsAttr) or not attribute.is_splat:
        return None
    return attribute.get_splat_value()


def is_splat(op: ir.Operation) -> bool:
    """Whether all elements of a constant are the same."""
    if _is_readable(op):
        return ir.DenseElementsAttr(op.attributes["value"]).is_splat
    return not _complex_text(op).startswith(("dense<[", 'dense<"'))


def copy_constant(op: ir.Operation, type_: ir.Type, point: ir.InsertionPoint) -> ir.Value:
    """A constant, Shardy's or StableHLO's, as one of StableHLO's; a splat may get another shape."""
    if _is_readable(op):
        value = ir.DenseElementsAttr(op.attributes["value"])
        if type_ != op.results[0].type:
            value = ir.DenseElementsAttr.get_splat(type_, value.get_splat_value())
        return ir.Operation.create(
            "stablehlo.constant",
            results=[type_],
            attributes={"value": value},
            loc=op.location,
            ip=point,
        ).results[0]
    text = f'"stablehlo.constant"() <{{value = {_complex_text(op)} : {type_}}}> : () -> {type_}'
    with op.location:
        copy = ir.Operation.parse(text, context=op.context).operation
    point.insert(copy)
    return copy.results[0]


def _is_readable(op: ir.Operation) -> bool:
    return not isinstance(element_of(op.results[0]), ir.ComplexType)


def _complex_text(op: ir.Operation) -> str:
    match = _VALUE.search(str(op.get_asm(print_generic_op_form=True)))
    assert match is not None, "a dense constant"
    return match.group(1)


def is_identity_of(reducer: str, value: ir.Value) -> bool:
    """Whether a value is a constant, or one broadcast, that a reducer never shows in its result.

    0.0 counts for a sum of floats: all that it can change is the sign of a zero, and a sum that
    starts from it has changed that already.
    """
    number = splat_of(value)
    if number is None:
        return False
    if isinstance(number, complex):
        return number == complex_identity(reducer)
    wanted = identity_of(reducer, element_of(value))
    return wanted is not None and number == wanted
