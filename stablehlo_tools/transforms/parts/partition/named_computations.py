"""Puts the ops of a named computation in its place.

Its shardings stay as constraints on the values that go in and come out.
"""

from __future__ import annotations

from stablehlo_tools.analysis.shardings import sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.walk import walk

_NAMED_COMPUTATION = "sdy.named_computation"


def dissolve_named_computations(module: ir.Module) -> None:
    """Dissolves every named computation of the module, inner ones first."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == _NAMED_COMPUTATION:
            found.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    for op in reversed(found):
        _dissolve(op)


def _dissolve(op: ir.Operation) -> None:
    block = op.regions[0].blocks[0]
    point = ir.InsertionPoint(op)
    for number, argument in enumerate(block.arguments):
        outside = op.operands[number]
        argument.replace_all_uses_with(_constrained(op, "in_shardings", number, outside, point))
    end = terminator(block)
    for view in list(block.operations):
        if view.operation != end:
            point.insert(view.operation.detach_from_parent())
    for number, result in enumerate(op.results):
        returned = end.operands[number]
        result.replace_all_uses_with(_constrained(op, "out_shardings", number, returned, point))
    op.erase()


def _constrained(
    op: ir.Operation, name: str, number: int, value: ir.Value, point: ir.InsertionPoint
) -> ir.Value:
    if name not in op.attributes or not isinstance(value.type, ir.RankedTensorType):
        return value
    return ir.Operation.create(
        "sdy.sharding_constraint",
        results=[value.type],
        operands=[value],
        attributes={"sharding": sharding_per_value(op.attributes[name])[number]},
        loc=op.location,
        ip=point,
    ).results[0]
