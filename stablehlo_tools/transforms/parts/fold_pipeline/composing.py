"""Writes tensors that consist of pieces of others, with as few ops as the pieces allow.

Pieces that lie in a source as they lie in the result, such as all microbatches of a batch or the
layers of stacked weights, become a reshape, with a transpose where their order is another.
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
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Convert,
    Known,
    Piece,
    Reshape,
    Source,
    Splat,
    Transpose,
    ViewOp,
)

_RESHAPE = "stablehlo.reshape"
_TRANSPOSE = "stablehlo.transpose"


class Placed(NamedTuple):
    """Where a box of a source is: a box of a value, after some ops."""

    value: ir.Value
    box: Box
    ops: tuple[ViewOp, ...] = ()


Place = Callable[[Source, Box], Placed]


class _Placed(NamedTuple):
    """A piece, with the value that it is a box of."""

    value: ir.Value
    box: Box
    target: Box
    ops: tuple[ViewOp, ...]


class Composer:
    """Builds at a point; `place` says which box of which value a box of a source is."""

    def __init__(self, build: Builder, place: Place) -> None:
        self._build = build
        self._place = place

    def compose(self, pieces: Sequence[Piece], kind: ir.Type) -> ir.Value:
        """A tensor of a type out of the pieces that make it up."""
        element = ir.RankedTensorType(kind).element_type
        return self._composed([self._placed(piece, element) for piece in pieces])

    def _placed(self, piece: Piece, element: ir.Type) -> _Placed:
        target, ops = piece.view.target, piece.view.ops
        if isinstance(piece.source, Splat):
            own = ir.Type.parse(piece.source.element, self._build.context)
            value = self._constant(piece.source.text, target.sizes, own)
            if own != element:
                value = self.stepped(value, Convert(str(element)))
            return _Placed(value, Box.whole(target.sizes), target, ())
        if isinstance(piece.source, Known):
            return _Placed(self._known(piece.source), piece.box, target, ops)
        value, box, first = self._place(piece.source, piece.box)
        return _Placed(value, box, target, (*ops, *first))

    def _constant(self, text: str, shape: Sequence[int], element: ir.Type) -> ir.Value:
        kind = self._build.tensor(shape, element)
        value = ir.Attribute.parse(f"{text} : {kind}", self._build.context)
        return self._build.op("constant", [], kind, value=value)

    def _known(self, known: Known) -> ir.Value:
        array = np.frombuffer(known.data, known.dtype).reshape(known.shape)
        return self.integers(array)

    def integers(self, array: NDArray[np.generic]) -> ir.Value:
        """A constant of integers or booleans."""
        context = self._build.context
        if array.dtype.kind == "b":
            i1 = ir.IntegerType.get_signless(1, context)
            return self._constant(f"dense<{array.tolist()}>".lower(), array.shape, i1)
        unsigned, width = array.dtype.kind == "u", 8 * array.dtype.itemsize
        make = ir.IntegerType.get_unsigned if unsigned else ir.IntegerType.get_signless
        element = make(width, context)
        kind = self._build.tensor(array.shape, element)
        with context:
            value = ir.DenseElementsAttr.get(array, type=element, shape=list(array.shape))
        return self._build.op("constant", [], kind, value=value)

    def _composed(self, pieces: Sequence[_Placed]) -> ir.Value:
        if len(pieces) == 1:
            return self._viewed(pieces[0])
        first = pieces[0].target
        varying = [
            d
            for d in range(len(first.starts))
            if any(piece.target.starts[d] != first.starts[d] for piece in pieces)
        ]
        dim = varying[0]
        if len(varying) == 1:
            return self._tiled(pieces, dim)
        ordered = sorted(pieces, key=lambda piece: piece.target.starts)
        rows = [list(row) for _, row in groupby(ordered, lambda p: p.target.starts[dim])]
        return self._joined([self._composed(row) for row in rows], dim)

    def _tiled(self, pieces: Sequence[_Placed], dim: int) -> ir.Value:
        """Pieces side by side along a dimension."""
        ordered = sorted(pieces, key=lambda piece: piece.target.starts[dim])
        together = self._together(ordered, dim)
        if together is not None:
            return together
        runs = [list(run) for _, run in groupby(ordered, lambda p: (p.value, p.ops))]
        if len(runs) == 1:
            return self._joined([self._viewed(piece) for piece in ordered], dim)
        return self._joined([self._composed(run) for run in runs], dim)

    def _viewed(self, piece: _Placed) -> ir.Value:
        return self.through(self._sliced(piece.value, piece.box), piece.ops)

    def through(self, value: ir.Value, ops: Sequence[ViewOp]) -> ir.Value:
        """What ops make of a value; the last comes first."""
        for op in reversed(ops):
            value = self.stepped(value, op)
        return value

    def stepped(self, value: ir.Value, op: ViewOp, lead: int = 0) -> ir.Value:
        """What one op makes of a value, behind some leading dimensions."""
        front = shape_of(value)[:lead]
        if isinstance(op, Convert):
            element = ir.Type.parse(op.element, self._build.context)
            kind = self._build.tensor(shape_of(value), element)
            return self._build.op("convert", [value], kind)
        if isinstance(op, Transpose):
            return self._reordered(value, [*range(lead), *(lead + d for d in op.order)])
        if isinstance(op, Reshape):
            return self.reshaped(value, [*front, *op.after])
        return self._build.broadcast(value, [*front, *op.shape], range(lead))

    def _together(self, pieces: Sequence[_Placed], dim: int) -> ir.Value | None:
        """All pieces at once, where they are a grid of boxes of one value."""
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
        value = self._sliced(first.value, grid.cover)
        value = self._reordered(self.reshaped(value, grid.apart), grid.order)
        value = self.reshaped(value, [len(pieces), *first.box.sizes])
        for op in reversed(first.ops):
            value = self.stepped(value, op, 1)
        shape = shape_of(value)[1:]
        value = self._reordered(value, [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)])
        shape[dim] *= len(pieces)
        return self.reshaped(value, shape)

    def _sliced(self, value: ir.Value, box: Box) -> ir.Value:
        if box == Box.whole(shape_of(value)):
            return value
        build = self._build
        return build.op(
            "slice",
            [value],
            build.tensor(box.sizes, element_of(value)),
            start_indices=build.integers(box.starts),
            limit_indices=build.integers([box.end(d) for d in range(len(box.sizes))]),
            strides=build.integers([1] * len(box.sizes)),
        )

    def reshaped(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """The same elements in another shape."""
        maker = producer(value)
        while maker is not None and maker.name == _RESHAPE:
            value = maker.operands[0]
            maker = producer(value)
        return value if shape_of(value) == list(shape) else self._build.reshape(value, shape)

    def _reordered(self, value: ir.Value, order: Sequence[int]) -> ir.Value:
        """Dimensions in another order; a reshape where only some of size 1 move."""
        maker = producer(value)
        if maker is not None and maker.name == _TRANSPOSE:
            first = list(ir.DenseI64ArrayAttr(maker.attributes["permutation"]))
            return self._reordered(maker.operands[0], [first[d] for d in order])
        shape = shape_of(value)
        after = [shape[d] for d in order]
        long = [d for d in order if shape[d] != 1]
        if long == sorted(long):
            return self.reshaped(value, after)
        kind = self._build.tensor(after, element_of(value))
        return self._build.op("transpose", [value], kind, permutation=self._build.integers(order))

    def _joined(self, values: Sequence[ir.Value], dim: int) -> ir.Value:
        shape = shape_of(values[0])
        shape[dim] = sum(shape_of(value)[dim] for value in values)
        kind = self._build.tensor(shape, element_of(values[0]))
        return self._build.op("concatenate", values, kind, dimension=self._build.integer(dim))


class _Grid(NamedTuple):
    """Boxes that fill `cover`: as shape `apart`, dimensions in `order` put their number first."""

    cover: Box
    apart: list[int]
    order: list[int]


def _grid(boxes: Sequence[Box]) -> _Grid | None:
    """How boxes of one size, in order, lie in what they fill together; None for no grid."""
    sizes, rank = boxes[0].sizes, len(boxes[0].sizes)
    starts = np.array([box.starts for box in boxes]).reshape(len(boxes), rank)
    low = starts.min(axis=0)
    digits = (starts - low) // np.maximum(sizes, 1)
    if ((starts - low) % np.maximum(sizes, 1)).any():
        return None
    counts = digits.max(axis=0) + 1
    if prod(map(int, counts)) != len(boxes):
        return None
    cover = Box(tuple(map(int, low)), tuple(int(c) * s for c, s in zip(counts, sizes, strict=True)))
    dims = [d for d in range(rank) if counts[d] > 1]
    split = _digits(digits, counts, dims)
    if split is None:
        return None
    parts, ordered = split
    apart: list[int] = []
    where: dict[int, list[int]] = {}
    inner: list[int] = []
    for dim in range(rank):
        for count in parts.get(dim, []):
            where.setdefault(dim, []).append(len(apart))
            apart.append(count)
        inner.append(len(apart))
        apart.append(sizes[dim])
    return _Grid(cover, apart, [*(where[dim][place] for dim, place in ordered), *inner])


def _digits(
    digits: NDArray[np.int64], counts: NDArray[np.int64], dims: Sequence[int]
) -> tuple[dict[int, list[int]], list[tuple[int, int]]] | None:
    """The counts that each dimension is read as, and the order in which they number the boxes."""
    found = _numbering({dim: [int(counts[dim])] for dim in dims}, digits, len(digits))
    if found is not None or len(dims) != 1:
        return found
    dim, count = dims[0], int(counts[dims[0]])
    for outer in range(2, count):
        if count % outer == 0:
            found = _numbering({dim: [outer, count // outer]}, digits, len(digits))
            if found is not None:
                return found
    return None


def _numbering(
    parts: dict[int, list[int]], digits: NDArray[np.int64], boxes: int
) -> tuple[dict[int, list[int]], list[tuple[int, int]]] | None:
    columns = {
        (dim, place): digits[:, dim] // prod(sizes[place + 1 :]) % sizes[place]
        for dim, sizes in parts.items()
        for place in range(len(sizes))
    }
    for order in permutations(columns):
        number = np.zeros(boxes, np.int64)
        for key in order:
            number = number * parts[key[0]][key[1]] + columns[key]
        if (number == np.arange(boxes)).all():
            return parts, list(order)
    return None


def nowhere(source: Source, box: Box) -> Placed:
    """The place of sources for one who composes of none."""
    raise AssertionError(f"{source} has no place here")


def interleaved(piece: Piece, dim: int, parts: int, number: int) -> Piece:
    """The piece among as many tensors as are wanted, in the place of this number behind the first
    `parts` elements of a dimension, which is then three."""
    target = piece.view.target
    sizes = apart(target.sizes, dim, parts)
    starts = (*target.starts[:dim], 0, number, *target.starts[dim:])
    ops = (Reshape(target.sizes, sizes), *piece.view.ops)
    return replace(piece, view=replace(piece.view, target=Box(starts, sizes), ops=ops))


def apart(shape: Sequence[int], dim: int, parts: int) -> tuple[int, ...]:
    """A shape with a dimension as samples, microbatches (one) and what a sample has of it."""
    return (*shape[:dim], parts, 1, shape[dim] // parts, *shape[dim + 1 :])


def shifted(piece: Piece, dim: int, by: int) -> Piece:
    """The piece further on along a dimension of what it is a part of."""
    target = piece.view.target
    target = target.along(dim, target.starts[dim] + by, target.sizes[dim])
    return replace(piece, view=replace(piece.view, target=target))


def stacked(piece: Piece, number: int) -> Piece:
    """The piece in a stack of as many tensors as are wanted, in the place of this number."""
    target = piece.view.target
    sizes = (1, *target.sizes)
    ops = (Reshape(target.sizes, sizes), *piece.view.ops)
    view = replace(piece.view, target=Box((number, *target.starts), sizes), ops=ops)
    return replace(piece, view=view)
