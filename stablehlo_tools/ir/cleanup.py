"""Ops that are not needed: computed twice, used by nothing, or reshapes that undo each other."""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, RESHAPE
from stablehlo_tools.dialect.traits import Trait, ops_with_any
from stablehlo_tools.ir.values import producer
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


_PLAIN = ("stablehlo.", "chlo.", "sdy.sharding_constraint", "sdy.constant")
_KEPT = ops_with_any(
    Trait.TRANSFER | Trait.TOKEN | Trait.BRANCH | Trait.LOOP | Trait.RANDOM | Trait.OPAQUE
) | {"stablehlo.return"}


def erase_unused(block: ir.Block) -> None:
    """Erases the ops of a block, and of blocks in it, whose results nothing uses; those with
    an effect, or that may have one in a region, stay."""
    for view in reversed(list(block.operations)):
        op = view.operation
        used = any(next(iter(result.uses), None) is not None for result in op.results)
        if not used and len(op.results) and op.name.startswith(_PLAIN) and op.name not in _KEPT:
            op.erase()
            continue
        for region in op.regions:
            for inner in region.blocks:
                erase_unused(inner)


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
