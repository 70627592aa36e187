"""Which loops values come from, and which take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import walk

_WHILE = "stablehlo.while"


def loops_in(root: ir.Operation) -> list[ir.Operation]:
    """The `while` ops in the regions of an op, in the order of the text, an outer one first."""
    loops: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == _WHILE:
            loops.append(op)
        return ir.WalkResult.ADVANCE

    walk(root, visit)
    return loops


def loops_ahead(values: Iterable[ir.Value]) -> Iterator[tuple[ir.Operation, int]]:
    """The results of loops that values are computed from, without a loop in between."""
    pending, seen = list(values), set[ir.Value]()
    while pending:
        value = pending.pop()
        maker = producer(value)
        if maker is None or value in seen:
            continue
        seen.add(value)
        if maker.name == _WHILE:
            yield maker, ir.OpResult(value).result_number
        else:
            pending += maker.operands


def loops_behind(value: ir.Value) -> Iterator[tuple[ir.Operation, int]]:
    """The operands of loops that are computed from a value, without a loop in between."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        for use in pending.pop().uses:
            op = use.owner.operation
            if op.name == _WHILE:
                yield op, use.operand_number
                continue
            for result in op.results:
                if result not in seen:
                    seen.add(result)
                    pending.append(result)
