"""Rewrites ops that move elements along a divided dimension, or read their neighbours, on parts.

Each device gets the elements that it needs for its block of the result (`operand_needs`): its own
and those that others send. The op then runs as on a single device, except that indices and padding
along the dimension are already applied.

    %y = stablehlo.convolution %x, %w, pad = [[1, 1]]     // x of 32 over 4 devices
    ==>
    %before, %behind = collective_permute of last and first elements, to the next and the previous
    %near = concatenate %before, %x, %behind              // 10 elements
    %y = stablehlo.convolution %near, %w, pad = [[0, 0]]

`LocalBody` keeps the pieces of each value that was put together. A later op on such a value reads
the original sources, and unused values are erased. So `jnp.roll`, two slices and a concatenate,
becomes one collective_permute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stablehlo_tools.analysis.shardings import Axes, rank_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import conv_numbers
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import BROADCAST
from stablehlo_tools.dialect.reducers import identity_of
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import CONSTANTS, copy_constant, is_splat, producer
from stablehlo_tools.transforms.parts.partition.halo import DimensionParts
from stablehlo_tools.transforms.parts.partition.halo_writing import (
    MovedTarget,
    MoveWriter,
    alike,
    embed_in_dim,
    is_zero,
    seen_through,
    within,
)
from stablehlo_tools.transforms.parts.partition.local_body import LocalBody
from stablehlo_tools.transforms.parts.partition.operand_needs import (
    HaloNeed,
    known_start,
    need_of,
    pooled_needs,
    reduced_window,
)

_Needed = tuple[int, Axes, HaloNeed]  # the dimension, and the axes that divide it


def slice_(local: LocalBody, op: ir.Operation) -> None:
    """Assembles the device's elements along divided dimensions; the op keeps its steps along
    them."""
    starts, limits, strides = (
        list(integers(op, name)) for name in ("start_indices", "limit_indices", "strides")
    )
    value = op.operands[0]
    for dim, axes in enumerate(local.sharding_of(value)):
        if axes:
            starts[dim], limits[dim] = 0, shape_of(value)[dim]
    needs = _needs(local, op)
    build = Builder(ir.InsertionPoint(op), op.location)
    sizes = [high - low for low, high in zip(starts, limits, strict=True)]
    if needs and local.move_origin(value) is None and sizes != shape_of(value):
        value = build.slice(value, starts, limits)  # first, so that less is sent
        starts, limits = [0] * len(sizes), sizes
    for needed in needs:
        value = _write_needed(local, op, [value], needed)
        limits[needed[0]] = shape_of(value)[needed[0]]
    if needs and value.type == op.results[0].type:
        _become(local, op, value)
        return
    op.operands[0] = value
    numbers = {"start_indices": starts, "limit_indices": limits, "strides": strides}
    for name, each in numbers.items():
        op.attributes[name] = ir.DenseI64ArrayAttr.get(each, op.context)


def concatenate(local: LocalBody, op: ir.Operation) -> None:
    """Assembles the device's elements along a divided dimension. An operand that is a splat of one
    number is not sent: each device fills it in."""
    for dim, axes, joined in _needs(local, op):
        build = Builder(ir.InsertionPoint(op), op.location)
        numbers = [_number(build, operand) for operand in op.operands]
        filling = next((number for number in numbers if number is not None), None)
        sent = [
            piece
            for piece, number in zip(joined.pieces, numbers, strict=True)
            if number is None or filling is None or not alike(number, filling)
        ]
        fills = 0 < len(sent) < len(numbers)
        need = replace(joined, pieces=tuple(sent), fills=True) if fills else joined
        value = _write_needed(local, op, list(op.operands), (dim, axes, need), filling)
        _become(local, op, value)


def _number(build: Builder, value: ir.Value) -> ir.Value | None:
    """Returns the scalar of a broadcast scalar or of a splat constant; None for any other value."""
    maker = producer(value)
    if maker is not None and maker.name == BROADCAST and not rank_of(maker.operands[0]):
        return maker.operands[0]
    if maker is not None and maker.name in CONSTANTS and is_splat(maker):
        return copy_constant(maker, build.tensor([], element_of(value)), build.point)
    return None


def pad(local: LocalBody, op: ir.Operation) -> None:
    """Assembles the device's elements along divided dimensions, and pads along the others."""
    needs = _needs(local, op)
    if not needs:
        return
    value, filling = op.operands
    # Pad along the other dimensions only.
    but = {dim for dim, _, _ in needs}
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    edges = [[0 if d in but else n for d, n in enumerate(integers(op, name))] for name in names]
    build = Builder(ir.InsertionPoint(op), op.location)
    value = build.pad(value, filling, *edges)
    for needed in needs:
        value = _write_needed(local, op, [value], needed, filling)
    _become(local, op, value)


def reverse(local: LocalBody, op: ir.Operation) -> None:
    """Reverses each part, and sends it to the opposite device."""
    needs = _needs(local, op)
    if not needs:
        return
    build = Builder(ir.InsertionPoint(op), op.location)
    value = op.operands[0]
    value = build.op("reverse", [value], value.type, dimensions=op.attributes["dimensions"])
    for needed in needs:
        value = _write_needed(local, op, [value], needed)
    _become(local, op, value)


def known_update(local: LocalBody, op: ir.Operation) -> None:
    """Rewrites a dynamic_update_slice with known starts as a select.

    Each device gets the rows of the update that fall into its part of the operand, and selects them
    by a mask.
    """
    operand, update = op.operands[0], op.operands[1]
    needs = {dim: (dim, axes, need) for dim, axes, need in _needs(local, op)}
    if not needs:
        return
    build = Builder(ir.InsertionPoint(op), op.location)
    whole, written = local.whole_shape(operand), local.whole_shape(update)
    mask: ir.Value | None = None
    for dim, size in enumerate(written):
        if size == whole[dim]:
            continue
        start = known_start(op, dim, whole[dim] - size)
        assert start is not None, "asked before"
        axes = local.sharding_of(operand)[dim]
        blocks = DimensionParts.blocks(whole[dim], local.size(axes))
        if dim in needs:
            update = _write_needed(local, op, [update], needs[dim])
        else:
            update = embed_in_dim(build, update, dim, start, whole[dim])
        lows = [min(max(start - first, 0), blocks.length) for first in blocks.starts]
        highs = [min(max(start + size - first, 0), blocks.length) for first in blocks.starts]
        along = within(local.devices, build, axes, (lows, highs), (shape_of(operand), dim))
        mask = along if mask is None else build.same("and", mask, along)
    assert mask is not None, "an update of all rows needs no exchange"
    _become(local, op, build.same("select", mask, update, operand))


def reduce_window(local: LocalBody, op: ir.Operation) -> None:
    """Assembles all elements that the windows of the device's block read."""
    count, rank = len(op.results), rank_of(op.operands[0])
    needs = _needs(local, op)
    for needed in needs:
        for number in range(count):
            start = op.operands[count + number]
            op.operands[number] = _write_needed(local, op, [op.operands[number]], needed, start)
    _complete(op, [dim for dim, _, _ in needs], rank, "base_dilations")


def select_and_scatter(local: LocalBody, op: ir.Operation) -> None:
    """Runs all windows that touch the device's block, and slices the block from the result.
    Neighbours recompute their own contribution."""
    operand, source = op.operands[0], op.operands[1]
    shapes = [local.whole_shape(value) for value in (*op.operands, *op.results)]
    cuts: list[tuple[int, Axes, list[int]]] = []
    for dim, axes in enumerate(local.sharding_of(op.results[0])):
        window = reduced_window(op, dim, shapes)
        if not axes or window.is_element:
            continue
        parts = local.size(axes)
        looked, added = pooled_needs(window, shapes[0][dim], parts)
        build = Builder(ir.InsertionPoint(op), op.location)
        element = element_of(source)
        number = identity_of("add", element)
        nothing = build.splat(0 if number is None else number, [], element)
        operand = _write_needed(local, op, [operand], (dim, axes, looked))
        source = _write_needed(local, op, [source], (dim, axes, added), nothing)
        piece, block = looked.pieces[0], DimensionParts.blocks(shapes[0][dim], parts)
        starts = zip(block.starts, looked.target.starts, strict=True)
        cuts.append((dim, axes, [piece.place + mine - first for mine, first in starts]))
    if not cuts:
        return
    op.operands[0], op.operands[1] = operand, source
    result, sizes = op.results[0], shape_of(op.results[0])
    result.set_type(operand.type)
    build = Builder(ir.InsertionPoint.after(op), op.location)
    places = [local.devices.zero()] * len(sizes)
    for dim, axes, table in cuts:
        places[dim] = local.devices.by_position(axes, table)
    local.stand_in(result, build.dynamic_slice(result, places, sizes))


def convolution(local: LocalBody, op: ir.Operation) -> None:
    """Sets the group counts to the device's groups, and assembles all elements that its windows
    read."""
    numbers = conv_numbers(op)
    lhs, kernel, out = (shape_of(value) for value in (*op.operands, *op.results))
    counts = {
        "feature_group_count": (lhs[numbers.input_feature] // kernel[numbers.kernel_input_feature]),
        "batch_group_count": (lhs[numbers.input_batch] // out[numbers.output_batch]),
    }
    for name, count in counts.items():
        op.attributes[name] = ir.IntegerAttr.get(op.attributes[name].type, count)
    build = Builder(ir.InsertionPoint(op), op.location)
    needs = _needs(local, op)
    for needed in needs:
        nothing = build.splat(0, [], element_of(op.operands[0]))
        op.operands[0] = _write_needed(local, op, [op.operands[0]], needed, nothing)
    dims = [numbers.input_spatial.index(dim) for dim, _, _ in needs]
    _complete(op, dims, len(numbers.input_spatial), "lhs_dilation")


def _complete(op: ir.Operation, dims: Sequence[int], rank: int, dilations: str) -> None:
    """Removes the padding and dilation of a window op along `dims`, which its operands now
    contain."""
    if not dims:
        return
    edges = list(integers(op, "padding", [0] * (2 * rank)))
    spread = list(integers(op, dilations, [1] * rank))
    for dim in dims:
        edges[2 * dim : 2 * dim + 2] = [0, 0]
        spread[dim] = 1
    with op.context:
        rows = np.asarray(edges, dtype=np.int64).reshape(rank, 2)
        op.attributes["padding"] = ir.DenseElementsAttr.get(rows)
    op.attributes[dilations] = ir.DenseI64ArrayAttr.get(spread, op.context)


def _needs(local: LocalBody, op: ir.Operation) -> list[_Needed]:
    """Returns what an op needs along each divided dimension of its first operand."""
    shapes = [local.whole_shape(value) for value in (*op.operands, *op.results)]
    needs: list[_Needed] = []
    for dim, axes in enumerate(local.sharding_of(op.operands[0])):
        need = need_of(op, dim, local.size(axes), shapes) if axes else None
        if need is not None:
            needs.append((dim, axes, need))
    return needs


def _write_needed(
    local: LocalBody,
    op: ir.Operation,
    values: Sequence[ir.Value],
    needed: _Needed,
    filling: ir.Value | None = None,
) -> ir.Value:
    """Writes the elements of `values` that an op needs along a dimension, before the op."""
    dim, axes, need = needed
    build = Builder(ir.InsertionPoint(op), op.location)
    if need.spread > 1:
        assert filling is not None, "spread elements need a filling between them"
        # Insert spread - 1 places of the filling between elements, and after the last one.
        high = [need.spread - 1 if d == dim else 0 for d in range(rank_of(values[0]))]
        values = [build.pad(value, filling, [0] * len(high), high, high) for value in values]
    number = filling if need.fills else None
    moved = MovedTarget(
        tuple(values), need.parts, need.pieces, need.target, number, is_zero(number)
    )
    return write_target(local, build, moved, dim, axes)


def write_target(
    local: LocalBody, build: Builder, moved: MovedTarget, dim: int, axes: Axes
) -> ir.Value:
    """Writes a target from the sources that its own sources were put together from.

    If a source was put together along this dimension first, and along another one last, the target
    is written before that last step. So it finds the original sources.
    """

    def known(value: ir.Value) -> MovedTarget | None:
        found = local.move_origin(value)
        return found[2] if found is not None and found[0] == dim else None

    last = local.move_origin(moved.sources[0])
    if len(moved.sources) == 1 and last is not None and last[0] != dim:
        other, other_axes, around = last
        free = moved.filling is None or around.filling is None
        if free and any(_was_moved(local, value, dim) for value in around.sources):
            sources = tuple(
                write_target(local, build, replace(moved, sources=(value,)), dim, axes)
                for value in around.sources
            )
            return write_target(local, build, replace(around, sources=sources), other, other_axes)
    moved = seen_through(moved, known)
    made = MoveWriter(local.devices, build, moved, dim, axes).write()
    if made in moved.sources:  # a new value, because the source may be of another global shape
        made = build.reshape(made, shape_of(made))
    local.note_moved(made, dim, axes, moved)
    return made


def _was_moved(local: LocalBody, value: ir.Value, dim: int) -> bool:
    """Returns True if a value, or a value that it was made from, was put together along a
    dimension."""
    found = local.move_origin(value)
    if found is None:
        return False
    return found[0] == dim or any(_was_moved(local, each, dim) for each in found[2].sources)


def _become(local: LocalBody, op: ir.Operation, value: ir.Value) -> None:
    """Replaces the result of an op by a value, and erases the op."""
    local.adopt(op.results[0], value)
    local.erase(op)
