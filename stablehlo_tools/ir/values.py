"""Finds the producers and users of values, and the elements of constants.

The bindings have no attribute for complex elements and fail to return one, so that complex
constants are read and copied as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cmp_to_key
from itertools import islice

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import to_place
from stablehlo_tools.dialect.names import RESHAPE, SHARDING_CONSTRAINT
from stablehlo_tools.dialect.reducers import complex_identity, identity_of
from stablehlo_tools.ir.builder import Builder, element_of

CONSTANTS = frozenset({"stablehlo.constant", "sdy.constant"})
_SPREADING = frozenset({"stablehlo.broadcast_in_dim", "stablehlo.reshape"})
_COMPLEX = re.compile(r"dense<\(([-+.e\d]+),([-+.e\d]+)\)>")
_VALUE = re.compile(r"value = (dense<.*>) : tensor<")


def producer(value: ir.Value) -> ir.Operation | None:
    """Returns the op that defines a value; None for a block argument."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def skip_constraints(value: ir.Value) -> ir.Value:
    """Returns the value before its sharding constraints, which do not change it."""
    return _before(SHARDING_CONSTRAINT, value)


def before_reshapes(value: ir.Value) -> ir.Value:
    """Returns the operand of the chain of reshapes that makes a value; else the value itself."""
    return _before(RESHAPE, value)


def _before(name: str, value: ir.Value) -> ir.Value:
    """Returns the operand of the chain of ops of this name that makes a value."""
    op = producer(value)
    while op is not None and op.name == name:
        value = op.operands[0]
        op = producer(value)
    return value


def maker_of(value: ir.Value) -> ir.Operation:
    """Returns the op that defines a value, which must not be a block argument."""
    op = producer(value)
    assert op is not None, "an argument of a block has no op that makes it"
    return op


_MADE_OF_CONSTANTS = frozenset({*_SPREADING, "stablehlo.iota"})


def is_spread_constant(value: ir.Value) -> bool:
    """Returns True if a value is computed from constants and iotas by broadcasts and reshapes."""
    op = producer(value)
    if op is None:
        return False
    if op.name in CONSTANTS:
        return True
    return op.name in _MADE_OF_CONSTANTS and all(map(is_spread_constant, op.operands))


def stand_in(value: ir.Value, replacement: ir.Value) -> None:
    """Replaces all uses of a value by one computed from it, except in that computation."""
    value.replace_all_uses_except(replacement, [maker_of(replacement)])


def key_of(op: ir.Operation) -> ir.Value | ir.Operation:
    """Returns a set key for an op; hashing the op itself is linear in its operands."""
    return op.results[0] if len(op.results) else op


def describe_op(op: ir.Operation) -> str:
    """Returns an op's name and source line, for a message."""
    place = to_place(op.location)
    name = op.name.removeprefix("stablehlo.")
    return f"{name} of {place.file}:{place.line}" if place.file else name


def is_float(type_: ir.Type) -> bool:
    """Returns True for a tensor type with real or complex floating-point elements."""
    if not isinstance(type_, ir.RankedTensorType):
        return False
    return isinstance(type_.element_type, ir.FloatType | ir.ComplexType)


def has_uses(value: ir.Value) -> bool:
    """Returns True if a value has uses."""
    return next(iter(value.uses), None) is not None


def is_used_once(value: ir.Value) -> bool:
    """Returns True if a value has one use."""
    return len(list(islice(value.uses, 2))) == 1


def in_block_order(ops: Sequence[ir.Operation]) -> list[ir.Operation]:
    """Returns ops of one block, sorted by their order in it."""

    def compare(one: ir.Operation, other: ir.Operation) -> int:
        return -1 if one.is_before_in_block(other) else int(one != other)

    return sorted(ops, key=cmp_to_key(compare))


def value_of(op: ir.Operation) -> ir.Attribute | None:
    """Returns a constant's value; None if its elements are complex."""
    return op.attributes["value"] if _is_readable(op) else None


def value_text(op: ir.Operation) -> str:
    """Returns a constant's value and type as MLIR prints them."""
    value = value_of(op)
    return str(value) if value else f"{_complex_text(op)} : {op.results[0].type}"


def splat_of(value: ir.Value) -> float | int | complex | None:
    """Returns the number that all elements of a value equal; None if not a splat constant."""
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
    """Returns the element of a splat constant; None for other constants and complex ones."""
    attribute = value_of(op)
    if not isinstance(attribute, ir.DenseElementsAttr) or not attribute.is_splat:
        return None
    return attribute.get_splat_value()


def is_splat(op: ir.Operation) -> bool:
    """Returns True if all elements of a constant are equal."""
    if _is_readable(op):
        return ir.DenseElementsAttr(op.attributes["value"]).is_splat
    return not _complex_text(op).startswith(("dense<[", 'dense<"'))


def copy_constant(op: ir.Operation, type_: ir.Type, point: ir.InsertionPoint) -> ir.Value:
    """Copies a constant, `sdy` or `stablehlo`, as a `stablehlo` one; splats may change shape."""
    if _is_readable(op):
        value = ir.DenseElementsAttr(op.attributes["value"])
        if type_ != op.results[0].type:
            value = ir.DenseElementsAttr.get_splat(type_, value.get_splat_value())
        return Builder(point, op.location).op("constant", [], type_, value=value)
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
    """Returns True if a value is a splat constant that is the identity of a reducer.

    0.0 counts for a sum of floats. It can only change the sign of a zero, and a sum that starts
    from it has changed that already.
    """
    number = splat_of(value)
    if number is None:
        return False
    if isinstance(number, complex):
        return number == complex_identity(reducer)
    wanted = identity_of(reducer, element_of(value))
    return wanted is not None and number == wanted
