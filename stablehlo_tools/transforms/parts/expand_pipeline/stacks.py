"""Spreads stacks of layers over the ranks that run them, and gathers them again.

A stack of rows, [rows, …], becomes [repeats, ranks, layers of a chunk, span, …], divided over the
ranks along dimension 1. With one chunk on each rank, that is a reshape. With more, no sharding of
[rows, …] describes the chunks of a rank. The program may keep a stack divided over the ranks, in
the order of the layers. It is then exchanged chunk by chunk instead of being gathered.

Chunk p runs on rank p mod `ranks`. In a stack of `ranks` equal parts with the layers in order, it
is chunk p mod `repeats` on rank p div `repeats`. Each rank sends `repeats` chunks and receives as
many. They are sent in as many rounds. In each, every rank sends one and receives one: a regular
bipartite graph is a sum of perfect matchings (König 1916). No rank ever holds more than its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.loop_carries import StackRows
from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import dimension_axes, function_sharding
from stablehlo_tools.bindings import ChannelHandle, ir
from stablehlo_tools.dialect.names import SHARDING_CONSTRAINT
from stablehlo_tools.dialect.traits import ELEMENTWISE
from stablehlo_tools.ir.builder import ANY_CHANNEL, Builder, element_of, shape_of
from stablehlo_tools.ir.values import has_uses, maker_of, producer
from stablehlo_tools.ir.walk import FUNCTION, is_inside
from stablehlo_tools.transforms.parts.expand_pipeline.expansion_plan import (
    RANK_DIMENSION,
    LayerChunks,
)
from stablehlo_tools.transforms.parts.expand_pipeline.region import Axis, RankRegion
from stablehlo_tools.transforms.parts.one_part import apart


def is_divided(value: ir.Value, axis: str) -> bool:
    """Returns True if dimension 0 of a value is divided over an axis, as its major axis.

    A constraint or the sharding of an argument of the program may state this: for the value itself,
    or for a value that it is computed from elementwise.
    """
    pending, seen, shape = [value], {value}, shape_of(value)
    while pending:
        each = pending.pop()
        op, stated = producer(each), None
        if op is None:
            argument = ir.BlockArgument(each)
            function = argument.owner.owner.operation
            if function.name == FUNCTION:
                stated = function_sharding(function, "arg_attrs", argument.arg_number)
        elif op.name == SHARDING_CONSTRAINT:
            stated = op.attributes["sharding"]
        if stated is not None:
            dims = dimension_axes(stated)
            if dims and dims[0][0][:1] == (AxisRef(axis),):
                return True
        elif op is not None and op.name in ELEMENTWISE:
            ranked = [one for one in op.operands if isinstance(one.type, ir.RankedTensorType)]
            sources = [one for one in ranked if shape_of(one) == shape and one not in seen]
            seen.update(sources)
            pending += sources
    return False


Round = tuple[int, ...]  # by the rank that runs it, the chunk sent, numbered over all ranks


def exchange(
    build: Builder, axis: Axis, chunks: LayerChunks, value: ir.Value, *, ordered: bool
) -> tuple[ir.Value, list[ir.Operation]]:
    """Rearranges [repeats, ranks, …], as the ranks run it, to [ranks, repeats, …] in the order of
    layers. With `ordered`, `value` has the order of layers, divided along dimension 0, and the
    reverse is done. Returns the result and the permutes."""
    before, after = (0, RANK_DIMENSION) if ordered else (RANK_DIMENSION, 0)
    anchor = build.point.ref_operation
    assert anchor is not None, "stacks are written before a loop"
    # Any channel will do: `finish` numbers the permutes once it knows which are used.
    region = RankRegion(axis, anchor, 0)
    build = region.end
    local = region.bring(value, before)
    shape = shape_of(local)
    del shape[before]
    rows = build.reshape(local, shape)
    # [ranks, rounds, 2]: the number of the chunk that a rank sends, and the place that it fills.
    ranks, repeats = chunks.ranks, chunks.repeats
    turns = rounds(ranks, repeats)
    numbers = np.zeros((ranks, len(turns), 2), dtype=np.int32)
    run, lain = (1, 0) if ordered else (0, 1)
    for turn, sent in enumerate(turns):
        for p in sent:
            numbers[p % ranks, turn, run] = p // ranks
            numbers[p // repeats, turn, lain] = p % repeats
    table = region.bring(region.outside.constant(numbers), 0)
    whole = build.splat(0, shape, element_of(value))
    rank = len(shape)

    def starts_at(turn: int, column: int) -> list[ir.Value]:
        taken = build.slice(table, [0, turn, column], [1, turn + 1, column + 1])
        zeros = [build.i32(0)] * (rank - 1)
        return [build.reshape(taken, []), *zeros]

    permutes: list[ir.Operation] = []
    for turn, sent in enumerate(turns):
        taken = build.dynamic_slice(rows, starts_at(turn, 0), [1, *shape[1:]])
        ways = [(p % ranks, p // repeats) for p in sent]
        if any(source != target for source, target in ways):
            # A chunk that stays is sent by the rank to itself, over no link.
            if ordered:
                ways = sorted((target, source) for source, target in ways)
            pairs = [(group[one], group[other]) for one, other in ways for group in axis.groups]
            taken = build.permute(taken, pairs, 0, ANY_CHANNEL)
            permutes.append(maker_of(taken))
        whole = build.update(whole, taken, starts_at(turn, 1))
    shape.insert(after, 1)
    (result,) = region.close([(build.reshape(whole, shape), after)])
    return result, permutes


@lru_cache
def rounds(ranks: int, repeats: int) -> tuple[Round, ...]:
    """Returns all chunks in `repeats` rounds; rounds in which every chunk stays come first."""
    left: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(ranks)]
    for p in range(ranks * repeats):
        left[p % ranks][p // repeats].append(p)
    turns: list[Round] = []
    for _ in range(repeats):
        stays = all(left[rank][rank] for rank in range(ranks))
        targets = list(range(ranks)) if stays else _matching(left)
        turns.append(tuple(left[rank][target].pop(0) for rank, target in enumerate(targets)))
    return tuple(turns)


def _matching(left: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Returns a different rank for each rank to send to, by augmenting paths (Kuhn 1955)."""
    taken: dict[int, int] = {}

    def augment(rank: int, seen: set[int]) -> bool:
        for target, waiting in enumerate(left[rank]):
            if not waiting or target in seen:
                continue
            seen.add(target)
            if target not in taken or augment(taken[target], seen):
                taken[target] = rank
                return True
        return False

    for rank in range(len(left)):
        matched = augment(rank, set())
        assert matched, "each rank sends as many chunks as it receives"
    return sorted(taken, key=lambda target: taken[target])


# First row, span, batch dimension, and True if the program keeps the rows in the ranks' order.
Form = tuple[int, int, DimTiling | None, bool]


@dataclass
class RankStacks:
    """Puts stacks in the order of the ranks and back. A gathered stack that is spread again reuses
    the spread value.

    `ordered` are the rows, by identity, of stacks that the whole program keeps in the ranks' order.
    """

    axis: Axis
    chunks: LayerChunks
    parts: int
    ordered: frozenset[int] = frozenset()
    _forms: dict[tuple[ir.Value, ir.Block, Form], ir.Value] = field(
        default_factory=dict[tuple[ir.Value, ir.Block, Form], ir.Value]
    )
    _made: list[ir.Value] = field(default_factory=list[ir.Value])
    _permutes: list[ir.Operation] = field(default_factory=list[ir.Operation])

    def spread_stack(
        self, build: Builder, value: ir.Value, rows: StackRows, layout: DimTiling | None
    ) -> ir.Value:
        """Returns [rows, …] as [repeats, ranks, layers, span, …]; the batch dimension becomes
        three."""
        key = value, build.point.block, self._form(rows, layout)
        if key not in self._forms:
            self._forms[key] = self._write_spread(build, value, rows, layout)
        return self._forms[key]

    def shape(self, rows: StackRows, shape: Sequence[int], layout: DimTiling | None) -> list[int]:
        """Returns the shape that a stack of a shape is spread to."""
        chunks = self.chunks
        head = [chunks.repeats, chunks.ranks, chunks.longest, rows.span]
        return [*head, *row_shape(shape, layout, self.parts)]

    def gather_stack(
        self,
        build: Builder,
        value: ir.Value,
        rows: StackRows,
        layout: DimTiling | None,
        before: ir.Value,
    ) -> ir.Value:
        """Returns the reverse of `spread`: [rows, …]. Rows that no iteration writes are those of
        `before`."""
        chunks, span, whole = self.chunks, rows.span, shape_of(before)
        each = value
        if id(rows) in self.ordered:
            each = self._swap_ranks_repeats(build, value)
        elif self._is_exchanged:
            each, permutes = exchange(build, self.axis, chunks, value, ordered=False)
            self._kept(each)
            self._permutes += permutes
        count = chunks.repeats * chunks.ranks * chunks.longest
        each = self._kept(build.reshape(each, [count, span, *whole[1:]]))
        if not chunks.is_even:  # without the padding of short chunks
            firsts = range(0, count, chunks.longest)
            each = _concatenate_rows(
                build,
                [
                    part_of(build, each, first, first + size)
                    for first, size in zip(firsts, chunks.sizes, strict=True)
                ],
            )
        stack = self._kept(build.reshape(each, [chunks.trips * span, *whole[1:]]))
        if chunks.trips * span != whole[0]:
            starts = [build.i32(rows.first)]
            starts += [build.i32(0)] * (len(whole) - 1)
            stack = build.update(before, stack, starts)
            self._kept(stack)
        self._forms[stack, build.point.block, self._form(rows, layout)] = value
        return stack

    def finish(self, channel: int) -> list[ir.Operation]:
        """Erases unused values and gives each permute a channel after `channel`; returns the
        permutes."""
        self._forms.clear()
        # Later values may use earlier ones.
        for value in reversed(self._made):
            op = producer(value)
            if op is None or has_uses(value):
                continue
            self._permutes = [each for each in self._permutes if not is_inside(each, op)]
            op.erase()
        for handle, permute in enumerate(self._permutes, channel + 1):
            channel_handle = ChannelHandle.get(handle, ANY_CHANNEL, permute.context)
            permute.attributes["channel_handle"] = channel_handle
        self._made.clear()
        return self._permutes

    def _write_spread(
        self, build: Builder, value: ir.Value, rows: StackRows, layout: DimTiling | None
    ) -> ir.Value:
        chunks, span = self.chunks, rows.span
        shape = self.shape(rows, shape_of(value), layout)
        rest = shape_of(value)[1:]
        if id(rows) in self.ordered:
            head = [chunks.ranks, chunks.repeats]
            return self._swap_ranks_repeats(
                build, build.reshape(value, [*head, *shape[len(head) :]])
            )
        if (
            self._is_exchanged
            and chunks.trips * span == shape_of(value)[0]
            and is_divided(value, self.axis.name)
        ):
            head = [chunks.ranks, chunks.repeats, chunks.longest, span]
            each = build.reshape(value, [*head, *rest])
            each, permutes = exchange(build, self.axis, chunks, each, ordered=True)
            self._permutes += permutes
            return each
        window = part_of(build, value, rows.first, rows.first + span * chunks.trips)
        each = build.reshape(window, [chunks.trips, span, *rest])
        if not chunks.is_even:
            each = self._pad_chunks(build, each)
        return build.reshape(each, shape)

    def _swap_ranks_repeats(self, build: Builder, value: ir.Value) -> ir.Value:
        """Returns [ranks, repeats, …] as [repeats, ranks, …], or the reverse: no data leaves a
        device."""
        rank = len(shape_of(value))
        return self._kept(build.transpose(value, [1, 0, *range(2, rank)]))

    @property
    def _is_exchanged(self) -> bool:
        """True if the chunks are on other ranks than equal parts of the layers in order would be.

        Chunks of different lengths are not such parts: their stacks are whole on every device
        before and after the loop.
        """
        return self.chunks.repeats > 1 and self.chunks.is_even

    def _kept(self, value: ir.Value) -> ir.Value:
        self._made.append(value)
        return value

    def _form(self, rows: StackRows, layout: DimTiling | None) -> Form:
        return rows.first, rows.span, layout, id(rows) in self.ordered

    def _pad_chunks(self, build: Builder, each: ir.Value) -> ir.Value:
        chunks, shape = self.chunks, shape_of(each)
        zeros = build.splat(0, [1, *shape[1:]], element_of(each))
        pieces: list[ir.Value] = []
        for first, size in zip(chunks.firsts, chunks.sizes, strict=True):
            pieces.append(part_of(build, each, first, first + size))
            # One row is enough: the lengths of chunks differ by at most one.
            if size < chunks.longest:
                pieces.append(zeros)
        return _concatenate_rows(build, pieces)


def row_shape(shape: Sequence[int], layout: DimTiling | None, parts: int) -> list[int]:
    """Returns the shape of a row of a stack, with its batch dimension split in three."""
    if layout is None:
        return list(shape[1:])
    return apart(shape, layout, parts)[1:]


def part_of(build: Builder, value: ir.Value, start: int, limit: int) -> ir.Value:
    """Returns rows `start` to `limit` of a tensor."""
    shape = shape_of(value)
    if (start, limit) == (0, shape[0]):
        return value
    return build.slice_along(value, 0, start, limit)


def _concatenate_rows(build: Builder, pieces: Sequence[ir.Value]) -> ir.Value:
    return pieces[0] if len(pieces) == 1 else build.concatenate(pieces, 0)
