"""Symbols of a module: the names of functions, and the functions that calls refer to."""

from __future__ import annotations

from stablehlo_tools.bindings import ir

FUNCTION = "func.func"
CALL = "func.call"
COMPOSITE = "stablehlo.composite"
CALLS = frozenset({CALL, COMPOSITE})


def symbol_name(op: ir.Operation | ir.OpView) -> str:
    """The name of an op that defines a symbol."""
    return ir.StringAttr(op.attributes["sym_name"]).value


def callee_name(call: ir.Operation) -> str:
    """The symbol that a `func.call` or a `stablehlo.composite` refers to."""
    attribute = call.attributes["callee" if call.name == CALL else "decomposition"]
    return ir.FlatSymbolRefAttr(attribute).value


def functions_by_name(module: ir.Module) -> dict[str, ir.Operation]:
    """The module's functions, in the order of its text."""
    return {
        symbol_name(op): op.operation
        for op in module.body.operations
        if op.operation.name == FUNCTION
    }
