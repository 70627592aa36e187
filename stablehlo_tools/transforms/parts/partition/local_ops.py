"""Ops that know sizes or places of elements, on one device's part.

Each rule gets an op with local operands and results and makes it compute the device's part of
them. All other ops change their types alone.

Slices, pads and concatenates move whole pieces of a divided dimension between devices:

    q, k, v = split(x, 3)        // x divided over 2 devices, q, k and v as well

What a device holds of the result is one piece of what one device holds of the operand (the other
way round for a pad or a concatenate), so that each piece goes straight to where it is wanted: a
collective_permute sends one piece a device, and there are as many as a device has pieces to send or
to receive.

Of gathers, scatters and updates the indexed dimension may be divided. The indices are global, and
the same on every device along the axes that divide it. Each device serves those that fall into its
part:

    gather                  clamp as on the whole, shift, gather, and put the identity of the
                            following sum where the index is another device's
    scatter                 shift; indices outside of the part are dropped by scatter itself
    dynamic_update_slice    of one row: write the row, or what is there already
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.shardings import Axes, axes_in, rank_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import conv_numbers, gather_numbers, scatter_numbers
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import (
    CONCATENATE,
    CONVOLUTION,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    IOTA,
    PAD,
    REDUCE,
    SCATTER,
    SLICE,
)
from stablehlo_tools.dialect.reducers import identity_of, reducer_kind
from stablehlo_tools.ir.builder import Builder, element_of, shape_of, write_reducer
from stablehlo_tools.ir.values import copy_constant, is_identity_of, is_splat, maker_of
from stablehlo_tools.transforms.parts.partition.dividing import all_reduce_of
from stablehlo_tools.transforms.parts.partition.local_body import LocalView


@dataclass(frozen=True)
class Round:
    """Pieces that move at once: (source, target) positions along the axes, and where each lies."""

    pairs: tuple[tuple[int, int], ...]
    places: tuple[int, ...]  # in the larger part, one for each pair


def _slice_pieces(local: LocalView, op: ir.Operation, dim: int) -> None:
    """Makes a slice whose types are local take its piece, from whichever device has it."""
    operand, result = op.operands[0], op.results[0]
    axes = local.divided(operand)[dim]
    part, piece = shape_of(operand)[dim], shape_of(result)[dim]
    start = integers(op, "start_indices")[dim]
    build = Builder(ir.InsertionPoint(op), op.location)
    made: ir.Value | None = None
    for moved in rounds(local.size(axes), part, piece, start):
        sent = _cut(local, build, operand, dim, piece, axes, moved, by_source=True)
        sent = _restrict(build, op, sent, dim)
        arrived = _move(local, build, sent, axes, moved)
        made = arrived if made is None else _choose(local, build, axes, moved, arrived, made)
    assert made is not None, "every device takes a piece"
    local.adopt(op.results[0], made)
    op.erase()


def _pad_pieces(local: LocalView, op: ir.Operation, dim: int) -> None:
    """Makes a pad whose types are local put each piece where the device that wants it has it."""
    operand, padding = op.operands
    low = integers(op, "edge_padding_low")[dim]
    build = Builder(ir.InsertionPoint(op), op.location)
    operand = _pad_others(build, op, operand, dim)
    made = build.broadcast(padding, shape_of(op.results[0]), [])
    local.adopt(op.results[0], _placed(local, build, op, made, operand, dim, low))
    op.erase()


def _concatenate_pieces(local: LocalView, op: ir.Operation, dim: int) -> None:
    """Makes a concatenate whose types are local put the pieces of its operands in their places."""
    result = op.results[0]
    build = Builder(ir.InsertionPoint(op), op.location)
    made = build.splat(0, shape_of(result), element_of(result))
    parts = local.size(local.divided(result)[dim])
    start = 0
    for operand in list(op.operands):
        made = _placed(local, build, op, made, operand, dim, start)
        start += shape_of(operand)[dim] * parts
    local.adopt(op.results[0], made)
    op.erase()


def _placed(
    local: LocalView,
    build: Builder,
    op: ir.Operation,
    made: ir.Value,
    operand: ir.Value,
    dim: int,
    start: int,
) -> ir.Value:
    """A part of a result with the pieces of an operand in it, which begins at `start`."""
    axes = local.divided(op.results[0])[dim]
    part, piece = shape_of(made)[dim], shape_of(operand)[dim]
    for moved in rounds(local.size(axes), part, piece, start):
        turned = Round(tuple((to, frm) for frm, to in moved.pairs), moved.places)
        arrived = _move(local, build, operand, axes, turned)
        there = _cut(local, build, made, dim, piece, axes, turned, by_source=False)
        chosen = _choose(local, build, axes, turned, arrived, there)
        starts = _starts(local, dim, len(shape_of(made)), axes, turned, by_source=False)
        made = build.op("dynamic_update_slice", [made, chosen, *starts], made.type)
    return made


def rounds(parts: int, part: int, piece: int, start: int) -> list[Round]:
    """Which piece of which part goes where; what stays on its device goes first.

    `parts` parts of `part` elements hold `parts` pieces of `piece` elements, one after another from
    `start` on. Piece t belongs to device t; a source sends one piece a round.
    """
    by_round: list[list[tuple[int, int, int]]] = []
    wanted = [(divmod(start + target * piece, part), target) for target in range(parts)]
    stay = [(source, target, place) for (source, place), target in wanted if source == target]
    move = [(source, target, place) for (source, place), target in wanted if source != target]
    if stay:
        by_round.append(stay)
    waiting = move
    while waiting:
        taken: dict[int, tuple[int, int, int]] = {}
        rest: list[tuple[int, int, int]] = []
        for entry in waiting:
            if entry[0] in taken:
                rest.append(entry)
            else:
                taken[entry[0]] = entry
        by_round.append(list(taken.values()))
        waiting = rest
    return [
        Round(tuple((s, t) for s, t, _ in entries), tuple(place for _, _, place in entries))
        for entries in by_round
    ]


def _move(local: LocalView, build: Builder, value: ir.Value, axes: Axes, moved: Round) -> ir.Value:
    """What each device gets: what the pairs send; its own where nothing moves."""
    if all(source == target for source, target in moved.pairs):
        return value
    return local.collectives.permute(build, value, axes, moved.pairs)


def _cut(
    local: LocalView,
    build: Builder,
    value: ir.Value,
    dim: int,
    piece: int,
    axes: Axes,
    moved: Round,
    *,
    by_source: bool,
) -> ir.Value:
    """The piece of a part that a device sends, or that it receives."""
    sizes = shape_of(value)
    sizes[dim] = piece
    starts = _starts(local, dim, len(sizes), axes, moved, by_source=by_source)
    return build.dynamic_slice(value, starts, sizes)


def _starts(
    local: LocalView, dim: int, rank: int, axes: Axes, moved: Round, *, by_source: bool
) -> list[ir.Value]:
    table = [0] * local.size(axes)
    for (source, target), place in zip(moved.pairs, moved.places, strict=True):
        table[source if by_source else target] = place
    starts = [local.offsets.zero()] * rank
    starts[dim] = local.offsets.by_position(axes, table)
    return starts


def _choose(
    local: LocalView,
    build: Builder,
    axes: Axes,
    moved: Round,
    arrived: ir.Value,
    otherwise: ir.Value,
) -> ir.Value:
    """What arrived, on the devices to which a pair sends; something else on the others."""
    receives = [0] * local.size(axes)
    for _, target in moved.pairs:
        receives[target] = 1
    if all(receives):
        return arrived
    scalar = local.offsets.by_position(axes, receives)
    here = build.compare("NE", scalar, local.offsets.zero())
    return build.op("select", [here, arrived, otherwise], arrived.type)


def _restrict(build: Builder, op: ir.Operation, value: ir.Value, dim: int) -> ir.Value:
    """A slice along the other dimensions, as the op has it."""
    starts, limits, strides = (
        list(integers(op, name)) for name in ("start_indices", "limit_indices", "strides")
    )
    starts[dim], limits[dim], strides[dim] = 0, shape_of(value)[dim], 1
    whole = shape_of(value)
    sizes = [(b - a + c - 1) // c for a, b, c in zip(starts, limits, strides, strict=True)]
    if sizes == whole:
        return value
    return build.op(
        "slice",
        [value],
        build.tensor(sizes, element_of(value)),
        start_indices=build.integers(starts),
        limit_indices=build.integers(limits),
        strides=build.integers(strides),
    )


def _pad_others(build: Builder, op: ir.Operation, value: ir.Value, dim: int) -> ir.Value:
    """A pad along the other dimensions, as the op has it."""
    edges: Sequence[list[int]] = [
        list(integers(op, f"{name}_padding{side}"))
        for name, side in (("edge", "_low"), ("edge", "_high"), ("interior", ""))
    ]
    for numbers in edges:
        numbers[dim] = 0
    if not any(map(any, edges)):
        return value
    sizes = [
        n + low + high + max(n - 1, 0) * inner
        for n, low, high, inner in zip(shape_of(value), *edges, strict=True)
    ]
    return build.op(
        "pad",
        [value, op.operands[1]],
        build.tensor(sizes, element_of(value)),
        edge_padding_low=build.integers(edges[0]),
        edge_padding_high=build.integers(edges[1]),
        interior_padding=build.integers(edges[2]),
    )


_INDEX_BITS = 32  # at least so many, that any place in a dimension can be told


def _gather(local: LocalView, op: ir.Operation) -> None:
    """Gathers from the device's part of the operand."""
    numbers = gather_numbers(op)
    operand, result = op.operands[0], op.results[0]
    sizes, whole = integers(op, "slice_sizes"), local.whole_shape(operand)
    divided = local.divided(operand)
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


def _scatter(local: LocalView, op: ir.Operation) -> None:
    """Scatters into the device's part of the operand."""
    if len(op.results) > 1:
        return
    numbers = scatter_numbers(op)
    operand, indices = op.operands[0], op.operands[1]
    divided = local.divided(operand)
    index_map = numbers.index_map
    inserted = numbers.inserted
    shifts = [
        local.offsets.start(divided[dim], shape_of(operand)[dim])
        if divided[dim] and dim in inserted
        else None
        for dim in index_map
    ]
    build = Builder(ir.InsertionPoint(op), op.location)
    if any(shift is not None for shift in shifts):
        wide = _wide(build, indices)
        op.operands[1] = _shifted(build, wide, shifts, numbers.index_vector)
        if "indices_are_sorted" in op.attributes:
            op.attributes["indices_are_sorted"] = ir.BoolAttr.get(False, op.context)
    summed = _summed_axes(op)
    if summed:
        op.operands[0] = _on_leader(local, build, op, summed)


def _dynamic_update_slice(local: LocalView, op: ir.Operation) -> None:
    """Updates the device's part of the operand."""
    operand, update, *starts = op.operands
    divided, whole, sizes = local.divided(operand), local.whole_shape(operand), shape_of(update)
    rows = [d for d, axes in enumerate(divided) if axes and local.divided(update)[d] != axes]
    if not rows:
        return
    build = Builder(ir.InsertionPoint(op), op.location)
    starts = [_wide(build, start) for start in starts]
    element = element_of(starts[0])
    inside: ir.Value | None = None
    for dim in rows:
        part = shape_of(operand)[dim]
        zero, last, end = (build.splat(n, [], element) for n in (0, whole[dim] - sizes[dim], part))
        clamped = build.op("clamp", [zero, starts[dim], last], last.type)
        offset = _as(build, local.offsets.start(divided[dim], part), element)
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
    element = element_of(indices)
    if isinstance(element, ir.IntegerType) and element.width < _INDEX_BITS:
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
    reducer = reducer_kind(op.regions[0].blocks[0])
    assert reducer is not None, "Shardy sums no scatter of another kind"
    if is_identity_of(reducer, operand):
        return operand
    element = element_of(operand)
    identity = identity_of(reducer, element)
    assert identity is not None, "made whole before"
    leads = build.compare("EQ", local.offsets.start(summed, 1), local.offsets.zero())
    others = build.splat(identity, shape_of(operand), element)
    return build.op("select", [leads, operand, others], operand.type)


def constant(local: LocalView, op: ir.Operation) -> None:
    """A splat in the local shape; of any other constant, the device's part."""
    old = op.results[0]
    dims = local.shardings.of(old)
    point = ir.InsertionPoint(op)
    if any(dims) and is_splat(op):
        new = copy_constant(op, local.part_type(old, dims), point)
    else:
        new = copy_constant(op, old.type, point)
        if any(dims):
            new = local.collectives.all_slice(Builder(point, op.location), new, dims)
    local.replace(op, new)


def _iota(local: LocalView, op: ir.Operation) -> None:
    """Counts from where the device's part starts."""
    result = op.results[0]
    dim = ir.IntegerAttr(op.attributes["iota_dimension"]).value
    axes = local.divided(result)[dim]
    if not axes:
        return
    build = Builder(ir.InsertionPoint.after(op), op.location)
    start = local.offsets.start(axes, shape_of(result)[dim])
    type_ = build.tensor([], element_of(result))
    if start.type != type_:
        start = build.op("convert", [start], type_)
    shifted = build.same("add", build.broadcast(start, shape_of(result), []), result)
    local.stand_in(result, shifted)


def _slice(local: LocalView, op: ir.Operation) -> None:
    """Whole along what is divided, or the same element of each of fewer pieces."""
    result = op.results[0]
    starts, limits, strides = (
        list(integers(op, name)) for name in ("start_indices", "limit_indices", "strides")
    )
    for dim, axes in enumerate(local.divided(result)):
        if axes:
            limits[dim] = starts[dim] + (shape_of(result)[dim] - 1) * strides[dim] + 1
    op.attributes["limit_indices"] = ir.DenseI64ArrayAttr.get(limits, op.context)
    for dim, axes in enumerate(local.divided(result)):
        shortened = shape_of(op.operands[0])[dim] != shape_of(result)[dim]
        if axes and shortened and strides[dim] == 1:
            _slice_pieces(local, op, dim)
            return


def _concatenate(local: LocalView, op: ir.Operation) -> None:
    """Pieces to where they belong, along a dimension that is divided."""
    dim = ir.IntegerAttr(op.attributes["dimension"]).value
    if local.divided(op.results[0])[dim]:
        _concatenate_pieces(local, op, dim)


def _pad(local: LocalView, op: ir.Operation) -> None:
    """Pieces to where they belong, along a dimension that is divided and grows."""
    result = op.results[0]
    for dim, axes in enumerate(local.divided(result)):
        if axes and shape_of(op.operands[0])[dim] != shape_of(result)[dim]:
            _pad_pieces(local, op, dim)
            return


def _dynamic_slice(local: LocalView, op: ir.Operation) -> None:
    """Whole along what is divided, where every start is clamped to 0."""
    result = op.results[0]
    op.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(shape_of(result), op.context)


def _convolution(local: LocalView, op: ir.Operation) -> None:
    """As many groups as the device holds."""
    numbers = conv_numbers(op)
    lhs, kernel, out = (shape_of(value) for value in (*op.operands, *op.results))
    counts = {
        "feature_group_count": (lhs[numbers.input_feature] // kernel[numbers.kernel_input_feature]),
        "batch_group_count": (lhs[numbers.input_batch] // out[numbers.output_batch]),
    }
    for name, count in counts.items():
        op.attributes[name] = ir.IntegerAttr.get(op.attributes[name].type, count)


def _reduce(local: LocalView, op: ir.Operation) -> None:
    """Partial results; where no all_reduce follows, gathered and reduced once more."""
    divided = local.divided(op.operands[0])
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


# The ops that know sizes or places; of all others the types alone are changed.
REWRITERS: dict[str, Callable[[LocalView, ir.Operation], None]] = {
    IOTA: _iota,
    SLICE: _slice,
    PAD: _pad,
    CONCATENATE: _concatenate,
    DYNAMIC_SLICE: _dynamic_slice,
    CONVOLUTION: _convolution,
    REDUCE: _reduce,
    GATHER: _gather,
    SCATTER: _scatter,
    DYNAMIC_UPDATE_SLICE: _dynamic_update_slice,
}
