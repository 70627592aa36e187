"""Small writing of tensors: other element types, single rows, numbers that change nothing."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.transforms.parts.expand_pipeline.counted import number
from stablehlo_tools.transforms.parts.split_batch.pieces import Place


def nothing(place: Place, shape: Sequence[int], element: ir.Type) -> ir.Value:
    """What changes no number that it is added to: -0.0 for floats.

    Ranks that have no results of their own hold it, so that a sum over all gives the others' bits.
    """
    return place.splat(-0.0 if isinstance(element, ir.FloatType) else 0, shape, element)


def wide(element: ir.Type) -> ir.Type:
    """The type that terms are added up in: at least 32 bits of float."""
    if isinstance(element, ir.FloatType) and element.width < 32:
        return ir.F32Type.get(element.context)
    return element


def as_element(place: Place, value: ir.Value, element: ir.Type) -> ir.Value:
    """A tensor with another element type."""
    if element_of(value) == element:
        return value
    return place.op("convert", [value], place.tensor(shape_of(value), element))


def as_type(place: Place, value: ir.Value, like: ir.Value) -> ir.Value:
    """A tensor with the element type of another."""
    return as_element(place, value, element_of(like))


def row_starts(place: Place, rows: ir.Value, head: Sequence[ir.Value]) -> list[ir.Value]:
    return [*head, *[number(place, 0)] * (len(shape_of(rows)) - len(head))]


def put_row(place: Place, rows: ir.Value, value: ir.Value, head: Sequence[ir.Value]) -> ir.Value:
    """Rows with one of them written."""
    row = place.reshape(value, [1, *shape_of(value)])
    return place.op("dynamic_update_slice", [rows, row, *row_starts(place, rows, head)], rows.type)


def row_of(place: Place, rows: ir.Value, head: Sequence[ir.Value]) -> ir.Value:
    """One of the rows."""
    shape = shape_of(rows)[1:]
    taken = place.dynamic_slice(rows, row_starts(place, rows, head), [1, *shape])
    return place.reshape(taken, shape)
