"""Gathers, scatters and updates whose indexed dimension is divided.

The indices are global, and the same on every device along the axes that divide the dimension. Each
device serves the ones that fall into its part:

    gather                  clamp as on the whole, shift, gather, and put the identity of the
                            following sum where the index is another device's
    scatter                 shift; indices outside of the part are dropped by scatter itself
    dynamic_update_slice    of one row: write the row, or what is there already
"""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.analysis.reducers import identity_of, is_identity_of, reducer_kind
from stablehlo_tools.analysis.tensor_shardings import Axes, axes_in
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of, write_reducer
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.transforms.parts.partition.local_view import LocalView
from stablehlo_tools.transforms.parts.partition.resharding import all_reduce_of
from stablehlo_tools.transforms.parts.partition.undividable import integers

_INDEX_BITS = 32  # at least so many, that any place in a dimension can be told


def gather(local: LocalView, op: ir.Operation) -> None:
    """Gathers from the device's part of the operand."""
    numbers = bindings.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    operand, result = op.operands[0], op.results[0]
    sizes, whole = integers(op, "slice_sizes"), local.whole_shape(operand)
    divided = local.divided(operand)
    index_map = list(numbers.start_index_map)
    masked = [
        dim
        for dim in index_map
        if divided[dim] and sizes[dim] == 1 and dim not in numbers.operand_batching_dims
    ]
    local_sizes = [
        part if size == full else size
        for part, size, full in zip(shape_of(operand), sizes, whole, strict=True)
    ]
    op.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(local_sizes, op.context)
    if not masked:
        return
    build = Builder(ir.InsertionPoint(op), op.location)
    vector_dim = numbers.index_vector_dim
    indices = _wide(build, op.operands[1])
    last = [full - size for full, size in zip(whole, sizes, strict=True)]
    clamped = build.op(
        "clamp",
        [
            build.splat(0, shape_of(indices), element_of(indices)),
            indices,
            _along(build, indices, [last[dim] for dim in index_map], vector_dim),
        ],
        indices.type,
    )
    starts = [local.offsets.start(divided[d], shape_of(operand)[d]) if d in masked else None
              for d in index_map]  # fmt: skip
    shifted = _shifted(build, clamped, starts, vector_dim)
    limits = [shape_of(operand)[dim] - 1 if dim in masked else last[dim] for dim in index_map]
    inside = _inside(build, shifted, limits, vector_dim)
    op.operands[1] = shifted
    if "indices_are_sorted" in op.attributes and len(index_map) > 1:
        op.attributes["indices_are_sorted"] = ir.BoolAttr.get(False, op.context)
    after = Builder(ir.InsertionPoint.after(op), op.location)
    batch = [d for d in range(len(shape_of(result))) if d not in numbers.offset_dims]
    element = element_of(result)
    filler = identity_of("add", element)
    assert filler is not None, "a gather of what has no identity is made whole before"
    mask = after.broadcast(inside, shape_of(result), batch)
    chosen = after.op(
        "select", [mask, result, after.splat(filler, shape_of(result), element)], result.type
    )
    local.stand_in(result, chosen)


def scatter(local: LocalView, op: ir.Operation) -> None:
    """Scatters into the device's part of the operand."""
    if len(op.results) > 1:
        return
    numbers = bindings.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    operand, indices = op.operands[0], op.operands[1]
    divided = local.divided(operand)
    index_map = list(numbers.scattered_dims_to_operand_dims)
    inserted = set(numbers.inserted_window_dims)
    shifts = [
        local.offsets.start(divided[dim], shape_of(operand)[dim])
        if divided[dim] and dim in inserted
        else None
        for dim in index_map
    ]
    build = Builder(ir.InsertionPoint(op), op.location)
    if any(shift is not None for shift in shifts):
        wide = _wide(build, indices)
        op.operands[1] = _shifted(build, wide, shifts, numbers.index_vector_dim)
        if "indices_are_sorted" in op.attributes:
            op.attributes["indices_are_sorted"] = ir.BoolAttr.get(False, op.context)
    summed = _summed_axes(op)
    if summed:
        op.operands[0] = _on_leader(local, build, op, summed)


def dynamic_update_slice(local: LocalView, op: ir.Operation) -> None:
    """Updates the device's part of the operand."""
    operand, update, *starts = op.operands
    divided, whole, sizes = local.divided(operand), local.whole_shape(operand), shape_of(update)
    rows = [d for d, axes in enumerate(divided) if axes and local.divided(update)[d] != axes]
    if not rows:
        return
    build = Builder(ir.InsertionPoint(op), op.location)
    starts = [_wide(build, start) for start in starts]
    kind = element_of(starts[0])
    inside: ir.Value | None = None
    for dim in rows:
        part = shape_of(operand)[dim]
        zero, last, end = (build.splat(n, [], kind) for n in (0, whole[dim] - sizes[dim], part))
        clamped = build.op("clamp", [zero, starts[dim], last], last.type)
        offset = _as(build, local.offsets.start(divided[dim], part), kind)
        starts[dim] = build.same("subtract", clamped, offset)
        low = build.compare("GE", starts[dim], zero)
        here = build.same("and", low, build.compare("LT", starts[dim], end))
        inside = here if inside is None else build.same("and", inside, here)
    assert inside is not None, "there are rows"
    there = build.dynamic_slice(operand, starts, sizes)
    op.operands[1] = build.op("select", [inside, update, there], update.type)
    for number, start in enumerate(starts):
        op.operands[2 + number] = start


def _wide(build: Builder, indices: ir.Value) -> ir.Value:
    """Indices in a type that can tell every place of a dimension."""
    kind = element_of(indices)
    if isinstance(kind, ir.IntegerType) and kind.width < _INDEX_BITS:
        return _as(build, indices, ir.IntegerType.get_signless(_INDEX_BITS, build.context))
    return indices


def _as(build: Builder, value: ir.Value, element: ir.Type) -> ir.Value:
    if element_of(value) == element:
        return value
    return build.op("convert", [value], build.tensor(shape_of(value), element))


def _along(build: Builder, indices: ir.Value, numbers: list[int], vector_dim: int) -> ir.Value:
    """A number for each component of index vectors, in the shape of the indices."""
    shape, element = shape_of(indices), element_of(indices)
    if len(set(numbers)) == 1:
        return build.splat(numbers[0], shape, element)
    return build.broadcast(_as(build, build.table(numbers), element), shape, [vector_dim])


def _shifted(
    build: Builder, indices: ir.Value, starts: list[ir.Value | None], vector_dim: int
) -> ir.Value:
    """Indices less the start of the device's part, for the components that have one."""
    shape, element = shape_of(indices), element_of(indices)
    if len(starts) == 1 and starts[0] is not None:
        start = build.broadcast(_as(build, starts[0], element), shape, [])
        return build.same("subtract", indices, start)
    scalars = [
        build.splat(0, [], element) if start is None else _as(build, start, element)
        for start in starts
    ]
    rows = [build.reshape(scalar, [1]) for scalar in scalars]
    vector = build.op(
        "concatenate",
        rows,
        build.tensor([len(rows)], element),
        dimension=build.integer(0),
    )
    return build.same("subtract", indices, build.broadcast(vector, shape, [vector_dim]))


def _inside(build: Builder, indices: ir.Value, limits: list[int], vector_dim: int) -> ir.Value:
    """Whether each index vector falls into the device's part; without the vector's dimension."""
    shape = shape_of(indices)
    zero = build.splat(0, shape, element_of(indices))
    low = build.compare("GE", indices, zero)
    high = build.compare("LE", indices, _along(build, indices, limits, vector_dim))
    each = build.same("and", low, high)
    if vector_dim == len(shape):
        return each
    rest = shape[:vector_dim] + shape[vector_dim + 1 :]
    if shape[vector_dim] == 1:
        return build.reshape(each, rest)
    boolean = element_of(each)
    whole = build.op(
        "reduce",
        [each, build.splat(1, [], boolean)],
        build.tensor(rest, boolean),
        dimensions=build.integers([vector_dim]),
    )
    write_reducer("and", boolean, maker_of(whole).regions[0], build.location)
    return whole


def _summed_axes(op: ir.Operation) -> Axes:
    """The axes over which Shardy's all_reduce sums a scatter's result."""
    all_reduce = all_reduce_of(op.results[0])
    return () if all_reduce is None else axes_in(str(all_reduce.attributes["reduction_axes"]))


def _on_leader(local: LocalView, build: Builder, op: ir.Operation, summed: Axes) -> ir.Value:
    """A scatter's operand on the first device along the axes, and an identity on the others."""
    operand = op.operands[0]
    kind = reducer_kind(op.regions[0].blocks[0])
    assert kind is not None, "Shardy sums no scatter of another kind"
    if is_identity_of(kind, operand):
        return operand
    element = element_of(operand)
    identity = identity_of(kind, element)
    assert identity is not None, "made whole before"
    leads = build.compare("EQ", local.offsets.start(summed, 1), local.offsets.zero())
    others = build.splat(identity, shape_of(operand), element)
    return build.op("select", [leads, operand, others], operand.type)
