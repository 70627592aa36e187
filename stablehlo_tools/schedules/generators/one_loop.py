"""Closed forms on the loop placement: GPipe, 1F1B, interleaved, breadth-first, circular and ZB-H.

Interleaved 1F1B is for any number of microbatches. They go round in groups: every rank runs its
first chunk for a whole group, then its second, and so on. A group of fewer than p would leave ranks
waiting for its microbatches to come round, so the m microbatches make m // p groups as even as they
can be, each of p to 2p - 1.

Zero-bubble schedules (arXiv 2401.10241) split the backward. Input gradients keep the pipeline
going; each rank puts its weight gradients off, by as much as it got its first input gradient
earlier than rank 0 does, and runs them at the end, where 1F1B idles.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.schedules.table import (
    Action,
    Table,
    backward,
    forward,
    input_gradient,
    loop,
    table_of,
    weight_gradient,
)

Visit = tuple[int, int]  # a stage and a microbatch


def gpipe(ranks: int, microbatches: int) -> Table:
    """Bubble (p - 1)(F + B); every activation of the batch is alive at once."""
    rows = [
        [forward(rank, i) for i in range(microbatches)]
        + [backward(rank, i) for i in range(microbatches)]
        for rank in range(ranks)
    ]
    return table_of("gpipe", loop(ranks), microbatches, rows)


def gpipe_but_1f1b_for_the_last(ranks: int, microbatches: int) -> Table:
    """GPipe, but the last rank runs each backward behind its forward.

    The times of GPipe; the last rank holds one activation.
    """
    last = [step(ranks - 1, i) for i in range(microbatches) for step in (forward, backward)]
    table = gpipe(ranks, microbatches)
    rows = [*table.rows[:-1], last]
    return table_of("gpipe-1f1b-last", table.placement, microbatches, rows)


def one_f_one_b(ranks: int, microbatches: int) -> Table:
    """Bubble (p - 1)(F + B); rank r holds at most p - r activations."""
    ahead = [ranks - rank for rank in range(ranks)]
    return _table("1f1b", ranks, microbatches, ahead)


def eager_one_f_one_b(ranks: int, microbatches: int) -> Table:
    """Forwards run ahead so far that a hop each way hides behind compute.

    Rank r holds at most 2(p - r) - 1 activations: the first step of the backward wave reaches it
    2(p - r) - 1 steps after its own first, so no rank waits for a transfer in between.
    """
    ahead = [2 * (ranks - rank) - 1 for rank in range(ranks)]
    return _table("eager-1f1b", ranks, microbatches, ahead)


def _table(name: str, ranks: int, microbatches: int, ahead: Sequence[int]) -> Table:
    rows = [
        alternating(
            [forward(rank, i) for i in range(microbatches)],
            [backward(rank, i) for i in range(microbatches)],
            ahead[rank],
        )
        for rank in range(ranks)
    ]
    return table_of(name, loop(ranks), microbatches, rows)


def alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> list[Action]:
    """`ahead` forwards, then a backward and a forward in turn, then the backwards left over.

    At most `ahead` activations are alive.
    """
    first = min(ahead, len(forwards))
    steady = zip(backwards, forwards[first:], strict=False)
    turns = [action for turn in steady for action in turn]
    return [*forwards[:first], *turns, *backwards[len(forwards) - first :]]


def interleaved_one_f_one_b(ranks: int, microbatches: int, chunks: int) -> Table:
    """Bubble (p - 1)(F + B) of a chunk, the least that m >= p microbatches can have.

    Rank r holds at most (v - 1)g + 2(p - 1 - r) + 1 activations, g the largest group; where p
    divides m, g is p.
    """
    largest = max(groups(ranks, microbatches))
    rows: list[list[Action]] = []
    for rank in range(ranks):
        forwards, backwards = visits(ranks, microbatches, chunks, rank)
        ahead = (chunks - 1) * largest + 2 * (ranks - 1 - rank) + 1
        rows.append(
            alternating(
                [forward(*visit) for visit in forwards],
                [backward(*visit) for visit in backwards],
                ahead,
            )
        )
    return table_of("interleaved-1f1b", loop(ranks, chunks), microbatches, rows)


def groups(ranks: int, microbatches: int) -> list[int]:
    """The sizes of the groups, as even as they can be, none below p where m is not."""
    count = max(1, microbatches // ranks)
    each, rest = divmod(microbatches, count)
    return [each + 1] * rest + [each] * (count - rest)


def visits(
    ranks: int, microbatches: int, chunks: int, rank: int, group: int | None = None
) -> tuple[list[Visit], list[Visit]]:
    """The forwards and the backwards of a rank in order, each a stage and a microbatch.

    `group` is the least number of microbatches in a group, p by default: fewer keep fewer
    activations alive, and leave ranks waiting.
    """
    forwards: list[Visit] = []
    backwards: list[Visit] = []
    stages = range(rank, ranks * chunks, ranks)
    first = 0
    for size in groups(ranks if group is None else group, microbatches):
        members = range(first, first + size)
        forwards += [(stage, i) for stage in stages for i in members]
        backwards += [(stage, i) for stage in reversed(stages) for i in members]
        first += size
    return forwards, backwards


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Table:
    """Breadth-first looped pipeline (arXiv 2211.05953): bubble (p - 1)(F + B) of a chunk.

    Each stage runs all microbatches in a row, which lets gathered weights be used once; every
    activation of the batch is alive at once.
    """
    batch = range(microbatches)
    rows = [
        [forward(stage, i) for stage in stages for i in batch]
        + [backward(stage, i) for stage in reversed(stages) for i in batch]
        for stages in (range(rank, ranks * chunks, ranks) for rank in range(ranks))
    ]
    return table_of("looped-bfs", loop(ranks, chunks), microbatches, rows)


def circular(ranks: int, microbatches: int, chunks: int, training: bool = True) -> Table:
    """The circular pipeline of one SPMD loop: groups go round the ranks, one hop an iteration.

    The bubble of the forward is (S - 1)/(mv + S - 1) with S = p. The backward is the loop run in
    reverse, as differentiation makes it, so every activation of the batch is alive at once. The
    table has the work; the loop itself sends on every iteration, work or none.
    """
    rows = []
    for rank in range(ranks):
        order, _ = visits(ranks, microbatches, chunks, rank)
        back = reversed(order) if training else ()
        rows.append([*(forward(*visit) for visit in order), *(backward(*visit) for visit in back)])
    name = "circular" if training else "circular-forward"
    return table_of(name, loop(ranks, chunks), microbatches, rows, training)


def zb_h1(ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """Bubble (p - 1)(F + I - W) of a chunk by END; p activations on every rank with one chunk.

    With v chunks the interleaved zero bubble of PyTorch: (v - 1)g + p activations, g the largest
    group, which is p where p divides m.
    """
    return _put_off("zb-h1", ranks, microbatches, chunks, 1)


def zb_h2(ranks: int, microbatches: int) -> Table:
    """Bubble (p - 1)(F + I - 2W) by SPAN; 2p - 1 activations on every rank."""
    return _put_off("zb-h2", ranks, microbatches, 1, 2)


def _put_off(name: str, ranks: int, microbatches: int, chunks: int, distance: int) -> Table:
    """`distance` more forwards ahead for each rank before the last, so many fewer put off."""
    largest = max(groups(ranks, microbatches))
    rows = [
        _row(
            *visits(ranks, microbatches, chunks, rank),
            ahead=(chunks - 1) * largest + distance * (ranks - 1 - rank),
            put_off=distance * rank,
        )
        for rank in range(ranks)
    ]
    return table_of(name, loop(ranks, chunks), microbatches, rows)


def _row(forwards: list[Visit], backwards: list[Visit], ahead: int, put_off: int) -> list[Action]:
    """`ahead` forwards, then forward and input gradient in turn, and `put_off` rounds later W."""
    row = [forward(*visit) for visit in forwards[:ahead]]
    for turn, visit in enumerate(backwards):
        if ahead + turn < len(forwards):
            row.append(forward(*forwards[ahead + turn]))
        row.append(input_gradient(*visit))
        if turn >= put_off:
            row.append(weight_gradient(*backwards[turn - put_off]))
    left = backwards[max(0, len(backwards) - put_off) :]
    return row + [weight_gradient(*visit) for visit in left]
