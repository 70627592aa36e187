"""Writes the head of a pipeline into the loop over ticks, so that each rank runs a part of it.

    %h = stablehlo.all_reduce …                 // of the last rank, zeros of others : 4x1024x2048
    %own = stablehlo.dynamic_slice %h, %rank    // 4x256x2048
    %logits = stablehlo.dot_general %own, %w    // 4x256x32000
    …
    %back = stablehlo.all_reduce …              // of parts between zeros : 4x1024x2048

Which microbatch is at the head in a tick is known to all ranks, by one table without a row for each
of them, so that all of them take part in its collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.schedules.lockstep import Direction, Lockstep
from stablehlo_tools.transforms.parts.expand_pipeline.head_division import HeadDivision
from stablehlo_tools.transforms.parts.expand_pipeline.link_results import LinkResults
from stablehlo_tools.transforms.parts.expand_pipeline.links import LinkWriter, Taken
from stablehlo_tools.transforms.parts.expand_pipeline.region import Region, of_one
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import (
    EmitContext,
    Row,
)
from stablehlo_tools.transforms.parts.expand_pipeline.training import Training
from stablehlo_tools.transforms.parts.one_part import OnePartWriter, cut


class DividedHeadWriter(LinkWriter):
    """The link between forwards and backwards, of which each rank runs a part.

    `direction` is that of the first backward loop: where a microbatch begins it, the head runs.
    """

    def __init__(
        self,
        plan: Training,
        division: HeadDivision,
        region: Region,
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
        (owner,) = {rank for _, rank, _ in begins}
        microbatches = np.full(len(direction.cells), -1, dtype=np.int32)
        for tick, _, microbatch in begins:
            microbatches[tick] = microbatch
        build, ranks = region.end, np.arange(region.axis.size, dtype=np.int32)
        self._table = build.constant(microbatches)
        self._rank = build.reshape(region.bring(region.outside.constant(ranks), 0), [])
        self._is_owner = build.compare("EQ", self._rank, build.i32(owner))

    def due(self, build: Builder, tick: ir.Value, own: Row) -> tuple[Row, ir.Value]:
        """On which microbatch the head runs, and whether it is due: the same on all ranks."""
        entry = build.reshape(build.dynamic_slice(self._table, [tick], [1]), [])
        zero = build.i32(0)
        row = own._replace(microbatch=build.same("maximum", entry, zero))
        return row, build.compare("GE", entry, zero)

    def _results(self, build: Builder, row: Row, taken: Taken) -> LinkResults:
        """What the link gives: each rank has its terms, and all have the rest."""
        dims, region = self._division.dims, self._region
        block = dims.graph.root
        writing = OnePartWriter(dims, self._rank, _nothing, self._context.finish)
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
        made = {name: self._joined(build, writing, next(returned)) for name in self._made}
        terms = [self._term(build, writing, next(returned)) for _ in self._link.sums]
        return LinkResults(made, terms, [self._joined(build, writing, n) for n in returned])

    def _joined(self, build: Builder, writing: OnePartWriter, number: int) -> ir.Value:
        """A value of the block, all of it."""
        dims = self._division.dims
        layout = dims.tilings.get(number)
        value = writing.get(number, layout, build)
        if layout is not None:
            shape = shape_of(dims.graph.values[number])
            return self._region.joined(build, value, layout, shape, self._rank)
        return self._region.total(build, value) if number in self._division.sums else value

    def _term(self, build: Builder, writing: OnePartWriter, number: int) -> ir.Value:
        """A rank's term of a sum; what all have alike is one rank's."""
        value = writing.get(number, None, build)
        return value if number in self._division.sums else of_one(build, value, self._is_owner)

    def _after(
        self, build: Builder, row: Row, held: Sequence[ir.Value], results: LinkResults
    ) -> list[ir.Value]:
        """What is carried then: values of all samples on one rank."""
        after, sums = super()._after(build, row, held, results), len(results.terms)
        finals = zip(after[sums:], held[sums:], strict=True)
        kept = [build.same("select", self._is_owner, new, old) for new, old in finals]
        return [*after[:sums], *kept]


def _nothing(number: int, layout: object) -> ir.Value:
    raise AssertionError(f"value {number} is from outside of the head, in {layout}")
