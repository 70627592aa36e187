"""One layer loop in the loop over ticks: what a rank does for it in a tick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, part_shape
from stablehlo_tools.analysis.loop_carries import Access
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.counted_loop import CountedLoop
from stablehlo_tools.schedules.lockstep import Direction
from stablehlo_tools.transforms.parts.expand_pipeline.chunks import RANK_DIMENSION
from stablehlo_tools.transforms.parts.expand_pipeline.elements import (
    nothing,
    put_row,
    row_of,
    wide,
)
from stablehlo_tools.transforms.parts.expand_pipeline.phases import (
    Phase,
    RowRead,
    RowWrite,
    inputs_of,
)
from stablehlo_tools.transforms.parts.expand_pipeline.region import Region
from stablehlo_tools.transforms.parts.expand_pipeline.stacks import row_shape
from stablehlo_tools.transforms.parts.expand_pipeline.state import NOTHING_KEPT, How, Kept, State
from stablehlo_tools.transforms.parts.expand_pipeline.tables import Row, Table
from stablehlo_tools.transforms.parts.one_part import (
    OnePartWriter,
    Outside,
    apart,
    cut,
    part_type_of,
    window,
)

Left = Mapping[int, ir.Value]  # stores of what a forward leaves, by the carry that reads it


class PhaseWriter:
    """Writes one phase into a region.

    Rows of the stacks in `kept` are held in slots, for as long as the schedule says; those of
    others for all microbatches.
    """

    def __init__(
        self,
        phase: Phase,
        direction: Direction,
        region: Region,
        how: How,
        finals: Sequence[int],
        kept: Kept = NOTHING_KEPT,
    ) -> None:
        self._phase = phase
        self._direction = direction
        self._region = region
        self._how = how
        self._layouts = phase.dims.tilings
        self._parts = phase.dims.parts
        self._finals = tuple(finals)
        self._kept = kept
        self._table = Table.of(
            region, direction, how.chunks, back=phase.loop.reverse, skip=how.skip
        )
        self._stacks: dict[int, ir.Value] = {}

    @property
    def ticks(self) -> int:
        """How many columns its table has."""
        return self._table.ticks

    def bring_stacks(self, kept: Sequence[int] = ()) -> None:
        """Brings each rank its rows of the stacks, those that are `kept` left out."""
        for read in self._phase.reads:
            carry = read.rows.carry
            if carry in kept or carry in self._stacks:
                continue
            layout = self._layout(carry)
            outer = self._phase.loop.op.operands[carry]
            spread = self._how.stacks.spread(self._region.outside, outer, read.rows, layout)
            local = self._region.bring(spread, RANK_DIMENSION)
            shape = shape_of(local)
            del shape[RANK_DIMENSION]
            self._stacks[carry] = self._region.end.reshape(local, shape)

    def initial(self) -> State:
        """The state before the first tick."""
        build, state = self._region.end, State()
        for carry in self._phase.flows:
            kind = self._part(carry)
            slots = self._direction.slots
            shape = list(kind.shape) if slots == 1 else [slots, *kind.shape]
            state.received[carry] = build.splat(0, shape, kind.element_type)
        for carry in self._finals:
            shape, element = self._final_shape(carry)
            state.finals[carry] = nothing(build, shape, element)
        for carry in self._phase.sums:
            whole = self._operand(carry)
            state.sums[carry] = build.splat(0, shape_of(whole), wide(element_of(whole)))
        for carry in self._phase.written:
            shape, element = self._store_shape(carry)
            start = self._phase.start_of_rows(carry, element)
            state.stores[carry] = build.splat(start, shape, element)
        return state

    def run(
        self, build: Builder, row: Row, state: State, starts: Mapping[int, ir.Value], kept: Left
    ) -> tuple[State, dict[int, ir.Value]]:
        """The work of a tick: the chunk's layers on one microbatch.

        `starts` are flows for the first chunk, where they are not those that the layer loop starts
        from; `kept` are the stores of the other phase. Returns the state, nothing received yet, and
        the flows behind the chunk.
        """
        phase, how = self._phase, self._how
        flows = [self._input(build, row, state, carry, starts) for carry in phase.flows]
        inner = State({}, {}, state.sums, state.stores)
        even = how.chunks.is_even and not how.skip
        limit = build.i32(how.chunks.longest) if even else row.layers
        loop = CountedLoop(build, limit, [*flows, *inner.flat()])
        carried = loop.arguments
        inner = inner.like(carried[len(flows) :])
        outside = self._outside(loop, row)
        after, ends = self._layer(loop, row, carried[: len(flows)], inner, (outside, kept))
        results = loop.close([*ends, *after.flat()])
        after = after.like(results[len(flows) :])
        if not how.skip:
            for carry, before in state.sums.items():
                after.sums[carry] = build.same("select", row.runs, after.sums[carry], before)
        out = dict(zip(phase.flows, results[: len(flows)], strict=True))
        finals = {
            carry: self._finished(build, row, whole, out[carry], carry)
            for carry, whole in state.finals.items()
        }
        return State(state.received, finals, after.sums, after.stores), out

    def hand_on(self, build: Builder, row: Row, state: State, out: Mapping[int, ir.Value]) -> State:
        """Sends the flows to the next rank, and puts away what comes."""
        step = -1 if self._phase.loop.reverse else 1
        received: dict[int, ir.Value] = {}
        for carry, value in out.items():
            come = self._region.permute(build, value, step)
            if self._direction.slots > 1:
                come = put_row(build, state.received[carry], come, [row.delivery])
            received[carry] = come
        return State(received, state.finals, state.sums, state.stores)

    def row(self, build: Builder, tick: ir.Value) -> Row:
        """The rank's work in a tick."""
        return self._table.row(build, tick)

    def _layer(
        self,
        loop: CountedLoop,
        row: Row,
        flows: Sequence[ir.Value],
        state: State,
        given: tuple[Outside, Left],
    ) -> tuple[State, list[ir.Value]]:
        """An iteration of the layer loop, inside of the loop over those of a chunk."""
        phase, build, (outside, kept) = self._phase, loop.inside, given
        layer = loop.counter
        if phase.loop.reverse:
            last = build.same("subtract", row.layers, build.i32(1))
            layer = build.same("subtract", last, layer)
        writing = OnePartWriter(phase.dims, row.microbatch, outside, self._how.finish)
        values = writing.values
        self._count(build, row, layer, values)
        values.update(zip((phase.body.arguments[c] for c in phase.flows), flows, strict=True))
        for carry in phase.sums:
            whole = self._operand(carry)
            values[phase.body.arguments[carry]] = build.splat_like(0, whole)
        for read in phase.reads:
            self._read(build, row, layer, read, writing, kept)
        writing.write(phase.nodes, build.point)
        sums: dict[int, ir.Value] = {}
        for carry, before in state.sums.items():
            term = writing.get(phase.body.returned[carry], None, build)
            sums[carry] = build.same("add", before, build.convert(term, element_of(before)))
        stores = dict(state.stores)
        for write in phase.writes:
            carry = write.rows.carry
            stores[carry] = self._write(build, row, layer, write, stores[carry], writing)
        ends = [writing.get(phase.body.returned[c], self._layout(c), build) for c in phase.flows]
        return State({}, {}, sums, stores), ends

    def _outside(self, loop: CountedLoop, row: Row) -> Outside:
        """Values from outside of the layer loop; parts of them are taken once a tick."""
        phase = self._phase
        place_of = {n: c for c, n in enumerate(phase.body.arguments)}
        cuts: dict[tuple[int, DimTiling], ir.Value] = {}

        def outside(number: int, layout: DimTiling | None) -> ir.Value:
            if number in place_of:
                value = phase.loop.op.operands[place_of[number]]
            else:
                value = phase.dims.graph.values[number]
            inside = self._region.whole(value)
            if layout is None:
                return inside
            key = number, layout
            if key not in cuts:
                cuts[key] = cut(loop.before, inside, layout, self._parts, row.microbatch)
            return cuts[key]

        return outside

    def _count(
        self, build: Builder, row: Row, layer: ir.Value, values: dict[int, ir.Value]
    ) -> None:
        """The counters of the layer loop, from the number of the iteration."""
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
        row: Row,
        layer: ir.Value,
        read: RowRead,
        writing: OnePartWriter,
        kept: Left,
    ) -> None:
        """A slice of a stack, from the rows that the rank holds."""
        carry, result = read.rows.carry, read.node.results[0]
        layout = self._layout(carry)
        type_ = ir.RankedTensorType(part_type_of(self._phase.dims, result))
        if carry in kept:
            stack = kept[carry]
            head = [row.kept if layout is not None else row.chunk, layer]
            starts, sizes = self._place(build, stack, head, read.access, None, row)
        else:
            stack = self._stacks[carry]
            starts, sizes = self._place(build, stack, [row.chunk, layer], read.access, layout, row)
        taken = build.dynamic_slice(stack, starts, sizes)
        writing.values[result] = build.reshape(
            build.convert(taken, type_.element_type), type_.shape
        )

    def _write(
        self,
        build: Builder,
        row: Row,
        layer: ir.Value,
        write: RowWrite,
        store: ir.Value,
        writing: OnePartWriter,
    ) -> ir.Value:
        """An update of a stack: written, or added to what other microbatches gave."""
        carry, number_ = write.rows.carry, write.update
        layout = self._layout(carry)
        slotted = carry in self._kept.carries and layout is not None
        head = [row.kept if slotted else row.chunk, layer]
        starts, sizes = self._place(
            build, store, head, write.access, None if slotted else layout, row
        )
        value = writing.get(number_, layout, build)
        new = build.reshape(build.convert(value, element_of(store)), sizes)
        kind = self._phase.terms.terms.get(number_)
        if kind is not None or not self._how.skip:
            old = build.dynamic_slice(store, starts, sizes)
            new = build.same(kind, old, new) if kind is not None else new
            if not self._how.skip:
                new = build.same("select", row.runs, new, old)
        return build.update(store, new, starts)

    def _place(
        self,
        build: Builder,
        stack: ir.Value,
        head: Sequence[ir.Value],
        access: Access,
        layout: DimTiling | None,
        row: Row,
    ) -> tuple[list[ir.Value], list[int]]:
        """Where rows of a stack begin, and their sizes."""
        sizes = [1, 1, access.count, *shape_of(stack)[3:]]
        starts = [*head, build.i32(access.offset), *[build.i32(0)] * (len(sizes) - 3)]
        if layout is not None:
            microbatches = layout.dim + 3  # two dimensions more in front, and behind `outer`
            sizes[microbatches] = 1
            starts[microbatches] = row.microbatch
        return starts, sizes

    def _input(
        self,
        build: Builder,
        row: Row,
        state: State,
        carry: int,
        starts: Mapping[int, ir.Value],
    ) -> ir.Value:
        """A flow in front of the chunk: as it was received, or as the layer loop starts."""
        come = state.received[carry]
        if self._direction.slots > 1:
            come = row_of(build, come, [row.source])
        start = starts.get(carry)
        if start is None:
            start = self._region.whole(self._operand(carry))
            layout = self._layout(carry)
            if layout is not None:
                start = cut(build, start, layout, self._parts, row.microbatch)
            if carry in self._phase.term_flows:
                first = build.compare("EQ", row.microbatch, build.i32(0))
                start = build.same("select", first, start, build.splat_like(0, start))
        return build.same("select", row.received, come, start)

    def _finished(
        self, build: Builder, row: Row, whole: ir.Value, part: ir.Value, carry: int
    ) -> ir.Value:
        """A flow behind the last layer, put where its microbatch belongs."""
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
        """How the batch lies in a carry; in a stack, behind the rows."""
        return self._layouts.get(self._phase.body.arguments[carry])

    def _part(self, carry: int) -> ir.RankedTensorType:
        whole, layout = self._operand(carry), self._layout(carry)
        shape = part_shape(tuple(shape_of(whole)), layout, self._parts)
        return ir.RankedTensorType.get(shape, element_of(whole), loc=self._region.location)

    def _final_shape(self, carry: int) -> tuple[list[int], ir.Type]:
        whole, layout = self._operand(carry), self._layout(carry)
        shape, element = shape_of(whole), element_of(whole)
        if carry in self._phase.term_flows:
            return shape, wide(element)
        return (apart(shape, layout, self._parts) if layout else shape), element

    def _store_shape(self, carry: int) -> tuple[list[int], ir.Type]:
        """[chunks or slots, layers, span, row]."""
        rows = next(w.rows for w in self._phase.writes if w.rows.carry == carry)
        whole, layout, chunks = self._operand(carry), self._layout(carry), self._how.chunks
        sums = any(
            w.update in self._phase.terms.terms for w in self._phase.writes if w.rows.carry == carry
        )
        element = wide(element_of(whole)) if sums else element_of(whole)
        if carry in self._kept.carries and layout is not None:
            row = part_shape(tuple(shape_of(whole)), layout, self._parts)[1:]
            return [self._kept.slots, chunks.longest, rows.span, *row], element
        row = row_shape(shape_of(whole), layout, self._parts)
        return [chunks.repeats, chunks.longest, rows.span, *row], element
