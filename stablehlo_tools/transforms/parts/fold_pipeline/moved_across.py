"""Collectives between the ranks of a pipeline, as moves of elements from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.transforms.parts.fold_pipeline.boxes import Box
from stablehlo_tools.transforms.parts.fold_pipeline.items import (
    Item,
    Known,
    Piece,
    Splat,
    UnresolvedError,
    zeros,
)

if TYPE_CHECKING:
    from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer


def permute(tracer: Tracer, op: ir.Operation, item: Item) -> Sequence[Item] | Piece | None:
    """What a rank receives, another has sent; or zeros, where none has."""
    pairs = tracer.region.groups(op)
    ranks = tracer.region.ranks
    if pairs is None or not ranks.moves(pairs):
        return None
    sources = {target: source for source, target in pairs}
    source = sources.get(ranks.devices[item.rank])
    sending = None if source is None else ranks.rank_of[source]
    for device, rank in enumerate(ranks.rank_of):
        other = sources.get(device)
        if rank == item.rank and sending != (None if other is None else ranks.rank_of[other]):
            raise UnresolvedError("the devices of one rank receive from different ranks", op, 3)
    if source is not None and ranks.devices[ranks.rank_of[source]] != source:
        raise UnresolvedError("it moves elements along two axes of the mesh at once", op, 3)
    if sending is None:
        return Piece(zeros(element_of(item.value)), Box.whole(item.box.sizes), item.view)
    return [replace(item, value=op.operands[0], rank=sending)]


def all_gather(tracer: Tracer, op: ir.Operation, item: Item) -> Sequence[Item] | None:
    """Each rank's share of a dimension."""
    members = _members(tracer, op, item)
    if members is None:
        return None
    place = ir.OpResult(item.value).result_number
    operand = op.operands[place]
    dim = ir.IntegerAttr(op.attributes["all_gather_dim"]).value
    size = shape_of(operand)[dim]
    found: list[Item] = []
    for box in item.box.cut(dim, [size * number for number in range(len(members))]):
        number = box.starts[dim] // size
        inner = box.along(dim, box.starts[dim] - number * size, box.sizes[dim])
        found.append(replace(item.part(op, box).at(operand, inner), rank=members[number]))
    return found


def all_reduce(tracer: Tracer, op: ir.Operation, item: Item) -> Sequence[Item] | None:
    """A sum of which all but one are zeros, from ranks that hold nothing of the result."""
    members = _members(tracer, op, item)
    if members is None:
        return None
    if not _adds(op.regions[0].blocks[0]):
        raise UnresolvedError(
            "it combines what several ranks hold in another way than by a sum", op, 3
        )
    operand = op.operands[ir.OpResult(item.value).result_number]
    held = {
        rank: [p for p in tracer.pieces(operand, rank, item.tick, item.box) if not _is_zero(p)]
        for rank in members
    }
    holding = [rank for rank, pieces in held.items() if pieces] or members[:1]
    boxes = [item.box]
    for rank in holding[1:] and holding:
        for piece in held[rank]:
            boxes = _cut_around(boxes, piece.view.target.moved(item.box.starts))
    return [_held_by_one(op, item, box, held, holding) for box in boxes]


def _adds(reducer: ir.Block) -> bool:
    """Whether a reducer adds its arguments, with sharding constraints or without."""
    ops = [view.operation for view in reducer.operations]
    ops = [op for op in ops if op.name != "sdy.sharding_constraint"]
    if [op.name for op in ops] != ["stablehlo.add", "stablehlo.return"]:
        return False
    return set(ops[0].operands) == set(reducer.arguments)


def _held_by_one(
    op: ir.Operation, item: Item, box: Box, held: dict[int, list[Piece]], holding: Sequence[int]
) -> Item:
    """The elements of a box, on the only rank where they are no zeros."""
    inner = box.moved([-start for start in item.box.starts])
    found = [
        rank for rank in holding if any(_overlap(p.view.target, inner) for p in held[rank])
    ] or list(holding[:1])
    if len(found) > 1:
        raise UnresolvedError("it adds up what several ranks hold", op, 4)
    operand = op.operands[ir.OpResult(item.value).result_number]
    return replace(item.part(op, box), value=operand, rank=found[0])


def _cut_around(boxes: Sequence[Box], by: Box) -> list[Box]:
    found = list(boxes)
    for dim in range(len(by.sizes)):
        found = [p for box in found for p in box.cut(dim, [by.starts[dim], by.end(dim)])]
    return found


def _overlap(one: Box, other: Box) -> bool:
    return all(
        one.starts[d] < other.end(d) and other.starts[d] < one.end(d) for d in range(len(one.sizes))
    )


def _is_zero(piece: Piece) -> bool:
    if isinstance(piece.source, Known):
        return not any(piece.source.data)
    return isinstance(piece.source, Splat) and piece.source.zero


def _members(tracer: Tracer, op: ir.Operation, item: Item) -> list[int] | None:
    """The ranks that a collective joins a rank with; None where it joins no ranks."""
    groups, ranks = tracer.region.groups(op), tracer.region.ranks
    if groups is None or not ranks.moves(groups):
        return None
    own = next((g for g in groups if ranks.devices[item.rank] in g), ())
    members = [ranks.rank_of[device] for device in own]
    if [ranks.devices[rank] for rank in members] != list(own):
        raise UnresolvedError("it joins devices along two axes of the mesh at once", op, 3)
    return members
