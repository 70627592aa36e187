"""Takes out ops that nobody uses, or that say nothing."""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.analysis.loops import FORMATTING
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.traits import ELEMENTWISE
from stablehlo_tools.ir.constants import CONSTANTS
from stablehlo_tools.ir.walk import walk

_CONSTRAINT = "sdy.sharding_constraint"
_PURE = (
    FORMATTING
    | ELEMENTWISE
    | CONSTANTS
    | {"stablehlo.iota", "stablehlo.gather", "stablehlo.partition_id"}
)


def erase_unused(block: ir.Block, anchor: ir.Operation | None = None) -> None:
    """Erases ops of a block that nobody uses and that do nothing else, and the anchor if unused."""
    for view in reversed(list(block.operations)):
        op = view.operation
        is_anchor = anchor is not None and op == anchor
        if not is_anchor and op.name not in _PURE:
            continue
        if len(op.results) and not any(_is_used(result) for result in op.results):
            op.erase()


def erase_open_constraints(root: ir.Operation) -> None:
    """Erases constraints in an op that leave all dimensions open, as jax writes them wherever an
    axis of the mesh is automatic."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == _CONSTRAINT and _is_open(op.attributes["sharding"]):
            found.append(op)
        return ir.WalkResult.ADVANCE

    walk(root, visit)
    for op in found:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()


def _is_open(attribute: ir.Attribute) -> bool:
    sharding = bindings.TensorShardingAttr(attribute)
    dims = [bindings.SdyDimensionShardingAttr(dim) for dim in sharding.dimension_shardings]
    if len(sharding.replicated_axes) or len(sharding.unreduced_axes):
        return False
    return not any(len(dim.axes) or dim.is_closed for dim in dims)


def _is_used(value: ir.Value) -> bool:
    return next(iter(value.uses), None) is not None
