"""Stacks of layers in the order of the ranks, and back.

A stack of rows, [rows, …], becomes [repeats, ranks, layers of a chunk, span, …], divided over the
ranks along dimension 1. With one chunk on each rank that is a reshape. With more, no sharding of
[rows, …] says where the chunks lie: a stack that the program keeps divided over the ranks, in the
order of the layers, is exchanged chunk by chunk instead of being gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.loop_carries import Rows
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import has_uses, producer
from stablehlo_tools.transforms.parts.expand_pipeline.chunks import Chunks
from stablehlo_tools.transforms.parts.expand_pipeline.divided import is_divided
from stablehlo_tools.transforms.parts.expand_pipeline.region import Axis, channel_handle
from stablehlo_tools.transforms.parts.expand_pipeline.resharding import (
    to_layer_order,
    to_rank_order,
)
from stablehlo_tools.transforms.parts.one_part import apart

# The rows, how the batch lies in them, and whether the program keeps them in the ranks' order.
Form = tuple[int, int, DimTiling | None, bool]


@dataclass
class Stacks:
    """Stacks put in the order of the ranks and back; what comes back and is put in that order again
    stays as it was.

    `ordered` are the rows, by identity, of stacks that the whole program keeps in that order.
    """

    axis: Axis
    chunks: Chunks
    parts: int
    ordered: frozenset[int] = frozenset()
    _forms: dict[tuple[ir.Value, ir.Block, Form], ir.Value] = field(
        default_factory=dict[tuple[ir.Value, ir.Block, Form], ir.Value]
    )
    _made: list[ir.Value] = field(default_factory=list[ir.Value])
    _permutes: list[ir.Operation] = field(default_factory=list[ir.Operation])

    def spread(
        self, build: Builder, value: ir.Value, rows: Rows, layout: DimTiling | None
    ) -> ir.Value:
        """[rows, …] as [repeats, ranks, layers, span, …], the batch of the rest in three."""
        key = value, build.point.block, self._form(rows, layout)
        if key not in self._forms:
            self._forms[key] = self._spread(build, value, rows, layout)
        return self._forms[key]

    def shape(self, rows: Rows, shape: Sequence[int], layout: DimTiling | None) -> list[int]:
        """The shape that a stack of a shape is spread to."""
        chunks = self.chunks
        head = [chunks.repeats, chunks.ranks, chunks.longest, rows.span]
        return [*head, *row_shape(shape, layout, self.parts)]

    def gathered(
        self,
        build: Builder,
        value: ir.Value,
        rows: Rows,
        layout: DimTiling | None,
        before: ir.Value,
    ) -> ir.Value:
        """The reverse: [rows, …] from what the ranks hold, rows that no iteration writes from
        `before`."""
        chunks, span, whole = self.chunks, rows.span, shape_of(before)
        each = value
        if id(rows) in self.ordered:
            each = self._turned(build, value)
        elif self._is_exchanged:
            done = to_layer_order(build, self.axis, chunks, value)
            each = self._kept(done.value)
            self._permutes += done.permutes
        count = chunks.repeats * chunks.ranks * chunks.longest
        each = self._kept(build.reshape(each, [count, span, *whole[1:]]))
        if not chunks.is_even:
            each = self._unpadded(build, each)
        stack = self._kept(build.reshape(each, [chunks.trips * span, *whole[1:]]))
        if chunks.trips * span != whole[0]:
            starts = [build.i32(rows.first)]
            starts += [build.i32(0)] * (len(whole) - 1)
            stack = build.update(before, stack, starts)
            self._kept(stack)
        self._forms[stack, build.point.block, self._form(rows, layout)] = value
        return stack

    def finish(self, channel: int) -> list[ir.Operation]:
        """Drops what nobody came to use, and gives each permute a channel behind `channel`; returns
        the permutes."""
        self._forms.clear()
        for value in reversed(self._made):
            op = producer(value)
            if op is None or has_uses(value):
                continue
            self._permutes = [each for each in self._permutes if not _stands_in(each, op)]
            op.erase()
        for handle, permute in enumerate(self._permutes, channel + 1):
            permute.attributes["channel_handle"] = channel_handle(handle, permute.context)
        self._made.clear()
        return self._permutes

    def _spread(
        self, build: Builder, value: ir.Value, rows: Rows, layout: DimTiling | None
    ) -> ir.Value:
        chunks, span = self.chunks, rows.span
        shape = self.shape(rows, shape_of(value), layout)
        rest = shape_of(value)[1:]
        if id(rows) in self.ordered:
            head = [chunks.ranks, chunks.repeats]
            return self._turned(build, build.reshape(value, [*head, *shape[len(head) :]]))
        if (
            self._is_exchanged
            and chunks.trips * span == shape_of(value)[0]
            and is_divided(value, self.axis.name)
        ):
            head = [chunks.ranks, chunks.repeats, chunks.longest, span]
            done = to_rank_order(build, self.axis, chunks, build.reshape(value, [*head, *rest]))
            self._permutes += done.permutes
            return done.value
        window = part_of(build, value, rows.first, rows.first + span * chunks.trips)
        each = build.reshape(window, [chunks.trips, span, *rest])
        if not chunks.is_even:
            each = self._padded(build, each)
        return build.reshape(each, shape)

    def _turned(self, build: Builder, value: ir.Value) -> ir.Value:
        """[ranks, repeats, …] as [repeats, ranks, …], or the reverse: nothing moves on a device."""
        rank = len(shape_of(value))
        return self._kept(build.transpose(value, [1, 0, *range(2, rank)]))

    @property
    def _is_exchanged(self) -> bool:
        """Whether the chunks lie on other ranks than the layers in order would.

        Chunks of different lengths cut layers in order in no equal parts: their stacks are whole
        on every device before and after the loop.
        """
        return self.chunks.repeats > 1 and self.chunks.is_even

    def _kept(self, value: ir.Value) -> ir.Value:
        self._made.append(value)
        return value

    def _form(self, rows: Rows, layout: DimTiling | None) -> Form:
        return rows.first, rows.span, layout, id(rows) in self.ordered

    def _padded(self, build: Builder, each: ir.Value) -> ir.Value:
        chunks, shape = self.chunks, shape_of(each)
        zeros = build.splat(0, [1, *shape[1:]], element_of(each))
        pieces: list[ir.Value] = []
        for first, size in zip(chunks.firsts, chunks.sizes, strict=True):
            pieces.append(part_of(build, each, first, first + size))
            if size < chunks.longest:
                pieces.append(zeros)
        return _joined(build, pieces)

    def _unpadded(self, build: Builder, each: ir.Value) -> ir.Value:
        chunks = self.chunks
        pieces = [
            part_of(build, each, p * chunks.longest, p * chunks.longest + size)
            for p, size in enumerate(chunks.sizes)
        ]
        return _joined(build, pieces)


def _stands_in(op: ir.Operation, computation: ir.Operation) -> bool:
    return op.parent is not None and op.parent.operation == computation


def row_shape(shape: Sequence[int], layout: DimTiling | None, parts: int) -> list[int]:
    """The shape of a row of a stack, its batch dimension in three; the layout is the stack's."""
    if layout is None:
        return list(shape[1:])
    return apart(shape, layout, parts)[1:]


def part_of(build: Builder, value: ir.Value, start: int, limit: int) -> ir.Value:
    """Rows of a tensor."""
    shape = shape_of(value)
    if (start, limit) == (0, shape[0]):
        return value
    return build.slice_along(value, 0, start, limit)


def _joined(build: Builder, pieces: Sequence[ir.Value]) -> ir.Value:
    return pieces[0] if len(pieces) == 1 else build.concatenate(pieces, 0)
