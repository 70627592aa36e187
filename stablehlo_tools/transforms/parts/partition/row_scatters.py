"""Scatters of whole rows, said as such.

    scatter of windows [1, 1024] into [V, 1024], by two indices (jax.vmap of an embedding)
        ==>  scatter of windows [1024], its first dimension inserted, by the first index; where the
             second is not 0 the first becomes -1

XLA:TPU runs a scatter whose windows have an indexed dimension row by row, in a loop of five kernels
(with libtpu 0.0.51, whatever the type, the reducer and the number of indices); and an inserted
dimension can be divided where one of the windows cannot.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import scatter_numbers
from stablehlo_tools.dialect.dimensions import integer
from stablehlo_tools.dialect.names import CONCATENATE, SCATTER
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import ops_named


def insert_indexed_dims(module: ir.Module) -> None:
    """Rewrites the scatters of a module, in place; those whose windows reach over more than one and
    less than all of an indexed dimension stay."""
    for op in ops_named(module.operation, {SCATTER}):
        _insert(op)


def _insert(op: ir.Operation) -> None:
    numbers, count = scatter_numbers(op), len(op.results)
    whole, update = shape_of(op.operands[0]), shape_of(op.operands[count + 1])
    places = dict(
        zip(numbers.window_dims(len(whole)), numbers.update_window_dims, strict=True)
    )  # of the operand's dimensions in the updates
    indexed = [dim for dim in numbers.index_map if dim in places]
    ones = [dim for dim in indexed if update[places[dim]] == 1]
    full = [dim for dim in indexed if dim not in ones and update[places[dim]] == whole[dim]]
    element = element_of(op.operands[count])
    is_signed = isinstance(element, ir.IntegerType) and not element.is_unsigned
    if not indexed or len(ones) + len(full) < len(indexed) or (full and not is_signed):
        return
    if len(full) == len(numbers.index_map):
        return  # nothing else would say that a window is out of bounds
    build = Builder(ir.InsertionPoint(op), op.location)
    kept = [dim for dim in numbers.index_map if dim not in full]
    if full:
        op.operands[count] = _only(
            build,
            op.operands[count],
            numbers.index_vector,
            [component for component, dim in enumerate(numbers.index_map) if dim in kept],
        )
        for flag in ("indices_are_sorted", "unique_indices"):
            if flag in op.attributes:
                op.attributes[flag] = ir.BoolAttr.get(False, op.context)
    gone = {places[dim] for dim in ones}
    rows = [size for at, size in enumerate(update) if at not in gone]
    if ones:
        for position in range(count + 1, 2 * count + 1):
            op.operands[position] = build.reshape(op.operands[position], rows)
    op.attributes["scatter_dimension_numbers"] = bindings.ScatterDimensionNumbers.get(
        [
            at - sum(each < at for each in gone)
            for at in numbers.update_window_dims
            if at not in gone
        ],
        sorted([*numbers.inserted, *ones]),
        list(numbers.operand_batching),
        list(numbers.indices_batching),
        kept,
        numbers.index_vector,
        context=op.context,
    )


def select_components(build: Builder, indices: ir.Value, dim: int, kept: Sequence[int]) -> ir.Value:
    """These components of indices, whose dimension `dim` holds them."""
    op = producer(indices)
    is_joined = op is not None and op.name == CONCATENATE and integer(op, "dimension") == dim
    if op is not None and is_joined and len(op.operands) == shape_of(indices)[dim]:
        parts = [op.operands[n] for n in kept]
    else:
        parts = [build.slice_along(indices, dim, n, n + 1) for n in kept]
    return parts[0] if len(parts) == 1 else build.concatenate(parts, dim)


def _only(build: Builder, indices: ir.Value, dim: int, kept: Sequence[int]) -> ir.Value:
    """These components of indices; all -1, where no window is, for an index of which another
    component is not 0."""
    shape = shape_of(indices)
    taken = select_components(build, indices, dim, kept)
    starts: ir.Value | None = None
    for component in range(shape[dim]):
        if component not in kept:
            part = build.slice_along(indices, dim, component, component + 1)
            is_start = build.compare("EQ", part, build.splat_like(0, part))
            starts = is_start if starts is None else build.same("and", starts, is_start)
    assert starts is not None, "one is left out"
    if len(kept) > 1:
        starts = build.broadcast(starts, shape_of(taken), list(range(len(shape))))
    return build.op("select", [starts, taken, build.splat_like(-1, taken)], taken.type)
