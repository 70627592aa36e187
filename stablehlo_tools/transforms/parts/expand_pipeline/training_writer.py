"""Writes a forward and a backward loop, with the head between them, as one loop over ticks.

A microbatch's backward begins as soon as its forward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import has_uses
from stablehlo_tools.ir.while_loop import CountedLoop
from stablehlo_tools.schedules.lockstep import Cell, Direction, Lockstep
from stablehlo_tools.transforms.parts.expand_pipeline.region import Region
from stablehlo_tools.transforms.parts.expand_pipeline.results import Results
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import (
    EmitContext,
    Kept,
    PhaseWriter,
    Row,
    State,
    put_row,
    row_of,
    sum_identity,
    wide,
)
from stablehlo_tools.transforms.parts.expand_pipeline.training import Training
from stablehlo_tools.transforms.parts.one_part import (
    OnePartWriter,
    apart,
    cut,
    part_type_of,
    window,
)


def write_training(
    plan: Training, schedule: Lockstep, region: Region, context: EmitContext
) -> None:
    """Replaces both loops and the head by one loop over the ticks of a schedule.

    The region stands where the backward loop stood.
    """
    slots = waiting_slots(schedule)
    if plan.forward.loop.reverse:
        schedule = mirrored(schedule)
    assert schedule.forward is not None
    assert schedule.backward is not None
    head, backward = plan.head, plan.backward
    kept = Kept(schedule.kept_slots, frozenset(head.residuals.values()))
    first = PhaseWriter(plan.forward, schedule.forward, region, context, head.whole_flows, kept)
    finals = [c for c in backward.flows if has_uses(backward.loop.op.results[c])]
    second = PhaseWriter(backward, schedule.backward, region, context, finals)
    first.bring_stacks()
    second.bring_stacks(tuple(head.residuals))
    between = HeadWriter(plan, region, context, slots)
    ahead, back = first.initial(), second.initial()
    carried = [*ahead.flat(), *back.flat(), *between.initial()]
    loop = CountedLoop(region.end, region.end.i32(first.ticks), carried)
    ahead, back, held = _split(ahead, back, loop.arguments)
    build, tick = loop.inside, loop.counter
    coming, going = first.row(build, tick), second.row(build, tick)
    ahead, up = first.run(build, coming, ahead, {}, {})
    held = between.keep(build, coming, held, up)
    starts, held = between.run(build, going, held)
    left = {carry: ahead.stores[source] for carry, source in head.residuals.items()}
    back, down = second.run(build, going, back, starts, left)
    ahead = first.hand_on(build, coming, ahead, up)
    back = second.hand_on(build, going, back, down)
    results = loop.close([*ahead.flat(), *back.flat(), *held])
    ahead, back, held = _split(ahead, back, results)
    for carry in set(head.residuals.values()):  # the backward may read a stack twice
        del ahead.stores[carry]
    _finish(plan, region, context, (ahead, back), between, held)


def mirrored(schedule: Lockstep) -> Lockstep:
    """The schedule with the last virtual stage for the first, for layers run in reverse."""
    directions = [_mirrored(each, schedule.chunks) for each in schedule.directions]
    return replace(schedule, forward=directions[0], backward=directions[1])


def _mirrored(direction: Direction, chunks: int) -> Direction:
    cells = tuple(
        tuple(cell and cell._replace(chunk=chunks - 1 - cell.chunk) for cell in column[::-1])
        for column in direction.cells
    )
    return replace(direction, cells=cells, deliveries=tuple(c[::-1] for c in direction.deliveries))


def waiting_slots(schedule: Lockstep) -> int:
    """How many microbatches wait at once between their last forward and their first backward."""
    assert schedule.forward is not None
    assert schedule.backward is not None
    last = schedule.ranks - 1
    final = schedule.chunks - 1
    ends = _ticks(schedule.forward, last, final)
    begins = _ticks(schedule.backward, last, final)
    return max(sum(ends[m] <= tick <= begins[m] for m in ends) for tick in begins.values())


def _ticks(direction: Direction, rank: int, chunk: int) -> dict[int, int]:
    """When each microbatch is in a chunk."""
    ticks: dict[int, int] = {}
    for tick, cells in enumerate(direction.cells):
        cell: Cell | None = cells[rank]
        if cell is not None and cell.chunk == chunk:
            ticks[cell.microbatch] = tick
    return ticks


def _split(
    ahead: State, back: State, values: Sequence[ir.Value]
) -> tuple[State, State, list[ir.Value]]:
    one = len(ahead.flat())
    two = one + len(back.flat())
    return ahead.like(values[:one]), back.like(values[one:two]), list(values[two:])


class HeadWriter:
    """Writes the head into the loop over ticks.

    It carries the activations that wait for it, the sums of its terms, and what the program needs
    of all samples, in this order.
    """

    def __init__(self, plan: Training, region: Region, context: EmitContext, slots: int) -> None:
        self._plan = plan
        self._head = plan.head
        self._dims = plan.forward.dims
        self._region = region
        self._context = context
        self._slots = slots

    def initial(self) -> list[ir.Value]:
        """What is carried before the first tick."""
        build, carried = self._region.end, list[ir.Value]()
        for carry in self._head.flows:
            type_ = self._part(self._plan.forward.node.results[carry])
            carried.append(build.splat(0, [self._slots, *type_.shape], type_.element_type))
        for value in map(self._value, self._head.sums):
            carried.append(sum_identity(build, shape_of(value), wide(element_of(value))))
        for value, layout in self._finals():
            rows = apart(shape_of(value), layout, self._dims.parts)
            carried.append(sum_identity(build, rows, element_of(value)))
        return carried

    def keep(
        self, build: Builder, row: Row, held: Sequence[ir.Value], flows: dict[int, ir.Value]
    ) -> list[ir.Value]:
        """Puts the activations behind the last layer away until the head takes them."""
        kept = list(held)
        for i, carry in enumerate(self._head.flows):
            slot = self._slot(build, row)
            old = row_of(build, held[i], [slot])
            new = build.same("select", row.ends, flows[carry], old)
            kept[i] = put_row(build, held[i], new, [slot])
        return kept

    def run(
        self, build: Builder, row: Row, held: Sequence[ir.Value]
    ) -> tuple[dict[int, ir.Value], list[ir.Value]]:
        """The head of a microbatch whose backward begins; what the backward loop starts from.

        With `skip` no other rank computes it.
        """
        begins = build.same("and", row.runs, build.same("not", row.received))
        waiting = len(self._head.flows)
        if self._context.skip:
            return self._branch(build, row, held, begins)
        starts, after = self._once(build, row, held)
        chosen = [
            build.same("select", begins, new, old)
            for new, old in zip(after, held[waiting:], strict=True)
        ]
        return starts, [*held[:waiting], *chosen]

    def finals(self, held: Sequence[ir.Value]) -> list[tuple[ir.Value, int | None]]:
        """The sums and the values of all samples, as results of the region."""
        build, waiting = self._region.end, len(self._head.flows)
        return [(self._region.total(build, value), None) for value in held[waiting:]]

    def replace(self, build: Builder, outer: Sequence[ir.Value]) -> None:
        """Lets the results of the region take the place of the head's values."""
        graph = self._dims.graph
        for number_, value in zip((*self._head.sums, *self._head.finals), outer, strict=True):
            old = self._value(number_)
            new = build.convert(build.reshape(value, shape_of(old)), element_of(old))
            old.replace_all_uses_with(new)
            graph.values[number_] = new

    def _branch(
        self, build: Builder, row: Row, held: Sequence[ir.Value], begins: ir.Value
    ) -> tuple[dict[int, ir.Value], list[ir.Value]]:
        waiting = len(self._head.flows)
        types = [self._part(n) for n in self._head.starts.values()]
        types += [value.type for value in held[waiting:]]
        choice = ir.Operation.create(
            "stablehlo.if",
            results=types,
            operands=[begins],
            regions=2,
            loc=self._region.location,
            ip=build.point,
        )
        inside = Builder(ir.InsertionPoint(choice.regions[0].blocks.append()), build.location)
        starts, after = self._once(inside, row, held)
        inside.end_region([*starts.values(), *after])
        other = Builder(ir.InsertionPoint(choice.regions[1].blocks.append()), build.location)
        unused = [
            other.splat(0, type_.shape, type_.element_type)
            for type_ in map(self._part, self._head.starts.values())
        ]
        other.end_region([*unused, *held[waiting:]])
        results: list[ir.Value] = list(choice.results)
        chosen_starts = dict(zip(self._head.starts, results, strict=False))
        return chosen_starts, [*held[:waiting], *results[len(chosen_starts) :]]

    def _once(
        self, build: Builder, row: Row, held: Sequence[ir.Value]
    ) -> tuple[dict[int, ir.Value], list[ir.Value]]:
        """The head on the row's microbatch, and what is carried then, the waiting left out."""
        head, waiting = self._head, len(self._head.flows)
        outside = self._outside(build, row)
        writing = OnePartWriter(self._dims, row.microbatch, outside, self._context.finish)
        for i, carry in enumerate(head.flows):
            value = row_of(build, held[i], [self._slot(build, row)])
            writing.values[self._plan.forward.node.results[carry]] = value
        writing.write(head.nodes, build.point)
        starts = {
            carry: writing.get(n, self._start_layout(carry, n), build)
            for carry, n in head.starts.items()
        }
        after: list[ir.Value] = []
        carried = held[waiting:]
        for n, before in zip(head.sums, carried, strict=False):
            term = build.convert(writing.get(n, None, build), element_of(before))
            after.append(build.same("add", before, term))
        for (n, before), (_, layout) in zip(
            zip(head.finals, carried[len(head.sums) :], strict=True), self._finals(), strict=True
        ):
            part = writing.get(n, layout, build)
            at, sizes = window(shape_of(before), layout, row.microbatch, build.i32(0))
            new = build.reshape(part, sizes)
            after.append(build.update(before, new, at))
        return starts, after

    def _outside(self, build: Builder, row: Row) -> Callable[[int, DimTiling | None], ir.Value]:
        def outside(n: int, layout: DimTiling | None) -> ir.Value:
            inside = self._region.whole(self._dims.graph.values[n])
            if layout is None:
                return inside
            return cut(build, inside, layout, self._dims.parts, row.microbatch)

        return outside

    def _start_layout(self, carry: int, n: int) -> DimTiling | None:
        return self._dims.tilings.get(n)

    def _finals(self) -> list[tuple[ir.Value, DimTiling]]:
        return [(self._value(n), self._dims.tilings[n]) for n in self._head.finals]

    def _slot(self, build: Builder, row: Row) -> ir.Value:
        """Microbatches come and go in turn."""
        if self._slots == 1:
            return build.i32(0)
        return build.same("remainder", row.microbatch, build.i32(self._slots))

    def _value(self, n: int) -> ir.Value:
        return self._dims.graph.values[n]

    def _part(self, n: int) -> ir.RankedTensorType:
        return ir.RankedTensorType(part_type_of(self._dims, n))


def _finish(
    plan: Training,
    region: Region,
    context: EmitContext,
    states: tuple[State, State],
    between: HeadWriter,
    held: Sequence[ir.Value],
) -> None:
    """Ends the region and puts its results where the loops and the head stood."""
    first, second = Results(plan.forward, region, context), Results(plan.backward, region, context)
    inside = [first.inside(states[0]), second.inside(states[1]), between.finals(held)]
    outer = region.close([each for group in inside for each in group])
    one, two = len(inside[0]), len(inside[0]) + len(inside[1])
    build = Builder(ir.InsertionPoint(plan.backward.loop.op), region.location)
    first.stand_in(build, outer[:one])
    between.replace(build, outer[two:])
    second.stand_in(build, outer[one:two])
    for node in plan.head.late:
        node.op.move_before(plan.backward.loop.op)
    plan.backward.loop.op.erase()
    for node in reversed(plan.head.gone):
        node.op.erase()
    plan.forward.loop.op.erase()
