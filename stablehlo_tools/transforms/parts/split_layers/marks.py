"""The mark that says which range of layers a loop goes over."""

from __future__ import annotations

from stablehlo_tools.bindings import ir

RANGE = "stablehlo_tools.range"


def mark(loop: ir.Operation, number: int) -> None:
    """Says which range, counted in the order of the rows, a loop goes over."""
    type_ = ir.IntegerType.get_signless(64, loop.context)
    loop.attributes[RANGE] = ir.IntegerAttr.get(type_, number)


def range_of(loop: ir.Operation) -> int | None:
    """The range that a loop goes over; None for other loops."""
    if RANGE not in loop.attributes:
        return None
    return ir.IntegerAttr(loop.attributes[RANGE]).value
