"""Marks on ops that are come back to: handles do not outlive the rewriting of loops around them."""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.parts.pipeline_collectives.survey import loops_of

TO_PIPELINE = "stablehlo_tools.to_pipeline"  # on the loops that are not done yet
TO_HOLD = "stablehlo_tools.to_hold"  # on the loops that are pipelined
SUNK = "stablehlo_tools.sunk"  # on the collectives that came out of a loop


def mark(op: ir.Operation, name: str) -> None:
    """Marks an op; copies of it have the mark too."""
    op.attributes[name] = ir.UnitAttr.get(op.context)


def next_loop(module: ir.Module) -> ir.Operation | None:
    """The first loop that is not done, inner ones before those around them."""
    return next((loop for loop in loops_of(module) if TO_PIPELINE in loop.attributes), None)


def unmarked(module: ir.Module, name: str) -> list[ir.Operation]:
    """The ops with a mark, inner ones last; they lose it."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if name in op.attributes:
            del op.attributes[name]
            found.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return found
