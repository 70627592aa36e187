"""Scatters that compilers make something else of.

What the gradient of a gather adds into zeros is written over what it is added to, if that is all it
is for; and XLA:TPU selects instead, where each row of the zeros gets one element at most.
"""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import scatter_numbers
from stablehlo_tools.dialect.names import ADD, SCATTER
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.ir.values import producer, splat_of


def written_over(op: ir.Operation) -> tuple[ir.Value, ir.Operation] | None:
    """Of `x + scatter(0, …)`, a sum that nothing else reads: x, and the scatter that adds."""
    if op.name != ADD:
        return None
    for scattered, other in ((op.operands[1], op.operands[0]), (op.operands[0], op.operands[1])):
        scatter = producer(scattered)
        if scatter is not None and _adds_to_zeros(scatter) and len(list(scattered.uses)) == 1:
            return other, scatter
    return None


def is_one_hot(op: ir.Operation) -> bool:
    """Whether a scatter puts at most one element into each row along one dimension of zeros."""
    if op.name != SCATTER or not _adds_to_zeros(op):
        return False
    numbers = scatter_numbers(op)
    rank = ir.RankedTensorType(op.operands[0].type).rank
    return (
        not numbers.update_window_dims
        and len(numbers.index_map) == 1
        and len(numbers.operand_batching) == rank - 1
        and ir.ShapedType(op.operands[2].type).shape[-1] == 1
    )


def _adds_to_zeros(op: ir.Operation) -> bool:
    if op.name != SCATTER or len(op.results) != 1 or splat_of(op.operands[0]) != 0:
        return False
    return reducer_kind(op.regions[0].blocks[0]) == "add"
