"""Ops that only move elements to places known beforehand, said by ops that say so.

    scatter at constant indices of one window (x.at[1:-1].add(u))
        ==>  dynamic_update_slice of what the slice of x and u make, from constant starts
    reshape of a broadcast of a dimension of 1 (an edge repeated by jnp.pad)
        ==>  concatenate of as many copies

A partitioner sees which elements go where, and sends those alone.
"""

from __future__ import annotations

from stablehlo_tools.analysis.device_values import folded
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import scatter_numbers
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import BROADCAST, RESHAPE, SCATTER
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.values import has_uses, producer
from stablehlo_tools.ir.walk import ops_named

_MOST_COPIES = 8  # of an edge: a wider one is spread by a broadcast


def plain_moves(module: ir.Module) -> None:
    """Rewrites the ops of a module, in place."""
    for op in ops_named(module.operation, {SCATTER}):
        _as_update(op)
    for op in ops_named(module.operation, {RESHAPE}):
        _as_copies(op)


def _as_update(op: ir.Operation) -> None:
    """A scatter of one window, wholly within its operand, that overwrites or combines by one op."""
    numbers = scatter_numbers(op)
    index = folded(op.operands[1]) if len(op.results) == 1 else None
    if index is None or index.ndim != 1 or numbers.index_vector != 0 or numbers.operand_batching:
        return
    operand, _, update = op.operands
    whole = shape_of(operand)
    sizes = [1] * len(whole)
    windows = numbers.window_dims(len(whole))
    for dim, update_dim in zip(windows, numbers.update_window_dims, strict=True):
        sizes[dim] = shape_of(update)[update_dim]
    starts = [0] * len(whole)
    for dim, start in zip(numbers.index_map, index.tolist(), strict=True):
        starts[dim] = int(start)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    if min(starts, default=0) < 0 or any(end > n for end, n in zip(ends, whole, strict=True)):
        return  # which a scatter drops
    block = op.regions[0].blocks[0]
    only = [inner.operation for inner in block.operations]
    overwrites = len(only) == 1 and list(only[0].operands) == [block.arguments[1]]
    reducer = None if overwrites else reducer_kind(block)
    in_order = list(numbers.update_window_dims) == sorted(numbers.update_window_dims)
    if not (overwrites or reducer) or not in_order:
        return
    build = Builder(ir.InsertionPoint(op), op.location)
    rows = build.reshape(update, sizes) if shape_of(update) != sizes else update
    if reducer:
        rows = build.same(reducer, build.slice(operand, starts, ends), rows)
    made = build.update(operand, rows, [build.i32(start) for start in starts])
    op.results[0].replace_all_uses_with(made)
    op.erase()


def _as_copies(op: ir.Operation) -> None:
    """A reshape that joins a new dimension of copies to a dimension of 1 next to it."""
    spread = producer(op.operands[0])
    if spread is None or spread.name != BROADCAST:
        return
    value = spread.operands[0]
    shape, wide, made = shape_of(value), shape_of(spread.results[0]), shape_of(op.results[0])
    if len(wide) != len(shape) + 1 or len(made) != len(shape):
        return
    kept = list(integers(spread, "broadcast_dimensions"))
    (new,) = set(range(len(wide))) - set(kept)
    copies = wide[new]
    dims = [d for d in range(len(shape)) if shape[d] == 1 and kept[d] in (new - 1, new + 1)]
    for dim in dims:
        joined = [copies if d == dim else n for d, n in enumerate(shape)]
        alike = kept == sorted(kept) and [wide[d] for d in kept] == shape
        if alike and joined == made and 0 < copies <= _MOST_COPIES:
            build = Builder(ir.InsertionPoint(op), op.location)
            result = value if copies == 1 else build.concatenate([value] * copies, dim)
            op.results[0].replace_all_uses_with(result)
            op.erase()
            if not has_uses(spread.results[0]):
                spread.erase()
            return
