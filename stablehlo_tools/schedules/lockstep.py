"""A schedule as one SPMD program runs it: all ranks in lock step, a column a tick, a ring a hop.

After every tick each rank hands the result of its forward to the next rank and that of its backward
to the one before, the last and the first rank being neighbours, whether anyone needs it or not. In
a tick a rank runs its forward before its backward. What is sent at the end of a tick can be read
from the next tick on; what arrives may take the place of what that tick read.

S ranks hold V chunks each, of M microbatches; virtual stage `chunk * S + rank`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.lockstep_slots import NONE, kept, received
from stablehlo_tools.schedules.lockstep_times import (
    Shape,
    Times,
    flow,
    in_turn,
    mirrored,
    side_by_side,
    ticks_of,
)


class Cell(NamedTuple):
    """What a rank runs in one direction in one tick.

    `source` is the receive slot that its input lies in, or -1 at the first stage of the direction
    (virtual stage 0 of a forward, the last of a backward), whose input comes from outside. `kept`
    is the slot that holds what the forward leaves for the backward of the same chunk and
    microbatch, and is the same in both cells; -1 in a schedule of one direction.
    """

    chunk: int
    microbatch: int
    source: int
    kept: int


@dataclass(frozen=True)
class Direction:
    """The forwards or the backwards of all ranks, and the slots for what they receive.

    `cells[tick][rank]` is None where the rank has no work in this direction.
    `deliveries[tick][rank]` is the slot for what arrives at the rank at the end of the tick; an
    arrival that nobody needs goes to a slot that holds nothing alive.
    """

    cells: tuple[tuple[Cell | None, ...], ...]
    deliveries: tuple[tuple[int, ...], ...]
    slots: int


@dataclass(frozen=True)
class Lockstep:
    """A schedule in columns; `kept_slots` a rank, 0 where there is but one direction."""

    name: str
    ranks: int
    chunks: int
    microbatches: int
    forward: Direction | None
    backward: Direction | None
    kept_slots: int

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The directions that there are, the forward first."""
        return tuple(each for each in (self.forward, self.backward) if each is not None)

    @property
    def ticks(self) -> int:
        """The number of columns."""
        return len(self.directions[0].cells)

    def busy(self, rank: int) -> int:
        """The number of ticks in which the rank has any work."""
        columns = zip(*(each.cells for each in self.directions), strict=True)
        return sum(any(cells[rank] is not None for cells in column) for column in columns)


def forward_lockstep(ranks: int, microbatches: int, chunks: int) -> Lockstep:
    """Forwards only, in max(MV + S - 1, VS + M - 1) ticks, the least there can be.

    A rank has MV forwards, and the last rank waits S - 1 ticks for its first; the last microbatch
    enters after M - 1 ticks, and then passes VS stages. One receive slot suffices where V = 1, S
    divides M, or M < S. Raises ToolError where a count is below one.
    """
    shape = _checked(ranks, microbatches, chunks)
    times = flow(shape)
    forward = _direction(shape, times, ticks_of(times))
    return Lockstep(f"{_looped(chunks)}-forward", *shape, forward, None, 0)


def backward_lockstep(ranks: int, microbatches: int, chunks: int) -> Lockstep:
    """Backwards only: the forward with rank r for S - 1 - r and chunk c for V - 1 - c.

    Raises ToolError where a count is below one.
    """
    shape = _checked(ranks, microbatches, chunks)
    times = mirrored(flow(shape), microbatches)
    backward = _direction(shape, times, ticks_of(times), back=True)
    return Lockstep(f"{_looped(chunks)}-backward", *shape, None, backward, 0)


def training_lockstep(ranks: int, microbatches: int, chunks: int, together: bool) -> Lockstep:
    """1F1B, interleaved where there are several chunks a rank.

    Not `together`, a rank runs a forward or a backward in a tick, in the order of the schedule's
    generator: 2(M + S - 1) ticks and min(S, M) kept slots for one chunk.

    `together`, it runs up to one of each. The first backward follows VS - 1 ticks of forwards, and
    the backwards take as long as `backward_lockstep`. The sum is reached where V = 1, S divides M
    or M < S, with min(MV, VS + S - 1) kept slots; else it takes up to
    (V - 1) min(S - M mod S, g - S) ticks more, g the largest group of interleaved 1F1B.
    Raises ToolError where a count is below one.
    """
    shape = _checked(ranks, microbatches, chunks)
    forward, backward = side_by_side(shape) if together else in_turn(shape)
    ticks = max(ticks_of(forward), ticks_of(backward))
    slots, count = kept(forward, backward, ticks)
    name = "1f1b" if chunks == 1 else "interleaved-1f1b"
    return Lockstep(
        f"{name}-together" if together else name,
        *shape,
        _direction(shape, forward, ticks, slots),
        _direction(shape, backward, ticks, slots, back=True),
        count,
    )


def _checked(ranks: int, microbatches: int, chunks: int) -> Shape:
    counts = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
    for what, count in counts.items():
        if count < 1:
            raise ToolError(f"a pipeline needs a positive number of {what}, not {count}")
    return Shape(ranks, chunks, microbatches)


def _looped(chunks: int) -> str:
    return "gpipe" if chunks == 1 else "circular"


def _direction(
    shape: Shape, times: Times, ticks: int, slots: Times | None = None, back: bool = False
) -> Direction:
    """The cells of a direction at their times, with the slots for what its ranks receive."""
    count = shape.microbatches
    inputs = received(mirrored(times, count) if back else times, ticks, count)
    sources = mirrored(inputs.sources, count) if back else inputs.sources
    deliveries = inputs.deliveries[::-1] if back else inputs.deliveries
    rows: list[list[Cell | None]] = []
    for rank, own in enumerate(times):
        row: list[Cell | None] = [None] * ticks
        held = slots[rank] if slots is not None else [NONE] * len(own)
        for item, (tick, source, slot) in enumerate(zip(own, sources[rank], held, strict=True)):
            row[tick] = Cell(*divmod(item, count), source, slot)
        rows.append(row)
    cells = tuple(zip(*rows, strict=True))
    return Direction(cells, tuple(zip(*deliveries, strict=True)), inputs.slots)
