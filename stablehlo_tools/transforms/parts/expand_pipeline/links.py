"""Writes a link into the loop over ticks: ops between two loops over layers, on one microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.frontend_attributes import set_mean_runs
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.transforms.parts.block_rewriter import part_type_of
from stablehlo_tools.transforms.parts.expand_pipeline.link_results import (
    LinkResults,
    Values,
    results_of_link,
)
from stablehlo_tools.transforms.parts.expand_pipeline.region import Region, sum_identity
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import (
    EmitContext,
    Row,
    wide,
)
from stablehlo_tools.transforms.parts.expand_pipeline.training import Training
from stablehlo_tools.transforms.parts.one_part import OnePartWriter, apart, window

Taken = Callable[[Builder, int], ir.Value]


def begins(build: Builder, row: Row) -> ir.Value:
    """Whether a rank runs the first chunk of a loop, with what a link makes."""
    return build.same("and", row.runs, build.same("not", row.received))


class LinkWriter:
    """Writes the link behind a loop.

    It carries the sums of its terms, and what the program needs of all samples, in this order.
    `ticks` are those in which it is due for one microbatch or for none.
    """

    def __init__(
        self,
        plan: Training,
        link: int,
        region: Region,
        context: EmitContext,
        ticks: int,
    ) -> None:
        self._link = plan.links[link]
        self._dims = plan.dims
        self._region = region
        self._context = context
        self._runs = plan.dims.parts / ticks
        self._made = plan.made(link)
        self._passed = tuple(number for number in plan.given(link) if number not in self._made)

    def due(self, build: Builder, tick: ir.Value, own: Row) -> tuple[Row, ir.Value]:
        """In which row the head runs, and whether it is due: in its rank's `own`, where the chunk
        begins with what it makes."""
        del tick
        return own, begins(build, own)

    def initial(self) -> list[ir.Value]:
        """What is carried before the first tick."""
        build, carried = self._region.end, list[ir.Value]()
        for value in map(self._value, self._link.sums):
            carried.append(sum_identity(build, shape_of(value), wide(element_of(value))))
        for value, layout in self._finals():
            shape = shape_of(value)
            rows = shape if layout is None else apart(shape, layout, self._dims.parts)
            carried.append(sum_identity(build, rows, element_of(value)))
        return carried

    def run(
        self,
        build: Builder,
        row: Row,
        begins: ir.Value,
        held: Sequence[ir.Value],
        taken: Taken,
    ) -> tuple[Values, list[ir.Value]]:
        """The link on the row's microbatch, where one is due; what it hands on and carries.

        With `skip` no other rank computes it.
        """
        passed = {number: taken(build, number) for number in self._passed}
        if not self._link.nodes:
            return passed, list(held)
        if self._context.skip:
            made, after = self._branch(build, row, begins, held, taken)
            return {**passed, **made}, after
        made, after = self._once(build, row, held, taken)
        chosen = [
            build.same("select", begins, new, old) for new, old in zip(after, held, strict=True)
        ]
        return {**passed, **made}, chosen

    def finals(self, held: Sequence[ir.Value]) -> list[tuple[ir.Value, int | None]]:
        """The sums and the values of all samples, as results of the region."""
        build = self._region.end
        return [(self._region.total(build, value), None) for value in held]

    def replace(self, build: Builder, outer: Sequence[ir.Value]) -> None:
        """Lets the results of the region take the place of the link's values."""
        graph = self._dims.graph
        for number, value in zip((*self._link.sums, *self._link.finals), outer, strict=True):
            old = self._value(number)
            new = build.convert(build.reshape(value, shape_of(old)), element_of(old))
            old.replace_all_uses_with(new)
            graph.values[number] = new

    def _branch(
        self,
        build: Builder,
        row: Row,
        begins: ir.Value,
        held: Sequence[ir.Value],
        taken: Taken,
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
        unused = [other.splat(0, type_.shape, type_.element_type) for type_ in types]
        other.end_region([*unused, *held])
        results: list[ir.Value] = list(choice.results)
        return dict(zip(self._made, results, strict=False)), results[len(types) :]

    def _once(
        self, build: Builder, row: Row, held: Sequence[ir.Value], taken: Taken
    ) -> tuple[Values, list[ir.Value]]:
        """The link on the row's microbatch, and what is carried then."""
        results = self._results(build, row, taken)
        return results.made, self._after(build, row, held, results)

    def _results(self, build: Builder, row: Row, taken: Taken) -> LinkResults:
        link = self._link
        writing = OnePartWriter(
            self._dims, row.microbatch, self._outside(build, row), self._context.finish
        )
        for number in link.takes:
            writing.values[number] = taken(build, number)
        writing.write(link.nodes, build.point)
        return results_of_link(link, self._dims, self._made, writing, build)

    def _after(
        self, build: Builder, row: Row, held: Sequence[ir.Value], results: LinkResults
    ) -> list[ir.Value]:
        """What is carried when the link has run."""
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

    def _outside(self, build: Builder, row: Row) -> Callable[[int, DimTiling | None], ir.Value]:
        def outside(number: int, layout: DimTiling | None) -> ir.Value:
            value = self._value(number)
            return self._region.part(build, value, layout, self._dims.parts, row.microbatch)

        return outside

    def _finals(self) -> list[tuple[ir.Value, DimTiling | None]]:
        return [(self._value(n), self._dims.tilings.get(n)) for n in self._link.finals]

    def _value(self, number: int) -> ir.Value:
        return self._dims.graph.values[number]
