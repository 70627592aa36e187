"""Composes tensors from pieces of others, with as few ops as possible.

Pieces may be arranged in a source as in the result: all microbatches of a batch, or the layers of
stacked weights. They become a reshape, and a transpose if their order differs. So a folded program
does not contain the slices and concatenations that fed the stages of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, permutations
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import TRANSPOSE
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.values import before_reshapes, producer
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Convert,
    Known,
    Source,
    SourceBox,
    Splat,
    TraceReshape,
    Transpose,
    ViewOp,
)


class Located(NamedTuple):
    """The box of a value that holds a box of a source, viewed through some ops."""

    value: ir.Value
    box: Box
    ops: tuple[ViewOp, ...] = ()


Locate = Callable[[Source, Box], Located]


def no_sources(source: Source, box: Box) -> Located:
    """Raises AssertionError, for a composer that only applies ops."""
    raise AssertionError(f"{source} must not be read, nor its box {box}")


class _LocatedPiece(NamedTuple):
    """A piece, with the value that it is a box of."""

    value: ir.Value
    box: Box
    target: Box
    ops: tuple[ViewOp, ...]


class Composer:
    """Writes at the builder's point; `locate` returns the box of a value that holds a box of a
    source."""

    def __init__(self, build: Builder, locate: Locate) -> None:
        self._build = build
        self._locate = locate
        self._reshaped: dict[tuple[ir.Value, tuple[int, ...]], ir.Value] = {}

    def compose(self, pieces: Sequence[SourceBox], type_: ir.Type) -> ir.Value:
        """Returns a tensor of a type, composed of pieces."""
        element = ir.RankedTensorType(type_).element_type
        return self._join_pieces([self._locate_piece(piece, element) for piece in pieces])

    def through(self, value: ir.Value, ops: Sequence[ViewOp]) -> ir.Value:
        """Returns the result of view ops on a value; the last is applied first."""
        for op in reversed(ops):
            value = self._apply_view_op(value, op)
        return value

    def reshape_value(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """Returns the same elements in another shape. Equal calls return one value, so that its
        pieces have one source."""
        value, key = before_reshapes(value), tuple(shape)
        if shape_of(value) == list(shape):
            return value
        if (value, key) not in self._reshaped:
            self._reshaped[value, key] = self._build.reshape(value, shape)
        return self._reshaped[value, key]

    def _locate_piece(self, piece: SourceBox, element: ir.Type) -> _LocatedPiece:
        target, ops = piece.view.target, piece.view.ops
        if isinstance(piece.source, Splat):
            build = self._build
            type_ = build.tensor(target.sizes, ir.Type.parse(piece.source.element, build.context))
            splat = ir.Attribute.parse(f"{piece.source.text} : {type_}", build.context)
            value = build.convert(build.op("constant", [], type_, value=splat), element)
            return _LocatedPiece(value, Box.whole(target.sizes), target, ())
        if isinstance(piece.source, Known):
            return _LocatedPiece(self._known(piece.source), piece.box, target, ops)
        value, box, first = self._locate(piece.source, piece.box)
        return _LocatedPiece(value, box, target, (*ops, *first))

    def _known(self, known: Known) -> ir.Value:
        """Returns a constant of integers or booleans."""
        array = np.frombuffer(known.data, known.dtype).reshape(known.shape)
        if array.dtype.kind != "u":
            return self._build.constant(array)
        element = ir.IntegerType.get_unsigned(8 * array.dtype.itemsize, self._build.context)
        with self._build.context:
            value = ir.DenseElementsAttr.get(array, type=element, shape=list(array.shape))
        return self._build.op("constant", [], value.type, value=value)

    def _join_pieces(self, pieces: Sequence[_LocatedPiece]) -> ir.Value:
        """Returns pieces side by side, along the first dimension in which their targets differ."""
        if len(pieces) == 1:
            return self._view_piece(pieces[0])
        along = enumerate(zip(*(piece.target.starts for piece in pieces), strict=True))
        varying = [dim for dim, starts in along if len(set(starts)) > 1]
        dim = varying[0]
        if len(varying) == 1:
            # Pieces along one dimension: in one step if they are a grid in one value, else in runs
            # of pieces of one value with the same ops.
            ordered = sorted(pieces, key=lambda piece: piece.target.starts[dim])
            at_once = self._at_once(ordered, dim)
            at_once = self._in_turns(ordered, dim) if at_once is None else at_once
            if at_once is not None:
                return at_once
            runs = [list(run) for _, run in groupby(ordered, lambda p: (p.value, p.ops))]
            if len(runs) == 1:
                return self._build.concatenate([self._view_piece(piece) for piece in ordered], dim)
            return self._build.concatenate([self._join_pieces(run) for run in runs], dim)
        ordered = sorted(pieces, key=lambda piece: piece.target.starts)
        rows = [list(row) for _, row in groupby(ordered, lambda p: p.target.starts[dim])]
        return self._build.concatenate([self._join_pieces(row) for row in rows], dim)

    def _in_turns(self, pieces: Sequence[_LocatedPiece], dim: int) -> ir.Value | None:
        """Returns all pieces if they alternate between several values; None otherwise. Value k may
        hold layer k of every stage, for instance, with the pieces in the order of all layers."""
        values = list(dict.fromkeys(piece.value for piece in pieces))
        count, size = len(values), pieces[0].target.sizes[dim]
        if count == 1 or len(pieces) < 2 * count or len(pieces) % count:
            return None
        if any(piece.target.sizes[dim] != size for piece in pieces):
            return None
        columns = [pieces[number::count] for number in range(count)]
        if any(p.value != v for v, own in zip(values, columns, strict=True) for p in own):
            return None
        stacks = [self._at_once(own, dim) for own in columns]
        known = [stack for stack in stacks if stack is not None]
        if len(known) < count:
            return None
        whole = shape_of(known[0])
        parts = [*whole[:dim], whole[dim] // size, 1, size, *whole[dim + 1 :]]
        value = self._build.concatenate([self.reshape_value(v, parts) for v in known], dim + 1)
        return self.reshape_value(value, [*whole[:dim], whole[dim] * count, *whole[dim + 1 :]])

    def _at_once(self, pieces: Sequence[_LocatedPiece], dim: int) -> ir.Value | None:
        """Returns all pieces by a reshape and a transpose; None if they are not a grid of boxes in
        one value."""
        pieces = self._without_gaps(pieces)
        first = pieces[0]
        alike = all(
            p.value == first.value
            and p.ops == first.ops
            and p.box.sizes == first.box.sizes
            and p.target.sizes == first.target.sizes
            for p in pieces
        )
        grid = _grid([piece.box for piece in pieces]) if alike else None
        if grid is None:
            return None
        cover, split, order = grid
        value = self._slice_box(first.value, cover)
        value = self._reorder_dims(self.reshape_value(value, split), order)
        value = self.reshape_value(value, [len(pieces), *first.box.sizes])
        for op in reversed(first.ops):
            value = self._apply_view_op(value, op, 1)
        shape = shape_of(value)[1:]
        value = self._reorder_dims(value, [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)])
        shape[dim] *= len(pieces)
        return self.reshape_value(value, shape)

    def _without_gaps(self, pieces: Sequence[_LocatedPiece]) -> Sequence[_LocatedPiece]:
        """Returns the pieces as boxes of a value without the gaps between them, if all gaps are
        equal; otherwise the pieces unchanged."""
        value, one = pieces[0].value, pieces[0].box
        if any(p.value != value or p.box.sizes != one.sizes for p in pieces):
            return pieces
        dims = [d for d in range(len(one.sizes)) if pieces[-1].box.starts[d] != one.starts[d]]
        if len(dims) != 1:
            return pieces
        (dim,) = dims
        size, shape = one.sizes[dim], shape_of(value)
        step, left = divmod(shape[dim], len(pieces))
        place = one.starts[dim] // size
        expected = [one.along(dim, one.starts[dim] + i * step, size) for i in range(len(pieces))]
        if left or step % size or step == size or one.starts[dim] % size or place * size >= step:
            return pieces
        if [piece.box for piece in pieces] != expected:
            return pieces
        parts = [*shape[:dim], len(pieces), step // size, size, *shape[dim + 1 :]]
        taken = self._build.slice_along(self.reshape_value(value, parts), dim + 1, place, place + 1)
        shape[dim] = len(pieces) * size
        value = self.reshape_value(taken, shape)
        return [
            piece._replace(value=value, box=one.along(dim, i * size, size))
            for i, piece in enumerate(pieces)
        ]

    def _view_piece(self, piece: _LocatedPiece) -> ir.Value:
        return self.through(self._slice_box(piece.value, piece.box), piece.ops)

    def _apply_view_op(self, value: ir.Value, op: ViewOp, lead: int = 0) -> ir.Value:
        """Returns the result of a view op on a value, applied to the dimensions after `lead`
        leading ones."""
        front = shape_of(value)[:lead]
        if isinstance(op, Convert):
            element = ir.Type.parse(op.element, self._build.context)
            return self._build.op("convert", [value], self._build.tensor(shape_of(value), element))
        if isinstance(op, Transpose):
            return self._reorder_dims(value, [*range(lead), *(lead + d for d in op.order)])
        if isinstance(op, TraceReshape):
            return self.reshape_value(value, [*front, *op.after])
        return self._build.broadcast(value, [*front, *op.shape], range(lead))

    def _slice_box(self, value: ir.Value, box: Box) -> ir.Value:
        if box == Box.whole(shape_of(value)):
            return value
        limits = [box.end(dim) for dim in range(len(box.sizes))]
        return self._build.slice(value, box.starts, limits)

    def _reorder_dims(self, value: ir.Value, order: Sequence[int]) -> ir.Value:
        """Returns a value with its dimensions reordered; by a reshape if only sizes of 1 move."""
        maker = producer(value)
        if maker is not None and maker.name == TRANSPOSE:
            # Two transposes in a row become one.
            first = integers(maker, "permutation")
            return self._reorder_dims(maker.operands[0], [first[d] for d in order])
        shape = shape_of(value)
        long = [d for d in order if shape[d] != 1]
        if long == sorted(long):
            return self.reshape_value(value, [shape[d] for d in order])
        return self._build.transpose(value, order)


def _grid(boxes: Sequence[Box]) -> tuple[Box, list[int], list[int]] | None:
    """Returns the arrangement of boxes of one size, in order, in their hull; None if they do not
    fill it.

    The result is the hull, a shape and an order. After a reshape and a transpose by these, the
    leading dimensions number the boxes, and the others are those of a box. Along a single
    dimension, that number may have two digits: microbatches that take every n-th sample.
    """
    sizes, rank = boxes[0].sizes, len(boxes[0].sizes)
    starts = np.array([box.starts for box in boxes]).reshape(len(boxes), rank)
    low = starts.min(axis=0)
    # A box may be empty; then its size must not divide.
    positions = (starts - low) // np.maximum(sizes, 1)
    if ((starts - low) % np.maximum(sizes, 1)).any():
        return None
    counts = [int(count) for count in positions.max(axis=0) + 1]
    if prod(counts) != len(boxes):
        return None
    dims = [dim for dim, count in enumerate(counts) if count > 1]
    ways = [{dim: [counts[dim]] for dim in dims}]  # the digits of each dimension
    if len(dims) == 1:
        (dim,), (count,) = dims, [counts[dim] for dim in dims]
        ways += [{dim: [n, count // n]} for n in range(2, count) if count % n == 0]
    for digits in ways:
        ordered = _numbering(digits, positions)
        if ordered is not None:
            break
    else:
        return None
    split: list[int] = []
    places: list[int] = []  # of the digits, then of the boxes' own dimensions
    inner: list[int] = []
    for dim in range(rank):
        places += range(len(split), len(split) + len(digits.get(dim, [])))
        split += digits.get(dim, [])
        inner.append(len(split))
        split.append(sizes[dim])
    cover = Box(tuple(map(int, low)), tuple(c * s for c, s in zip(counts, sizes, strict=True)))
    return cover, split, [*(places[number] for number in ordered), *inner]


def _numbering(
    digits: dict[int, list[int]], positions: NDArray[np.int64]
) -> tuple[int, ...] | None:
    """Returns the order of digits that numbers the boxes 0, 1, 2, …; None if there is none."""
    sizes = [size for each in digits.values() for size in each]
    columns = [
        positions[:, dim] // prod(each[place + 1 :]) % each[place]
        for dim, each in digits.items()
        for place in range(len(each))
    ]
    for order in permutations(range(len(columns))):
        number = np.zeros(len(positions), np.int64)
        for column in order:
            number = number * sizes[column] + columns[column]
        if (number == np.arange(len(positions))).all():
            return order
    return None


# Pieces of one microbatch's or layer's input, as pieces of the input of all of them.


def shift_piece(piece: SourceBox, dim: int, by: int) -> SourceBox:
    """Returns the piece with its target shifted along a dimension."""
    target = piece.view.target
    target = target.along(dim, target.starts[dim] + by, target.sizes[dim])
    return replace(piece, view=replace(piece.view, target=target))


def stack_piece(piece: SourceBox, number: int) -> SourceBox:
    """Returns the piece as part of row `number` in a stack along a new leading dimension."""
    target = piece.view.target
    sizes = (1, *target.sizes)
    return _reshape_piece(piece, Box((number, *target.starts), sizes))


def interleave_piece(piece: SourceBox, dim: int, parts: int, number: int) -> SourceBox:
    """Returns the piece with one dimension of its target split in three, as in `split_samples`. The
    second of the three is the number of the microbatch."""
    target = piece.view.target
    sizes = split_samples(target.sizes, dim, parts)
    starts = (*target.starts[:dim], 0, number, *target.starts[dim:])
    return _reshape_piece(piece, Box(starts, sizes))


def split_samples(shape: Sequence[int], dim: int, parts: int) -> tuple[int, ...]:
    """Returns a shape with a dimension split into samples, microbatches (size 1) and the elements
    of a sample."""
    return (*shape[:dim], parts, 1, shape[dim] // parts, *shape[dim + 1 :])


def _reshape_piece(piece: SourceBox, target: Box) -> SourceBox:
    ops = (TraceReshape(piece.view.target.sizes, target.sizes), *piece.view.ops)
    return replace(piece, view=replace(piece.view, target=target, ops=ops))
