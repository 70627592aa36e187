"""Recognises a loop over layers, by what its body does with each carry.

A `while` that counts is such a loop if it takes slices of stacked weights, one row, or a fixed
number of rows, an iteration, in order or in reverse. Every other carry is a counter, a constant, a
stacked result that each iteration writes its rows of, or a flow: what iterations hand on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_values import LoopIndices
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.trip_counts import counted, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import is_float, producer, unconstrained
from stablehlo_tools.ir.walk import is_inside

_SLICE = "stablehlo.dynamic_slice"
_UPDATE = "stablehlo.dynamic_update_slice"
_CONSTRAINT = "sdy.sharding_constraint"
_ROW_RANK = 1  # a stack of rank 1 has scalars for rows: no weights, but a rate a layer


@dataclass(frozen=True)
class Access:
    """A slice or an update of `count` rows: from row `offset` of those of the iteration."""

    op: ir.Operation
    offset: int
    count: int = 1


@dataclass(frozen=True)
class Rows:
    """Rows `first` to `first + span * trips` of an array, `span` of them an iteration.

    `carry` is the position of the loop's operands that the array is.
    """

    carry: int
    first: int
    span: int
    accesses: tuple[Access, ...]


@dataclass(frozen=True)
class LayerLoop:
    """A `while` that runs `trips` times, through its stacks in order, or in reverse.

    `counters` gives what each iteration adds to a carry. `reads` and `writes` are stacks, at most
    one of each kind for a carry; a carry with both is read, a row at a time, before it is written.
    """

    op: ir.Operation
    trips: int
    reverse: bool
    counters: dict[int, int]
    constants: frozenset[int]
    reads: dict[int, Rows]
    writes: dict[int, Rows]
    flows: tuple[int, ...]

    @property
    def weights(self) -> tuple[int, ...]:
        """The stacks that it reads whose rows may be weights: vectors of floats or matrices of
        anything, for weights may be quantised."""
        kinds = {carry: self.op.operands[carry].type for carry in self.reads}
        return tuple(
            carry
            for carry, kind in kinds.items()
            if ir.RankedTensorType(kind).rank > (_ROW_RANK if is_float(kind) else _ROW_RANK + 1)
        )

    @property
    def block(self) -> ir.Block:
        """The block of an iteration."""
        return self.op.regions[1].blocks[0]


def layer_loops(block: ir.Block, effects: Effects) -> list[LayerLoop]:
    """The layer loops of a block and of loops in it, in the order of the text: an outer one before
    those in it.

    A loop around a layer loop whose weights stay the same for it is none: it goes over batches.
    """
    found = list(_candidates(block, effects))
    return [outer for outer in found if not any(_keeps_weights(outer, loop) for loop in found)]


def _keeps_weights(outer: LayerLoop, inner: LayerLoop) -> bool:
    """Whether all weights of a loop come from outside of another one that it stands in."""
    if inner is outer or not is_inside(inner.op, outer.op):
        return False
    for carry in inner.weights:
        value = unconstrained(inner.op.operands[carry])
        maker = producer(value)
        if maker is not None and is_inside(maker, outer.op):
            return False
        is_carried = maker is None and value in list(outer.block.arguments)
        if is_carried and ir.BlockArgument(value).arg_number not in outer.constants:
            return False
    return True


def _candidates(block: ir.Block, effects: Effects) -> Iterator[LayerLoop]:
    for view in block.operations:
        op = view.operation
        found = read_layer_loop(op, effects) if op.name == "stablehlo.while" else None
        if found is not None:
            yield found
        for region in op.regions:
            for inner in region.blocks:
                yield from _candidates(inner, effects)


def read_layer_loop(
    loop: ir.Operation, effects: Effects, *, weights: bool = True
) -> LayerLoop | None:
    """The loop as a loop over layers; None where it takes no slices of stacked weights, or, if
    layers may share their `weights`, neither reads nor writes rows."""
    found = counted(loop, known_integer)
    if isinstance(found, str) or len(set(found.trips)) != 1 or found.trips[0] < 2:
        return None
    reader = _Reader(loop, effects, found.trips[0])
    layers = reader.layer_loop()
    return layers if layers is not None and (layers.weights or not weights) else None


def _covers(rows: Rows) -> bool:
    """Whether updates take every row once."""
    taken = [r for each in rows.accesses for r in range(each.offset, each.offset + each.count)]
    return sorted(taken) == list(range(rows.span))


class _Reader:
    def __init__(self, loop: ir.Operation, effects: Effects, trips: int) -> None:
        self._loop = loop
        self._body = LoopBody(loop, effects)
        self._trips = trips
        self._indices = LoopIndices(self._body, trips, known_integer)
        self._slopes: dict[tuple[int, bool], int] = {}  # of reads, and of writes, by carry

    def layer_loop(self) -> LayerLoop | None:
        body = self._body
        reads: dict[int, Rows] = {}
        writes: dict[int, Rows] = {}
        for carry in range(len(body.arguments)):
            if carry in body.steps:
                continue
            if carry in body.invariant:
                rows = self._read(carry, self._users(body.arguments[carry]))
                if rows is not None:
                    reads[carry] = rows
                continue
            self._written(carry, reads, writes)
        reverse = self._direction(reads, writes)
        if reverse is None:
            return None
        known = {*body.steps, *body.invariant, *writes}
        return LayerLoop(
            self._loop,
            self._trips,
            reverse,
            dict(body.steps),
            frozenset(body.invariant - reads.keys()),
            reads,
            writes,
            tuple(c for c in range(len(body.arguments)) if c not in known),
        )

    def _direction(self, reads: dict[int, Rows], writes: dict[int, Rows]) -> bool | None:
        """Whether the stacks are gone through from the end; those that are read the other way are
        left out of `reads`. None where two are written in opposite directions, or there is none."""
        written = {self._slopes[carry, True] < 0 for carry in writes}
        if len(written) > 1 or not (reads or written):
            return None
        reverse = written.pop() if written else self._slopes[next(iter(reads)), False] < 0
        for carry in list(reads):
            if (self._slopes[carry, False] < 0) != reverse:
                if carry in writes:
                    return None
                del reads[carry]
        return reverse

    def _users(self, value: ir.Value) -> list[tuple[ir.Operation, ir.Value]]:
        """The ops that read a value, or what a constraint makes of it; and what they read."""
        found: list[tuple[ir.Operation, ir.Value]] = []
        for use in value.uses:
            op = use.owner.operation
            if op.name == _CONSTRAINT:
                found += self._users(op.results[0])
            else:
                found.append((op, value))
        return found

    def _read(self, carry: int, users: list[tuple[ir.Operation, ir.Value]]) -> Rows | None:
        """The rows that slices take of a carry, if nothing else uses it."""
        end = self._body.ends[carry]
        slices: list[ir.Operation] = []
        for op, value in users:
            if op.name == "stablehlo.return" and value == end:
                continue
            if op.name != _SLICE or op.operands[0] != value:
                return None
            slices.append(op)
        return self._rows(carry, slices, 1)

    def _written(self, carry: int, reads: dict[int, Rows], writes: dict[int, Rows]) -> None:
        """Notes a carry whose every row is updated once, after it was read if it is."""
        argument, value = self._body.arguments[carry], self._body.ends[carry]
        updates: list[ir.Operation] = []
        while True:
            op = producer(value)
            if op is not None and op.name == _CONSTRAINT:
                value = op.operands[0]
                continue
            if op is None or op.name != _UPDATE:
                break
            updates.append(op)
            value = op.operands[0]
        if value != argument or not updates:
            return
        if any(len(list(op.results[0].uses)) != 1 for op in updates):
            return
        rows = self._rows(carry, updates[::-1], 2)
        if rows is None or not _covers(rows):
            return
        others = [(op, read) for op, read in self._users(argument) if op not in updates]
        if others:
            taken = self._read(carry, others)
            if taken is None or (taken.first, taken.span) != (rows.first, rows.span):
                return
            reads[carry] = taken
        writes[carry] = rows

    def _rows(self, carry: int, ops: list[ir.Operation], before_starts: int) -> Rows | None:
        """What rows ops move over, if they do so by a constant step and take all of each."""
        found = [self._starts(op, before_starts) for op in ops]
        starts = [row for row in found if row is not None]
        if not starts or len(starts) < len(ops):
            return None
        slopes = {row[1] - row[0] for row in starts}
        if len(slopes) != 1 or 0 in slopes:
            return None
        slope = slopes.pop()
        lows = [min(row[0], row[-1]) for row in starts]
        first, span = min(lows), abs(slope)
        if max(lows) - first >= span:
            return None
        size = shape_of(ops[0].operands[0])[0]
        if first < 0 or first + span * self._trips > size:
            first = size - span * self._trips  # a window that the last offsets do not fill
            if first < 0 or any(not 0 <= low - first < span for low in lows):
                return None
        self._slopes[carry, before_starts > 1] = slope
        counts = [self._part(op, before_starts)[0] for op in ops]
        accesses = [
            Access(op, low - first, count) for op, low, count in zip(ops, lows, counts, strict=True)
        ]
        if any(access.offset + access.count > span for access in accesses):
            return None
        return Rows(carry, first, span, tuple(accesses))

    def _starts(self, op: ir.Operation, before_starts: int) -> list[int] | None:
        """The row that an op begins at in each iteration, if it moves by a constant step."""
        whole, part = shape_of(op.operands[0]), self._part(op, before_starts)
        starts = list(op.operands)[before_starts:]
        if not whole or part[1:] != whole[1:]:
            return None
        row = self._indices.of(starts[0])
        if row is None or any(not 0 <= place < whole[0] for place in row):
            return None
        step = row[1] - row[0]
        steady = all(b - a == step for a, b in pairwise(row))
        return row if steady else None

    def _part(self, op: ir.Operation, before_starts: int) -> list[int]:
        return shape_of(op.results[0] if before_starts == 1 else op.operands[1])
