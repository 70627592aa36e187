"""The schedule that the directions of a loop over ticks make together."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.pipelines.directions import ReadDirection
from stablehlo_tools.analysis.pipelines.playing import is_consistent
from stablehlo_tools.schedules.lockstep import Lockstep


def schedule_of(directions: Sequence[ReadDirection], ranks: int) -> Lockstep | None:
    """The schedule of one direction, or of a forward and a backward of the same chunks.

    None where they are of different pipelines, or values do not reach the cells that read them.
    """
    first = directions[0]
    if len({(each.chunks, each.microbatches, each.sizes) for each in directions}) != 1:
        return None
    by_way = {each.back: each.direction for each in directions}
    if len(by_way) != len(directions):
        return None
    kept = [
        cell.kept
        for each in directions
        for column in each.direction.cells
        for cell in column
        if cell is not None
    ]
    schedule = Lockstep(
        "read",
        ranks,
        first.chunks,
        first.microbatches,
        by_way.get(False),
        by_way.get(True),
        max(kept) + 1,
    )
    return schedule if is_consistent(schedule) else None
