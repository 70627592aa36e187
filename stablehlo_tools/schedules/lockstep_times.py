"""The tick of every forward and backward where all ranks advance together.

Times are lists by rank and item; the item of a chunk for a microbatch is
`chunk * microbatches + microbatch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stablehlo_tools.schedules.actions import Action, Kind, actions_of
from stablehlo_tools.schedules.generators.interleaved import groups, interleaved_one_f_one_b
from stablehlo_tools.schedules.generators.one_f_one_b import one_f_one_b

Times = Sequence[Sequence[int]]  # [rank][item]: a tick


class Shape(NamedTuple):
    """How many of each: S ranks, V chunks a rank, M microbatches."""

    ranks: int
    chunks: int
    microbatches: int


def ticks_of(times: Times) -> int:
    """The number of ticks until the last item is done."""
    return 1 + max(map(max, times))


def mirrored(times: Times, microbatches: int) -> list[list[int]]:
    """The same with rank r for S - 1 - r and chunk c for V - 1 - c."""
    starts = range(len(times[0]) - microbatches, -1, -microbatches)
    return [
        [tick for start in starts for tick in own[start : start + microbatches]]
        for own in reversed(times)
    ]


def flow(shape: Shape, sizes: Iterable[int] | None = None) -> Times:
    """Forwards alone, in groups of microbatches that visit the chunks in turn.

    A group smaller than the ring, which must be the last, waits for its first to come round. The
    groups of interleaved 1F1B, which are taken if none are given, leave no rank waiting where
    M >= S.
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
    """Forwards and backwards side by side, each a flow, the backwards as early as they can be.

    The groups are S microbatches and a smaller one at the end, or as even as they can be: whichever
    ends first, and the former where both do, as its groups wait less.
    """
    whole, rest = divmod(shape.microbatches, shape.ranks)
    padded = [shape.ranks] * whole + [rest] * (rest > 0)
    even = groups(shape.ranks, shape.microbatches)
    pairs = [_both_ways(shape, sizes) for sizes in (padded, even)]
    return min(pairs, key=lambda pair: ticks_of(pair[1]))


def _both_ways(shape: Shape, sizes: Sequence[int]) -> tuple[Times, Times]:
    """A flow and its mirror image, which starts as soon as no backward precedes its forward."""
    forward = flow(shape, sizes)
    delay = (shape.chunks - 1) * max(shape.ranks, *sizes) + shape.ranks - 1
    backward = mirrored(forward, shape.microbatches)
    return forward, [[tick + delay for tick in own] for own in backward]


def in_turn(shape: Shape) -> tuple[Times, Times]:
    """1F1B, interleaved where there are chunks, a step in the first tick behind all that it needs.

    Gives the columns of `forms.aligned`, many times faster, as these steps need but one other.
    """
    ranks, chunks, microbatches = shape
    table = (
        one_f_one_b(ranks, microbatches)
        if chunks == 1
        else interleaved_one_f_one_b(ranks, microbatches, chunks)
    )
    last = ranks * chunks - 1
    rows = [_along_the_flow(actions_of(row), microbatches, last) for row in table.rows]
    made = _ticks_in_order(rows, (last + 1) * microbatches, microbatches)
    forward, backward = (_by_rank(each, shape) for each in made)
    return forward, mirrored(backward, microbatches)


class _Work(NamedTuple):
    back: bool
    place: int  # microbatch by microbatch, along the flow of its own direction


def _along_the_flow(actions: Iterable[Action], microbatches: int, last: int) -> list[_Work]:
    return [
        _Work(False, stage * microbatches + microbatch)
        if kind is Kind.FORWARD
        else _Work(True, (last - stage) * microbatches + microbatch)
        for kind, stage, microbatch in actions
    ]


def _ticks_in_order(
    rows: Sequence[Sequence[_Work]], count: int, microbatches: int
) -> tuple[list[int], list[int]]:
    """The ticks of forwards and backwards, both along their flow, each rank in its own order.

    A rank's order has each forward before its backward, so what a step waits for is its input.
    """
    never = 1 << 62
    outside = [-1] * microbatches  # what the first stage reads is there before the first tick
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


def _by_rank(ticks: Sequence[int], shape: Shape) -> list[list[int]]:
    """Ticks along the flow, by the position of the rank in it."""
    ranks, _, microbatches = shape
    starts = range(0, len(ticks), microbatches)
    return [
        [tick for start in starts[rank::ranks] for tick in ticks[start : start + microbatches]]
        for rank in range(ranks)
    ]
