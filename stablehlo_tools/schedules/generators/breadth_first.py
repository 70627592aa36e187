"""Looped schedules that go breadth first: all microbatches through one chunk, then the next."""

from __future__ import annotations

from stablehlo_tools.schedules.actions import backward, forward
from stablehlo_tools.schedules.generators.interleaved import visits
from stablehlo_tools.schedules.placement import loop
from stablehlo_tools.schedules.table import Table, table_of


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
