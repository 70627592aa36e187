"""Ops that compute the same, once."""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.walk import walk


def share_common(module: ir.Module) -> None:
    """Runs MLIR's common subexpression elimination in each manual computation.

    Handles of ops in them must not be used afterwards.
    """
    computations: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name != MANUAL_COMPUTATION:
            return ir.WalkResult.ADVANCE
        computations.append(op)
        return ir.WalkResult.SKIP

    walk(module.operation, visit)
    manager = bindings.parse_pass_pipeline(f"{MANUAL_COMPUTATION}(cse)", module.context)
    for op in computations:
        manager.run(op)
