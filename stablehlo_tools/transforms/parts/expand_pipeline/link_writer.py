"""Writes links into the loop over ticks: ops between two loops over layers, on one microbatch.

Each rank may run a part of the head, the link between the forwards and the backwards:

    %h = stablehlo.all_reduce …                 // of the last rank, zeros of others : 4x1024x2048
    %own = stablehlo.dynamic_slice %h, %rank    // 4x256x2048
    %logits = stablehlo.dot_general %own, %w    // 4x256x32000
    …
    %back = stablehlo.all_reduce …              // of parts between zeros : 4x1024x2048

All ranks know which microbatch is at the head in a tick, from one table without a row for each
rank. So all of them take part in its collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.frontend_attributes import set_mean_runs
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.schedules.lockstep import Direction, Lockstep
from stablehlo_tools.transforms.parts.block_rewriter import part_type_of
from stablehlo_tools.transforms.parts.expand_pipeline.head_division import HeadDivision
from stablehlo_tools.transforms.parts.expand_pipeline.region import RankRegion, of_one, sum_identity
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import EmitContext, TickRow, wide
from stablehlo_tools.transforms.parts.expand_pipeline.training_plan import (
    LinkResults,
    Training,
    Values,
    results_of_link,
)
from stablehlo_tools.transforms.parts.one_part import OnePartWriter, apart, cut, window

Taken = Callable[[Builder, int], ir.Value]


def begins(build: Builder, row: TickRow) -> ir.Value:
    """Returns a flag: the rank runs the first chunk of a loop, which reads the results of a
    link."""
    return build.same("and", row.runs, build.same("not", row.received))


class LinkWriter:
    """Writes the link after a loop.

    It carries the sums of its terms, and then values that the program needs of all samples. In each
    of the `ticks`, it is due for one microbatch or for none.
    """

    def __init__(
        self, plan: Training, link: int, region: RankRegion, context: EmitContext, ticks: int
    ) -> None:
        self._link = plan.links[link]
        self._dims = plan.dims
        self._region = region
        self._context = context
        self._runs = plan.dims.parts / ticks
        self._made = plan.made(link)
        self._passed = tuple(
            number for number in plan.link_outputs(link) if number not in self._made
        )

    def due(self, build: Builder, tick: ir.Value, own: TickRow) -> tuple[TickRow, ir.Value]:
        """Returns the row in which the link runs, and a flag that it is due. It runs in its rank's
        `own` row, when that begins the first chunk of the next loop."""
        del tick
        return own, begins(build, own)

    def initial(self) -> list[ir.Value]:
        """Returns the values carried before the first tick."""
        build, carried = self._region.end, list[ir.Value]()
        for value in map(self._value, self._link.sums):
            carried.append(sum_identity(build, shape_of(value), wide(element_of(value))))
        for value, layout in self._finals():
            shape = shape_of(value)
            rows = shape if layout is None else apart(shape, layout, self._dims.parts)
            carried.append(sum_identity(build, rows, element_of(value)))
        return carried

    def run(
        self, build: Builder, row: TickRow, begins: ir.Value, held: Sequence[ir.Value], taken: Taken
    ) -> tuple[Values, list[ir.Value]]:
        """Writes the link on the row's microbatch, if it is due; returns the values it passes on
        and those it carries.

        With `skip`, it is in a branch, so that no other rank computes it.
        """
        passed = {number: taken(build, number) for number in self._passed}
        if not self._link.nodes:
            return passed, list(held)
        if self._context.skip:
            made, after = self._branch(build, row, begins, held, taken)
            return {**passed, **made}, after
        # Without `skip` every rank computes the link; ranks on which it is not due drop it.
        made, after = self._once(build, row, held, taken)
        chosen = [
            build.same("select", begins, new, old) for new, old in zip(after, held, strict=True)
        ]
        return {**passed, **made}, chosen

    def finals(self, held: Sequence[ir.Value]) -> list[tuple[ir.Value, int | None]]:
        """Returns the sums and the values of all samples, as results of the region."""
        build = self._region.end
        return [(self._region.total(build, value), None) for value in held]

    def replace(self, build: Builder, outer: Sequence[ir.Value]) -> None:
        """Replaces the link's values by the results of the region."""
        graph = self._dims.graph
        for number, value in zip((*self._link.sums, *self._link.finals), outer, strict=True):
            old = self._value(number)
            new = build.convert(build.reshape(value, shape_of(old)), element_of(old))
            old.replace_all_uses_with(new)
            graph.values[number] = new

    def _branch(
        self, build: Builder, row: TickRow, begins: ir.Value, held: Sequence[ir.Value], taken: Taken
    ) -> tuple[Values, list[ir.Value]]:
        types = [ir.RankedTensorType(part_type_of(self._dims, number)) for number in self._made]
        choice = build.create(
            "stablehlo.if", [begins], [*types, *(v.type for v in held)], regions=2
        )
        set_mean_runs(choice, self._runs)
        inside = Builder(ir.InsertionPoint(choice.regions[0].blocks.append()), build.location)
        made, after = self._once(inside, row, held, taken)
        inside.end_region([*made.values(), *after])
        other = Builder(ir.InsertionPoint(choice.regions[1].blocks.append()), build.location)
        # Both branches must return the same types; no op uses these values.
        unused = [other.splat(0, type_.shape, type_.element_type) for type_ in types]
        other.end_region([*unused, *held])
        results: list[ir.Value] = list(choice.results)
        return dict(zip(self._made, results, strict=False)), results[len(types) :]

    def _once(
        self, build: Builder, row: TickRow, held: Sequence[ir.Value], taken: Taken
    ) -> tuple[Values, list[ir.Value]]:
        """Writes the link on the row's microbatch; returns the values it passes on and those it
        carries."""
        results = self._results(build, row, taken)
        return results.made, self._update_carries(build, row, held, results)

    def _results(self, build: Builder, row: TickRow, taken: Taken) -> LinkResults:
        link = self._link

        def outside(number: int, layout: DimTiling | None) -> ir.Value:
            value = self._value(number)
            return self._region.part(build, value, layout, self._dims.parts, row.microbatch)

        writing = OnePartWriter(self._dims, row.microbatch, outside, self._context.finish)
        for number in link.takes:
            writing.values[number] = taken(build, number)
        writing.write(link.nodes, build.point)
        return results_of_link(link, self._dims, self._made, writing, build)

    def _update_carries(
        self, build: Builder, row: TickRow, held: Sequence[ir.Value], results: LinkResults
    ) -> list[ir.Value]:
        """Returns the values carried after the link has run."""
        after: list[ir.Value] = []
        for term, before in zip(results.terms, held, strict=False):
            after.append(build.same("add", before, build.convert(term, element_of(before))))
        of_samples = held[len(results.terms) :]
        for part, before, (_, layout) in zip(
            results.finals, of_samples, self._finals(), strict=True
        ):
            if layout is None:
                after.append(part)
                continue
            at, sizes = window(shape_of(before), layout, row.microbatch, build.i32(0))
            after.append(build.update(before, build.reshape(part, sizes), at))
        return after

    def _finals(self) -> list[tuple[ir.Value, DimTiling | None]]:
        return [(self._value(n), self._dims.tilings.get(n)) for n in self._link.finals]

    def _value(self, number: int) -> ir.Value:
        return self._dims.graph.values[number]


class DividedHeadWriter(LinkWriter):
    """Writes the head, the link between forwards and backwards, with a part on each rank.

    `direction` is that of the first backward loop: the head runs when a microbatch begins it.
    """

    def __init__(
        self,
        plan: Training,
        division: HeadDivision,
        region: RankRegion,
        context: EmitContext,
        schedule: Lockstep,
        direction: Direction,
    ) -> None:
        super().__init__(plan, plan.stacks - 1, region, context, schedule.ticks)
        self._division = division
        begins = [
            (tick, rank, cell.microbatch)
            for tick, cells in enumerate(direction.cells)
            for rank, cell in enumerate(cells)
            if cell is not None and cell.source < 0
        ]
        # All microbatches begin their backward on the same rank, the last one.
        (owner,) = {rank for _, rank, _ in begins}
        microbatches = np.full(len(direction.cells), -1, dtype=np.int32)
        for tick, _, microbatch in begins:
            microbatches[tick] = microbatch
        build, ranks = region.end, np.arange(region.axis.size, dtype=np.int32)
        self._table = build.constant(microbatches)
        self._rank = build.reshape(region.bring(region.outside.constant(ranks), 0), [])
        self._is_owner = build.compare("EQ", self._rank, build.i32(owner))

    def due(self, build: Builder, tick: ir.Value, own: TickRow) -> tuple[TickRow, ir.Value]:
        """Returns a row with the microbatch at the head, and a flag that there is one: the same on
        all ranks."""
        entry = build.reshape(build.dynamic_slice(self._table, [tick], [1]), [])
        zero = build.i32(0)
        row = own._replace(microbatch=build.same("maximum", entry, zero))
        return row, build.compare("GE", entry, zero)

    def _results(self, build: Builder, row: TickRow, taken: Taken) -> LinkResults:
        """Returns the results of the link: each rank has its own terms, and all have the rest."""
        dims, region = self._division.dims, self._region
        block = dims.graph.root

        def outside(number: int, layout: object) -> ir.Value:
            raise AssertionError(f"value {number} is from outside of the head, in {layout}")

        writing = OnePartWriter(dims, self._rank, outside, self._context.finish)
        writing.values[block.arguments[0]] = row.microbatch
        for number, each in self._division.arguments.items():
            layout = dims.tilings.get(number)
            if each.waits:
                value = region.from_one(build, taken(build, each.number), self._is_owner)
            else:
                whole, parts = self._value(each.number), self._dims.parts
                value = region.part(build, whole, each.layout, parts, row.microbatch)
            if layout is not None:
                value = cut(build, value, layout, region.axis.size, self._rank)
            writing.values[number] = value
        writing.write(block.nodes, build.point)
        returned = iter(block.returned)
        made = {name: self._join_parts(build, writing, next(returned)) for name in self._made}
        terms: list[ir.Value] = []
        for number in islice(returned, len(self._link.sums)):
            value = writing.operand(number, None, build)
            if number not in self._division.sums:  # if it is the same on all ranks, count it once
                value = of_one(build, value, self._is_owner)
            terms.append(value)
        return LinkResults(made, terms, [self._join_parts(build, writing, n) for n in returned])

    def _join_parts(self, build: Builder, writing: OnePartWriter, number: int) -> ir.Value:
        """Returns a value of the block whole, if its parts are on the ranks."""
        dims = self._division.dims
        layout = dims.tilings.get(number)
        value = writing.operand(number, layout, build)
        if layout is not None:
            shape = shape_of(dims.graph.values[number])
            return self._region.join_parts(build, value, layout, shape, self._rank)
        return self._region.total(build, value) if number in self._division.sums else value

    def _update_carries(
        self, build: Builder, row: TickRow, held: Sequence[ir.Value], results: LinkResults
    ) -> list[ir.Value]:
        """Returns the values carried after the link has run: values of all samples are kept on one
        rank."""
        after, sums = super()._update_carries(build, row, held, results), len(results.terms)
        finals = zip(after[sums:], held[sums:], strict=True)
        kept = [build.same("select", self._is_owner, new, old) for new, old in finals]
        return [*after[:sums], *kept]
