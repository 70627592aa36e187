"""A schedule in lock step as a timeline of steps, for the charts that draw those."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stablehlo_tools.schedules.costs import costs
from stablehlo_tools.schedules.lockstep import Lockstep
from stablehlo_tools.schedules.simulator import Timeline
from stablehlo_tools.schedules.table import Action, backward, forward, loop, table_of

Span = tuple[float, float]  # when a step starts and ends
SpanOf = Callable[[int, int, bool, bool], Span]  # of rank, tick, backward, beside the other


def tick_timeline(name: str, schedule: Lockstep) -> Timeline:
    """A step takes a tick, and half of one where a rank runs a forward and a backward in it."""
    return timeline_of(name, schedule, _in_ticks)


def timeline_of(name: str, schedule: Lockstep, span_of: SpanOf) -> Timeline:
    """The steps of each rank, one for each cell with work, at the times given."""
    rows: list[list[Action]] = []
    starts: list[list[float]] = []
    ends: list[list[float]] = []
    for rank in range(schedule.ranks):
        steps = list(_steps(schedule, rank))
        spans = [span_of(rank, tick, back, both) for tick, back, both, _ in steps]
        rows.append([action for *_, action in steps])
        starts.append([start for start, _ in spans])
        ends.append([end for _, end in spans])
    placement = loop(schedule.ranks, schedule.chunks)
    training = len(schedule.directions) == 2
    table = table_of(name, placement, schedule.microbatches, rows, training)
    return Timeline(table, costs(placement.stages), tuple(starts), tuple(ends))


def _steps(schedule: Lockstep, rank: int) -> Iterator[tuple[int, bool, bool, Action]]:
    """The cells of a rank that have work: tick, backward, beside another one, and what it is."""
    for tick in range(schedule.ticks):
        cells = [
            (direction is schedule.backward, direction.cells[tick][rank])
            for direction in schedule.directions
        ]
        work = [(back, cell) for back, cell in cells if cell is not None]
        for back, cell in work:
            stage = cell.chunk * schedule.ranks + rank
            made = backward if back else forward
            yield tick, back, len(work) > 1, made(stage, cell.microbatch)


def _in_ticks(_: int, tick: int, back: bool, both: bool) -> Span:
    if not both:
        return tick, tick + 1
    return (tick + 0.5, tick + 1) if back else (tick, tick + 0.5)
