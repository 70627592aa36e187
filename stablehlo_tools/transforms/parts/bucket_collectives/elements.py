"""Elements of several types as integers of one: the narrowest that all are whole multiples of.

    tensor<4x3xf32>, tensor<5xbf16>  ==>  tensor<4x6xui16>, tensor<5xui16>

A bitcast keeps every bit, those of a NaN too, which an exchange of mixed floats does not: XLA:CPU
and XLA:GPU convert the narrower ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.transforms.parts.bucket_collectives.exchange import reshaped


def common_element(elements: Sequence[ir.Type]) -> ir.Type:
    """The type to exchange elements in: their own, or an unsigned integer that divides them all."""
    if all(element == elements[0] for element in elements):
        return elements[0]
    return ir.IntegerType.get_unsigned(min(map(_width, elements)), elements[0].context)


def encoded_shape(shape: Sequence[int], own: ir.Type, element: ir.Type) -> list[int]:
    """The shape that `encoded` gives a tensor of its own element type."""
    count = 1 if own == element else _width(own) // _width(element)
    return [*shape[:-1], shape[-1] * count] if count > 1 else list(shape)


def encoded(builder: Builder, value: ir.Value, element: ir.Type) -> ir.Value:
    """The value's bits as elements of another type, so many more in the last dimension."""
    own, shape = element_of(value), shape_of(value)
    if own == element:
        return value
    count = _width(own) // _width(element)
    split = [*shape, count] if count > 1 else shape
    bits = builder.op("bitcast_convert", [value], builder.tensor(split, element))
    return reshaped(builder, bits, encoded_shape(shape, own, element))


def decoded(builder: Builder, value: ir.Value, element: ir.Type) -> ir.Value:
    """What `encoded` made the value of, of elements of the given type."""
    own, shape = element_of(value), shape_of(value)
    if own == element:
        return value
    count = _width(element) // _width(own)
    narrow = [*shape[:-1], shape[-1] // count] if count > 1 else shape
    bits = reshaped(builder, value, [*narrow, count] if count > 1 else shape)
    return builder.op("bitcast_convert", [bits], builder.tensor(narrow, element))


def _width(element: ir.Type) -> int:
    assert isinstance(element, ir.IntegerType | ir.FloatType), "elements of whole bytes"
    return element.width
