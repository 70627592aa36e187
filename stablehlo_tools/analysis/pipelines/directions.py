"""From a table of integers to a direction of a schedule, where the table is one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.pipelines.columns import Column
from stablehlo_tools.schedules.lockstep import Cell, Direction

Entries = NDArray[np.int32]  # [ranks, ticks, columns]


class ReadDirection(NamedTuple):
    """A direction as a table says it; `sizes` are the layers of each chunk, by virtual stage."""

    back: bool
    direction: Direction
    chunks: int
    microbatches: int
    sizes: tuple[int, ...]


def read_direction(entries: Entries, *, training: bool) -> ReadDirection | None:
    """The direction that a table says; None where its integers say none.

    Every rank has to run each of its chunks once on each microbatch, only the first virtual stage
    of a direction may take its input from outside, and chunks must be of consecutive layers.
    Without `training` nothing is kept, whatever the column holds.
    """
    runs = entries[:, :, Column.RUNS]
    flags = entries[:, :, : Column.RECEIVED + 1]
    if not np.isin(flags, (0, 1)).all() or (entries < 0).any() or not runs.any():
        return None
    ranks = len(entries)
    at = np.nonzero(runs)
    chunk, microbatch = (entries[..., c][at] for c in (Column.CHUNK, Column.MICROBATCH))
    chunks, microbatches = int(chunk.max()) + 1, int(microbatch.max()) + 1
    work = (at[0] * chunks + chunk) * microbatches + microbatch
    if not np.array_equal(np.sort(work), np.arange(ranks * chunks * microbatches)):
        return None
    slots = entries[..., (Column.SOURCE, Column.KEPT, Column.DELIVERY)]
    if slots.max() > chunks * microbatches:  # one more than there can be values
        return None
    stage = chunk * ranks + at[0]
    back = _is_backward(entries[at], stage, ranks * chunks - 1)
    sizes = _sizes(entries[at], stage, ranks * chunks)
    if back is None or sizes is None:
        return None
    direction = _direction(entries, training=training)
    return ReadDirection(back, direction, chunks, microbatches, sizes)


def _is_backward(rows: Entries, stage: NDArray[np.int64], last: int) -> bool | None:
    """Which way the microbatches go, where the flags of all rows agree on one."""
    begins, ends = rows[:, Column.RECEIVED] == 0, rows[:, Column.ENDS] == 1
    for back, (first, final) in ((False, (0, last)), (True, (last, 0))):
        if np.array_equal(begins, stage == first) and np.array_equal(ends, stage == final):
            return back
    return None


def _sizes(rows: Entries, stage: NDArray[np.int64], stages: int) -> tuple[int, ...] | None:
    """The layers of each virtual stage, where all rows agree and no layer is left out."""
    sizes, firsts = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    sizes[stage], firsts[stage] = rows[:, Column.LAYERS], rows[:, Column.FIRST]
    same = (sizes[stage] == rows[:, Column.LAYERS]) & (firsts[stage] == rows[:, Column.FIRST])
    follows = np.array_equal(firsts, np.cumsum(sizes) - sizes)
    if not same.all() or not follows or (sizes < 1).any():
        return None
    return tuple(int(size) for size in sizes)


def _direction(entries: Entries, *, training: bool) -> Direction:
    columns = entries.transpose(1, 0, 2).tolist()
    cells = tuple(tuple(_cell(row, training=training) for row in column) for column in columns)
    deliveries = tuple(tuple(row[Column.DELIVERY] for row in column) for column in columns)
    slots = 1 + int(max(entries[..., Column.SOURCE].max(), entries[..., Column.DELIVERY].max()))
    return Direction(cells, deliveries, slots)


def _cell(row: list[int], *, training: bool) -> Cell | None:
    if not row[Column.RUNS]:
        return None
    source = row[Column.SOURCE] if row[Column.RECEIVED] else -1
    kept = row[Column.KEPT] if training else -1
    return Cell(row[Column.CHUNK], row[Column.MICROBATCH], source, kept)
