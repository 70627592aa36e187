"""DualPipe and DualPipeV: a forward and a backward overlap in every step of the steady state.

DualPipe (DeepSeek-V3, arXiv 2412.19437; github.com/deepseek-ai/DualPipe) runs two pipelines through
the same ranks in opposite directions; DualPipeV folds it at the middle, where rank r takes over
what ranks r and 2p - 1 - r did. To a rank both are alike: a near stage, which its microbatches
reach first, and a far one. Hence one list of phases writes either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.costs import Costs
from stablehlo_tools.schedules.simulator import simulate
from stablehlo_tools.schedules.table import (
    Action,
    Pair,
    Step,
    Table,
    backward,
    bidirectional,
    forward,
    input_gradient,
    table_of,
    v_shape,
    weight_gradient,
)


class _Phase(NamedTuple):
    """Moves that a rank repeats.

    A move is a forward F, a full backward B or an input gradient I of the near (n) or the far (f)
    stage; or W, the oldest weight gradient still to do. F&B are an overlapped pair.
    """

    times: int
    moves: tuple[str, ...]


def dualpipe(ranks: int, microbatches: int, overlapped: bool = True) -> Table:
    """Even microbatches go down the ranks and odd ones up.

    Each rank holds two stages' parameters and at most p + 1 activations. Of the makespan it idles
    (p/2 - 1)(F&B + B - 3W) at most, where F&B is the time of an overlapped pair and B of a full
    backward, if F = I >= W and F&B >= F + W, alike on all stages. Without `overlapped` every pair
    is a forward and then a backward. Raises ToolError but for an even number of ranks and an even
    number of microbatches of at least two a rank.
    """
    if ranks % 2 or microbatches % 2 or microbatches < 2 * ranks:
        raise ToolError(
            f"dualpipe: {ranks} ranks and {microbatches} microbatches; it takes an even number of "
            "ranks, and an even number of microbatches that is at least twice the ranks"
        )
    half = ranks // 2
    rows: list[list[Step]] = []
    for rank in range(ranks):
        near = min(rank, ranks - 1 - rank)
        routes = (0, 1) if rank < half else (1, 0)
        chunks = [_Chunk(near, routes[0], 2), _Chunk(ranks - 1 - near, routes[1], 2)]
        rows.append(_row(half, near, microbatches // 2, chunks, overlapped))
    return table_of("dualpipe", bidirectional(ranks), microbatches, rows)


def dualpipe_v(ranks: int, microbatches: int, overlapped: bool = True) -> Table:
    """Rank r holds stages r and 2p - 1 - r, and at most 2p + 1 activations of theirs.

    Of the makespan it idles (p - 1)(F&B + B - 3W) at most, of a stage's times and under the
    conditions of `dualpipe`. Raises ToolError for fewer than two microbatches a rank.
    """
    if microbatches < 2 * ranks:
        raise ToolError(
            f"dualpipe-v: {ranks} ranks and {microbatches} microbatches; it takes at least twice "
            f"as many microbatches as ranks, here {2 * ranks}"
        )
    rows = [
        _row(
            ranks,
            rank,
            microbatches,
            [_Chunk(rank, 0, 1), _Chunk(2 * ranks - 1 - rank, 0, 1)],
            overlapped,
        )
        for rank in range(ranks)
    ]
    return table_of("dualpipe-v", v_shape(ranks, 2), microbatches, rows)


def fastest(
    write: Callable[[int, int, bool], Table], ranks: int, microbatches: int, costs: Costs
) -> Table:
    """Of `dualpipe` or `dualpipe_v`, with or without pairs, the table of the lower makespan.

    A pair hands on its forward's activation only when its backward is done as well, so where
    overlapping saves little time the first and the last waves through the ranks are the later for
    it, and a forward before its backward is faster. On a tie the pairs stay.
    """
    tables = [write(ranks, microbatches, overlapped) for overlapped in (True, False)]
    return min(tables, key=lambda table: simulate(table, costs).makespan)


def _phases(half: int, near: int, microbatches: int) -> list[_Phase]:
    """The eight phases of a rank `near` ranks from its end of a pipeline of `half` such ranks.

    `microbatches` are those of each stage. From the middle rank, `half - 1 - near` ranks away, the
    far stage's forwards come; until then the rank fills up with near ones.
    """
    away = half - 1 - near
    steady = microbatches - 2 * half + near + 1
    # On the middle rank the first far backward needs the forward before it to be done.
    opening = ("nF", "fB") if away == 0 else ("nF&fB",)
    closing = [move for _ in range(near + 1) for move in ("fB", "nB")]
    split = near + 1  # the later half of the last backwards leave their weight gradients open
    closing[split:] = [move.replace("B", "I") for move in closing[split:]]
    return [
        _Phase(2 * away, ("nF",)),
        _Phase(near + 1, ("nF", "fF")),
        _Phase(away, ("fI", "W", "fF")),
        _Phase(1, (*opening, "fF&nB")),
        _Phase(steady - 1, ("nF&fB", "fF&nB")),
        _Phase(away, ("fB", "fF&nB")),
        _Phase(1, tuple(closing)),
        _Phase(away, ("W", "nI")),
        _Phase(near + 1, ("W",)),
    ]


class _Chunk:
    """A stage of a rank, whose microbatches run forward and backward in their order."""

    def __init__(self, stage: int, first: int, step: int) -> None:
        self.stage = stage
        self.forwards = count(first, step)
        self.backwards = count(first, step)


def _row(
    half: int, near: int, microbatches: int, chunks: Sequence[_Chunk], overlapped: bool
) -> list[Step]:
    row: list[Step] = []
    still: deque[tuple[int, int]] = deque()  # stage and microbatch of each weight gradient to do
    of = dict(zip("nf", chunks, strict=True))
    for times, moves in _phases(half, near, microbatches):
        for move in moves * times:
            steps = [_step(part, of, still) for part in move.split("&")]
            row += [Pair(*steps)] if overlapped and len(steps) > 1 else steps
    return row


def _step(move: str, of: dict[str, _Chunk], still: deque[tuple[int, int]]) -> Action:
    if move == "W":
        return weight_gradient(*still.popleft())
    chunk, what = of[move[0]], move[1]
    if what == "F":
        return forward(chunk.stage, next(chunk.forwards))
    microbatch = next(chunk.backwards)
    if what == "B":
        return backward(chunk.stage, microbatch)
    still.append((chunk.stage, microbatch))
    return input_gradient(chunk.stage, microbatch)
