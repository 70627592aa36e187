"""A pipeline as plain data: what `inspect` prints of it, and what the page of `report` draws.

Sizes are bytes on a rank, times nanoseconds. docs/inspect.md describes the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from stablehlo_tools.schedules.lockstep import Lockstep
from stablehlo_tools.schedules.setting import costs
from stablehlo_tools.schedules.simulator import Timeline
from stablehlo_tools.schedules.table import Action, backward, forward, loop, table_of

Span = tuple[float, float]  # when a step starts and ends
SpanOf = Callable[[int, int, bool, bool], Span]  # of rank, tick, backward, beside the other
MOST_CELLS = 50_000  # that JSON and pages hold one by one


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


@dataclass(frozen=True)
class DirectionRow:
    """The forward or the backward of a pipeline.

    `sent_bytes` are what a rank sends in a tick, `received_bytes` what its `receive_slots` take.
    `read_bytes` are of the rows for each microbatch that another loop left, `written_bytes` of what
    the layers leave or, in a backward, of the gradients that they add up.
    """

    direction: str  # forward or backward
    sent_bytes: int
    receive_slots: int
    received_bytes: int
    weights_bytes: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class PipelineTimes:
    """What a pipeline takes on a device, with each rank waiting for its neighbours alone.

    `layer_ns` are of one layer of each direction and `permute_ns` of what it sends; `head_ns` is
    what a rank does where a backward begins, `rest_ns` all else of a tick. `bubble` is the share of
    the ranks' time in which they run no layers that count, and no head.
    """

    total_ns: float
    bubble: float
    layer_ns: tuple[float, ...]
    permute_ns: tuple[float, ...]
    head_ns: float
    rest_ns: float


@dataclass(frozen=True)
class PipelineReport:
    """One pipeline of a program.

    `devices` hold what is said of a rank: several where other mesh axes are left to a partitioner.
    `layers` are those of each virtual stage, chunk * ranks + rank. `cells` are a rank's ticks, or
    its half ticks where a tick has a forward and a backward; `run` those with work. `permuted_read`
    is the share of what is sent over the ring that anyone reads. `kept_bytes` are what a rank's
    `kept_slots` hold between a forward and its backward; `reduced_bytes` are summed over the axis
    at the end, by so many `reductions`.
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
        """The share of the cells that have no work."""
        return 1 - self.run / self.cells

    @property
    def permuted_bytes(self) -> int:
        """What a rank sends in all ticks."""
        return self.schedule.ticks * sum(each.sent_bytes for each in self.directions)

    @property
    def is_drawn(self) -> bool:
        """Whether there are few enough cells to show each of them."""
        return self.cells <= MOST_CELLS

    def to_json(self) -> dict[str, Any]:
        """Plain data; `timeline` is a row for each rank, of what it runs in each tick: `0F3`
        for the forward of virtual stage 0 on microbatch 3."""
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
