"""Finds where each element of a result comes from, for ops that only move elements.

Indices and masks count if they are known before the run. If they are unknown, `links` leaves out
some moves, so that links are never wrong. `sources` always has all operands that an element may
come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product

import numpy as np

from stablehlo_tools.analysis.device_values import clamped_starts, fold_value
from stablehlo_tools.analysis.elements.boxes import (
    Box,
    Shape,
    boxes_of,
    boxes_outside,
    canonical,
    meet,
    shape_of,
    size_of,
    whole_box,
)
from stablehlo_tools.analysis.elements.element_links import (
    ElementPiece,
    ElementReshape,
    Link,
    identity,
    link_by_relation,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import gather_numbers, scatter_numbers
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import (
    BROADCAST,
    CONCATENATE,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    PAD,
    RESHAPE,
    REVERSE,
    SCATTER,
    SELECT,
    SLICE,
    TRANSPOSE,
)
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.ir.walk import terminator

_MOST_WINDOWS = 16  # of a gather or a scatter, that are followed
Links = list[tuple[int, Link]]


@dataclass(frozen=True)
class ElementMoves:
    """Says where the operands' elements go.

    `links`: moves by the number of the operand. `sources`: operands that elements of the result may
    come from. `kept`: operands that lose no element. `left`: operands that keep some element,
    unknown which. `steering`: indices that are not known.
    """

    links: tuple[tuple[int, Link], ...]
    sources: frozenset[int]
    kept: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    steering: tuple[int, ...] = ()


def moves_of(op: ir.Operation) -> ElementMoves | None:
    """Returns the moves of an op; None for ops that compute, and for unknown shapes."""
    rule = _RULES.get(op.name)
    if rule is None:
        return None
    shapes = [shape_of(value.type) for value in op.operands]
    result = shape_of(op.results[0].type) if len(op.results) == 1 else None
    if result is None or 0 in result or any(shape is None for shape in shapes):
        return None
    return rule(op, [shape for shape in shapes if shape is not None], result)


def _moves_from_links(links: Links, kept: Iterable[int] = ()) -> ElementMoves:
    """Returns moves by links, which must include one for each possible source."""
    return ElementMoves(tuple(links), frozenset(i for i, _ in links), frozenset(kept))


def _same(rank: int) -> tuple[tuple[int, int], ...]:
    return tuple((d, d) for d in range(rank))


def _moves_by_relation(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> ElementMoves:
    """Returns the moves of all operands by the relation of the op's dimensions."""
    links: Links = []
    kept: list[int] = []
    for i, shape in enumerate(shapes):
        piece = link_by_relation(op, i, shape, result)
        if piece is not None:
            links.append((i, piece))
        if 0 in shape or (piece is not None and size_of(piece.source) == size_of(whole_box(shape))):
            kept.append(i)
    return _moves_from_links(links, kept)


def _pad(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> ElementMoves:
    """Returns the moves of a pad: places without an element of the operand are filled."""
    operand, filling = shapes
    piece, links = link_by_relation(op, 0, operand, result), Links()
    if piece is not None:
        links.append((0, piece))
    covered = [] if piece is None else [piece.target]
    parts = ((0, len(result) - 1),) if filling else ()
    links += [
        (1, ElementPiece(whole_box(filling), box, parts)) for box in boxes_outside(result, covered)
    ]
    is_whole = piece is not None and size_of(piece.target) == size_of(whole_box(operand))
    return _moves_from_links(links, kept=[*([0] if is_whole else []), *{i for i, _ in links} & {1}])


def _complex(_: ir.Operation, shapes: Sequence[Shape], result: Shape) -> ElementMoves:
    links: Links = []
    for i, shape in enumerate(shapes):
        target = (*whole_box(shape), range(i, i + 1))
        links.append((i, ElementPiece(whole_box(shape), target, _same(len(shape)))))
    return _moves_from_links(links, kept=[0, 1])


def _part(position: int) -> _Rule:
    """Returns the rule of the real or the imaginary part; of a real number, itself or zero."""

    def rule(_: ir.Operation, shapes: Sequence[Shape], result: Shape) -> ElementMoves:
        if shapes[0] == result:
            links: Links = [] if position else [(0, identity(result))]
            return _moves_from_links(links, kept=[] if position else [0])
        source = (*whole_box(result), range(position, position + 1))
        return _moves_from_links([(0, ElementPiece(source, whole_box(result), _same(len(result))))])

    return rule


def _select(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> ElementMoves | None:
    mask = fold_value(op.operands[0])
    if mask is None:
        return None
    if mask.ndim < len(result):  # a scalar, or one number for both parts
        mask = np.broadcast_to(mask.reshape(*mask.shape, *[1] * (len(result) - mask.ndim)), result)
    links: Links = []
    for i, side in ((1, mask), (2, ~mask)):
        for box in boxes_of(side):
            links.append((i, ElementPiece(box, box, _same(len(result)))))
    kept = [1] if mask.all() else [2] if not mask.any() else []
    return _moves_from_links(links, kept)


def _dynamic_slice(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> ElementMoves | None:
    sizes = integers(op, "slice_sizes")
    starts = _starts(list(op.operands)[1:], sizes, shapes[0])
    if None in starts:
        steering = tuple(1 + d for d, start in enumerate(starts) if start is None)
        return ElementMoves((), frozenset({0}), left=frozenset({0}), steering=steering)
    taken = [
        range(start, start + size)
        for start, size in zip(starts, sizes, strict=True)
        if start is not None
    ]
    operand = shapes[0]
    ranges = [*map(canonical, taken), *map(range, operand[len(taken) :])]
    piece = ElementPiece(tuple(ranges), whole_box(result), _same(len(result)))
    return _moves_from_links([(0, piece)], kept=[0] if operand == result else [])


def _starts(indices: Sequence[ir.Value], sizes: Sequence[int], whole: Shape) -> list[int | None]:
    """Returns the clamped start of a window along each dimension; None if it is unknown."""
    starts: list[int | None] = []
    for index, size, extent in zip(indices, sizes, whole, strict=False):
        known = np.array(0) if size == extent else fold_value(index)
        starts.append(None if known is None else int(clamped_starts(known, size, extent)))
    return starts


def _update(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> ElementMoves:
    whole, update = shapes[0], shapes[1]
    if 0 in update:
        return _moves_from_links([(0, identity(result))], kept=[0])
    if whole == update:
        return _moves_from_links([(1, identity(result))], kept=[1])
    starts = _starts(list(op.operands)[2:], update, whole)
    if None in starts:
        steering = tuple(2 + d for d, start in enumerate(starts) if start is None)
        return ElementMoves((), frozenset({0, 1}), frozenset({1}), frozenset({0}), steering)
    box = tuple(
        range(start or 0, (start or 0) + size)
        for start, size in zip([*starts, *[0] * (len(whole) - len(starts))], update, strict=True)
    )
    links: Links = [(1, ElementPiece(whole_box(update), box, _same(len(result))))]
    return _moves_of_update(links, [box], result, update=1)


def _moves_of_update(
    links: Links, boxes: Sequence[Box], result: Shape, update: int
) -> ElementMoves:
    """Returns the moves of an update into some disjoint boxes; the operand has the rest."""
    rest = boxes_outside(result, boxes)
    written = sum(size_of(link.target) for _, link in links if isinstance(link, ElementPiece))
    links = [*links, *((0, ElementPiece(box, box, _same(len(result)))) for box in rest)]
    sources = {update} if written == size_of(whole_box(result)) else {0, update}
    return ElementMoves(tuple(links), frozenset(sources), frozenset({1} & {update}))


def _gather(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> ElementMoves | None:
    numbers = gather_numbers(op)
    unknown = ElementMoves((), frozenset({0}), left=frozenset({0}), steering=(1,))
    if numbers.operand_batching or len(result) != _rank(op.results[0]):
        return unknown
    sizes = integers(op, "slice_sizes")
    windows = _windows(op.operands[1], numbers.index_vector, numbers.index_map, len(shapes[0]))
    if windows is None:
        return unknown
    batch = numbers.batch_dims(len(result))
    along = tuple(zip(numbers.window_dims(len(sizes)), numbers.windows, strict=True))
    links: Links = []
    for place, begins in windows:
        limits = [extent - size for extent, size in zip(shapes[0], sizes, strict=True)]
        starts = [min(max(b, 0), limit) for b, limit in zip(begins, limits, strict=True)]
        source = tuple(range(s, s + size) for s, size in zip(starts, sizes, strict=True))
        target = list(whole_box(result))
        for r, position in zip(batch, place, strict=True):
            target[r] = range(position, position + 1)
        links.append((0, ElementPiece(source, tuple(target), along)))
    return _moves_from_links(links)


def _windows(
    indices: ir.Value, vector: int, dimensions: Sequence[int], rank: int
) -> list[tuple[tuple[int, ...], list[int]]] | None:
    """Returns the first windows: their places in the batch, and their starts before clamping."""
    table = fold_value(indices)
    if table is None:
        return None
    table = np.expand_dims(table, -1) if vector == table.ndim else np.moveaxis(table, vector, -1)
    windows: list[tuple[tuple[int, ...], list[int]]] = []
    for place in islice(product(*map(range, table.shape[:-1])), _MOST_WINDOWS):
        begins = [0] * rank
        for dimension, start in zip(dimensions, table[place], strict=True):
            begins[dimension] = int(start)
        windows.append((place, begins))
    return windows


def _scatter(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> ElementMoves | None:
    """Returns the moves of a scatter that overwrites; updates out of bounds are not written."""
    body = Combining(op).combiner
    returned = terminator(body).operands[0]
    if len(shapes) != 3 or returned not in list(body.arguments):
        return None
    if returned == body.arguments[0] or 0 in shapes[2]:
        return _moves_from_links([(0, identity(result))], kept=[0])
    written = scatter_writes(op, shapes)
    if written is None:
        is_smaller = size_of(whole_box(shapes[2])) < size_of(whole_box(result))
        left = frozenset({0} if is_smaller else ())
        return ElementMoves((), frozenset({0, 2}), left=left, steering=(1,))
    return _moves_of_update(*written, result, update=2)


def scatter_writes(op: ir.Operation, shapes: Sequence[Shape]) -> tuple[Links, list[Box]] | None:
    """Returns a link for each update of a scatter, and the disjoint boxes that they write.

    None if they are unknown, or not disjoint.
    """
    numbers = scatter_numbers(op)
    operand, _, updates = shapes
    if numbers.operand_batching or len(updates) != _rank(op.operands[2]):
        return None
    batch = numbers.batch_dims(len(updates))
    if size_of(whole_box(tuple(updates[u] for u in batch))) > _MOST_WINDOWS:
        return None
    windows = _windows(op.operands[1], numbers.index_vector, numbers.index_map, len(operand))
    if windows is None:
        return None
    along = tuple(zip(numbers.windows, numbers.window_dims(len(operand)), strict=True))
    links: Links = []
    boxes: list[Box] = []
    for place, begins in windows:
        box = [range(b, b + 1) for b in begins]
        for u, d in along:
            box[d] = range(begins[d], begins[d] + updates[u])
        inside = meet(tuple(box), whole_box(operand))
        if inside is None:
            continue
        boxes.append(inside)
        source = list(whole_box(updates))
        for u, position in zip(batch, place, strict=True):
            source[u] = range(position, position + 1)
        if inside == tuple(box):
            links.append((2, ElementPiece(tuple(source), inside, along)))
    overlap = any(meet(one, other) is not None for one, other in combinations(boxes, 2))
    return None if overlap else (links, boxes)


def _rank(value: ir.Value) -> int:
    return ir.RankedTensorType(value.type).rank


_Rule = Callable[[ir.Operation, Sequence[Shape], Shape], ElementMoves | None]
_RULES: dict[str, _Rule] = {
    BROADCAST: _moves_by_relation,
    CONCATENATE: _moves_by_relation,
    DYNAMIC_SLICE: _dynamic_slice,
    DYNAMIC_UPDATE_SLICE: _update,
    GATHER: _gather,
    PAD: _pad,
    RESHAPE: lambda _, shapes, result: _moves_from_links(
        [(0, ElementReshape(shapes[0], result))], kept=[0]
    ),
    REVERSE: _moves_by_relation,
    SCATTER: _scatter,
    SELECT: _select,
    SLICE: _moves_by_relation,
    TRANSPOSE: _moves_by_relation,
    "stablehlo.complex": _complex,
    "stablehlo.imag": _part(1),
    "stablehlo.real": _part(0),
}
