"""Refusing programs whose collectives have their order already."""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.walk import walk

_EDGE = "sdy.data_flow_edge"  # of the middle of Shardy's propagation; nothing else uses its input


def refuse_tokens(module: ir.Module, name: str, precondition: str) -> None:
    """Raises a located ToolError where an op has a token: a pass that reorders comes before.

    Or where one is an edge of Shardy's propagation, which a value that is used anew breaks.
    """

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == _EDGE:
            raise ToolError(
                f"{_EDGE} stands where {name} may use a value once more: end Shardy's propagation "
                f"with sdy-sink-data-flow-edges before {name} ({precondition})",
                op.location,
            )
        for value in (*op.operands, *op.results):
            if bindings.TokenType.isinstance(value.type):
                raise ToolError(
                    f"{op.name} has a token, which orders what {name} is to interleave: run "
                    f"{name} before thread-tokens, or strip-tokens first ({precondition})",
                    op.location,
                )
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
