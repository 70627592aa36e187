"""Rewrites ops whose attributes have sizes or indices, on one device's part.

Each rule gets an op with local operands and results and makes it compute the device's part of the
results. All other ops only change their types.

Elements of a part beyond the end of a dimension that does not divide evenly are undefined. Ops that
mix elements along it overwrite them with neutral ones: reduces with their initial value,
contractions with zeros, scatters with an index that is in no part.

The indexed dimension of gathers, scatters and updates may be divided. The indices are global, and
the same on every device along the axes that divide it. Each device handles the indices that fall
into its part:

    gather                  clamp as for the whole, shift, and gather; if the index is another
                            device's, write the identity of the following sum
    scatter                 shift; scatter itself drops indices outside of the part
    dynamic_update_slice    write the rows of the update that are in the part, keep the others
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stablehlo_tools.analysis.shardings import Axes, rank_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import (
    conv_numbers,
    dot_numbers,
    gather_numbers,
    scatter_numbers,
)
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import (
    CONCATENATE,
    CONVOLUTION,
    DOT_GENERAL,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    IOTA,
    PAD,
    REDUCE,
    REVERSE,
    SCATTER,
    SLICE,
)
from stablehlo_tools.dialect.reducers import identity_of, reducer_kind
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import copy_constant, is_identity_of, is_splat
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.transforms.parts.partition import moved_ops
from stablehlo_tools.transforms.parts.partition.dividing import all_reduce_of, summed_axes
from stablehlo_tools.transforms.parts.partition.halo import DimensionParts
from stablehlo_tools.transforms.parts.partition.halo_writing import within
from stablehlo_tools.transforms.parts.partition.local_body import LocalBody
from stablehlo_tools.transforms.parts.partition.operand_needs import (
    REDUCE_WINDOW,
    SELECT_AND_SCATTER,
)
from stablehlo_tools.transforms.parts.partition.sharding_rules import starts_known

# The largest integer up to which a type represents all integers, for types with few mantissa bits.
_EXACT = {"f16": 1 << 11, "bf16": 1 << 8, "f32": 1 << 24, "complex<f32>": 1 << 24}
_INDEX_BITS = 32  # enough bits for any index of a dimension


def _gather(local: LocalBody, op: ir.Operation) -> None:
    """Gathers from the device's part of the operand."""
    numbers = gather_numbers(op)
    operand, result = op.operands[0], op.results[0]
    sizes, whole = integers(op, "slice_sizes"), local.whole_shape(operand)
    divided = local.sharding_of(operand)
    index_map = numbers.index_map
    masked = [
        dim
        for dim in index_map
        if divided[dim] and sizes[dim] == 1 and dim not in numbers.operand_batching
    ]
    local_sizes = [
        part if size == full else size
        for part, size, full in zip(shape_of(operand), sizes, whole, strict=True)
    ]
    op.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(local_sizes, op.context)
    if not masked:
        return
    build = Builder(ir.InsertionPoint(op), op.location)
    vector_dim = numbers.index_vector
    indices = _wide(build, op.operands[1])
    last = [full - size for full, size in zip(whole, sizes, strict=True)]
    zeros = build.splat_like(0, indices)
    ends = _along(build, indices, [last[dim] for dim in index_map], vector_dim)
    clamped = build.same("clamp", zeros, indices, ends)
    starts = [local.devices.start(divided[d], shape_of(operand)[d]) if d in masked else None
              for d in index_map]  # fmt: skip
    shifted = _subtract_starts(build, clamped, starts, vector_dim)
    limits = [shape_of(operand)[dim] - 1 if dim in masked else last[dim] for dim in index_map]
    inside = _inside(build, shifted, limits, vector_dim)
    op.operands[1] = shifted
    # Clamping keeps the order of single numbers, but not the lexicographic order of vectors.
    if "indices_are_sorted" in op.attributes and len(index_map) > 1:
        op.attributes["indices_are_sorted"] = ir.BoolAttr.get(False, op.context)
    after = Builder(ir.InsertionPoint.after(op), op.location)
    batch = [d for d in range(len(shape_of(result))) if d not in numbers.windows]
    filler = identity_of("add", element_of(result))
    assert filler is not None, "types without an identity are gathered whole"
    mask = after.broadcast(inside, shape_of(result), batch)
    local.stand_in(result, after.same("select", mask, result, after.splat_like(filler, result)))


def _scatter(local: LocalBody, op: ir.Operation) -> None:
    """Scatters into the device's part of the operand."""
    if len(op.results) > 1:
        return
    numbers = scatter_numbers(op)
    operand, indices = op.operands[0], op.operands[1]
    divided = local.sharding_of(operand)
    shifts = [
        local.devices.start(divided[dim], shape_of(operand)[dim])
        if divided[dim] and dim in numbers.omitted
        else None
        for dim in numbers.index_map
    ]
    build = Builder(ir.InsertionPoint(op), op.location)
    padded = _padding(local, indices, numbers.index_dims(rank_of(indices)))
    if padded:
        op.operands[1] = indices = _out_of_reach(local, build, indices, padded)
    if any(shift is not None for shift in shifts):
        wide = _wide(build, indices)
        op.operands[1] = _subtract_starts(build, wide, shifts, numbers.index_vector)
        # Shifted unsigned indices wrap around.
        if "indices_are_sorted" in op.attributes:
            op.attributes["indices_are_sorted"] = ir.BoolAttr.get(False, op.context)
    # An all_reduce sums the result over these axes, so only one device may keep the operand.
    summed = summed_axes(op.results[0])
    if summed:
        op.operands[0] = _on_leader(local, build, op, summed)


def _dynamic_update_slice(local: LocalBody, op: ir.Operation) -> None:
    """Updates the device's part of the operand with a whole update, or a known part of one.

    The rule reads the rows of the part nearest to the start, as many as the update has. It
    overwrites the rows within the update.
    """
    if starts_known(op, [local.whole_shape(value) for value in op.operands]):
        moved_ops.known_update(local, op)
        return
    operand, update, *starts = op.operands
    divided, whole, sizes = local.sharding_of(operand), local.whole_shape(operand), shape_of(update)
    cut = [d for d, axes in enumerate(divided) if axes and local.sharding_of(update)[d] != axes]
    if not cut:
        return
    build = Builder(ir.InsertionPoint(op), op.location)
    room = [full - size for full, size in zip(whole, sizes, strict=True)]
    starts = [_convert_to_signed(build, *each) for each in zip(starts, room, strict=True)]
    element = element_of(starts[0])
    taken = [min(n, part) for n, part in zip(sizes, shape_of(operand), strict=True)]
    inside: ir.Value | None = None
    shifts: dict[int, ir.Value] = {}
    for dim in cut:
        part = shape_of(operand)[dim]
        zero, last, end = (build.splat(n, [], element) for n in (0, room[dim], part - taken[dim]))
        clamped = build.same("clamp", zero, starts[dim], last)
        offset = build.convert(local.devices.start(divided[dim], part), element)
        begin = build.same("subtract", clamped, offset)
        starts[dim] = build.same("clamp", zero, begin, end)
        shifts[dim] = build.same("subtract", starts[dim], begin)
        within = _rows_within(build, shifts[dim], sizes[dim], (taken, dim))
        inside = within if inside is None else build.same("and", inside, within)
    assert inside is not None, "`cut` is not empty"
    there = build.dynamic_slice(operand, starts, taken)
    rows = _shifted_rows(build, update, taken, shifts)
    op.operands[1] = build.same("select", inside, rows, there)
    for number, start in enumerate(starts):
        op.operands[2 + number] = start


def _rows_within(
    build: Builder, shift: ir.Value, size: int, where: tuple[Sequence[int], int]
) -> ir.Value:
    """Returns a mask of the rows whose index plus `shift` is within the first `size` rows.

    It has the shape in `where`, and varies along the dimension in `where`. For one row it
    broadcasts a scalar.
    """
    shape, dim = where
    element = element_of(shift)
    rows = shift
    if shape[dim] > 1:
        iota = build.iota(build.tensor([shape[dim]], element), 0)
        rows = build.same("add", build.broadcast(shift, [shape[dim]], []), iota)
    low = build.compare("GE", rows, build.splat(0, shape_of(rows), element))
    high = build.compare("LT", rows, build.splat(size, shape_of(rows), element))
    return build.broadcast(build.same("and", low, high), shape, [dim] if shape[dim] > 1 else [])


def _shifted_rows(
    build: Builder, update: ir.Value, taken: Sequence[int], shifts: dict[int, ir.Value]
) -> ir.Value:
    """Returns the rows of an update from `shifts` on, in the shape `taken`. Rows outside of the
    update are arbitrary."""
    zero = build.splat(0, [], element_of(next(iter(shifts.values()))))
    starts = [zero] * len(taken)
    edges = [0] * len(taken)
    for dim, shift in shifts.items():
        if shape_of(update)[dim] > 1:
            edges[dim] = taken[dim]
            starts[dim] = build.same("add", shift, build.splat(taken[dim], [], element_of(shift)))
    if not any(edges):
        return update
    filling = build.splat(0, [], element_of(update))
    wide = build.pad(update, filling, edges, edges, [0] * len(edges))
    return build.dynamic_slice(wide, starts, taken)


def _wide(build: Builder, indices: ir.Value) -> ir.Value:
    """Converts indices to a type that can hold any index of a dimension."""
    element = element_of(indices)
    if isinstance(element, ir.IntegerType) and element.width < _INDEX_BITS:
        return build.convert(indices, ir.IntegerType.get_signless(_INDEX_BITS, build.context))
    return indices


def _convert_to_signed(build: Builder, start: ir.Value, last: int) -> ir.Value:
    """Converts a start to a signed type, so that other starts can be subtracted. An unsigned start
    is clamped to `last` first."""
    start = _wide(build, start)
    element = ir.IntegerType(element_of(start))
    if not element.is_unsigned:
        return start
    limits = [build.splat(n, [], element) for n in (0, last)]
    start = build.same("clamp", limits[0], start, limits[1])
    return build.convert(start, ir.IntegerType.get_signless(element.width, build.context))


def _along(build: Builder, indices: ir.Value, numbers: list[int], vector_dim: int) -> ir.Value:
    """Returns one number for each component of index vectors, in the shape of the indices."""
    shape, element = shape_of(indices), element_of(indices)
    if len(set(numbers)) == 1:
        return build.splat(numbers[0], shape, element)
    return build.broadcast(build.convert(build.table(numbers), element), shape, [vector_dim])


def _subtract_starts(
    build: Builder, indices: ir.Value, starts: list[ir.Value | None], vector_dim: int
) -> ir.Value:
    """Subtracts the start of the device's part from the components of indices that have one."""
    shape, element = shape_of(indices), element_of(indices)
    if len(starts) == 1 and starts[0] is not None:
        start = build.broadcast(build.convert(starts[0], element), shape, [])
        return build.same("subtract", indices, start)
    scalars = [
        build.splat(0, [], element) if start is None else build.convert(start, element)
        for start in starts
    ]
    rows = [build.reshape(scalar, [1]) for scalar in scalars]
    vector = build.broadcast(build.concatenate(rows, 0), shape, [vector_dim])
    return build.same("subtract", indices, vector)


def _inside(build: Builder, indices: ir.Value, limits: list[int], vector_dim: int) -> ir.Value:
    """Returns a mask of the index vectors that fall into the device's part, without the vectors'
    dimension."""
    shape = shape_of(indices)
    low = build.compare("GE", indices, build.splat_like(0, indices))
    high = build.compare("LE", indices, _along(build, indices, limits, vector_dim))
    each = build.same("and", low, high)
    if vector_dim == len(shape):
        return each
    rest = shape[:vector_dim] + shape[vector_dim + 1 :]
    if shape[vector_dim] == 1:
        return build.reshape(each, rest)
    return build.reduce(each, build.splat(1, [], element_of(each)), [vector_dim], "and")


def _on_leader(local: LocalBody, build: Builder, op: ir.Operation, summed: Axes) -> ir.Value:
    """Returns a scatter's operand on the first device along the axes, and the identity on the
    others."""
    operand = op.operands[0]
    reducer = reducer_kind(Combining(op).combiner)
    assert reducer is not None, "Shardy only sums scatters with a known reducer"
    if is_identity_of(reducer, operand):
        return operand
    element = element_of(operand)
    identity = identity_of(reducer, element)
    assert identity is not None, "scatters without an identity are made whole"
    leads = build.compare("EQ", local.devices.start(summed, 1), local.devices.zero())
    others = build.splat(identity, shape_of(operand), element)
    return build.same("select", leads, operand, others)


def constant(local: LocalBody, op: ir.Operation) -> None:
    """Replaces a splat by one in the local shape, and any other constant by the device's slice of
    it."""
    old = op.results[0]
    dims = local.shardings.axes_by_dim(old)
    point = ir.InsertionPoint(op)
    if any(dims) and is_splat(op):
        new = copy_constant(op, local.part_type(old, dims), point)
    else:
        new = copy_constant(op, old.type, point)
        if any(dims):
            new = local.collectives.all_slice(Builder(point, op.location), new, dims)
    local.replace(op, new)


def _iota(local: LocalBody, op: ir.Operation) -> None:
    """Adds the start of the device's part to an iota."""
    result = op.results[0]
    dim = ir.IntegerAttr(op.attributes["iota_dimension"]).value
    axes = local.sharding_of(result)[dim]
    if not axes:
        return
    build = Builder(ir.InsertionPoint.after(op), op.location)
    start = local.devices.start(axes, shape_of(result)[dim])
    shape, element = shape_of(result), element_of(result)
    counted = result
    # Count in i32: in a float type the start of the part, or the sum, may not be exact.
    if local.whole_shape(result)[dim] > _EXACT.get(str(element), local.whole_shape(result)[dim]):
        type_ = build.tensor(shape, start.type.element_type)
        counted = build.iota(type_, dim)
    start = build.convert(start, element_of(counted))
    shifted = build.same("add", build.broadcast(start, shape, []), counted)
    if counted == result:
        local.stand_in(result, shifted)
    else:
        local.adopt(result, build.convert(shifted, element))
        local.erase(op)


def _dynamic_slice(local: LocalBody, op: ir.Operation) -> None:
    """Keeps divided dimensions whole. There every start is clamped to 0."""
    op.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(shape_of(op.results[0]), op.context)


_Padding = list[tuple[int, Axes, int]]  # dimensions, the axes that divide them, global sizes


def _padding(local: LocalBody, value: ir.Value, dims: Iterable[int]) -> _Padding:
    """Returns those of the dimensions along which some devices hold padding."""
    divided, whole = local.sharding_of(value), local.whole_shape(value)
    return [(d, divided[d], whole[d]) for d in dims if whole[d] % local.size(divided[d])]


def _valid(local: LocalBody, build: Builder, shape: Sequence[int], padding: _Padding) -> ir.Value:
    """Returns a mask in a shape that is True outside of the padding."""
    masks: list[ir.Value] = []
    for dim, axes, size in padding:
        blocks = DimensionParts.blocks(size, local.size(axes))
        defined = [blocks.defined_size(d) for d in range(local.size(axes))]
        ranges = [0] * len(defined), defined
        masks.append(within(local.devices, build, axes, ranges, (shape, dim)))
    mask = masks[0]
    for other in masks[1:]:
        mask = build.same("and", mask, other)
    return mask


def _mask(
    local: LocalBody,
    op: ir.Operation,
    number: int,
    dims: Iterable[int],
    filling: ir.Value | None = None,
) -> None:
    """Overwrites the padding of an operand along dimensions with a scalar (default: zeros)."""
    value = op.operands[number]
    padding = _padding(local, value, dims)
    if not padding:
        return
    build = Builder(ir.InsertionPoint(op), op.location)
    shape = shape_of(value)
    others = build.splat_like(0, value) if filling is None else build.broadcast(filling, shape, [])
    mask = _valid(local, build, shape, padding)
    op.operands[number] = build.same("select", mask, value, others)
    local.like(op.operands[number], value)


def _out_of_reach(
    local: LocalBody, build: Builder, indices: ir.Value, padding: _Padding
) -> ir.Value:
    """Replaces the indices in the padding by an index that is out of bounds."""
    indices = _wide(build, indices)
    element, shape = ir.IntegerType(element_of(indices)), shape_of(indices)
    # StableHLO drops the updates of a scatter whose indices are out of bounds.
    nowhere = (1 << 31) - 1 if element.is_unsigned else -1
    mask = _valid(local, build, shape, padding)
    others = build.splat(nowhere, shape, element)
    return build.same("select", mask, indices, others)


def _dot_general(local: LocalBody, op: ir.Operation) -> None:
    """Overwrites padding along the contracting dimensions with zeros."""
    numbers = dot_numbers(op)
    for number, dims in enumerate((numbers.lhs_contracting, numbers.rhs_contracting)):
        _mask(local, op, number, dims)


def _convolution(local: LocalBody, op: ir.Operation) -> None:
    """Overwrites padding along the summed dimensions with zeros, and exchanges the windows'
    borders."""
    numbers = conv_numbers(op)
    _mask(local, op, 0, [numbers.input_feature])
    _mask(local, op, 1, [numbers.kernel_input_feature, *numbers.kernel_spatial])
    moved_ops.convolution(local, op)


def _reduce(local: LocalBody, op: ir.Operation) -> None:
    """Reduces a part. If no all_reduce follows, it gathers the partial results and reduces once
    more."""
    divided = local.sharding_of(op.operands[0])
    for number in range(len(op.results)):
        start = op.operands[len(op.results) + number]
        _mask(local, op, number, integers(op, "dimensions"), start)
    axes = tuple(axis for dim in integers(op, "dimensions") for axis in divided[dim])
    if not axes or all_reduce_of(op.results[0]) is not None:
        return
    count = len(op.results)
    again = op.clone(ip=ir.InsertionPoint.after(op))
    for old, new in zip(op.results, again.results, strict=True):
        local.adopt(old, new)
    build = Builder(ir.InsertionPoint(again), op.location)
    for number, partial in enumerate(op.results):
        row = build.reshape(partial, [1, *shape_of(partial)])
        lists = [axes, *((),) * rank_of(partial)]
        again.operands[number] = local.collectives.all_gather(build, row, lists)
        again.operands[count + number] = op.operands[count + number]
    again.attributes["dimensions"] = ir.DenseI64ArrayAttr.get([0], op.context)


# The rules for ops whose attributes have sizes or indices. All other ops only change their types.
REWRITERS: dict[str, Callable[[LocalBody, ir.Operation], None]] = {
    IOTA: _iota,
    SLICE: moved_ops.slice_,
    PAD: moved_ops.pad,
    CONCATENATE: moved_ops.concatenate,
    REVERSE: moved_ops.reverse,
    REDUCE_WINDOW: moved_ops.reduce_window,
    SELECT_AND_SCATTER: moved_ops.select_and_scatter,
    CONVOLUTION: _convolution,
    DYNAMIC_SLICE: _dynamic_slice,
    DOT_GENERAL: _dot_general,
    REDUCE: _reduce,
    GATHER: _gather,
    SCATTER: _scatter,
    DYNAMIC_UPDATE_SLICE: _dynamic_update_slice,
}
