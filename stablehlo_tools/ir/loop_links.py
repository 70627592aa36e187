"""What one loop hands to the next, without what stands between that leaves it as it is."""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.values import producer, unconstrained
from stablehlo_tools.ir.walk import walk

_WHILE = "stablehlo.while"
_UPDATE = "stablehlo.dynamic_update_slice"
_KEEPING = frozenset({"sdy.sharding_constraint", "stablehlo.reshape"})


def link_loops(module: ir.Module) -> None:
    """Lets what a loop is given stand for a result that every iteration hands on as it came; and a
    stack that one loop has written stand for reshapes of it that another loop is given.

    Sharding constraints on the way are dropped.
    """

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name != _WHILE:
            return ir.WalkResult.ADVANCE
        for place, value in enumerate(op.operands):
            source = _stack(value)
            if source is not None:
                op.operands[place] = source
        block = op.regions[1].blocks[0]
        ends = terminator(block).operands
        for place, argument in enumerate(block.arguments):
            if ends[place] == argument:
                op.results[place].replace_all_uses_with(op.operands[place])
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def _stack(value: ir.Value) -> ir.Value | None:
    """The result of a loop that a value is, if the loop wrote it row by row."""
    found, maker = value, producer(value)
    while maker is not None and maker.name in _KEEPING:
        found = maker.operands[0]
        maker = producer(found)
    if maker is None or maker.name != _WHILE or found.type != value.type:
        return None
    place = ir.OpResult(found).result_number
    end = producer(unconstrained(terminator(maker.regions[1].blocks[0]).operands[place]))
    return found if end is not None and end.name == _UPDATE else None
