"""Loops over layers written again as loops over ranges of them, with pieces for stacks.

`RangeWriter` copies one loop for one range: stacks get the type of a piece, rows are counted from
its first, and the loop ends where the next range begins. `RangeEmission` does so wherever the rows
of a stack go, and lets other ops on stacks run on pieces, as `all_parts.py` does for a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import Channels
from stablehlo_tools.analysis.dataflow import Node, captured
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.layer_loops.cut_loops import (
    ROWS,
    CutLoops,
    Key,
    in_pieces,
    rows_of,
    stacks,
)
from stablehlo_tools.analysis.layer_loops.linked_loops import mark
from stablehlo_tools.analysis.loop_carries import LayerLoop, Rows
from stablehlo_tools.analysis.loops import (
    Counted,
    constant_integer,
    counted,
    known_integer,
    wrap,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import key_of, maker_of, unconstrained
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.transforms.parts.all_parts import AllPartsWriter

_CONSTRAINT = "sdy.sharding_constraint"
_UPDATE = "stablehlo.dynamic_update_slice"
_INCLUSIVE = frozenset({"LE", "GE"})


@dataclass(frozen=True)
class Range:
    """Layers `first` to `end` of a loop, `number` counted in the order of the rows."""

    number: int
    first: int
    end: int

    def iterations(self, loop: LayerLoop) -> tuple[int, int]:
        """The first iteration of the loop that goes over these layers, and the one behind."""
        if loop.reverse:
            return loop.trips - self.end, loop.trips - self.first
        return self.first, self.end


def ranges(loop: LayerLoop, counts: Sequence[int]) -> list[Range]:
    """The ranges of so many layers each, in the order in which the loop goes over them."""
    ascending: list[Range] = []
    first = 0
    for number, count in enumerate(counts):
        ascending.append(Range(number, first, first + count))
        first += count
    return ascending[::-1] if loop.reverse else ascending


class RangeWriter:
    """Writes the loops over ranges in front of a loop over all layers."""

    def __init__(
        self, loop: LayerLoop, values: Mapping[ir.Value, ir.Value], channels: Channels
    ) -> None:
        self._loop = loop
        self._values = values  # what stands for values from outside that its regions use
        self._channels = channels
        counting = counted(loop.op, known_integer)
        assert isinstance(counting, Counted), "a loop over layers counts"
        self._counted = counting

    def counters(self, part: Range, before: Mapping[int, ir.Value]) -> dict[int, ir.Value]:
        """Where counters start; `before` is what the range before, if any, left in them."""
        op, build = self._loop.op, self._builder(self._loop.op)
        begin, _ = part.iterations(self._loop)
        starts: dict[int, ir.Value] = {}
        for carry, step in self._loop.counters.items():
            start = constant_integer(op.operands[carry])
            if not begin:
                starts[carry] = op.operands[carry]
            elif start is None:
                starts[carry] = before[carry]
            else:
                type_ = op.operands[carry].type
                number = wrap(start + begin * step, type_)
                starts[carry] = build.splat(number, [], element_of(op.operands[carry]))
        return starts

    def write(self, part: Range, operands: Sequence[ir.Value]) -> ir.Operation:
        """The loop over a range, which takes a piece of each stack."""
        loop = self._loop
        copy = copy_with(loop.op, self._values, ir.InsertionPoint(loop.op))
        for place, value in enumerate(operands):
            copy.operands[place] = value
        for carry in stacks(loop):
            type_ = operands[carry].type
            copy.results[carry].set_type(type_)
            copy.regions[0].blocks[0].arguments[carry].set_type(type_)
            _retype(copy.regions[1].blocks[0].arguments[carry], type_)
        self._shift(copy, part)
        self._bound(copy, part)
        mark(copy, part.number)
        if part.iterations(loop)[0]:
            for op in _inside(copy):
                self._channels.renew(op)
        return copy

    def _shift(self, copy: ir.Operation, part: Range) -> None:
        """Counts the rows of each stack from the first of its piece."""
        accesses = self._accesses()
        shifted: dict[tuple[ir.Block, ir.Value, int], ir.Value] = {}
        for known, access in zip(_inside(self._loop.op), list(_inside(copy)), strict=True):
            if key_of(known) not in accesses:
                continue
            rows, place = accesses[key_of(known)]
            shift, start = rows.first + rows.span * part.first, access.operands[place]
            key = access.block, start, shift
            if shift and key not in shifted:
                build = self._builder(access)
                offset = build.splat(shift, [], element_of(start))
                shifted[key] = build.same("subtract", start, offset)
            if shift:
                access.operands[place] = shifted[key]

    def _accesses(self) -> dict[Key, tuple[Rows, int]]:
        """The ops that read or write rows, of which stack, and where they say which."""
        accesses: dict[Key, tuple[Rows, int]] = {}
        for kinds, place in ((self._loop.reads, 1), (self._loop.writes, 2)):
            for rows in kinds.values():
                accesses |= {key_of(access.op): (rows, place) for access in rows.accesses}
        return accesses

    def _bound(self, copy: ir.Operation, part: Range) -> None:
        """Ends a range before the last where the next begins."""
        _, end = part.iterations(self._loop)
        if end == self._loop.trips:
            return
        counter = self._counted.counter
        last = end - 1 if counter.direction in _INCLUSIVE else end
        known = maker_of(unconstrained(terminator(self._loop.op.regions[0].blocks[0]).operands[0]))
        compare = maker_of(unconstrained(terminator(copy.regions[0].blocks[0]).operands[0]))
        place = 1 if known.operands[1] == counter.bound else 0
        number = self._counted.starts[0] + last * counter.step
        bound = self._builder(compare).splat(number, [], element_of(counter.bound))
        compare.operands[place] = bound

    def _builder(self, place: ir.Operation) -> Builder:
        return Builder(ir.InsertionPoint(place), self._loop.op.location)


def _retype(value: ir.Value, type_: ir.Type) -> None:
    """Gives a stack in a body, and what updates of its rows make of it, the type of a piece."""
    value.set_type(type_)
    for use in value.uses:
        op = use.owner.operation
        if op.name == _CONSTRAINT or (op.name == _UPDATE and not use.operand_number):
            _retype(op.results[0], type_)


def _inside(op: ir.Operation) -> Iterator[ir.Operation]:
    """The ops in the regions of an op, in the order of the text."""
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                yield view.operation
                yield from _inside(view.operation)


class RangeEmission(AllPartsWriter):
    """Rewrites a block as the analysis of its rows says, with `counts` layers in each range."""

    def __init__(
        self, dims: BatchDims, loops: CutLoops, counts: Sequence[int], channels: Channels
    ) -> None:
        super().__init__(dims, channels, counts)
        self._cut = loops

    def write_control_flow(self, node: Node, point: ir.InsertionPoint) -> None:
        """Writes a loop that is to be cut as loops over ranges, others around pieces."""
        loop = self._cut.find(node)
        if loop is not None:
            self._ranges(loop)
            self._dead.append(loop.op)
        elif self._cut.is_left(node):
            self._take_whole(node.op)
            self._capture_whole(node)
        else:
            super().write_control_flow(node, point)

    def _ranges(self, loop: LayerLoop) -> None:
        """Writes the loops over ranges, and lets what they give stand for what the loop gave."""
        op = loop.op
        outside = {value: self._pieces.whole(value, op) for value in captured(op)}
        writer = RangeWriter(loop, outside, self._channels)
        pieces = {carry: list(self._taken_rows(loop, carry)) for carry in stacks(loop)}
        current = {
            carry: self._pieces.whole(value, op)
            for carry, value in enumerate(op.operands)
            if carry not in pieces
        }
        for part in ranges(loop, self._sizes):
            current |= writer.counters(part, current)
            rows = {carry: each[part.number] for carry, each in pieces.items()}
            operands = {**current, **rows}
            made = writer.write(part, [operands[carry] for carry in range(len(op.operands))])
            for carry in (*loop.counters, *loop.flows):
                current[carry] = made.results[carry]
            for carry in loop.writes:
                pieces[carry][part.number] = made.results[carry]
        for carry, value in current.items():
            op.results[carry].replace_all_uses_with(value)
        for carry, each in pieces.items():
            self._give_rows(loop, carry, each)

    def _taken_rows(self, loop: LayerLoop, carry: int) -> Sequence[ir.Value]:
        """The rows of a stack that each range goes over."""
        value = loop.op.operands[carry]
        if carry in in_pieces(loop):
            return self._pieces.parts_of(value, ROWS, loop.op)
        whole, rows = self._pieces.whole(value, loop.op), rows_of(loop, carry)
        build = Builder(ir.InsertionPoint(loop.op), loop.op.location)
        taken: list[ir.Value] = []
        first = rows.first
        for count in self._sizes:
            taken.append(build.slice_along(whole, 0, first, first + rows.span * count))
            first += rows.span * count
        return taken

    def _give_rows(self, loop: LayerLoop, carry: int, pieces: list[ir.Value]) -> None:
        """What stands for a stack behind the loop."""
        result, value = loop.op.results[carry], loop.op.operands[carry]
        if carry in in_pieces(loop):
            self._pieces.put(result, ROWS, pieces)
            return
        whole, rows = self._pieces.whole(value, loop.op), rows_of(loop, carry)
        if carry not in loop.writes:
            result.replace_all_uses_with(whole)
            return
        build = Builder(ir.InsertionPoint(loop.op), loop.op.location)
        end, size = rows.first + rows.span * loop.trips, shape_of(whole)[0]
        edges = ((0, rows.first, 0), (end, size, len(pieces) + 1))
        for first, last, place in edges:
            if first < last:
                pieces.insert(place, build.slice_along(whole, 0, first, last))
        result.replace_all_uses_with(build.concatenate(pieces, 0))
