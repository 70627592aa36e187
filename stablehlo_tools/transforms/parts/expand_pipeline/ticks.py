"""One layer loop in the loop over ticks: the work of a rank for it in a tick.

The schedule is a table of integers with a row for each tick; every rank has its own. In a tick, a
rank reads a microbatch's activations, received from the rank before or as the layer loop starts. It
runs the layers of one of its chunks on them, and sends the result on (`Ring`). The loop over ticks
also carries a `TickState`. `one_part.OnePartWriter` writes the ops of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.dataflow import inputs_of
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, part_shape
from stablehlo_tools.analysis.loop_carries import RowAccess
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.frontend_attributes import set_mean_runs
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.while_loop import CountedLoop
from stablehlo_tools.schedules.lockstep import Direction
from stablehlo_tools.transforms.parts.block_rewriter import part_type_of
from stablehlo_tools.transforms.parts.expand_pipeline.expansion_plan import (
    RANK_DIMENSION,
    LayerChunks,
)
from stablehlo_tools.transforms.parts.expand_pipeline.layer_phase import (
    LayerPhase,
    RowRead,
    RowWrite,
)
from stablehlo_tools.transforms.parts.expand_pipeline.region import (
    RankRegion,
    sum_identity,
    without_axis,
)
from stablehlo_tools.transforms.parts.expand_pipeline.stacks import RankStacks, row_shape
from stablehlo_tools.transforms.parts.one_part import OnePartWriter, Outside, apart, window


def wide(element: ir.Type) -> ir.Type:
    """Returns the type in which terms are added up: floats have at least 32 bits."""
    if isinstance(element, ir.FloatType) and element.width < 32:
        return ir.F32Type.get(element.context)
    return element


@dataclass
class TickState:
    """The values that a phase carries from tick to tick, by the carry of its layer loop.

    `finals` are flows after the last layer, `sums` the terms added up so far, `stores` the rows
    written so far. A `Ring` carries values that are sent between ranks.
    """

    finals: dict[int, ir.Value] = field(default_factory=dict[int, ir.Value])
    sums: dict[int, ir.Value] = field(default_factory=dict[int, ir.Value])
    stores: dict[int, ir.Value] = field(default_factory=dict[int, ir.Value])

    def flat(self) -> list[ir.Value]:
        """Returns all values, in the order in which `like` reads them."""
        return [value for group in self._groups() for value in group.values()]

    def like(self, values: Sequence[ir.Value]) -> TickState:
        """Returns a state with other values."""
        rest = list(values)
        groups = [{carry: rest.pop(0) for carry in group} for group in self._groups()]
        return TickState(*groups)

    def _groups(self) -> tuple[dict[int, ir.Value], ...]:
        return self.finals, self.sums, self.stores


@dataclass(frozen=True)
class Kept:
    """The stacks that a forward keeps for the backward, by carry, and the number of slots of
    each."""

    slots: int = 0
    carries: frozenset[int] = frozenset()


@dataclass(frozen=True)
class EmitContext:
    """The settings for writing phases. `skip` omits the layers of a rank that has no work; `axis`
    is the manual axis."""

    chunks: LayerChunks
    stacks: RankStacks
    skip: bool
    axis: str

    def finish(self, copy: ir.Operation) -> None:
        """Removes the axis from a copied op's shardings: in the manual computation, none may name
        it."""
        without_axis(copy, self.axis)


class TickRow(NamedTuple):
    """The work of a rank in a tick, in i32 scalars; `runs`, `ends` and `received` are i1.

    `first` and `layers` are the first iteration of the chunk and their number. `ends` is set for
    the last chunk of the direction, `received` if the input came from another rank. The others are
    those of a `TickCell`, with `source` and `kept` never below 0.
    """

    runs: ir.Value
    ends: ir.Value
    received: ir.Value
    chunk: ir.Value
    microbatch: ir.Value
    source: ir.Value
    kept: ir.Value
    delivery: ir.Value
    first: ir.Value
    layers: ir.Value


_FLAGS = 3


def _table(
    direction: Direction, chunks: LayerChunks, *, back: bool, joins: bool, skip: bool
) -> np.ndarray:
    """Returns the table [ranks, ticks, columns], with a row for the work of each rank in each tick.

    Microbatches move from the last rank to the first if `back`, else from the first to the last.
    With `joins`, the first chunk reads results of a link after another loop. With `skip`, a rank
    without work has no iterations.
    """
    ticks, ranks = len(direction.cells), chunks.ranks
    numbers = np.zeros((ranks, ticks, len(TickRow._fields)), dtype=np.int32)
    last = ranks * chunks.repeats - 1
    first, final = (last, 0) if back else (0, last)
    for tick, cells in enumerate(direction.cells):
        for rank, cell in enumerate(cells):
            delivery = direction.deliveries[tick][rank]
            if cell is None:
                # Without `skip`, an idle rank runs its first chunk, and its results are dropped.
                count = 0 if skip else chunks.sizes[rank]
                numbers[rank, tick] = (0, 0, 0, 0, 0, 0, 0, delivery, chunks.firsts[rank], count)
                continue
            p = cell.chunk * ranks + rank
            numbers[rank, tick] = (
                1,
                p == final,
                cell.source >= 0 and not (joins and p == first),
                cell.chunk,
                cell.microbatch,
                max(cell.source, 0),
                max(cell.kept, 0),
                delivery,
                chunks.firsts[p],
                chunks.sizes[p],
            )
    return numbers


Left = Mapping[int, ir.Value]  # stores of a forward's residuals, by the carry that reads them
Arrived = Callable[[Builder, int], ir.Value]  # by carry, a flow as the rank received it


@dataclass(frozen=True)
class Given:
    """The inputs of a phase in a tick.

    `arrived` returns the flow of a carry as the rank received it. `starts` are flows for the first
    chunk, by carry, that differ from those the layer loop starts from. If it is None, that chunk
    reads received flows as all others do. `along` are values of the microbatch that other loops or
    links made, by number. `kept` are the stores of the phase's forward.
    """

    arrived: Arrived
    starts: Mapping[int, ir.Value] | None = field(default_factory=dict[int, ir.Value])
    along: Mapping[int, ir.Value] = field(default_factory=dict[int, ir.Value])
    kept: Left = field(default_factory=dict[int, ir.Value])


class TickPhaseWriter:
    """Writes one phase into a region.

    Rows of the stacks in `kept` are held in slots, for as long as the schedule says; those of other
    stacks for all microbatches. `trips` is the mean number of iterations in a tick of the loop over
    a chunk's layers. With `joins`, the first chunk reads the results of a link.
    """

    def __init__(
        self,
        phase: LayerPhase,
        direction: Direction,
        region: RankRegion,
        context: EmitContext,
        finals: Sequence[int],
        trips: float,
        kept: Kept | None = None,
        joins: bool = False,
    ) -> None:
        self._phase = phase
        self._region = region
        self.context = context
        self._layouts = phase.dims.tilings
        self._parts = phase.dims.parts
        self._finals = tuple(finals)
        self._trips = trips
        self._kept = kept or Kept()
        self.ticks = len(direction.cells)
        table = _table(
            direction, context.chunks, back=phase.loop.reverse, joins=joins, skip=context.skip
        )
        self._table = region.bring(region.outside.constant(table), 0)
        self._stacks: dict[int, ir.Value] = {}

    def bring_stacks(self, kept: Sequence[int] = ()) -> None:
        """Brings each rank its rows of the stacks, except those whose carries are in `kept`."""
        for read in self._phase.reads:
            carry = read.rows.carry
            if carry in kept or carry in self._stacks:
                continue
            layout = self._layout(carry)
            outer = self._phase.loop.op.operands[carry]
            spread = self.context.stacks.spread_stack(
                self._region.outside, outer, read.rows, layout
            )
            local = self._region.bring(spread, RANK_DIMENSION)
            shape = shape_of(local)
            del shape[RANK_DIMENSION]
            self._stacks[carry] = self._region.end.reshape(local, shape)

    def initial(self) -> TickState:
        """Returns the state before the first tick."""
        build, state = self._region.end, TickState()
        for carry in self._finals:
            whole, layout = self._operand(carry), self._layout(carry)
            shape, element = shape_of(whole), element_of(whole)
            if carry in self._phase.term_flows:
                element = wide(element)
            elif layout is not None:
                shape = apart(shape, layout, self._parts)
            state.finals[carry] = sum_identity(build, shape, element)
        for carry in self._phase.sums:
            whole = self._operand(carry)
            state.sums[carry] = build.splat(0, shape_of(whole), wide(element_of(whole)))
        for carry in self._phase.written:
            shape, element = self._store_shape(carry)
            start = self._phase.start_of_rows(carry, element)
            state.stores[carry] = build.splat(start, shape, element)
        return state

    @property
    def load(self) -> dict[int, ir.RankedTensorType]:
        """The types of the flows of one microbatch, by the number of the layer loop's result."""
        load: dict[int, ir.RankedTensorType] = {}
        for carry in self._phase.flows:
            whole, layout = self._operand(carry), self._layout(carry)
            shape = part_shape(tuple(shape_of(whole)), layout, self._parts)
            type_ = ir.RankedTensorType.get(shape, element_of(whole), loc=self._region.location)
            load[self._phase.node.results[carry]] = type_
        return load

    def run(
        self, build: Builder, row: TickRow, state: TickState, given: Given
    ) -> tuple[TickState, dict[int, ir.Value]]:
        """Writes the work of a tick: the chunk's layers on one microbatch. Returns the state, and
        the flows after the chunk, by carry."""
        phase, context = self._phase, self.context
        flows = [self._incoming_flow(build, row, carry, given) for carry in phase.flows]
        inner = TickState({}, state.sums, state.stores)
        even = context.chunks.is_even and not context.skip
        # A constant limit, where possible, lets later passes know the number of trips.
        limit = build.i32(context.chunks.longest) if even else row.layers
        loop = CountedLoop(build, limit, [*flows, *inner.flat()])
        if context.skip:
            # The limit is an entry of a table: state the mean for passes that weigh loops.
            set_mean_runs(loop.op, self._trips)
        carried = loop.arguments
        inner = inner.like(carried[len(flows) :])
        outside = self._outside(loop, row)
        after, ends = self._layer(loop, row, carried[: len(flows)], inner, (outside, given))
        results = loop.close([*ends, *after.flat()])
        after = after.like(results[len(flows) :])
        if not context.skip:
            # An idle rank has run a chunk, too: keep its sums of before the tick.
            for carry, before in state.sums.items():
                after.sums[carry] = build.same("select", row.runs, after.sums[carry], before)
        out = dict(zip(phase.flows, results[: len(flows)], strict=True))
        finals = {
            carry: self._update_final_flow(build, row, whole, out[carry], carry)
            for carry, whole in state.finals.items()
        }
        return TickState(finals, after.sums, after.stores), out

    def start(self, build: Builder, row: TickRow, carry: int) -> ir.Value:
        """Returns a flow of one microbatch as the layer loop starts it."""
        whole, layout = self._operand(carry), self._layout(carry)
        start = self._region.part(build, whole, layout, self._parts, row.microbatch)
        if carry in self._phase.term_flows:
            first = build.compare("EQ", row.microbatch, build.i32(0))
            start = build.same("select", first, start, build.splat_like(0, start))
        return start

    def row(self, build: Builder, tick: ir.Value) -> TickRow:
        """Returns the rank's work in a tick."""
        zero = build.i32(0)
        columns = len(TickRow._fields)
        row = build.reshape(
            build.dynamic_slice(self._table, [zero, tick, zero], [1, 1, columns]), [columns]
        )
        values = [
            build.reshape(build.slice_along(row, 0, column, column + 1), [])
            for column in range(columns)
        ]
        flags = [build.compare("NE", value, zero) for value in values[:_FLAGS]]
        return TickRow(*flags, *values[_FLAGS:])

    def _layer(
        self,
        loop: CountedLoop,
        row: TickRow,
        flows: Sequence[ir.Value],
        state: TickState,
        taken: tuple[Outside, Given],
    ) -> tuple[TickState, list[ir.Value]]:
        """Writes an iteration of the layer loop, inside of the loop over a chunk's layers. Returns
        the state and the flows."""
        phase, build, (outside, given) = self._phase, loop.inside, taken
        layer = loop.counter
        if phase.loop.reverse:
            last = build.same("subtract", row.layers, build.i32(1))
            layer = build.same("subtract", last, layer)
        writing = OnePartWriter(phase.dims, row.microbatch, outside, self.context.finish)
        values = writing.values
        values.update(given.along)
        for carry in phase.loop.constants:
            if phase.node.operands[carry] in given.along:
                values[phase.body.arguments[carry]] = given.along[phase.node.operands[carry]]
        self._count(build, row, layer, values)
        values.update(zip((phase.body.arguments[c] for c in phase.flows), flows, strict=True))
        for carry in phase.sums:
            # An iteration computes its term alone, which is added to the sum below.
            whole = self._operand(carry)
            values[phase.body.arguments[carry]] = build.splat_like(0, whole)
        for read in phase.reads:
            self._read(build, row, layer, read, writing, given.kept)
        writing.write(phase.nodes, build.point)
        sums: dict[int, ir.Value] = {}
        for carry, before in state.sums.items():
            term = writing.operand(phase.body.returned[carry], None, build)
            sums[carry] = build.same("add", before, build.convert(term, element_of(before)))
        stores = dict(state.stores)
        for write in phase.writes:
            carry = write.rows.carry
            stores[carry] = self._write(build, row, layer, write, stores[carry], writing)
        ends = [
            writing.operand(phase.body.returned[c], self._layout(c), build) for c in phase.flows
        ]
        return TickState({}, sums, stores), ends

    def _outside(self, loop: CountedLoop, row: TickRow) -> Outside:
        """Returns a function for values from outside of the layer loop; parts of them are cut once
        a tick."""
        phase = self._phase
        place_of = {n: c for c, n in enumerate(phase.body.arguments)}
        cuts: dict[tuple[int, DimTiling | None], ir.Value] = {}

        def outside(number: int, layout: DimTiling | None) -> ir.Value:
            if number in place_of:
                value = phase.loop.op.operands[place_of[number]]
            else:
                value = phase.dims.graph.values[number]
            key = number, layout
            if key not in cuts:
                cuts[key] = self._region.part(
                    loop.before, value, layout, self._parts, row.microbatch
                )
            return cuts[key]

        return outside

    def _count(
        self, build: Builder, row: TickRow, layer: ir.Value, values: dict[int, ir.Value]
    ) -> None:
        """Computes the counters of the layer loop from the number of the iteration."""
        loop = self._phase.loop
        used = {n for node in self._phase.nodes for n in inputs_of(node)}
        for carry, step in loop.counters.items():
            argument = self._phase.body.arguments[carry]
            if argument not in used and argument not in self._phase.body.returned:
                continue
            iteration = build.same("add", row.first, layer)
            if loop.reverse:
                last = build.i32(loop.trips - 1)
                iteration = build.same("subtract", last, iteration)
            start = self._region.whole(loop.op.operands[carry])
            counted = build.convert(iteration, element_of(start))
            moved = build.same("multiply", counted, build.splat_like(step, start))
            values[argument] = build.same("add", moved, start)

    def _read(
        self,
        build: Builder,
        row: TickRow,
        layer: ir.Value,
        read: RowRead,
        writing: OnePartWriter,
        kept: Left,
    ) -> None:
        """Reads a slice of a stack from the rows that the rank holds."""
        carry, result = read.rows.carry, read.node.results[0]
        layout = self._layout(carry)
        type_ = ir.RankedTensorType(part_type_of(self._phase.dims, result))
        slotted = carry in kept
        stack = kept[carry] if slotted else self._stacks[carry]
        head = [row.kept if slotted and layout is not None else row.chunk, layer]
        starts, sizes = self._rows_window(
            build, stack, head, read.access, None if slotted else layout, row
        )
        taken = build.dynamic_slice(stack, starts, sizes)
        writing.values[result] = build.reshape(
            build.convert(taken, type_.element_type), type_.shape
        )

    def _write(
        self,
        build: Builder,
        row: TickRow,
        layer: ir.Value,
        write: RowWrite,
        store: ir.Value,
        writing: OnePartWriter,
    ) -> ir.Value:
        """Returns a store with rows written, or added to those of other microbatches."""
        carry, number_ = write.rows.carry, write.update
        layout = self._layout(carry)
        slotted = carry in self._kept.carries and layout is not None
        head = [row.kept if slotted else row.chunk, layer]
        starts, sizes = self._rows_window(
            build, store, head, write.access, None if slotted else layout, row
        )
        value = writing.operand(number_, layout, build)
        new = build.reshape(build.convert(value, element_of(store)), sizes)
        kind = self._phase.terms.terms.get(number_)
        if kind is not None or not self.context.skip:
            old = build.dynamic_slice(store, starts, sizes)
            new = build.same(kind, old, new) if kind is not None else new
            if not self.context.skip:
                new = build.same("select", row.runs, new, old)
        return build.update(store, new, starts)

    def _rows_window(
        self,
        build: Builder,
        stack: ir.Value,
        head: Sequence[ir.Value],
        access: RowAccess,
        layout: DimTiling | None,
        row: TickRow,
    ) -> tuple[list[ir.Value], list[int]]:
        """Returns the start of the rows in a stack, and their sizes."""
        sizes = [1, 1, access.count, *shape_of(stack)[3:]]
        starts = [*head, build.i32(access.offset), *[build.i32(0)] * (len(sizes) - 3)]
        if layout is not None:
            microbatches = layout.dim + 3  # two more dimensions before it, and after `outer`
            sizes[microbatches] = 1
            starts[microbatches] = row.microbatch
        return starts, sizes

    def _incoming_flow(self, build: Builder, row: TickRow, carry: int, given: Given) -> ir.Value:
        """Returns a flow before the chunk: as received, or as the layer loop starts it."""
        come = given.arrived(build, carry)
        if given.starts is None:
            return come
        start = given.starts.get(carry)
        if start is None:
            start = self.start(build, row, carry)
        return build.same("select", row.received, come, start)

    def _update_final_flow(
        self, build: Builder, row: TickRow, whole: ir.Value, part: ir.Value, carry: int
    ) -> ir.Value:
        """Returns a final flow with this microbatch's part written, if the chunk is the last
        one."""
        layout = self._layout(carry)
        if carry in self._phase.term_flows:
            total = build.same("add", whole, build.convert(part, element_of(whole)))
            return build.same("select", row.ends, total, whole)
        if layout is None:
            return build.same("select", row.ends, part, whole)
        starts, sizes = window(shape_of(whole), layout, row.microbatch, build.i32(0))
        old = build.dynamic_slice(whole, starts, sizes)
        new = build.same("select", row.ends, build.reshape(part, sizes), old)
        return build.update(whole, new, starts)

    def _operand(self, carry: int) -> ir.Value:
        return self._phase.loop.op.operands[carry]

    def _layout(self, carry: int) -> DimTiling | None:
        """Returns the batch dimension of a carry; in a stack, it is after the rows."""
        return self._layouts.get(self._phase.body.arguments[carry])

    def _store_shape(self, carry: int) -> tuple[list[int], ir.Type]:
        """Returns the shape [chunks or slots, layers, span, row] and the element type of a
        store."""
        rows = next(w.rows for w in self._phase.writes if w.rows.carry == carry)
        whole, layout, chunks = self._operand(carry), self._layout(carry), self.context.chunks
        sums = any(
            w.update in self._phase.terms.terms for w in self._phase.writes if w.rows.carry == carry
        )
        element = wide(element_of(whole)) if sums else element_of(whole)
        if carry in self._kept.carries and layout is not None:
            row = part_shape(tuple(shape_of(whole)), layout, self._parts)[1:]
            return [self._kept.slots, chunks.longest, rows.span, *row], element
        row = row_shape(shape_of(whole), layout, self._parts)
        return [chunks.repeats, chunks.longest, rows.span, *row], element


_BACKWARD = 2.0  # a backward costs two forwards: two products with each weight instead of one


def mean_runs(
    directions: Sequence[Direction], chunks: Sequence[LayerChunks], backwards: Sequence[bool]
) -> list[float]:
    """Returns the iterations of each loop in a tick on the slowest rank, as the mean over all
    ticks."""
    runs = [_iterations(each, own) for each, own in zip(directions, chunks, strict=True)]
    weights = [_BACKWARD if back else 1.0 for back in backwards]
    load = sum(weight * each for weight, each in zip(weights, runs, strict=True))
    slowest = np.argmax(load, axis=0)
    ticks = np.arange(len(slowest))
    return [float(each[slowest, ticks].mean()) for each in runs]


def _iterations(direction: Direction, chunks: LayerChunks) -> NDArray[np.int64]:
    """Returns the iterations in each tick, as [ranks, ticks]."""
    return np.array(
        [
            [
                0 if cell is None else chunks.sizes[cell.chunk * chunks.ranks + rank]
                for rank, cell in enumerate(column)
            ]
            for column in direction.cells
        ]
    ).T
