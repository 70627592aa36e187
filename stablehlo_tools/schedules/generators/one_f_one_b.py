"""1F1B (PipeDream-Flush, arXiv 2006.09503), and its eager form."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.schedules.actions import Action, backward, forward
from stablehlo_tools.schedules.placement import loop
from stablehlo_tools.schedules.table import Table, table_of


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
