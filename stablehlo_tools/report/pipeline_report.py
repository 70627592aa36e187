"""Describes a pipeline as plain data for `inspect` and `report`, and renders it as text.

Sizes are bytes on a rank, times nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from stablehlo_tools.diagnostics import duration, size
from stablehlo_tools.report.schedule_gantt import IDLE, MIXED, Gantt, shown
from stablehlo_tools.report.schedule_table import count_text, percent
from stablehlo_tools.schedules.lockstep import Lockstep
from stablehlo_tools.schedules.setting import costs
from stablehlo_tools.schedules.table import Action, backward, forward, loop, table_of
from stablehlo_tools.schedules.table_simulator import Timeline

MOST_CELLS = 50_000  # most that JSON and pages list one by one
_COLUMNS = 96  # width of a chart
_MOST_RANKS = 64
_WIDEST_TICK = 4  # columns


@dataclass(frozen=True)
class PipelineReport:
    """One pipeline of a program.

    A rank consists of `devices`: more than one if other mesh axes are left to a partitioner.
    `layers` has the number of layers of each virtual stage, chunk * ranks + rank. `cells` are the
    ranks' ticks, or half ticks if a tick has a forward and a backward; `run` are those with work.
    `permuted_read` is the share of the bytes sent over the ring that a rank reads. `kept_bytes` is
    the size of a rank's `kept_slots`, between a forward and its backward. `reductions` sum
    `reduced_bytes` over the axis at the end.
    """

    place: str
    kind: str  # gpipe, circular, 1f1b, interleaved-1f1b or custom
    axis: str
    mesh: str
    devices: int
    layers: tuple[int, ...]
    cells: int
    run: int
    closed_form: float
    formula: str
    skips: bool
    directions: tuple[DirectionRow, ...]
    permuted_read: float
    kept_bytes: int
    weights_bytes: int
    reductions: int
    reduced_bytes: int
    schedule: Lockstep
    times: PipelineTimes | None = None

    @property
    def bubble(self) -> float:
        """The share of the cells without work."""
        return 1 - self.run / self.cells

    @property
    def permuted_bytes(self) -> int:
        """The bytes that a rank sends in all ticks."""
        return self.schedule.ticks * sum(each.sent_bytes for each in self.directions)

    @property
    def is_drawn(self) -> bool:
        """True if there are few enough cells to list each of them."""
        return self.cells <= MOST_CELLS

    def to_json(self) -> dict[str, Any]:
        """Returns plain data; `timeline` has a row for each rank, with its steps in each tick.

        For example `0F3` is the forward of virtual stage 0 on microbatch 3.
        """
        schedule = self.schedule
        return {
            "kind": self.kind,
            "place": self.place,
            "axis": self.axis,
            "mesh": self.mesh,
            "devices": self.devices,
            "ranks": schedule.ranks,
            "chunks": schedule.chunks,
            "microbatches": schedule.microbatches,
            "layers": list(self.layers),
            "ticks": schedule.ticks,
            "cells": self.cells,
            "run": self.run,
            "bubble": self.bubble,
            "closed_form": self.closed_form,
            "formula": self.formula,
            "skips": self.skips,
            "directions": [asdict(each) for each in self.directions],
            "permuted_bytes": self.permuted_bytes,
            "permuted_read": self.permuted_read,
            "kept_slots": schedule.kept_slots,
            "kept_bytes": self.kept_bytes,
            "weights_bytes": self.weights_bytes,
            "reductions": self.reductions,
            "reduced_bytes": self.reduced_bytes,
            "times": None if self.times is None else asdict(self.times),
            "timeline": self._ticks() if self.is_drawn else None,
        }

    def _ticks(self) -> list[list[str]]:
        timeline = tick_timeline(self.kind, self.schedule)
        drawn: list[list[str]] = []
        for row, starts in zip(timeline.table.rows, timeline.starts, strict=True):
            ticks: list[list[str]] = [[] for _ in range(self.schedule.ticks)]
            for step, start in zip(row, starts, strict=True):
                ticks[int(start)].append(str(step))
            drawn.append([" ".join(steps) for steps in ticks])
        return drawn


@dataclass(frozen=True)
class PipelineTimes:
    """The times of a pipeline on a device, if each rank waits only for its neighbours.

    `layer_ns` is of one layer of each direction, the mean if stacks differ, and `permute_ns` of
    the permutes of each direction. `head_ns` is the work where a backward begins, `rest_ns` all
    other work of a tick. `bubble` is the share of the ranks' time in which they run neither useful
    layers nor the head.
    """

    total_ns: float
    bubble: float
    layer_ns: tuple[float, ...]
    permute_ns: tuple[float, ...]
    head_ns: float
    rest_ns: float


@dataclass(frozen=True)
class DirectionRow:
    """The forward or the backward of a pipeline.

    A rank sends `sent_bytes` in a tick; its `receive_slots` hold `received_bytes`. `read_bytes` are
    the rows for each microbatch from another loop. `written_bytes` are what the layers store for
    each microbatch or, in a backward, the accumulated gradients.
    """

    direction: str  # forward or backward
    sent_bytes: int
    receive_slots: int
    received_bytes: int
    weights_bytes: int
    read_bytes: int
    written_bytes: int


def tick_timeline(name: str, schedule: Lockstep) -> Timeline:
    """Returns the timeline in ticks; a forward and a backward in the same tick get half each."""
    ranks = range(schedule.ranks)
    rows: list[list[Action]] = [[] for _ in ranks]
    starts: list[list[float]] = [[] for _ in ranks]
    ends: list[list[float]] = [[] for _ in ranks]
    for rank, tick in product(ranks, range(schedule.ticks)):
        cells = ((each, each.cells[tick][rank]) for each in schedule.directions)
        work = [(direction, cell) for direction, cell in cells if cell is not None]
        for number, (direction, cell) in enumerate(work):
            made = backward if direction is schedule.backward else forward
            rows[rank].append(made(cell.chunk * schedule.ranks + rank, cell.microbatch))
            starts[rank].append(tick + number / len(work))
            ends[rank].append(tick + (number + 1) / len(work))
    placement = loop(schedule.ranks, schedule.chunks)
    training = len(schedule.directions) == 2
    table = table_of(name, placement, schedule.microbatches, rows, training)
    return Timeline(table, costs(placement.stages), tuple(starts), tuple(ends))


def pipeline_lines(pipeline: PipelineReport) -> Iterator[str]:
    """Yields the text lines of one pipeline."""
    schedule = pipeline.schedule
    yield (
        f'pipeline over "{pipeline.axis}": {pipeline.kind}, {schedule.ranks} ranks of '
        f"{count_text(schedule.chunks, 'chunk')} of {layers_of(pipeline.layers)}, "
        f"{count_text(schedule.microbatches, 'microbatch', 'es')}; {pipeline.place}"
    )
    yield from (f"  {name:9} {said}" for name, said in pipeline_figures(pipeline))
    if schedule.ranks <= _MOST_RANKS and pipeline.is_drawn:
        yield ""
        yield from (f"  {line}" for line in _chart(pipeline))


def pipeline_figures(pipeline: PipelineReport) -> Iterator[tuple[str, str]]:
    """Yields the figures of a pipeline, as pairs of a name and text."""
    schedule = pipeline.schedule
    is_twice = pipeline.cells > schedule.ranks * schedule.ticks
    cells = "forward and backward cells" if is_twice else "cells"
    yield (
        "bubble",
        f"{percent(pipeline.bubble)}: {pipeline.cells - pipeline.run:,} of {pipeline.cells:,} "
        f"{cells} in {schedule.ticks:,} ticks have no work; "
        f"closed form {pipeline.formula} = {percent(pipeline.closed_form)}",
    )
    yield "garbage", "skipped" if pipeline.skips else "computed in cells without work"
    times = pipeline.times
    if times is not None:
        overhead = f"{percent(times.bubble)} of it bubble and overhead"
        yield "time", f"{duration(times.total_ns)} predicted, {overhead}"
        parts = [
            f"a layer {_each(pipeline, times.layer_ns, duration)}",
            f"a permute {_each(pipeline, times.permute_ns, duration)}",
            *([f"the head {duration(times.head_ns)}"] if times.head_ns else []),
            f"the rest of a tick {duration(times.rest_ns)}",
        ]
        yield "of which", ", ".join(parts)
    yield (
        "permuted",
        f"{_each(pipeline, [each.sent_bytes for each in pipeline.directions])} a tick; "
        f"{size(pipeline.permuted_bytes)} in all, {percent(pipeline.permuted_read)} of it read",
    )
    slots = [
        f"{each.direction} {size(each.received_bytes)} in {count_text(each.receive_slots, 'slot')}"
        for each in pipeline.directions
    ]
    yield "received", ", ".join(slots)
    if schedule.kept_slots:
        held = f"{count_text(schedule.kept_slots, 'slot')} for a chunk and a microbatch"
        yield "kept", f"{size(pipeline.kept_bytes)} in {held}, from forward to backward"
    else:
        for row in pipeline.directions:
            if row.read_bytes:
                yield "read", f"{size(row.read_bytes)} that another loop stored for each microbatch"
            if row.written_bytes:
                back = row.direction == "backward"
                what = "gradients" if back else "results that layers store for each microbatch"
                yield "left", f"{size(row.written_bytes)} of {what}"
    yield "weights", size(pipeline.weights_bytes)
    if pipeline.reductions:
        ends = f"by {count_text(pipeline.reductions, 'reduction')} over the ranks at the end"
        yield "reduced", f"{size(pipeline.reduced_bytes)}, {ends}"
    if pipeline.devices > 1:
        shared = f"{pipeline.devices} devices, which share them along the other axes"
        yield "sizes", f"are per rank: {shared}"


def layers_of(sizes: Sequence[int]) -> str:
    """Returns the number of layers as text: `2 layers`, `1 to 2 layers`."""
    least, most = min(sizes), max(sizes)
    return count_text(most, "layer") if least == most else f"{least} to {most} layers"


def _each(
    pipeline: PipelineReport, figures: Sequence[float], unit: Callable[[float], str] = size
) -> str:
    """Returns the figure of each direction as text."""
    rows = zip(pipeline.directions, figures, strict=True)
    return ", ".join(f"{row.direction} {unit(figure)}" for row, figure in rows)


def _chart(pipeline: PipelineReport) -> Iterator[str]:
    timeline = tick_timeline(pipeline.kind, pipeline.schedule)
    gantt = Gantt(timeline, min(_COLUMNS, _WIDEST_TICK * pipeline.schedule.ticks))
    ranks = pipeline.schedule.ranks
    label = len(f"r{ranks - 1} ")
    yield f"{' ' * label}{gantt.axis(0, gantt.width)}  ticks".rstrip()
    for rank in range(ranks):
        yield f"r{rank}".ljust(label) + shown(gantt.row(rank), False)
    if gantt.in_blocks:
        yield (
            f"a column is a block of ticks: F, B, or {MIXED} for both, in lower case if over a "
            f"tenth of it is idle, {IDLE} if over half is"
        )
    elif pipeline.schedule.chunks > 1:
        yield "odd chunks in lower case"
