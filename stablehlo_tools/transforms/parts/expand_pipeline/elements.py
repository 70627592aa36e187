"""Small writing of tensors: other element types, single rows, numbers that change nothing."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, shape_of


def nothing(build: Builder, shape: Sequence[int], element: ir.Type) -> ir.Value:
    """What changes no number that it is added to: -0.0 for floats.

    Ranks that have no results of their own hold it, so that a sum over all gives the others' bits.
    """
    return build.splat(-0.0 if isinstance(element, ir.FloatType) else 0, shape, element)


def wide(element: ir.Type) -> ir.Type:
    """The type that terms are added up in: at least 32 bits of float."""
    if isinstance(element, ir.FloatType) and element.width < 32:
        return ir.F32Type.get(element.context)
    return element


def row_starts(build: Builder, rows: ir.Value, head: Sequence[ir.Value]) -> list[ir.Value]:
    return [*head, *[build.i32(0)] * (len(shape_of(rows)) - len(head))]


def put_row(build: Builder, rows: ir.Value, value: ir.Value, head: Sequence[ir.Value]) -> ir.Value:
    """Rows with one of them written."""
    row = build.reshape(value, [1, *shape_of(value)])
    return build.update(rows, row, row_starts(build, rows, head))


def row_of(build: Builder, rows: ir.Value, head: Sequence[ir.Value]) -> ir.Value:
    """One of the rows."""
    shape = shape_of(rows)[1:]
    taken = build.dynamic_slice(rows, row_starts(build, rows, head), [1, *shape])
    return build.reshape(taken, shape)
