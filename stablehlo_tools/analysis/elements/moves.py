"""Ops that move elements and compute nothing: where each element of the result comes from.

Indices and masks count where they are known before the run. What is not known leaves links out, so
that links are never wrong, and operands in: `sources` are all that an element may come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.device_arithmetic import clamped_starts
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
from stablehlo_tools.analysis.elements.folding import folded
from stablehlo_tools.analysis.elements.links import Link, Piece, Reshape, identity
from stablehlo_tools.bindings import ir
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
from stablehlo_tools.ir.carriers import terminator

_MOST_WINDOWS = 16  # of a gather or a scatter, that are told apart
Links = list[tuple[int, Link]]


@dataclass(frozen=True)
class Moved:
    """What becomes of the operands' elements.

    `links`: by the number of the operand. `sources`: operands that elements of the result may come
    from. `kept`: those of which no element is lost. `left`: those of which some element is left,
    nobody knows which. `steering`: indices that are not known.
    """

    links: tuple[tuple[int, Link], ...]
    sources: frozenset[int]
    kept: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    steering: tuple[int, ...] = ()


def moves_of(op: ir.Operation) -> Moved | None:
    """What an op does to the elements of its operands; None for one that computes, or of a shape
    that is not known.
    """
    rule = _RULES.get(op.name)
    if rule is None:
        return None
    shapes = [shape_of(value.type) for value in op.operands]
    result = shape_of(op.results[0].type) if len(op.results) == 1 else None
    if result is None or 0 in result or any(shape is None for shape in shapes):
        return None
    return rule(op, [shape for shape in shapes if shape is not None], result)


def _moved(links: Links, kept: Iterable[int] = ()) -> Moved:
    """By links that have, of each operand that elements may come from, at least one."""
    return Moved(tuple(links), frozenset(i for i, _ in links), frozenset(kept))


def _numbers(op: ir.Operation, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(op.attributes[name]))


def _same(rank: int) -> tuple[tuple[int, int], ...]:
    return tuple((d, d) for d in range(rank))


def _reshape(_: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved:
    return _moved([(0, Reshape(shapes[0], result))], kept=[0])


def _transpose(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved:
    along = tuple((d, r) for r, d in enumerate(_with_parts(_numbers(op, "permutation"), result)))
    return _moved([(0, Piece(whole_box(shapes[0]), whole_box(result), along))], kept=[0])


def _with_parts(dimensions: list[int], shape: Shape) -> list[int]:
    """With the dimension of the parts of a complex number, which stays the last."""
    return [*dimensions, len(shape) - 1] if len(dimensions) < len(shape) else dimensions


def _broadcast(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved:
    dimensions = _numbers(op, "broadcast_dimensions")
    if len(dimensions) < len(shapes[0]):
        dimensions.append(len(result) - 1)
    along = tuple((d, r) for d, r in enumerate(dimensions) if shapes[0][d] == result[r])
    return _moved([(0, Piece(whole_box(shapes[0]), whole_box(result), along))], kept=[0])


def _reverse(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved:
    flipped = _numbers(op, "dimensions")
    target = tuple(
        range(size)[::-1] if d in flipped else range(size) for d, size in enumerate(result)
    )
    return _moved([(0, Piece(whole_box(shapes[0]), target, _same(len(result))))], kept=[0])


def _slice(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved:
    names = ("start_indices", "limit_indices", "strides")
    taken = [range(*part) for part in zip(*(_numbers(op, name) for name in names), strict=True)]
    return _window(taken, shapes[0], result)


def _window(taken: list[range], operand: Shape, result: Shape) -> Moved:
    """A part of the operand."""
    ranges = [*map(canonical, taken), *map(range, operand[len(taken) :])]
    piece = Piece(tuple(ranges), whole_box(result), _same(len(result)))
    return _moved([(0, piece)], kept=[0] if operand == result else [])


def _concatenate(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved:
    along = ir.IntegerAttr(op.attributes["dimension"]).value
    links: Links = []
    start = 0
    for i, shape in enumerate(shapes):
        if size := shape[along]:
            target = list(whole_box(result))
            target[along] = range(start, start + size)
            links.append((i, Piece(whole_box(shape), tuple(target), _same(len(result)))))
            start += size
    return _moved(links, kept=range(len(shapes)))


def _pad(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    amounts = list(zip(*(_numbers(op, name) for name in names), strict=True))
    operand = shapes[0]
    source: list[range] = []
    target: list[range] = []
    for (low, _, interior), size, padded in zip(amounts, operand, result, strict=False):
        step = 1 + interior
        first = -(min(low, 0) // step)
        places = range(low + first * step, min(low + size * step, padded), step)
        places = places[: max(size - first, 0)]
        source.append(range(first, first + len(places)))
        target.append(places)
    source += map(range, operand[len(amounts) :])
    target += map(range, result[len(amounts) :])
    links: Links = []
    covered: list[Box] = []
    if all(source):
        kept = tuple(map(canonical, target))
        covered.append(kept)
        links.append((0, Piece(tuple(map(canonical, source)), kept, _same(len(result)))))
    parts = () if len(amounts) == len(result) else ((0, len(result) - 1),)
    filling = whole_box(shapes[1])
    links += [(1, Piece(filling, box, parts)) for box in boxes_outside(result, covered)]
    lossless = [0] if covered and size_of(covered[0]) == size_of(whole_box(operand)) else []
    used = {i for i, _ in links}
    return _moved(links, kept=[*lossless, *used & {1}])


def _complex(_: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved:
    links: Links = []
    for i, shape in enumerate(shapes):
        target = (*whole_box(shape), range(i, i + 1))
        links.append((i, Piece(whole_box(shape), target, _same(len(shape)))))
    return _moved(links, kept=[0, 1])


def _part(position: int) -> _Rule:
    """The real or the imaginary part; of a real number, itself or zero."""

    def rule(_: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved:
        if shapes[0] == result:
            return _moved([] if position else [(0, identity(result))], kept=[] if position else [0])
        source = (*whole_box(result), range(position, position + 1))
        return _moved([(0, Piece(source, whole_box(result), _same(len(result))))])

    return rule


def _select(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved | None:
    mask = folded(op.operands[0])
    if mask is None:
        return None
    if mask.ndim < len(result):  # a scalar, or one number for both parts
        mask = np.broadcast_to(mask.reshape(*mask.shape, *[1] * (len(result) - mask.ndim)), result)
    links: Links = []
    for i, side in ((1, mask), (2, ~mask)):
        for box in boxes_of(side):
            links.append((i, Piece(box, box, _same(len(result)))))
    kept = [1] if mask.all() else [2] if not mask.any() else []
    return _moved(links, kept)


def _dynamic_slice(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved | None:
    sizes = _numbers(op, "slice_sizes")
    starts = _starts(list(op.operands)[1:], sizes, shapes[0])
    if None in starts:
        steering = tuple(1 + d for d, start in enumerate(starts) if start is None)
        return Moved((), frozenset({0}), left=frozenset({0}), steering=steering)
    taken = [
        range(start, start + size)
        for start, size in zip(starts, sizes, strict=True)
        if start is not None
    ]
    return _window(taken, shapes[0], result)


def _starts(indices: Sequence[ir.Value], sizes: Sequence[int], whole: Shape) -> list[int | None]:
    """Where a window begins along each dimension, clamped; None where that is not known."""
    starts: list[int | None] = []
    for index, size, extent in zip(indices, sizes, whole, strict=False):
        known = np.array(0) if size == extent else folded(index)
        starts.append(None if known is None else int(clamped_starts(known, size, extent)))
    return starts


def _update(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved:
    whole, update = shapes[0], shapes[1]
    if 0 in update:
        return _moved([(0, identity(result))], kept=[0])
    if whole == update:
        return _moved([(1, identity(result))], kept=[1])
    rank = len(op.operands) - 2
    starts = _starts(list(op.operands)[2:], update, whole)
    if None in starts:
        steering = tuple(2 + d for d, start in enumerate(starts) if start is None)
        return Moved((), frozenset({0, 1}), frozenset({1}), frozenset({0}), steering)
    box = tuple(
        range(start or 0, (start or 0) + size)
        for start, size in zip([*starts, *[0] * (len(whole) - rank)], update, strict=True)
    )
    links: Links = [(1, Piece(whole_box(update), box, _same(len(result))))]
    return _overwritten(links, [box], result, update=1)


def _overwritten(links: Links, boxes: Sequence[Box], result: Shape, update: int) -> Moved:
    """The operand, but for what lies in some boxes, which do not meet, beside an update."""
    rest = boxes_outside(result, boxes)
    written = sum(size_of(link.target) for _, link in links if isinstance(link, Piece))
    links = [*links, *((0, Piece(box, box, _same(len(result)))) for box in rest)]
    sources = {update} if written == size_of(whole_box(result)) else {0, update}
    return Moved(tuple(links), frozenset(sources), frozenset({1} & {update}))


def _gather(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved | None:
    numbers = bindings.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    unknown = Moved((), frozenset({0}), left=frozenset({0}), steering=(1,))
    if len(numbers.operand_batching_dims) or len(result) != _rank(op.results[0]):
        return unknown
    sizes = _numbers(op, "slice_sizes")
    windows = _windows(
        op.operands[1], int(numbers.index_vector_dim), list(numbers.start_index_map), len(shapes[0])
    )
    if windows is None:
        return unknown
    offsets = list(numbers.offset_dims)
    kept = [d for d in range(len(sizes)) if d not in list(numbers.collapsed_slice_dims)]
    batch = [r for r in range(len(result)) if r not in offsets]
    along = tuple(zip(kept, offsets, strict=True))
    links: Links = []
    for place, begins in windows:
        limits = [extent - size for extent, size in zip(shapes[0], sizes, strict=True)]
        starts = [min(max(b, 0), limit) for b, limit in zip(begins, limits, strict=True)]
        source = tuple(range(s, s + size) for s, size in zip(starts, sizes, strict=True))
        target = list(whole_box(result))
        for r, position in zip(batch, place, strict=True):
            target[r] = range(position, position + 1)
        links.append((0, Piece(source, tuple(target), along)))
    return _moved(links)


def _windows(
    indices: ir.Value, vector: int, dimensions: Sequence[int], rank: int
) -> list[tuple[tuple[int, ...], list[int]]] | None:
    """The first windows, by their place in the batch: where each begins, as it is written."""
    table = folded(indices)
    if table is None:
        return None
    table = np.expand_dims(table, -1) if vector == table.ndim else np.moveaxis(table, vector, -1)
    windows: list[tuple[tuple[int, ...], list[int]]] = []
    for place in product(*map(range, table.shape[:-1])):
        if len(windows) == _MOST_WINDOWS:
            break
        begins = [0] * rank
        for dimension, start in zip(dimensions, table[place], strict=True):
            begins[dimension] = int(start)
        windows.append((place, begins))
    return windows


def _scatter(op: ir.Operation, shapes: Sequence[Shape], result: Shape) -> Moved | None:
    """One that overwrites; its indices may lie outside, where nothing is written."""
    body = op.regions[0].blocks[0]
    returned = terminator(body).operands[0]
    if len(shapes) != 3 or returned not in list(body.arguments):
        return None
    if returned == body.arguments[0] or 0 in shapes[2]:
        return _moved([(0, identity(result))], kept=[0])
    written = scattered(op, shapes)
    if written is None:
        is_smaller = size_of(whole_box(shapes[2])) < size_of(whole_box(result))
        left = frozenset({0} if is_smaller else ())
        return Moved((), frozenset({0, 2}), left=left, steering=(1,))
    links, boxes = written
    return _overwritten(links, boxes, result, update=2)


def scattered(op: ir.Operation, shapes: Sequence[Shape]) -> tuple[Links, list[Box]] | None:
    """Where a scatter writes: a link for each of its updates, none of which meet, and the places.

    None where that is not known.
    """
    numbers = bindings.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    operand, _, updates = shapes
    if len(numbers.input_batching_dims) or len(updates) != _rank(op.operands[2]):
        return None
    offsets = list(numbers.update_window_dims)
    inserted = list(numbers.inserted_window_dims)
    batch = [u for u in range(len(updates)) if u not in offsets]
    vector = int(numbers.index_vector_dim)
    count = size_of(whole_box(tuple(updates[u] for u in batch)))
    if count > _MOST_WINDOWS:
        return None
    windows = _windows(
        op.operands[1], vector, list(numbers.scattered_dims_to_operand_dims), len(operand)
    )
    if windows is None:
        return None
    kept = [d for d in range(len(operand)) if d not in inserted]
    along = tuple(zip(offsets, kept, strict=True))
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
            links.append((2, Piece(tuple(source), inside, along)))
    if any(meet(one, other) is not None for one, other in combinations(boxes, 2)):
        return None
    return links, boxes


def _rank(value: ir.Value) -> int:
    return ir.RankedTensorType(value.type).rank


_Rule = Callable[[ir.Operation, Sequence[Shape], Shape], Moved | None]
_RULES: dict[str, _Rule] = {
    BROADCAST: _broadcast,
    CONCATENATE: _concatenate,
    DYNAMIC_SLICE: _dynamic_slice,
    DYNAMIC_UPDATE_SLICE: _update,
    GATHER: _gather,
    PAD: _pad,
    RESHAPE: _reshape,
    REVERSE: _reverse,
    SCATTER: _scatter,
    SELECT: _select,
    SLICE: _slice,
    TRANSPOSE: _transpose,
    "stablehlo.complex": _complex,
    "stablehlo.imag": _part(1),
    "stablehlo.real": _part(0),
}
