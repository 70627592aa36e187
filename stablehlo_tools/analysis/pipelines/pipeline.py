"""What is known of a pipeline that stands in a module: its name, and how much of it is bubble."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.pipelines.rank_tables import MeshAxis
from stablehlo_tools.analysis.pipelines.tick_loops import Holdings
from stablehlo_tools.bindings import ir
from stablehlo_tools.schedules.lockstep import Cell, Lockstep

Iterations = NDArray[np.int32]  # [ranks, ticks]: layers that a rank runs in a tick
CUSTOM = "custom"
LEAST_OF_ONE = "(S - 1) / (MV + S - 1)"
LEAST_OF_BOTH = "(VS + S - 2) / (MV + VS + S - 2)"


@dataclass(frozen=True)
class Phase:
    """One direction of a pipeline in the program.

    `layers` are the loops over a chunk's layers, one for each stack of layers, the first in front;
    `iterations` how many of them a rank runs in each tick, those on garbage among them. Bytes are
    of a rank: of `sent` a tick, of `received` slots.
    """

    back: bool
    layers: tuple[ir.Operation, ...]
    iterations: tuple[Iterations, ...]
    permutes: tuple[ir.Operation, ...]
    sent: int
    received: int
    held: Holdings


@dataclass(frozen=True)
class Pipeline:
    """A pipeline as it stands in a module.

    `schedule` is what its tables say. `devices` hold what is said of one rank: several where other
    axes of the mesh are left to a partitioner. `sizes` are the layers of each virtual stage; `kept`
    the bytes that forwards keep for backwards; `finals` the reductions over the ranks at the end.
    """

    loop: ir.Operation
    axis: MeshAxis
    devices: int
    schedule: Lockstep
    sizes: tuple[int, ...]
    phases: tuple[Phase, ...]
    kept: int
    finals: tuple[Collective, ...]

    @property
    def weights(self) -> int:
        """Bytes of the weights that a rank holds."""
        stacks: dict[ir.Value, int] = {}
        for phase in self.phases:
            stacks.update(phase.held.weights)
        return sum(stacks.values())

    @property
    def skips(self) -> bool:
        """Whether a rank without work runs no layers."""
        directions = zip(self.phases, self.schedule.directions, strict=True)
        return all(
            not any(each[rank, tick] for each in phase.iterations)
            for phase, direction in directions
            for tick, column in enumerate(direction.cells)
            for rank, cell in enumerate(column)
            if cell is None
        )


class Bubble(NamedTuple):
    """The cells of a schedule, those that run, and the least share of idle ones.

    A cell is a rank's tick, and half a one where a tick has a forward and a backward; a half that
    all ranks leave out is none. `formula` is in S ranks, V chunks a rank and M microbatches;
    `closed_form` is what it comes to.
    """

    cells: int
    run: int
    formula: str
    closed_form: float

    @property
    def share(self) -> float:
        """The share of the cells that do not run."""
        return 1 - self.run / self.cells


def bubble_of(schedule: Lockstep, *, skips: bool) -> Bubble:
    """Counts the idle cells of a schedule; with `skips`, what no rank runs in a tick is no cell.

    The closed form is that of GPipe for one direction, (S - 1) / (M + S - 1) with V = 1
    (arXiv 1811.06965, section 2.3); chunks divide the bubble by V (arXiv 2104.04473, section 2.2),
    and a 1F1B that runs a forward or a backward in a tick has the same: 2MV of 2(MV + S - 1) ticks.
    Where M < S, chunks cannot be interleaved so closely, and where S does not divide M, 1F1B cannot
    always. With a forward and a backward in one tick, the first backward follows VS - 1 ticks of
    forwards, and the backwards take MV + S - 1 ticks; where ticks of one kind alone are half as
    long, there are 2(MV + S - 1) halves.
    """
    run = sum(cell is not None for column in _columns(schedule) for cell in column)
    ranks, chunks, microbatches = schedule.ranks, schedule.chunks, schedule.microbatches
    cells, work = ranks * schedule.ticks, microbatches * chunks
    together = is_together(schedule)
    if together and skips:
        halves = (any(cell is not None for cell in column) for column in _columns(schedule))
        cells = ranks * sum(halves)
    if not together or skips:
        idle = ranks - 1
        return Bubble(cells, run, LEAST_OF_ONE, idle / (work + idle))
    idle = chunks * ranks + ranks - 2
    return Bubble(2 * cells, run, LEAST_OF_BOTH, idle / (work + idle))


def _columns(schedule: Lockstep) -> Iterator[Sequence[Cell | None]]:
    """The cells of each tick, of each direction."""
    for direction in schedule.directions:
        yield from direction.cells


def is_together(schedule: Lockstep) -> bool:
    """Whether any rank runs a forward and a backward in one tick."""
    if schedule.forward is None or schedule.backward is None:
        return False
    columns = zip(schedule.forward.cells, schedule.backward.cells, strict=True)
    return any(
        ahead is not None and back is not None
        for column in columns
        for ahead, back in zip(*column, strict=True)
    )


def schedule_name(schedule: Lockstep) -> str:
    """`gpipe`, `circular`, `1f1b`, `eager-1f1b`, `interleaved-` of both, or `custom`.

    One direction is GPipe with one chunk a rank, circular with several. Both in one loop are 1F1B
    where the last rank runs the first backward as soon as it can, and then one forward, one
    backward; eager where ranks do so in one tick.
    """
    interleaved = schedule.chunks > 1
    if len(schedule.directions) == 1:
        return "circular" if interleaved else "gpipe"
    if not _alternates(schedule):
        return CUSTOM
    name = "eager-1f1b" if is_together(schedule) else "1f1b"
    return f"interleaved-{name}" if interleaved else name


def _alternates(schedule: Lockstep) -> bool:
    """Whether the last rank goes on to backwards after its first microbatch, and from then on runs
    no two forwards in a row."""
    assert schedule.forward is not None
    assert schedule.backward is not None
    last = schedule.ranks - 1
    steps: list[tuple[bool, Cell]] = []
    for ahead, back in zip(schedule.forward.cells, schedule.backward.cells, strict=True):
        cells = ((False, ahead[last]), (True, back[last]))
        steps += [(is_back, cell) for is_back, cell in cells if cell is not None]
    final = schedule.chunks - 1
    first = next(at for at, (_, cell) in enumerate(steps) if cell.chunk == final)
    turns = [is_back for is_back, _ in steps[first:]]
    before, after = steps[first][1], steps[first + 1][1]
    own = (before.chunk, before.microbatch) == (after.chunk, after.microbatch)
    return own and all(one or other for one, other in pairwise(turns))
