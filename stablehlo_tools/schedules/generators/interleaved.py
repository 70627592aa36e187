"""Interleaved 1F1B (arXiv 2104.04473) for any number of microbatches.

Microbatches go round in groups: every rank runs its first chunk for a whole group, then its second,
and so on. A group of fewer than p would leave ranks waiting for its microbatches to come round, so
the m microbatches make m // p groups as even as they can be, each of p to 2p - 1.
"""

from __future__ import annotations

from stablehlo_tools.schedules.actions import Action, backward, forward
from stablehlo_tools.schedules.generators.one_f_one_b import alternating
from stablehlo_tools.schedules.placement import loop
from stablehlo_tools.schedules.table import Table, table_of

Visit = tuple[int, int]  # a stage and a microbatch


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
