"""The rows of an array that the iterations of a loop write: each row once, whatever the order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from stablehlo_tools.analysis.loop_indices import LoopIndices, written_positions
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of


class WrittenRows(NamedTuple):
    """The dimension that the rows are of; whether they are all that the array has."""

    dim: int
    is_whole: bool


def written_rows(
    ops: Sequence[ir.Operation], indices: LoopIndices, trips: int
) -> WrittenRows | None:
    """The rows that dynamic_update_slices write in so many iterations, each into what the one
    before it gives; None where that is not known, or a row is written twice."""
    if len(ops) == 1 and trips == 1 and shape_of(ops[0].operands[0]):
        return WrittenRows(0, shape_of(ops[0].operands[0]) == shape_of(ops[0].operands[1]))
    ranges: list[tuple[int, int]] = []
    dims: set[int] = set()
    is_broad = True
    for op in ops:
        written = written_positions(op, indices)
        if written is None:
            return None
        dim, starts = written
        array, update = shape_of(op.operands[0]), shape_of(op.operands[1])
        last = array[dim] - update[dim]  # a start beyond is moved back
        ranges += [(at, at + update[dim]) for at in (min(max(s, 0), last) for s in starts)]
        dims.add(dim)
        is_broad = is_broad and array[:dim] + array[dim + 1 :] == update[:dim] + update[dim + 1 :]
    ranges.sort()
    if len(dims) != 1 or any(first[1] > second[0] for first, second in pairwise(ranges)):
        return None
    dim = dims.pop()
    written_count = sum(limit - start for start, limit in ranges)
    return WrittenRows(dim, is_broad and written_count == shape_of(ops[0].operands[0])[dim])
