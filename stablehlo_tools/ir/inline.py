"""Replaces a call of a single-block function by a copy of its body."""

from __future__ import annotations

from collections.abc import Mapping

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.symbols import CALLS, callee_name, functions_by_name
from stablehlo_tools.ir.walk import walk


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
        copy = copy_with(op.operation, values, ir.InsertionPoint(call))
        values.update(zip(op.operation.results, copy.results, strict=True))
        copies.append(copy)
    for result, returned in zip(call.results, end.operands, strict=True):
        result.replace_all_uses_with(values[returned])
    call.erase()
    return copies


def inline_all_calls(module: ir.Module) -> None:
    """Inlines every call and composite of a function that has a body, and drops those functions.

    Raises a located ToolError for a recursive call.
    """
    functions = functions_by_name(module)
    if len(functions) < 2:
        return
    called: set[str] = set()
    rounds = 0
    while calls := [call for call in _calls(module) if _has_body(functions, callee_name(call))]:
        rounds += 1
        if rounds > len(functions):
            raise ToolError(f"@{callee_name(calls[0])} calls itself", calls[0].location)
        for call in calls:
            called.add(callee_name(call))
            inline_call(call, functions[callee_name(call)])
    for name in called:
        if "sym_visibility" in functions[name].attributes:
            functions[name].erase()


def _calls(module: ir.Module) -> list[ir.Operation]:
    """Every call and composite of the module."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in CALLS:
            found.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return found


def _has_body(functions: dict[str, ir.Operation], name: str) -> bool:
    return name in functions and len(functions[name].regions[0].blocks) == 1


def copy_with(
    op: ir.Operation, values: Mapping[ir.Value, ir.Value], point: ir.InsertionPoint
) -> ir.Operation:
    """A copy of an op that reads, in its regions too, what stands for its operands."""
    copy = op.clone(ip=point)
    _rename(copy, values)
    return copy


def _rename(op: ir.Operation, values: Mapping[ir.Value, ir.Value]) -> None:
    """Points the operands of an op, and of ops in its regions, at what stands for them."""
    for position, value in enumerate(op.operands):
        if value in values:
            op.operands[position] = values[value]
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                _rename(inner.operation, values)
