"""Constants: what splat they are, and copies of them in other shapes.

The bindings have no attribute for complex elements and fail to hand one out; those constants are
copied as text.
"""

from __future__ import annotations

import re

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.values import producer

CONSTANTS = frozenset({"stablehlo.constant", "sdy.constant"})
_SPREADING = frozenset({"stablehlo.broadcast_in_dim", "stablehlo.reshape"})
_COMPLEX = re.compile(r"dense<\(([-+.e\d]+),([-+.e\d]+)\)>")
_VALUE = re.compile(r"value = (dense<.*>) : tensor<")


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
