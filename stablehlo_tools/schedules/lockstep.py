"""A schedule for one SPMD program: all ranks run one column per tick and permute around a ring.

After every tick each rank sends the result of its forward to the next rank, and that of its
backward to the previous one, even if no rank needs it. The last and the first rank are neighbours.
In a tick a rank runs its forward before its backward. Data sent at the end of a tick can be read
from the next tick on. An arrival may overwrite a slot that the same tick has read.

S ranks hold V chunks each, of M microbatches; the virtual stage is `chunk * S + rank`. First every
item of work is assigned a tick. Times are lists by rank and item; the item of a chunk and a
microbatch is `chunk * microbatches + microbatch`. Ranks and chunks are numbered along the flow of
the direction. Then buffers are assigned, as few as the overlap of their uses allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.generators.by_rule import (
    groups,
    interleaved_one_f_one_b,
    one_f_one_b,
)
from stablehlo_tools.schedules.table import ActionKind, actions_of

Times = Sequence[Sequence[int]]  # [rank][item]: a tick
NONE = -1


class Shape(NamedTuple):
    """The sizes of a schedule: S ranks, V chunks per rank, M microbatches."""

    ranks: int
    chunks: int
    microbatches: int


def ticks_of(times: Times) -> int:
    """The number of ticks until the last item is done."""
    return 1 + max(map(max, times))


def mirror_ticks(times: Times, microbatches: int) -> list[list[int]]:
    """Returns the ticks with rank r replaced by S - 1 - r and chunk c by V - 1 - c."""
    starts = range(len(times[0]) - microbatches, -1, -microbatches)
    return [
        [tick for start in starts for tick in own[start : start + microbatches]]
        for own in reversed(times)
    ]


def flow(shape: Shape, sizes: Iterable[int] | None = None) -> Times:
    """Returns the ticks of a forward-only schedule, in groups that visit the chunks in turn.

    `sizes` are the numbers of microbatches of the groups (default: those of interleaved 1F1B, with
    which no rank waits if M >= S). A group smaller than the ring must be the last; it waits until
    its first microbatch has passed around the ring.
    """
    ranks, chunks, microbatches = shape
    position = [0] * (chunks * microbatches)
    start = first = 0
    for size in groups(ranks, microbatches) if sizes is None else sizes:
        stride = max(size, ranks)
        for chunk in range(chunks):
            item = chunk * microbatches + first
            position[item : item + size] = range(start, start + size)
            start += stride
        first += size
    return [[tick + rank for tick in position] for rank in range(ranks)]


def side_by_side(shape: Shape) -> tuple[Times, Times]:
    """Returns the ticks of forwards and backwards that run in parallel, each as a `flow`.

    The backwards start as early as possible. The groups are S microbatches each and a smaller last
    one, or nearly equal. The variant that ends first is chosen; on a tie the former, because its
    groups wait less.
    """
    whole, rest = divmod(shape.microbatches, shape.ranks)
    padded = [shape.ranks] * whole + [rest] * (rest > 0)
    pairs: list[tuple[Times, Times]] = []
    for sizes in (padded, groups(shape.ranks, shape.microbatches)):
        forward = flow(shape, sizes)
        # The mirror image starts as soon as no backward precedes its forward.
        delay = (shape.chunks - 1) * max(shape.ranks, *sizes) + shape.ranks - 1
        backward = mirror_ticks(forward, shape.microbatches)
        pairs.append((forward, [[tick + delay for tick in own] for own in backward]))
    return min(pairs, key=lambda pair: ticks_of(pair[1]))


def in_turn(shape: Shape) -> tuple[Times, Times]:
    """Returns the ticks of 1F1B, interleaved if V > 1, each step as soon as its input is available.

    The result equals the columns of `explicit_tables.aligned`. It is much faster to compute,
    because each of these steps has only one input.
    """
    ranks, chunks, microbatches = shape
    table = (
        one_f_one_b(ranks, microbatches)
        if chunks == 1
        else interleaved_one_f_one_b(ranks, microbatches, chunks)
    )
    last = ranks * chunks - 1
    rows = [
        [
            (False, stage * microbatches + microbatch)
            if kind is ActionKind.FORWARD
            else (True, (last - stage) * microbatches + microbatch)
            for kind, stage, microbatch in actions_of(row)
        ]
        for row in table.rows
    ]
    made = _ticks_in_order(rows, (last + 1) * microbatches, microbatches)
    starts = range(0, (last + 1) * microbatches, microbatches)
    forward, backward = (  # by the position of the rank in the flow
        [
            [tick for start in starts[rank::ranks] for tick in ticks[start : start + microbatches]]
            for rank in range(ranks)
        ]
        for ticks in made
    )
    return forward, mirror_ticks(backward, microbatches)


# True for a backward, and its item, numbered along the flow of its own direction.
type _Work = tuple[bool, int]


def _ticks_in_order(
    rows: Sequence[Sequence[_Work]], count: int, microbatches: int
) -> tuple[list[int], list[int]]:
    """The ticks of forwards and backwards, both along their flow, each rank in its own order.

    A rank's order has each forward before its backward, so what a step waits for is its input.
    """
    never = 1 << 62
    outside = [-1] * microbatches  # inputs of the first stage are available before the first tick
    made = (outside + [never] * count, outside + [never] * count)
    done = [0] * len(rows)
    left = 2 * count
    tick = 0
    while left:
        for rank, row in enumerate(rows):
            if done[rank] == len(row):
                continue
            back, place = row[done[rank]]
            if made[back][place] < tick:
                made[back][place + microbatches] = tick
                done[rank] += 1
                left -= 1
        tick += 1
    return made[0][microbatches:], made[1][microbatches:]


class Received(NamedTuple):
    """The slots for the data of a direction, from the tick of arrival to the tick of the read."""

    sources: list[list[int]]  # [rank][item]: the slot it is read from; NONE for the first stage
    deliveries: list[list[int]]  # [rank][tick]: the slot for the arrival at the end of the tick
    slots: int


def assign_receive_slots(times: Times, ticks: int, microbatches: int) -> Received:
    """Assigns the receive slots of a direction: the same number on each rank, at least one.

    Colours the live intervals of a rank in the order of their starts, which is optimal: it needs as
    many colours as the most intervals that overlap. An arrival that is never read needs a slot only
    in the tick of its arrival.
    """
    sources: list[list[int]] = []
    deliveries: list[list[int]] = []
    slots = 1
    for rank, own in enumerate(times):
        step = 0 if rank else microbatches  # back at the first rank the next chunk begins
        arriving = [NONE] * ticks
        for item, tick in enumerate(times[rank - 1][: len(own) - step], step):
            arriving[tick] = item
        source = [NONE] * len(own)
        delivery: list[int] = []
        pool = _Pool()
        for read, arrived in zip(_by_tick(own, ticks), arriving, strict=True):
            if read != NONE and source[read] != NONE:
                pool.give_back(source[read])
            # Every rank permutes in every tick, so each arrival needs a slot, read or not.
            slot = pool.take()
            delivery.append(slot)
            if arrived == NONE:
                pool.give_back(slot)
            else:
                source[arrived] = slot
        sources.append(source)
        deliveries.append(delivery)
        slots = max(slots, pool.size)
    return Received(sources, deliveries, slots)


def kept(forward: Times, backward: Times, ticks: int) -> tuple[list[list[int]], int]:
    """The slot that holds each item of each rank from its forward to its backward, and how many.

    Both directions number ranks and chunks as the forward does. A tick runs its forward before its
    backward, so that a slot read in a tick is free for the forward of the next.
    """
    slots: list[list[int]] = []
    most = 0
    for ahead, back in zip(forward, backward, strict=True):
        own = [NONE] * len(ahead)
        pool = _Pool()
        for written, read in zip(_by_tick(ahead, ticks), _by_tick(back, ticks), strict=True):
            if written != NONE:
                own[written] = pool.take()
            if read != NONE:
                pool.give_back(own[read])
        slots.append(own)
        most = max(most, pool.size)
    return slots, most


def _by_tick(times: Sequence[int], ticks: int) -> list[int]:
    """Returns the item of each tick; NONE for a tick without one."""
    items = [NONE] * ticks
    for item, tick in enumerate(times):
        items[tick] = item
    return items


class _Pool:
    """A pool that allocates the lowest free slot, and a new one only if none is free."""

    def __init__(self) -> None:
        self.size = 0
        self._free: list[int] = []

    def take(self) -> int:
        if self._free:
            return heappop(self._free)
        self.size += 1
        return self.size - 1

    def give_back(self, slot: int) -> None:
        heappush(self._free, slot)


class TickCell(NamedTuple):
    """The work of a rank in one direction in one tick.

    `source` is the receive slot of its input. It is -1 at the first stage of the direction (virtual
    stage 0 of a forward, the last of a backward), whose input comes from outside. `kept` is the
    slot for the residuals from a forward to the backward of the same chunk and microbatch. It is
    the same in both cells, and -1 in a schedule of one direction.
    """

    chunk: int
    microbatch: int
    source: int
    kept: int


@dataclass(frozen=True)
class Direction:
    """The forwards or the backwards of all ranks, and their receive slots.

    `cells[tick][rank]` is None if the rank has no work in this direction. `deliveries[tick][rank]`
    is the slot for the data that arrive at the rank at the end of the tick. An arrival that is
    never read goes to a slot without live data.
    """

    cells: tuple[tuple[TickCell | None, ...], ...]
    deliveries: tuple[tuple[int, ...], ...]
    slots: int


@dataclass(frozen=True)
class Lockstep:
    """A schedule in columns; `kept_slots` is per rank, 0 if there is only one direction."""

    name: str
    ranks: int
    chunks: int
    microbatches: int
    forward: Direction | None
    backward: Direction | None
    kept_slots: int

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The existing directions, the forward first."""
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
    """Returns forwards only, in max(MV + S - 1, VS + M - 1) ticks, which is the minimum.

    A rank has MV forwards, and the last rank waits S - 1 ticks for its first. The last microbatch
    enters after M - 1 ticks and then passes VS stages. One receive slot suffices if V = 1, S
    divides M, or M < S. Raises ToolError if a count is below one.
    """
    shape = _check_shape(ranks, microbatches, chunks)
    times = flow(shape)
    forward = _direction(shape, times, ticks_of(times))
    return Lockstep(f"{_loop_name(chunks)}-forward", *shape, forward, None, 0)


def backward_lockstep(ranks: int, microbatches: int, chunks: int) -> Lockstep:
    """Returns backwards only: the forward schedule mirrored.

    Rank r has the work of rank S - 1 - r, and chunk c that of chunk V - 1 - c. Raises ToolError if
    a count is below one.
    """
    shape = _check_shape(ranks, microbatches, chunks)
    times = mirror_ticks(flow(shape), microbatches)
    backward = _direction(shape, times, ticks_of(times), back=True)
    return Lockstep(f"{_loop_name(chunks)}-backward", *shape, None, backward, 0)


def training_lockstep(ranks: int, microbatches: int, chunks: int, together: bool) -> Lockstep:
    """Returns 1F1B, interleaved if V > 1.

    Without `together`, a rank runs a forward or a backward in a tick, in the order of the
    schedule's generator. One chunk needs 2(M + S - 1) ticks and min(S, M) kept slots.

    With `together`, a rank runs up to one of each in a tick. The first backward follows VS - 1
    ticks of forwards, and the backwards run as long as `backward_lockstep`. The total is this sum
    if V = 1, S divides M or M < S, with min(MV, VS + S - 1) kept slots. Else it is up to
    (V - 1) min(S - M mod S, g - S) ticks more, where g is the largest group of interleaved 1F1B.
    Raises ToolError if a count is below one.
    """
    shape = _check_shape(ranks, microbatches, chunks)
    forward, backward = side_by_side(shape) if together else in_turn(shape)
    ticks = max(ticks_of(forward), ticks_of(backward))
    slots, count = kept(forward, backward, ticks)
    name = "eager-1f1b" if together else "1f1b"
    return Lockstep(
        name if chunks == 1 else f"interleaved-{name}",
        *shape,
        _direction(shape, forward, ticks, slots),
        _direction(shape, backward, ticks, slots, back=True),
        count,
    )


class StackTurns(NamedTuple):
    """The part of one stack of layers in a schedule of several stacks.

    It has its own chunks, counted from 0, and its own slots for residuals.
    """

    forward: Direction
    backward: Direction
    kept_slots: int


def turns_of(schedule: Lockstep, stacks: int) -> list[StackTurns]:
    """Splits a training schedule by `stacks` stacks of layers, which divide its chunks evenly.

    The first stack comes first. All stacks share the receive slots: `source` of a stack's first
    chunk is the slot of the previous stack's last chunk.
    """
    each = schedule.chunks // stacks
    return [
        _turns(schedule, range(first, first + each)) for first in range(0, schedule.chunks, each)
    ]


def _turns(schedule: Lockstep, chunks: range) -> StackTurns:
    """Returns the part of the stack with these chunks of the schedule."""

    def own(_: int, cell: TickCell) -> TickCell | None:
        inside = cell.chunk in chunks
        return cell._replace(chunk=cell.chunk - chunks.start) if inside else None

    ahead, back = (_change_cells(direction, own) for direction in schedule.directions)
    pools = [_Pool() for _ in ahead.cells[0]]
    slots: dict[tuple[int, int, int], int] = {}
    for column, other in zip(ahead.cells, back.cells, strict=True):
        for rank, cell in enumerate(column):
            if cell is not None:
                slots[rank, cell.chunk, cell.microbatch] = pools[rank].take()
        for rank, cell in enumerate(other):
            if cell is not None:
                pools[rank].give_back(slots[rank, cell.chunk, cell.microbatch])
    most = max(pool.size for pool in pools)

    def kept_in_slot(rank: int, cell: TickCell) -> TickCell:
        return cell._replace(kept=slots[rank, cell.chunk, cell.microbatch])

    return StackTurns(_change_cells(ahead, kept_in_slot), _change_cells(back, kept_in_slot), most)


def _change_cells(
    direction: Direction, change: Callable[[int, TickCell], TickCell | None]
) -> Direction:
    cells = tuple(
        tuple(None if cell is None else change(rank, cell) for rank, cell in enumerate(column))
        for column in direction.cells
    )
    return replace(direction, cells=cells)


def _check_shape(ranks: int, microbatches: int, chunks: int) -> Shape:
    for what, count in {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}.items():
        if count < 1:
            raise ToolError(f"a pipeline needs a positive number of {what}, not {count}")
    return Shape(ranks, chunks, microbatches)


def _loop_name(chunks: int) -> str:
    return "gpipe" if chunks == 1 else "circular"


def _direction(
    shape: Shape, times: Times, ticks: int, slots: Times | None = None, back: bool = False
) -> Direction:
    """The cells of a direction at their times, with the slots for what its ranks receive."""
    count = shape.microbatches
    inputs = assign_receive_slots(mirror_ticks(times, count) if back else times, ticks, count)
    sources = mirror_ticks(inputs.sources, count) if back else inputs.sources
    deliveries = inputs.deliveries[::-1] if back else inputs.deliveries
    rows: list[list[TickCell | None]] = []
    for rank, own in enumerate(times):
        row: list[TickCell | None] = [None] * ticks
        held = slots[rank] if slots is not None else [NONE] * len(own)
        for item, (tick, source, slot) in enumerate(zip(own, sources[rank], held, strict=True)):
            row[tick] = TickCell(*divmod(item, count), source, slot)
        rows.append(row)
    cells = tuple(zip(*rows, strict=True))
    return Direction(cells, tuple(zip(*deliveries, strict=True)), inputs.slots)
