"""GPipe: every forward, then every backward (arXiv 1811.06965)."""

from __future__ import annotations

from stablehlo_tools.schedules.actions import backward, forward
from stablehlo_tools.schedules.placement import loop
from stablehlo_tools.schedules.table import Table, table_of


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
