"""Replaces a call of a single-block function by a copy of its body."""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import terminator


def inline_call(call: ir.Operation, function: ir.Operation) -> list[ir.Operation]:
    """Copies the body of `function` to where `call` stands and erases the call.

    Values that the body returns take the place of the call's results. Returns the top-level ops
    that were copied, which keep their own locations.
    """
    body = function.regions[0].blocks[0]
    values: dict[ir.Value, ir.Value] = dict(zip(body.arguments, call.operands, strict=True))
    copies: list[ir.Operation] = []
    end = terminator(body)
    for op in body.operations:
        if op.operation == end:
            break
        copy = op.operation.clone(ip=ir.InsertionPoint(call))
        _rename(copy, values)
        values.update(zip(op.operation.results, copy.results, strict=True))
        copies.append(copy)
    for result, returned in zip(call.results, end.operands, strict=True):
        result.replace_all_uses_with(values[returned])
    call.erase()
    return copies


def _rename(op: ir.Operation, values: dict[ir.Value, ir.Value]) -> None:
    """Points the operands of an op, and of ops in its regions, at what stands for them."""
    for position, value in enumerate(op.operands):
        if value in values:
            op.operands[position] = values[value]
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                _rename(inner.operation, values)
