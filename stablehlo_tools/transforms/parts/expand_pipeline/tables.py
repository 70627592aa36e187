"""The schedule as a table of integers that every rank reads its own rows of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.schedules.lockstep import Direction
from stablehlo_tools.transforms.parts.expand_pipeline.chunks import Chunks
from stablehlo_tools.transforms.parts.expand_pipeline.region import Region


class Row(NamedTuple):
    """What a rank does in a tick, in scalars: i32, and i1 for `runs` and `ends`.

    `first` and `layers` are the iterations of the chunk, the first one and how many; `ends` says
    that it is the last chunk of the direction, `received` that its input came from another; the
    others are those of a `Cell`, `source` and `kept` never below 0.
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


@dataclass(frozen=True)
class Table:
    """A direction of a schedule, in the region of the ranks: [1, ticks, columns] on each."""

    inside: ir.Value
    ticks: int

    @staticmethod
    def of(
        region: Region, direction: Direction, chunks: Chunks, *, back: bool, skip: bool
    ) -> Table:
        """Writes the table outside and brings each rank its part; with `skip`, a rank without work
        has no iterations."""
        numbers = _numbers(direction, chunks, back=back, skip=skip)
        return Table(region.bring(region.outside.constant(numbers), 0), numbers.shape[1])

    def row(self, build: Builder, tick: ir.Value) -> Row:
        """The rank's row of a tick."""
        zero = build.i32(0)
        columns = len(Row._fields)
        row = build.reshape(
            build.dynamic_slice(self.inside, [zero, tick, zero], [1, 1, columns]), [columns]
        )
        values = [_entry(build, row, column) for column in range(columns)]
        flags = [build.compare("NE", value, zero) for value in values[:_FLAGS]]
        return Row(*flags, *values[_FLAGS:])


def _numbers(direction: Direction, chunks: Chunks, *, back: bool, skip: bool) -> np.ndarray:
    ticks, ranks = len(direction.cells), chunks.ranks
    found = np.zeros((ranks, ticks, len(Row._fields)), dtype=np.int32)
    final = 0 if back else ranks * chunks.repeats - 1
    for tick, cells in enumerate(direction.cells):
        for rank, cell in enumerate(cells):
            delivery = direction.deliveries[tick][rank]
            if cell is None:
                count = 0 if skip else chunks.sizes[rank]
                found[rank, tick] = (0, 0, 0, 0, 0, 0, 0, delivery, chunks.firsts[rank], count)
                continue
            p = cell.chunk * ranks + rank
            found[rank, tick] = (
                1,
                p == final,
                cell.source >= 0,
                cell.chunk,
                cell.microbatch,
                max(cell.source, 0),
                max(cell.kept, 0),
                delivery,
                chunks.firsts[p],
                chunks.sizes[p],
            )
    return found


def _entry(build: Builder, row: ir.Value, column: int) -> ir.Value:
    return build.reshape(build.slice_along(row, 0, column, column + 1), [])
