"""Schedules of slices of sequences: 1F1B whose unit is a part of a microbatch's tokens.

Under causal attention a slice reads keys and values of the slices before it, which lie on the rank
of the stage: forwards of a microbatch run from its first slice to its last, gradients from its last
to its first. A rank is so many slices ahead that the last forward of a microbatch, not its first,
begins its backwards. The slices are thought to take equal times. Seq1F1B (Sun et al., arXiv
2406.03488) cuts them so that they do; SlimPipe (Li et al., arXiv 2504.14519) cuts them at equal
lengths, and lets ranks exchange parts of their attention, which is inside of a phase and no part of
an order.
"""

from __future__ import annotations

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.generators.by_rule import Visit, alternating
from stablehlo_tools.schedules.table import Table, backward, forward, loop, table_of


def seq1f1b(ranks: int, microbatches: int, slices: int) -> Table:
    """Bubble (p - 1)(F + B) of a slice; rank r holds at most k + p - 1 - r slices, k a microbatch.

    Its warm-up of p - r - 2 + k slices is as in Sea AI Lab's zero-bubble-pipeline-parallelism
    (zerobubble/scheduler/seq1f1b.py). With one slice it is 1F1B.
    """
    return _sliced("seq1f1b", ranks, microbatches, slices, 1, 1)


def slimpipe(ranks: int, microbatches: int, slices: int, chunks: int = 1) -> Table:
    """Bubble (p - 1)(F + B) of a slice on a chunk.

    Rank r holds at most vk + 2(p - 1 - r) slices of its v chunks, where a microbatch is vk: two
    more for every hop to the last rank, so that transfers both ways hide behind compute. Raises
    ToolError for several chunks and fewer slices than ranks, where some would wait for ever.
    """
    if chunks > 1 and slices < ranks:
        raise ToolError(
            f"slimpipe: {chunks} chunks a rank and {slices} slices of {ranks} ranks; with more "
            "than one chunk it takes at least as many slices as ranks"
        )
    return _sliced("slimpipe", ranks, microbatches, slices, chunks, 2)


def _sliced(
    name: str, ranks: int, microbatches: int, slices: int, chunks: int, each_hop: int
) -> Table:
    """`each_hop`: how many slices a rank is ahead of the next one."""
    rows = []
    for rank in range(ranks):
        forwards: list[Visit] = []
        backwards: list[Visit] = []
        for first in range(0, microbatches * slices, slices):
            stages = range(rank, ranks * chunks, ranks)
            visits = [(stage, first + part) for stage in stages for part in range(slices)]
            forwards += visits
            backwards += reversed(visits)
        rows.append(
            alternating(
                [forward(*visit) for visit in forwards],
                [backward(*visit) for visit in backwards],
                chunks * slices + each_hop * (ranks - 1 - rank),
            )
        )
    units = microbatches * slices
    return table_of(name, loop(ranks, chunks), units, rows, sequence_slices=slices)
