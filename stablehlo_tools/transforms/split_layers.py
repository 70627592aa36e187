"""Cuts loops over layers into consecutive loops over ranges of them.

A stage of a pipeline has some of the layers, and a `lax.scan` over layers is one loop over all of
them. This pass writes a loop for each range, and keeps all values that are stacked by layer in
pieces: weights, residuals, gradients and their accumulators, the state of an optimizer.

    %y, %kept = stablehlo.while(%h = %x, %stack = %w)          // 8 layers: h' = f(h, w[i])
    %next = stablehlo.subtract %w, %gradient                   // of tensor<8x64x64xf32>
  ==>                                                          // counts=3,5
    %w0 = stablehlo.slice %w [0:3, 0:64, 0:64]
    %w1 = stablehlo.slice %w [3:8, 0:64, 0:64]
    %y0, %kept0 = stablehlo.while(%h = %x, %stack = %w0)       // stablehlo_tools.range = 0
    %y, %kept1 = stablehlo.while(%h = %y0, %stack = %w1)       // stablehlo_tools.range = 1
    %next0 = stablehlo.subtract %w0, %gradient0
    %next1 = stablehlo.subtract %w1, %gradient1
    %next = stablehlo.concatenate %next0, %next1, dim = 0

Ranges are in the order of the rows: a loop that reads its stacks in reverse, as backwards do, has
the loop over the last range first. Counters start from their values in the loop over all layers.
Loops around, as over microbatches, carry the pieces.

Preconditions:
  P1  `counts` are at least 1 and add up to the trips of a loop over layers that has not been cut.
  P2  `loop`, if it is given, is the number of such a loop, from 0, in the order of the text.
  P3  A loop to be cut is in `main`, in one of its manual computations, or in a `while`, `if` or
      `case` of these.

Guarantees: the signature stays. All values are bitwise as before if the backend computes a row the
same way for any number of rows, except sums over layers: they are sums of the ranges' sums.

All loops over that many layers are cut in the same way, because the backward belongs to the
forward. With `loop`, only the loop and those that share stacks with it are cut. A program with
several stacks of different height needs a run for each. A loop whose layers share all their weights
is cut if another loop reads rows that it writes. Calls are inlined, and unused ops are removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.collectives import Channels
from stablehlo_tools.analysis.dataflow import Node, captured_values
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.layer_loops.cut_loops import (
    ROWS,
    CutLoops,
    Key,
    choose,
    in_pieces,
    rows_of,
    stacks,
)
from stablehlo_tools.analysis.layer_loops.linked_loops import mark
from stablehlo_tools.analysis.loop_carries import LayerLoop, StackRows
from stablehlo_tools.analysis.loops import (
    Counted,
    constant_integer,
    count_trips,
    known_integer,
    wrap,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError, note
from stablehlo_tools.dialect.names import DYNAMIC_UPDATE_SLICE, SHARDING_CONSTRAINT
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.cleanup import erase_unused
from stablehlo_tools.ir.inline import copy_with, inline_all_calls
from stablehlo_tools.ir.values import key_of, maker_of, skip_constraints
from stablehlo_tools.ir.views import Function, While
from stablehlo_tools.ir.walk import entry_function, functions_by_name, terminator
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.transforms.parts.all_parts import AllPartsWriter


@dataclass(frozen=True)
class SplitLayersPass(Pass):
    """Loops over layers become loops over ranges of them; values stacked by layer are in pieces.

    `counts`: the number of layers in each range, in the order of the rows. `loop`: cut only the
    stack of this loop, by its number among the loops over layers that have not been cut; -1 (the
    default) for all loops over that many layers. `explain`: a note on the loops that are cut.
    """

    name: ClassVar[str] = "split-layers"
    counts: tuple[int, ...]
    loop: int = -1
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        if min(self.counts, default=0) < 1:
            raise ToolError(
                f"split-layers: every range needs at least one layer: counts={self._shown} (P1)",
                module.operation.location,
            )
        inline_all_calls(module)
        main = entry_function(module)
        effects = Effects(functions_by_name(module))
        chosen = choose(main, effects, sum(self.counts), self._shown, self.loop)
        if self.explain:
            diagnostics.collected += [
                note(
                    f"split-layers: {len(each.cut)} loops over {sum(self.counts)} layers become "
                    f"{len(self.counts)} each, over {self._shown}; {len(each.dims.op_tilings)} ops "
                    "on stacks run on pieces",
                    each.cut[0].op.location,
                )
                for each in chosen
            ]
        channels = Channels(module)
        with ir.Location.unknown(module.context):
            for each in chosen:
                RangeEmission(each.dims, each.loops, self.counts, channels).run()
        erase_unused(Function(main).body)

    @property
    def _shown(self) -> str:
        return ", ".join(map(str, self.counts))


_INCLUSIVE = frozenset({"LE", "GE"})


@dataclass(frozen=True)
class Range:
    """Layers `first` to `end` of a loop; `number` counts the ranges in the order of the rows."""

    number: int
    first: int
    end: int

    def iterations(self, loop: LayerLoop) -> tuple[int, int]:
        """Returns the first iteration of the loop over these layers, and the one after the last."""
        if loop.reverse:
            return loop.trips - self.end, loop.trips - self.first
        return self.first, self.end


def ranges(loop: LayerLoop, counts: Sequence[int]) -> list[Range]:
    """Returns the ranges with these numbers of layers, in the order in which the loop runs them."""
    ascending: list[Range] = []
    first = 0
    for number, count in enumerate(counts):
        ascending.append(Range(number, first, first + count))
        first += count
    return ascending[::-1] if loop.reverse else ascending


class RangeWriter:
    """Writes the loops over ranges before a loop over all layers."""

    def __init__(
        self, loop: LayerLoop, values: Mapping[ir.Value, ir.Value], channels: Channels
    ) -> None:
        self._loop = loop
        self._values = values  # replacements of values from outside that its regions use
        self._channels = channels
        counting = count_trips(loop.op, known_integer)
        assert isinstance(counting, Counted), "a loop over layers counts"
        self._counted = counting

    def counters(self, part: Range, before: Mapping[int, ir.Value]) -> dict[int, ir.Value]:
        """Returns the start of each counter; `before` are the counters after the range before, if
        any."""
        op, build = self._loop.op, self._builder(self._loop.op)
        begin, _ = part.iterations(self._loop)
        starts: dict[int, ir.Value] = {}
        for carry, step in self._loop.counters.items():
            start = constant_integer(op.operands[carry])
            if not begin:
                starts[carry] = op.operands[carry]
            elif start is None:
                # The start is known only at run time, so the counter goes on from the range before.
                starts[carry] = before[carry]
            else:
                type_ = op.operands[carry].type
                number = wrap(start + begin * step, type_)
                starts[carry] = build.splat(number, [], element_of(op.operands[carry]))
        return starts

    def write(self, part: Range, operands: Sequence[ir.Value]) -> ir.Operation:
        """Writes the loop over a range, which reads a piece of each stack; returns it."""
        loop = self._loop
        copy = copy_with(loop.op, self._values, ir.InsertionPoint(loop.op))
        for place, value in enumerate(operands):
            copy.operands[place] = value
        for carry in stacks(loop):
            type_ = operands[carry].type
            copy.results[carry].set_type(type_)
            While(copy).condition.arguments[carry].set_type(type_)
            _retype(While(copy).body.arguments[carry], type_)
        self._shift(copy, part)
        self._bound(copy, part)
        mark(copy, part.number)
        # The first loop keeps the channels; those after it need new ones.
        if part.iterations(loop)[0]:
            for op in _inside(copy):
                self._channels.renew(op)
        return copy

    def _shift(self, copy: ir.Operation, part: Range) -> None:
        """Makes the loop count the rows of each stack from the first row of its piece."""
        # The stack of each op that reads or writes rows, and the operand that is the row's number.
        accesses: dict[Key, tuple[StackRows, int]] = {}
        for kinds, place in ((self._loop.reads, 1), (self._loop.writes, 2)):
            for rows in kinds.values():
                accesses |= {key_of(access.op): (rows, place) for access in rows.accesses}
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

    def _bound(self, copy: ir.Operation, part: Range) -> None:
        """Sets the bound of a range before the last to the start of the next."""
        _, end = part.iterations(self._loop)
        if end == self._loop.trips:
            return
        counter = self._counted.counter
        last = end - 1 if counter.direction in _INCLUSIVE else end
        known = maker_of(skip_constraints(terminator(While(self._loop.op).condition).operands[0]))
        compare = maker_of(skip_constraints(terminator(While(copy).condition).operands[0]))
        place = 1 if known.operands[1] == counter.bound else 0
        number = self._counted.starts[0] + last * counter.step
        bound = self._builder(compare).splat(number, [], element_of(counter.bound))
        compare.operands[place] = bound

    def _builder(self, place: ir.Operation) -> Builder:
        return Builder(ir.InsertionPoint(place), self._loop.op.location)


def _retype(value: ir.Value, type_: ir.Type) -> None:
    """Sets the type of a stack in a body, and of updates and constraints of it, to that of a
    piece."""
    value.set_type(type_)
    for use in value.uses:
        op = use.owner.operation
        writes_rows = op.name == DYNAMIC_UPDATE_SLICE and not use.operand_number
        if op.name == SHARDING_CONSTRAINT or writes_rows:
            _retype(op.results[0], type_)


def _inside(op: ir.Operation) -> Iterator[ir.Operation]:
    """Yields the ops in the regions of an op, in textual order."""
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                yield view.operation
                yield from _inside(view.operation)


class RangeEmission(AllPartsWriter):
    """Rewrites a block according to the analysis of its rows, with `counts` layers in each
    range."""

    def __init__(
        self, dims: BatchDims, loops: CutLoops, counts: Sequence[int], channels: Channels
    ) -> None:
        super().__init__(dims, channels, counts)
        self._cut = loops

    def write_control_flow(self, node: Node, point: ir.InsertionPoint) -> None:
        """Writes a loop that is to be cut as loops over ranges, and other control flow around
        pieces."""
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
        """Writes the loops over ranges, and replaces the results of the loop by theirs."""
        op = loop.op
        outside = {value: self._pieces.whole(value, op) for value in captured_values(op)}
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
        """Returns the rows of a stack that each range reads or writes."""
        value = loop.op.operands[carry]
        # The ranges of the loop cover the whole stack, so it is in pieces everywhere.
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
        """Replaces a stack that is a result of the loop."""
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
