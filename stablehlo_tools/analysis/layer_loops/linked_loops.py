"""The loops of a program: which takes values of which, and which range of layers each goes over.

Two loops are linked where one takes what the other gives, through ops but no third loop: a
backward loop takes the residuals of its forward one. A loop that `split-layers` wrote has a mark
that says which range it goes over, so that a later run, or a later pass, does not take it for a
loop over all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.values import producer

RANGE = "stablehlo_tools.range"


def loops_ahead(values: Iterable[ir.Value]) -> Iterator[tuple[ir.Operation, int]]:
    """The results of loops that values are computed from, without a loop in between."""
    pending, seen = list(values), set[ir.Value]()
    while pending:
        value = pending.pop()
        maker = producer(value)
        if maker is None or value in seen:
            continue
        seen.add(value)
        if maker.name == WHILE:
            yield maker, ir.OpResult(value).result_number
        else:
            pending += maker.operands


def loops_behind(value: ir.Value) -> Iterator[tuple[ir.Operation, int]]:
    """The operands of loops that are computed from a value, without a loop in between."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        for use in pending.pop().uses:
            op = use.owner.operation
            if op.name == WHILE:
                yield op, use.operand_number
                continue
            for result in op.results:
                if result not in seen:
                    seen.add(result)
                    pending.append(result)


def mark(loop: ir.Operation, number: int) -> None:
    """Says which range, counted in the order of the rows, a loop goes over."""
    type_ = ir.IntegerType.get_signless(64, loop.context)
    loop.attributes[RANGE] = ir.IntegerAttr.get(type_, number)


def range_of(loop: ir.Operation) -> int | None:
    """The range that a loop goes over; None for other loops."""
    if RANGE not in loop.attributes:
        return None
    return ir.IntegerAttr(loop.attributes[RANGE]).value
