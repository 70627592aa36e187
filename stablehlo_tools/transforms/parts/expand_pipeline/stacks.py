"""Stacks of layers spread over the ranks that run them, and back.

A stack of rows, [rows, …], becomes [repeats, ranks, layers of a chunk, span, …], divided over the
ranks along dimension 1. With one chunk on each rank that is a reshape. With more, no sharding of
[rows, …] says where the chunks lie: a stack that the program keeps divided over the ranks, in the
order of the layers, is exchanged chunk by chunk instead of being gathered.

Chunk p runs on rank p mod `ranks`; where layers lie in order, in `ranks` equal parts, it is number
p mod `repeats` on rank p div `repeats`. From each rank `repeats` chunks go out and as many come in,
so that they go in as many rounds, in each of which every rank sends one and receives one: a regular
bipartite graph is a sum of perfect matchings (König 1916). No rank ever holds more than its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.loop_carries import Rows
from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import dimension_axes, function_sharding
from stablehlo_tools.bindings import ChannelHandle, ir
from stablehlo_tools.dialect.names import SHARDING_CONSTRAINT
from stablehlo_tools.dialect.traits import ELEMENTWISE
from stablehlo_tools.ir.builder import ANY_CHANNEL, Builder, element_of, shape_of
from stablehlo_tools.ir.values import has_uses, maker_of, producer
from stablehlo_tools.ir.walk import FUNCTION
from stablehlo_tools.transforms.parts.expand_pipeline.expansion_plan import RANK_DIMENSION, Chunks
from stablehlo_tools.transforms.parts.expand_pipeline.region import Axis, Region
from stablehlo_tools.transforms.parts.one_part import apart


def is_divided(value: ir.Value, axis: str) -> bool:
    """Whether dimension 0 of a value is divided over an axis, first of all.

    So it is where a constraint says so, or the sharding of an argument of the program, of the value
    itself or of what it is computed from element by element.
    """
    pending, seen = [value], {value}
    while pending:
        each = pending.pop()
        stated = _stated(each)
        if stated is not None:
            if divides(stated, axis):
                return True
            continue
        op = producer(each)
        if op is None or op.name not in ELEMENTWISE:
            continue
        sources = [one for one in op.operands if _same_shape(one, value) and one not in seen]
        seen.update(sources)
        pending += sources
    return False


def divides(sharding: ir.Attribute, axis: str) -> bool:
    """Whether a sharding divides dimension 0 over all of an axis, and only then over others."""
    dims = dimension_axes(sharding)
    return bool(dims) and dims[0][0][:1] == (AxisRef(axis),)


def _stated(value: ir.Value) -> ir.Attribute | None:
    op = producer(value)
    if op is not None:
        return op.attributes["sharding"] if op.name == SHARDING_CONSTRAINT else None
    argument = ir.BlockArgument(value)
    parent = argument.owner.owner.operation
    if parent.name != FUNCTION:
        return None
    return function_sharding(parent, "arg_attrs", argument.arg_number)


def _same_shape(one: ir.Value, other: ir.Value) -> bool:
    types = one.type, other.type
    if not all(isinstance(type_, ir.RankedTensorType) for type_ in types):
        return False
    shapes = [ir.RankedTensorType(type_).shape for type_ in types]
    return shapes[0] == shapes[1]


Round = tuple[int, ...]  # by the rank that runs it, the chunk that goes, counted over all ranks


class Exchanged(NamedTuple):
    """A stack in the other order, and the permutes that bring it there."""

    value: ir.Value
    permutes: tuple[ir.Operation, ...]


def to_layer_order(build: Builder, axis: Axis, chunks: Chunks, value: ir.Value) -> Exchanged:
    """[repeats, ranks, …] as the ranks run it becomes [ranks, repeats, …], layers in order."""
    return _Exchange(build, axis, chunks).write(value, RANK_DIMENSION, 0)


def to_rank_order(build: Builder, axis: Axis, chunks: Chunks, value: ir.Value) -> Exchanged:
    """The reverse: [ranks, repeats, …] in the order of layers, divided along dimension 0."""
    return _Exchange(build, axis, chunks).write(value, 0, RANK_DIMENSION)


class _Exchange:
    def __init__(self, build: Builder, axis: Axis, chunks: Chunks) -> None:
        self._axis = axis
        self._chunks = chunks
        anchor = build.point.ref_operation
        assert anchor is not None, "stacks are made in front of a loop"
        self._region = Region(axis, anchor, 0)

    def write(self, value: ir.Value, before: int, after: int) -> Exchanged:
        region, build = self._region, self._region.end
        local = region.bring(value, before)
        shape = shape_of(local)
        del shape[before]
        rows = build.reshape(local, shape)
        table = region.bring(self._table(ordered=before == 0), 0)
        whole = build.splat(0, shape, element_of(value))
        permutes: list[ir.Operation] = []
        for turn, sent in enumerate(rounds(self._chunks.ranks, self._chunks.repeats)):
            taken = build.dynamic_slice(rows, self._at(table, turn, 0, rows), [1, *shape[1:]])
            if any(p % self._chunks.ranks != p // self._chunks.repeats for p in sent):
                taken = self._permute(build, taken, sent, ordered=before == 0)
                permutes.append(maker_of(taken))
            starts = self._at(table, turn, 1, rows)
            whole = build.update(whole, taken, starts)
        shape.insert(after, 1)
        (result,) = region.close([(build.reshape(whole, shape), after)])
        return Exchanged(result, tuple(permutes))

    def _permute(self, build: Builder, value: ir.Value, sent: Round, *, ordered: bool) -> ir.Value:
        """A chunk that stays is sent by the rank to itself, which takes no link."""
        ways = [(p % self._chunks.ranks, p // self._chunks.repeats) for p in sent]
        if ordered:
            ways = sorted((target, source) for source, target in ways)
        pairs = [(group[one], group[other]) for one, other in ways for group in self._axis.groups]
        return build.permute(value, pairs, 0, ANY_CHANNEL)

    def _table(self, *, ordered: bool) -> ir.Value:
        """[ranks, rounds, 2]: which of its chunks a rank sends, and which place it fills."""
        ranks, repeats = self._chunks.ranks, self._chunks.repeats
        turns = rounds(ranks, repeats)
        table = np.zeros((ranks, len(turns), 2), dtype=np.int32)
        run, lain = (1, 0) if ordered else (0, 1)
        for turn, sent in enumerate(turns):
            for p in sent:
                table[p % ranks, turn, run] = p // ranks
                table[p // repeats, turn, lain] = p % repeats
        return self._region.outside.constant(table)

    def _at(self, table: ir.Value, turn: int, column: int, rows: ir.Value) -> list[ir.Value]:
        build = self._region.end
        taken = build.slice(table, [0, turn, column], [1, turn + 1, column + 1])
        zeros = [build.i32(0)] * (len(shape_of(rows)) - 1)
        return [build.reshape(taken, []), *zeros]


@lru_cache
def rounds(ranks: int, repeats: int) -> tuple[Round, ...]:
    """All chunks in `repeats` rounds; those in which every chunk stays come first."""
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
    """For each rank another one to send to, all different, by augmenting paths (Kuhn 1955)."""
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
        assert matched, "as many go to a rank as from it"
    return sorted(taken, key=lambda target: taken[target])


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
            channel_handle = ChannelHandle.get(handle, ANY_CHANNEL, permute.context)
            permute.attributes["channel_handle"] = channel_handle
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
