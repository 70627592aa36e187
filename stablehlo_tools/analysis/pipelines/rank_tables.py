"""Reads the table of a pipeline: its columns, the rows that each rank has, and the schedule.

In a program for all devices, the table is a constant that a manual computation receives divided
along the axis. In the program of one device, it is a constant sliced at the device's place on the
axis. Its integers are a schedule in lock step if they can be played as one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.loops import constant_integer
from stablehlo_tools.analysis.replica_groups import AxisRef, DeviceMesh, mesh_axes_groups
from stablehlo_tools.analysis.shardings import sharding_axes, sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import DYNAMIC_SLICE, MANUAL_COMPUTATION
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import CONSTANTS, producer, value_of
from stablehlo_tools.schedules.lockstep import Direction, Lockstep, TickCell


class Column(enum.IntEnum):
    """The position of each integer in a row.

    `RUNS`, `ENDS` and `RECEIVED` are flags: the rank has work; it is the last chunk of the
    direction; the input comes from a receive slot. `CHUNK`, `MICROBATCH`, `SOURCE` and `KEPT` are
    those of a `TickCell`, never below 0. `DELIVERY` is the slot for the value that
    arrives at the end of the tick. `FIRST` is the first layer of the chunk, `LAYERS` their number.
    """

    RUNS = 0
    ENDS = 1
    RECEIVED = 2
    CHUNK = 3
    MICROBATCH = 4
    SOURCE = 5
    KEPT = 6
    DELIVERY = 7
    FIRST = 8
    LAYERS = 9


@dataclass(frozen=True)
class RankAxis:
    """A mesh axis. `groups` are its lines: devices that differ only along it, in order."""

    mesh: str
    name: str
    groups: tuple[tuple[int, ...], ...]
    devices: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.groups[0])

    def ring(self, step: int) -> frozenset[tuple[int, int]]:
        """Returns pairs from each device to the one `step` further along the axis, cyclically."""
        return frozenset(
            (group[rank], group[(rank + step) % self.size])
            for group in self.groups
            for rank in range(self.size)
        )


@dataclass(frozen=True)
class RankTable:
    """The table of all ranks, [ranks, ticks, columns], and their axis."""

    entries: NDArray[np.int32]
    axis: RankAxis


def rank_table(value: ir.Value, facts: ModuleFacts, known: DeviceValues) -> RankTable | None:
    """Returns the table of all ranks, given a rank's part, [1, ticks, columns]; None for others."""
    owner = producer(value)
    if owner is None:
        # The manual computation receives the table divided along the axis.
        argument = ir.BlockArgument(value)
        op = argument.owner.owner.operation
        if op.name != MANUAL_COMPUTATION:
            return None
        entries = _constant(op.operands[argument.arg_number])
        sharding = sharding_per_value(op.attributes["in_shardings"])[argument.arg_number]
        mesh_name, axes = sharding_axes(sharding)
        mesh = facts.meshes.get(mesh_name)
        if entries is None or mesh is None or len(axes) != 1:
            return None
        if dict(mesh.axes).get(axes[0]) != len(entries) or len(entries) < 2:
            return None
        return RankTable(entries, _axis(mesh_name, mesh, axes[0]))
    # The table is sliced at the device's place on an axis.
    entries = _constant(owner.operands[0]) if owner.name == DYNAMIC_SLICE else None
    starts = list(owner.operands)[1:]
    if entries is None or any(constant_integer(start) != 0 for start in starts[1:]):
        return None
    places = known.scalar(starts[0])
    if places is None:
        return None
    rows = _along(facts, len(entries), [int(place) for place in places])
    return None if rows is None else RankTable(entries, rows)


def _along(facts: ModuleFacts, ranks: int, places: Sequence[int]) -> RankAxis | None:
    """Returns the axis on which each device has the given place; None if there is none."""
    for mesh_name, mesh in facts.meshes.items():
        for name, size in mesh.axes:
            if size != ranks or size < 2 or mesh.size != len(places):
                continue
            axis = _axis(mesh_name, mesh, name)
            if all(places[d] == rank for group in axis.groups for rank, d in enumerate(group)):
                return axis
    return None


def _axis(mesh_name: str, mesh: DeviceMesh, name: str) -> RankAxis:
    return RankAxis(mesh_name, name, mesh_axes_groups(mesh, (AxisRef(name),)), mesh.size)


def _constant(value: ir.Value) -> NDArray[np.int32] | None:
    op = producer(value)
    if op is None or op.name not in CONSTANTS or len(shape_of(value)) != 3:
        return None
    if str(element_of(value)) != "i32" or shape_of(value)[2] != len(Column):
        return None
    attribute = value_of(op)
    assert attribute is not None, "constants of integers have a value"
    return np.array(ir.DenseElementsAttr(attribute), dtype=np.int32)


Entries = NDArray[np.int32]  # [ranks, ticks, columns]
_Work = tuple[int, int]  # a virtual stage and a microbatch
_Slots = list[list[_Work | None]]  # by rank


class ReadDirection(NamedTuple):
    """A direction that was read from a table; `sizes` are the layers of each virtual stage."""

    back: bool
    direction: Direction
    chunks: int
    microbatches: int
    sizes: tuple[int, ...]


class Joined(NamedTuple):
    """The tables of one direction, in forward order of their stacks, and their union."""

    tables: tuple[int, ...]
    entries: Entries


def join_tables(tables: Sequence[Entries]) -> list[Joined] | None:
    """Returns the tables of a loop, joined by direction; None if one has no direction.

    If several stacks of layers take turns, each has a table for each direction. Each counts its
    chunks and kept slots from 0. In the union they are renumbered: those of a stack follow those of
    the stacks before it.
    """
    if len(tables) <= 2:
        return [Joined((i,), table) for i, table in enumerate(tables)]
    ways: tuple[list[int], list[int]] = ([], [])
    for i, table in enumerate(tables):
        back = _ends_at_the_first(table)
        if back is None:
            return None
        ways[back].append(i)
    first = [int(np.nonzero(t[:, :, Column.RUNS].any(axis=0))[0][0]) for t in tables]  # tick
    ahead = sorted(ways[0], key=lambda i: first[i])
    back = sorted(ways[1], key=lambda i: -first[i])
    if len(ahead) != len(back):
        return None
    kept = [_count([tables[i], tables[j]], Column.KEPT) for i, j in zip(ahead, back, strict=True)]
    both = [_together([tables[i] for i in own], kept) for own in (ahead, back)]
    return [
        Joined(tuple(own), entries)
        for own, entries in zip((ahead, back), both, strict=True)
        if entries is not None
    ]


def _ends_at_the_first(table: Entries) -> bool | None:
    """Returns True for a backward table, in which microbatches leave on the first rank.

    False for a forward one; None for any other.
    """
    ends = set(np.nonzero(table[:, :, Column.ENDS])[0].tolist())
    if ends == {0}:
        return True
    return False if ends == {len(table) - 1} else None


def _count(tables: Sequence[Entries], column: Column) -> int:
    return 1 + max(int(table[..., column].max()) for table in tables)


def _together(tables: Sequence[Entries], kept: Sequence[int]) -> Entries | None:
    """Returns one table for stacks that take turns, in order; None if two run at once."""
    whole = np.zeros_like(tables[0])
    whole[..., Column.DELIVERY] = tables[0][..., Column.DELIVERY]
    chunks, layers = _count(tables, Column.CHUNK), 0
    back = _ends_at_the_first(tables[0])
    for stack, table in enumerate(tables):
        runs = table[:, :, Column.RUNS] == 1
        if whole[:, :, Column.RUNS][runs].any():
            return None
        rows = table[runs]
        rows[:, Column.ENDS] *= stack == (0 if back else len(tables) - 1)
        if not back and stack:
            rows[:, Column.RECEIVED] = 1  # of a link, which reads the result of the stack before
        rows[:, Column.CHUNK] += stack * chunks
        rows[:, Column.KEPT] += sum(kept[:stack])
        rows[:, Column.FIRST] += layers
        whole[runs] = rows
        layers += int((table[runs][:, Column.FIRST] + table[runs][:, Column.LAYERS]).max())
    return whole


def read_direction(entries: Entries, *, training: bool) -> ReadDirection | None:
    """Returns the direction that a table holds; None if its integers are not valid.

    Every rank must run each of its chunks once on each microbatch. Only the first virtual stage of
    a direction may read its input from outside. Chunks must be of consecutive layers. Without
    `training`, nothing is kept, and the column is ignored.
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
    return ReadDirection(back, _direction(entries, training=training), chunks, microbatches, sizes)


def _is_backward(rows: Entries, stage: NDArray[np.int64], last: int) -> bool | None:
    """Returns True if all rows are of a backward, False if of a forward, None if they disagree."""
    begins, ends = rows[:, Column.RECEIVED] == 0, rows[:, Column.ENDS] == 1
    for back, (first, final) in ((False, (0, last)), (True, (last, 0))):
        if np.array_equal(begins, stage == first) and np.array_equal(ends, stage == final):
            return back
    return None


def _sizes(rows: Entries, stage: NDArray[np.int64], stages: int) -> tuple[int, ...] | None:
    """Returns the layers of each virtual stage; None if rows disagree or layers are missing."""
    sizes, firsts = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    sizes[stage], firsts[stage] = rows[:, Column.LAYERS], rows[:, Column.FIRST]
    same = (sizes[stage] == rows[:, Column.LAYERS]) & (firsts[stage] == rows[:, Column.FIRST])
    follows = np.array_equal(firsts, np.cumsum(sizes) - sizes)
    if not same.all() or not follows or (sizes < 1).any():
        return None
    return tuple(int(size) for size in sizes)


def _direction(entries: Entries, *, training: bool) -> Direction:
    columns = entries.transpose(1, 0, 2).tolist()

    def cell_of(row: list[int]) -> TickCell | None:
        if not row[Column.RUNS]:
            return None
        source = row[Column.SOURCE] if row[Column.RECEIVED] else -1
        kept = row[Column.KEPT] if training else -1
        return TickCell(row[Column.CHUNK], row[Column.MICROBATCH], source, kept)

    cells = tuple(tuple(map(cell_of, column)) for column in columns)
    deliveries = tuple(tuple(row[Column.DELIVERY] for row in column) for column in columns)
    slots = 1 + int(max(entries[..., Column.SOURCE].max(), entries[..., Column.DELIVERY].max()))
    return Direction(cells, deliveries, slots)


def is_consistent(schedule: Lockstep) -> bool:
    """Returns True if each cell finds its input in the slot that it reads.

    By the rules of `schedules.lockstep`, a forward runs before the backward of the same tick. A
    value sent at the end of a tick can be read from the next tick on. Arrivals overwrite their
    slot.
    """
    players = [_Player(schedule, each, each is schedule.backward) for each in schedule.directions]
    kept: _Slots = [[None] * schedule.kept_slots for _ in range(schedule.ranks)]
    together = schedule.forward is not None and schedule.backward is not None
    for tick in range(schedule.ticks):
        for player in players:
            if not player.play(tick, kept if together else None):
                return False
    return True


class _Player:
    def __init__(self, schedule: Lockstep, direction: Direction, back: bool) -> None:
        self._ranks = schedule.ranks
        self._last = schedule.ranks * schedule.chunks - 1
        self._direction = direction
        self._back = back
        self._slots: _Slots = [[None] * direction.slots for _ in range(schedule.ranks)]

    def play(self, tick: int, kept: _Slots | None) -> bool:
        """Runs a column and delivers the sent values; returns True if all inputs were there."""
        sent: list[_Work | None] = [None] * self._ranks
        step = -1 if self._back else 1
        for rank, cell in enumerate(self._direction.cells[tick]):
            if cell is None:
                continue
            stage = cell.chunk * self._ranks + rank
            work = stage, cell.microbatch
            if cell.source < 0:
                has_input = stage == (self._last if self._back else 0)
            else:
                has_input = self._slots[rank][cell.source] == (stage - step, cell.microbatch)
            if not has_input:
                return False
            if kept is not None:  # a forward keeps the residual that its backward reads
                if not self._back:
                    kept[rank][cell.kept] = work
                elif kept[rank][cell.kept] != work:
                    return False
            sent[rank] = work
        for rank, slot in enumerate(self._direction.deliveries[tick]):
            self._slots[rank][slot] = sent[(rank - step) % self._ranks]
        return True


def schedule_of(directions: Sequence[ReadDirection], ranks: int) -> Lockstep | None:
    """Returns the schedule of one direction, or of a forward and a backward of the same chunks.

    None if they belong to different pipelines, or if values do not reach the cells that read them.
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
