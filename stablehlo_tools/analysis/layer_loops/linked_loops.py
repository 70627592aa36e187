"""Finds the loops of a program that depend on each other, and the range of layers of each.

Two loops are linked if one reads results of the other, through ops but no third loop. A backward
loop, for example, reads the residuals of its forward loop. `split-layers` marks the loops that it
writes with their range. So a later run, or a later pass, does not treat such a loop as one over all
layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.values import producer

RANGE = "stablehlo_tools.range"


def loops_ahead(values: Iterable[ir.Value]) -> Iterator[tuple[ir.Operation, int]]:
    """Yields the results of loops that values depend on, without a loop in between."""
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
    """Yields the operands of loops that depend on a value, without a loop in between."""
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
    """Marks a loop with its range, counted in the order of the rows."""
    type_ = ir.IntegerType.get_signless(64, loop.context)
    loop.attributes[RANGE] = ir.IntegerAttr.get(type_, number)


def range_of(loop: ir.Operation) -> int | None:
    """Returns the range of a marked loop; None for other loops."""
    if RANGE not in loop.attributes:
        return None
    return ir.IntegerAttr(loop.attributes[RANGE]).value
