"""Writes a plan: a loop over the ticks of a schedule in place of each pipeline's loops.

A single layer loop becomes one loop over ticks (`_write_loop`). For 1F1B, forward loops, backward
loops and the ops between them become one (`TrainingWriter`). Both write a manual computation over
the axis of the ranks. `LoopResults` turns its results into the values that the layer loops
returned.

In a tick of 1F1B, a rank runs a chunk of some stack forward, or one backward, or both, or neither,
as the schedule says. Each loop over layers occurs once in the loop over ticks, with no iterations
if it is not its turn. The link before a stack runs when the stack's first chunk begins forward, on
that rank. The link after the stack's backward runs when that chunk ends backward, on the same rank.
So values that the first link keeps for the second stay on the rank. The head runs on the last rank,
when a microbatch's backward begins; the activations wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from stablehlo_tools.analysis.collectives import next_channel
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.values import has_uses
from stablehlo_tools.ir.while_loop import CountedLoop
from stablehlo_tools.schedules.lockstep import Direction, Lockstep, TickCell, turns_of
from stablehlo_tools.transforms.parts.block_rewriter import part_type_of
from stablehlo_tools.transforms.parts.expand_pipeline.expansion_plan import (
    ExpansionPlan,
    PipelinedLoops,
)
from stablehlo_tools.transforms.parts.expand_pipeline.head_division import HeadDivision
from stablehlo_tools.transforms.parts.expand_pipeline.layer_phase import LayerPhase
from stablehlo_tools.transforms.parts.expand_pipeline.link_writer import (
    DividedHeadWriter,
    LinkWriter,
    Taken,
    begins,
)
from stablehlo_tools.transforms.parts.expand_pipeline.region import RankRegion
from stablehlo_tools.transforms.parts.expand_pipeline.results import LoopResults, Shares
from stablehlo_tools.transforms.parts.expand_pipeline.slots import Ring, Sent, Slots
from stablehlo_tools.transforms.parts.expand_pipeline.stack_orders import StackOrder, put_in_order
from stablehlo_tools.transforms.parts.expand_pipeline.stacks import RankStacks
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import (
    EmitContext,
    Given,
    Kept,
    TickPhaseWriter,
    TickRow,
    TickState,
    mean_runs,
)
from stablehlo_tools.transforms.parts.expand_pipeline.training_plan import (
    LayerGap,
    Training,
    Values,
)


def mirror_direction(direction: Direction, chunks: int) -> Direction:
    """Returns a direction with the virtual stages reversed, for layers run in reverse."""
    cells = tuple(
        tuple(cell and cell._replace(chunk=chunks - 1 - cell.chunk) for cell in column[::-1])
        for column in direction.cells
    )
    return replace(direction, cells=cells, deliveries=tuple(c[::-1] for c in direction.deliveries))


def waiting_slots(schedule: Lockstep, rank: int, chunk: int) -> int:
    """Returns how many microbatches wait at once between their forward and their backward of a
    chunk."""
    assert schedule.forward is not None
    assert schedule.backward is not None
    ends = _ticks(schedule.forward, rank, chunk)
    starts = _ticks(schedule.backward, rank, chunk)
    return max(sum(ends[m] <= tick <= starts[m] for m in ends) for tick in starts.values())


def _ticks(direction: Direction, rank: int, chunk: int) -> dict[int, int]:
    """Returns the tick in which each microbatch is in a chunk."""
    ticks: dict[int, int] = {}
    for tick, cells in enumerate(direction.cells):
        cell: TickCell | None = cells[rank]
        if cell is not None and cell.chunk == chunk:
            ticks[cell.microbatch] = tick
    return ticks


@dataclass(frozen=True)
class _Carried:
    """The values that the loop over ticks carries.

    They are the received values of each direction, the state of each loop and the sums of each
    link. Others wait in slots: for each link, and for the layers of each loop.
    """

    received: list[list[ir.Value]]
    states: list[TickState]
    links: list[list[ir.Value]]
    for_links: list[list[ir.Value]]
    for_layers: list[list[ir.Value]]

    def flat(self) -> list[ir.Value]:
        """Returns all values, in the order in which `like` reads them."""
        states = [state.flat() for state in self.states]
        groups = chain(self.received, states, self.links, self.for_links, self.for_layers)
        return list(chain.from_iterable(groups))

    def like(self, values: Iterable[ir.Value]) -> _Carried:
        """Returns a copy with other values."""
        rest = iter(values)

        def again(groups: Iterable[Sequence[ir.Value]]) -> list[list[ir.Value]]:
            return [list(islice(rest, len(group))) for group in groups]

        received = again(self.received)
        states = [state.like(list(islice(rest, len(state.flat())))) for state in self.states]
        return _Carried(
            received, states, again(self.links), again(self.for_links), again(self.for_layers)
        )


class TrainingWriter:
    """Replaces loops and links by one loop over the ticks of a schedule.

    Loop i of the plan is followed by link i; forwards come first. `contexts` are those of the
    stacks. `head` is the division of the head over the ranks; None if it is not divided. The region
    is written at the position of the last loop.
    """

    def __init__(
        self,
        plan: Training,
        schedule: Lockstep,
        region: RankRegion,
        contexts: Sequence[EmitContext],
        head: HeadDivision | None,
    ) -> None:
        self.plan = plan
        self.stacks = plan.stacks
        self._region = region
        # Backward loops run in the reverse order, each on the chunks of its forward.
        both_ways = [*contexts, *reversed(contexts)]
        turns = turns_of(schedule, plan.stacks)
        directions = [turn.forward for turn in turns]
        directions += [turn.backward for turn in reversed(turns)]
        # Schedules number chunks in execution order; a reverse loop begins with the last layers.
        if plan.forward.loop.reverse:
            repeats = contexts[0].chunks.repeats
            directions = [mirror_direction(direction, repeats) for direction in directions]
        kept_slots = [turn.kept_slots for turn in turns]
        chunks = [context.chunks for context in both_ways]
        backwards = [i >= self.stacks for i in range(len(directions))]
        trips = mean_runs(directions, chunks, backwards)
        self.writers: list[TickPhaseWriter] = []
        for i, (each, direction) in enumerate(zip(plan.passes, directions, strict=True)):
            kept = Kept()
            if i < self.stacks:
                sources = frozenset(plan.passes[plan.mirror(i)].residuals.values())
                kept = Kept(kept_slots[i], sources)
            # The first chunk of a later stack starts from the link before it, on the same rank.
            joins = 0 < i < self.stacks
            self.writers.append(
                TickPhaseWriter(
                    each.phase,
                    direction,
                    region,
                    both_ways[i],
                    each.whole_flows,
                    trips[i],
                    kept,
                    joins,
                )
            )
        loads = [
            {**writer.load, **self._types(each.along)}
            for writer, each in zip(self.writers, plan.passes, strict=True)
        ]
        step = -1 if plan.forward.loop.reverse else 1
        self.rings = (
            Ring(region, directions[0].slots, step, loads[: self.stacks]),
            Ring(region, directions[-1].slots, -step, loads[self.stacks :]),
        )
        self.links = [
            LinkWriter(plan, i, region, contexts[0], schedule.ticks) for i in range(len(plan.links))
        ]
        if head is not None:
            self.links[self.stacks - 1] = DividedHeadWriter(
                plan, head, region, contexts[0], schedule, directions[self.stacks]
            )
        self.for_links = [self._waiting(i, link, schedule) for i, link in enumerate(plan.links)]
        self.for_layers = [
            Slots(self._types(each.kept), kept_slots[min(i, plan.mirror(i))])
            for i, each in enumerate(plan.passes)
        ]

    def write(self) -> None:
        """Writes the region, and replaces the values of the loops and links by its results."""
        for writer, each in zip(self.writers, self.plan.passes, strict=True):
            writer.bring_stacks(tuple(each.residuals))
        build = self._region.end
        carried = _Carried(
            [ring.initial() for ring in self.rings],
            [writer.initial() for writer in self.writers],
            [link.initial() for link in self.links],
            [slots.initial(build) for slots in self.for_links],
            [slots.initial(build) for slots in self.for_layers],
        )
        loop = CountedLoop(build, build.i32(self.writers[0].ticks), carried.flat())
        rows = [writer.row(loop.inside, loop.counter) for writer in self.writers]
        head = self.links[self.stacks - 1].due(loop.inside, loop.counter, rows[self.stacks])
        tick = _Tick(self, loop.inside, rows, head, carried.like(loop.arguments))
        after = carried.like(loop.close(tick.write().flat()))
        for i, each in enumerate(self.plan.passes):
            # Only the backward reads residuals, so they do not leave the loop over ticks.
            for carry in set(each.residuals.values()):  # a backward may read a stack twice
                del after.states[self.plan.mirror(i)].stores[carry]
        self._finish(after)

    def _waiting(self, i: int, link: LayerGap, schedule: Lockstep) -> Slots:
        """Returns the slots for values that wait for a link. For the head, these are all its
        inputs. For a backward link, they are the values that the link before the same stack holds
        for it."""
        repeats = schedule.chunks // self.stacks
        if i == self.stacks - 1:
            count = waiting_slots(schedule, schedule.ranks - 1, schedule.chunks - 1)
            return Slots(self._types(link.takes), count)
        if not link.held:
            return Slots({}, 1)
        chunk = self.plan.mirror(i) * repeats
        return Slots(self._types(link.held), waiting_slots(schedule, 0, chunk))

    def _types(self, numbers: Iterable[int]) -> dict[int, ir.RankedTensorType]:
        return {n: ir.RankedTensorType(part_type_of(self.plan.dims, n)) for n in numbers}

    def _finish(self, carried: _Carried) -> None:
        region, plan = self._region, self.plan
        results = [
            LoopResults(each.phase, region, writer.context)
            for each, writer in zip(plan.passes, self.writers, strict=True)
        ]
        inside = [one.inside(state) for one, state in zip(results, carried.states, strict=True)]
        inside += [link.finals(held) for link, held in zip(self.links, carried.links, strict=True)]
        outer = iter(region.close([each for group in inside for each in group]))
        of_loops, of_links = (
            [list(islice(outer, len(group))) for group in groups]
            for groups in (inside[: len(results)], inside[len(results) :])
        )
        last = plan.backward.loop.op
        build = Builder(ir.InsertionPoint(last), region.location)
        for i, result in enumerate(results):
            result.stand_in(build, of_loops[i])
            if i < len(self.links):
                self.links[i].replace(build, of_links[i])
            # These use results of the region, which is at the position of the last loop.
            for node in plan.late[i]:
                node.op.move_before(last)
        gone = [*plan.gone, *(each.phase.node for each in plan.passes)]
        # Erase users before the ops that they use.
        for node in sorted(gone, key=lambda node: node.index, reverse=True):
            node.op.erase()


class _Tick:
    """The body of the loop over ticks, which contains each loop and each link once."""

    def __init__(
        self,
        writer: TrainingWriter,
        build: Builder,
        rows: Sequence[TickRow],
        head: tuple[TickRow, ir.Value],
        carried: _Carried,
    ) -> None:
        self._writer = writer
        self._plan = writer.plan
        self._build = build
        self._rows = rows
        self._at_head = head
        self._before = carried
        self._carried = replace(
            carried,
            states=[*carried.states],
            links=[*carried.links],
            for_links=[*carried.for_links],
            for_layers=[*carried.for_layers],
        )
        # For each loop, the values that leave the chunk: its flows and the values sent along.
        self._behind: list[Values] = []

    def write(self) -> _Carried:
        """Writes the ops; returns the values that the next tick reads."""
        stacks, last = self._writer.stacks, len(self._plan.passes) - 1
        made: Values = {}
        for stack in range(stacks):
            if stack:
                made = self._join(stack)
            self._run(stack, made)
        made = self._head()
        for loop in range(stacks, last + 1):
            self._run(loop, made if loop == stacks else {})
        joined = [self._join_back(link) for link in range(stacks, last)]
        received = [
            self._hand_on(0, range(stacks), ()),
            self._hand_on(1, range(stacks, last + 1), joined),
        ]
        return replace(self._carried, received=received)

    def _join(self, stack: int) -> Values:
        """Writes the link before a stack's forward, and stores the values for the link after its
        backward."""
        link, row = stack - 1, self._rows[stack]
        when = begins(self._build, row)

        def link_operand(build: Builder, number: int) -> ir.Value:
            return self._read_ring(build, stack - 1, number, row)

        made = self._link(link, row, when, link_operand)
        back = self._plan.mirror(stack)
        if back < len(self._plan.links):
            self._put_away(back, row, when, made)
        return made

    def _head(self) -> Values:
        head = self._writer.stacks - 1
        row = self._rows[head]
        self._put_away(head, row, row.ends, self._behind[head])
        at_head, due = self._at_head

        def link_operand(build: Builder, number: int) -> ir.Value:
            return self._waiting(build, head, at_head, number)

        return self._link(head, at_head, due, link_operand)

    def _join_back(self, link: int) -> Sent:
        """Writes the link after a stack's backward; returns the values to send to the stack
        before."""
        row, build = self._rows[link], self._build
        held = self._plan.links[link].held

        def link_operand(at: Builder, number: int) -> ir.Value:
            if number in held:
                return self._waiting(at, link, row, number)
            return self._behind[link][number]

        made = self._link(link, row, row.ends, link_operand)
        following, starts = self._plan.passes[link + 1], self._plan.links[link].starts
        phase = following.phase
        values = {number: made[number] for number in following.along}
        for carry in phase.flows:
            start = (
                made[starts[carry]]
                if carry in starts
                else self._writer.writers[link + 1].start(build, row, carry)
            )
            values[phase.node.results[carry]] = start
        return Sent(row.ends, link + 1 - self._writer.stacks, values)

    def _link(self, link: int, row: TickRow, due: ir.Value, taken: Taken) -> Values:
        """Writes a link for the row of a loop; returns the values that it makes or passes on."""
        made, self._carried.links[link] = self._writer.links[link].run(
            self._build, row, due, self._before.links[link], taken
        )
        return made

    def _put_away(self, link: int, row: TickRow, when: ir.Value, values: Values) -> None:
        """Stores values that wait for a link."""
        slots = self._writer.for_links[link]
        self._carried.for_links[link] = slots.put(
            self._build, self._before.for_links[link], slots.in_turn(row.microbatch), when, values
        )

    def _waiting(self, build: Builder, link: int, row: TickRow, number: int) -> ir.Value:
        slots = self._writer.for_links[link]
        held = self._carried.for_links[link]
        return slots.read_slot(build, held, slots.in_turn(row.microbatch), number)

    def _read_ring(self, build: Builder, loop: int, number: int, row: TickRow) -> ir.Value:
        """Returns a value of a loop's load as the rank received it."""
        way, load = divmod(loop, self._writer.stacks)
        ring = self._writer.rings[way]
        return ring.read_received(build, self._before.received[way], load, number, row.source)

    def _run(self, loop: int, made: Values) -> None:
        """Writes a loop over layers; `made` are the values of the link that it begins with, if
        any."""
        writer, row, build = self._writer.writers[loop], self._rows[loop], self._build
        this, back = self._plan.passes[loop], self._plan.mirror(loop)
        along: Values = {}
        for number in this.along:
            along[number] = self._read_ring(build, loop, number, row)
            if number in made:
                along[number] = build.same("select", row.received, along[number], made[number])
        kept = along
        left: Values = {}
        if loop < self._writer.stacks:
            slots = self._writer.for_layers[back]
            self._carried.for_layers[back] = slots.put(
                build, self._before.for_layers[back], lambda _: row.kept, row.runs, along
            )
        else:
            slots = self._writer.for_layers[loop]
            held = self._carried.for_layers[loop]
            kept = along | {
                number: slots.read_slot(build, held, lambda _: row.kept, number)
                for number in this.kept
            }
            stores = self._carried.states[back].stores
            left = {carry: stores[source] for carry, source in this.residuals.items()}

        def received_flow(at: Builder, carry: int) -> ir.Value:
            return self._read_ring(at, loop, this.phase.node.results[carry], row)

        starts: Values | None = {}
        # `_join_back` has sent the start of these loops: they read what they received.
        if loop > self._writer.stacks:
            starts = None
        elif loop:
            handed = self._plan.links[loop - 1].starts
            starts = {carry: made[number] for carry, number in handed.items()}
        given = Given(received_flow, starts, kept, left)
        self._carried.states[loop], out = writer.run(build, row, self._before.states[loop], given)
        results = this.phase.node.results
        self._behind.append({results[carry]: value for carry, value in out.items()} | along)

    def _hand_on(self, way: int, loops: range, joined: Sequence[Sent]) -> list[ir.Value]:
        sent = [
            Sent(self._rows[loop].runs, load, self._behind[loop]) for load, loop in enumerate(loops)
        ]
        row = self._rows[loops[0]]
        return self._writer.rings[way].hand_on(
            self._build, self._before.received[way], [*sent, *joined], row.delivery
        )


class PlanWriter:
    """Writes the pipelines of a plan into its module.

    `exchanges` are the permutes that bring stacks into another order.
    """

    def __init__(
        self, module: ir.Module, plan: ExpansionPlan, orders: Sequence[StackOrder] = ()
    ) -> None:
        self._module = module
        self._plan = plan
        self._orders = {order.chunks.trips: order for order in orders}
        # The last handle in use; regions count on from it.
        self._channel = next_channel(module) - 1
        self._stacks: dict[int, RankStacks] = {}
        self._shares = Shares(plan)
        self.exchanges: list[ir.Operation] = []

    def run(self) -> None:
        """Rewrites the module, which erases the plan's loops."""
        if self._orders:
            graph = self._plan.cut.trial.dims.graph
            put_in_order(self._module, graph, self._plan.axis, tuple(self._orders.values()))
        for each in self._plan.pipelines:
            self._write(each)
        for stacks in self._stacks.values():
            permutes = stacks.finish(self._channel)
            self._channel += len(permutes)
            self.exchanges += permutes

    def _write(self, each: PipelinedLoops) -> None:
        work, plan = each.work, self._plan
        region = RankRegion(plan.axis, each.last.loop.op, self._channel)
        contexts: list[EmitContext] = []
        for chunks in each.chunks:
            # One for all loops over the same number of layers, so that one can reuse the stacks of
            # another.
            trips = chunks.trips
            if trips not in self._stacks:
                ordered = self._orders[trips].rows if trips in self._orders else frozenset[int]()
                self._stacks[trips] = RankStacks(plan.axis, chunks, plan.microbatches, ordered)
            stacks = self._stacks[trips]
            contexts.append(EmitContext(chunks, stacks, plan.options.skip, plan.axis.name))
        if isinstance(work, LayerPhase):
            direction = each.schedule.directions[0]
            _write_loop(work, direction, region, contexts[0], self._shares)
        else:
            TrainingWriter(work, each.schedule, region, contexts, each.head).write()
        self._channel = region.channel


def _write_loop(
    phase: LayerPhase,
    direction: Direction,
    region: RankRegion,
    context: EmitContext,
    shares: Shares,
) -> None:
    """Replaces the layer loop by a loop over the ticks of a schedule of one direction."""
    finals = [c for c in phase.flows if has_uses(phase.loop.op.results[c])]
    (trips,) = mean_runs([direction], [context.chunks], [False])
    writer = TickPhaseWriter(phase, direction, region, context, finals, trips)
    writer.bring_stacks()
    ring = Ring(region, direction.slots, -1 if phase.loop.reverse else 1, [writer.load])
    received, state = ring.initial(), writer.initial()
    ticks = region.end.i32(writer.ticks)
    loop = CountedLoop(region.end, ticks, [*received, *state.flat()])
    build, row = loop.inside, writer.row(loop.inside, loop.counter)
    received, state = _apart(state, loop.arguments)
    numbers = phase.node.results

    def received_flow(at: Builder, carry: int) -> ir.Value:
        return ring.read_received(at, received, 0, numbers[carry], row.source)

    state, out = writer.run(build, row, state, Given(received_flow))
    behind = {numbers[carry]: value for carry, value in out.items()}
    after = ring.hand_on(build, received, [Sent(row.runs, 0, behind)], row.delivery)
    _, state = _apart(state, loop.close([*after, *state.flat()]))
    results = LoopResults(phase, region, context, shares)
    inside = results.inside(state)
    outer = region.close(inside)
    results.stand_in(Builder(ir.InsertionPoint(phase.loop.op), phase.loop.op.location), outer)
    phase.loop.op.erase()


def _apart(state: TickState, values: Sequence[ir.Value]) -> tuple[list[ir.Value], TickState]:
    """Returns the received values and the state."""
    received = len(values) - len(state.flat())
    return list(values[:received]), state.like(values[received:])
