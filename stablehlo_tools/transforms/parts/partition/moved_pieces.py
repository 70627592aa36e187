"""Slices, pads and concatenates that move whole pieces of a divided dimension between devices.

    q, k, v = split(x, 3)        // x divided over 2 devices, q, k and v as well

What a device holds of the result is one piece of what one device holds of the operand (the other
way round for a pad or a concatenate), so that each piece goes straight to where it is wanted: a
collective_permute sends one piece a device, and there are as many as a device has pieces to send or
to receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.tensor_shardings import Axes
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.transforms.parts.partition.local_view import LocalView
from stablehlo_tools.transforms.parts.partition.undividable import integers


@dataclass(frozen=True)
class Round:
    """Pieces that move at once: (source, target) positions along the axes, and where each lies."""

    pairs: tuple[tuple[int, int], ...]
    places: tuple[int, ...]  # in the larger part, one for each pair


def slice_pieces(local: LocalView, op: ir.Operation, dim: int) -> None:
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


def pad_pieces(local: LocalView, op: ir.Operation, dim: int) -> None:
    """Makes a pad whose types are local put each piece where the device that wants it has it."""
    operand, padding = op.operands
    low = integers(op, "edge_padding_low")[dim]
    build = Builder(ir.InsertionPoint(op), op.location)
    operand = _pad_others(build, op, operand, dim)
    made = build.broadcast(padding, shape_of(op.results[0]), [])
    local.adopt(op.results[0], _placed(local, build, op, made, operand, dim, low))
    op.erase()


def concatenate_pieces(local: LocalView, op: ir.Operation, dim: int) -> None:
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
    found: list[list[tuple[int, int, int]]] = []
    wanted = [(divmod(start + target * piece, part), target) for target in range(parts)]
    stay = [(source, target, place) for (source, place), target in wanted if source == target]
    move = [(source, target, place) for (source, place), target in wanted if source != target]
    if stay:
        found.append(stay)
    waiting = move
    while waiting:
        taken: dict[int, tuple[int, int, int]] = {}
        rest: list[tuple[int, int, int]] = []
        for entry in waiting:
            if entry[0] in taken:
                rest.append(entry)
            else:
                taken[entry[0]] = entry
        found.append(list(taken.values()))
        waiting = rest
    return [
        Round(tuple((s, t) for s, t, _ in entries), tuple(place for _, _, place in entries))
        for entries in found
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
        integers(op, name) for name in ("start_indices", "limit_indices", "strides")
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
        integers(op, f"{name}_padding{side}")
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
