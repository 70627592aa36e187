"""Which layers lie on which rank, and stacks of layers in that order.

The layers are cut into `ranks * repeats` chunks of consecutive ones; chunk p lies on rank p mod
`ranks`. A stack of rows, [rows, …], becomes [repeats, ranks, layers of a chunk, span, …], to be
divided over the ranks along dimension 1. Where the layers do not divide evenly, the first chunks
have one more, and the others end in a row of zeros that is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from stablehlo_tools.analysis.batch_dims.layout import Layout
from stablehlo_tools.analysis.layer_loops.reading import Rows
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.building import element_of, shape_of
from stablehlo_tools.transforms.expanding.narrowing import apart
from stablehlo_tools.transforms.splitting.pieces import Place

RANK_DIMENSION = 1
Form = tuple[int, int, Layout | None]  # the rows, and how the batch lies in them


@dataclass(frozen=True)
class Chunks:
    """How `trips` iterations of a layer loop lie on the ranks."""

    ranks: int
    repeats: int
    trips: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The iterations of each chunk."""
        count = self.ranks * self.repeats
        return tuple(self.trips // count + (p < self.trips % count) for p in range(count))

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first iteration of each chunk."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @property
    def longest(self) -> int:
        """The iterations of the largest chunk."""
        return self.sizes[0]

    @property
    def is_even(self) -> bool:
        """Whether all chunks have as many."""
        return self.sizes[0] == self.sizes[-1]

    def order(self) -> list[int]:
        """The iterations in the order in which the ranks hold them: rank 0's first.

        For uneven chunks, -1 stands for a row that fills a chunk up.
        """
        rows: list[int] = []
        for rank in range(self.ranks):
            for chunk in range(self.repeats):
                p = chunk * self.ranks + rank
                taken = range(self.firsts[p], self.firsts[p] + self.sizes[p])
                rows += [*taken, *[-1] * (self.longest - self.sizes[p])]
        return rows


@dataclass
class Stacks:
    """Stacks put in the order of the ranks and back; what comes back and is put in that order again
    stays as it was."""

    chunks: Chunks
    parts: int
    _forms: dict[tuple[ir.Value, Form], ir.Value] = field(
        default_factory=dict[tuple[ir.Value, Form], ir.Value]
    )

    def spread(
        self, place: Place, value: ir.Value, rows: Rows, layout: Layout | None
    ) -> ir.Value:
        """[rows, …] as [repeats, ranks, layers, span, …], the batch of the rest in three."""
        form = self._form(rows, layout)
        if (value, form) in self._forms:
            return self._forms[value, form]
        chunks, span = self.chunks, rows.span
        rest = shape_of(value)[1:]
        window = part_of(place, value, rows.first, rows.first + span * chunks.trips)
        each = place.reshape(window, [chunks.trips, span, *rest])
        if not chunks.is_even:
            each = self._padded(place, each)
        spread = place.reshape(each, self.shape(rows, shape_of(value), layout))
        self._forms[value, form] = spread
        return spread

    def shape(self, rows: Rows, shape: Sequence[int], layout: Layout | None) -> list[int]:
        """The shape that a stack of a shape is spread to."""
        chunks = self.chunks
        head = [chunks.repeats, chunks.ranks, chunks.longest, rows.span]
        return [*head, *row_shape(shape, layout, self.parts)]

    def gathered(
        self, place: Place, value: ir.Value, rows: Rows, layout: Layout | None, before: ir.Value
    ) -> ir.Value:
        """The reverse: [rows, …] from what the ranks hold, rows that no iteration writes from
        `before`."""
        chunks, span, whole = self.chunks, rows.span, shape_of(before)
        count = chunks.repeats * chunks.ranks * chunks.longest
        each = place.reshape(value, [count, span, *whole[1:]])
        if not chunks.is_even:
            each = self._unpadded(place, each)
        stack = place.reshape(each, [chunks.trips * span, *whole[1:]])
        if chunks.trips * span != whole[0]:
            starts = [place.splat(rows.first, [], _i32(place))]
            starts += [place.splat(0, [], _i32(place))] * (len(whole) - 1)
            stack = place.op("dynamic_update_slice", [before, stack, *starts], before.type)
        self._forms[stack, self._form(rows, layout)] = value
        return stack

    def _form(self, rows: Rows, layout: Layout | None) -> Form:
        return rows.first, rows.span, layout

    def _padded(self, place: Place, each: ir.Value) -> ir.Value:
        chunks, shape = self.chunks, shape_of(each)
        zeros = place.splat(0, [1, *shape[1:]], element_of(each))
        pieces: list[ir.Value] = []
        for first, size in zip(chunks.firsts, chunks.sizes, strict=True):
            pieces.append(part_of(place, each, first, first + size))
            if size < chunks.longest:
                pieces.append(zeros)
        rows = chunks.longest * len(chunks.sizes)
        return _joined(place, pieces, [rows, *shape[1:]])

    def _unpadded(self, place: Place, each: ir.Value) -> ir.Value:
        chunks, shape = self.chunks, shape_of(each)
        pieces = [
            part_of(place, each, p * chunks.longest, p * chunks.longest + size)
            for p, size in enumerate(chunks.sizes)
        ]
        return _joined(place, pieces, [chunks.trips, *shape[1:]])


def row_shape(shape: Sequence[int], layout: Layout | None, parts: int) -> list[int]:
    """The shape of a row of a stack, its batch dimension in three; the layout is the stack's."""
    if layout is None:
        return list(shape[1:])
    return apart(shape, layout, parts)[1:]


def part_of(place: Place, value: ir.Value, start: int, limit: int) -> ir.Value:
    """Rows of a tensor."""
    shape = shape_of(value)
    if (start, limit) == (0, shape[0]):
        return value
    return place.op(
        "slice",
        [value],
        place.tensor([limit - start, *shape[1:]], element_of(value)),
        start_indices=place.integers([start] + [0] * (len(shape) - 1)),
        limit_indices=place.integers([limit, *shape[1:]]),
        strides=place.integers([1] * len(shape)),
    )


def _joined(place: Place, pieces: Sequence[ir.Value], shape: Sequence[int]) -> ir.Value:
    if len(pieces) == 1:
        return pieces[0]
    kind = place.tensor(shape, element_of(pieces[0]))
    return place.op("concatenate", pieces, kind, dimension=place.integer(0))


def _i32(place: Place) -> ir.Type:
    return ir.IntegerType.get_signless(32, place.context)
