"""Reshapes that undo each other."""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import RESHAPE
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import walk


def fold_reshapes(module: ir.Module) -> None:
    """Lets a value stand for what reshapes of it make, where that has its shape again."""

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name != RESHAPE:
            return ir.WalkResult.ADVANCE
        result = op.results[0]
        source = producer(op.operands[0])
        while source is not None and source.name == RESHAPE:
            if source.operands[0].type == result.type:
                result.replace_all_uses_with(source.operands[0])
                break
            source = producer(source.operands[0])
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
