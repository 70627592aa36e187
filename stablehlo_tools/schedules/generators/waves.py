"""Schedules of waves: a microbatch runs down and up its route without a pause, and back as it came.

All phases are thought to take one slot. A microbatch that starts in slot t runs stage s forward in
slot t + s and, of S stages, backward in slot t + 2S - 1 - s. On the routes below, microbatches of a
group that start two slots apart never meet on a rank, and neither do groups that start 2S slots
apart: the forwards of a group fill the slots that the backwards of the one before leave. Each rank
takes its phases in the order of their slots; how long they really take is the simulator's.

Chimera (Li and Hoefler, arXiv 2107.06925; github.com/Shigangli/Chimera) sends half of the
microbatches down the ranks and half up, in groups of p / 2 a direction. Longer batches follow by
its "direct concatenation"; its forward doubling and backward halving recompute, or halve
microbatches, and are not written here.

Hanayo (Liu et al., arXiv 2308.15762) goes down and up the ranks once a wave, with one copy of the
parameters, in groups of p. For one wave this is Chimera of 2p ranks, folded at the middle.
"""

from __future__ import annotations

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.table import (
    Action,
    Placement,
    Table,
    backward,
    bidirectional,
    forward,
    table_of,
    v_shape,
)

_APART = 2  # slots between two microbatches of a group


def chimera(ranks: int, microbatches: int) -> Table:
    """Even microbatches go down the ranks and odd ones up; each rank holds two stages' parameters.

    A rank holds p / 2 + 1 to p activations. Where a backward takes as long as a forward, the bubble
    is p - 2 of them, (p - 2)/(2m + p - 2) of the time, for m a multiple of p. Raises ToolError for
    an odd number of ranks, where the two directions would meet.
    """
    if ranks % 2:
        raise ToolError(
            f"chimera: {ranks} ranks; it takes an even number of ranks",
            instead=(f"ranks={ranks}", f"ranks={ranks + 1}"),
        )
    return _waves("chimera", bidirectional(ranks), microbatches, ranks // 2)


def hanayo(ranks: int, microbatches: int, chunks: int) -> Table:
    """Down the ranks and up again once for every two chunks: V / 2 waves.

    A rank holds at most pV activations, as much as p microbatches of its share. Where a backward
    takes as long as a forward, the bubble is 2(p - 1) of them, of one chunk each: (p - 1)/(mV + p -
    1) of the time, for m a multiple of p. Raises ToolError for an odd number of chunks.
    """
    if chunks % 2:
        raise ToolError(
            f"hanayo: {chunks} chunk{'s' * (chunks != 1)} a rank; it takes an even number of "
            "chunks, two a wave",
            instead=(f"chunks={chunks}", f"chunks={chunks + 1}"),
        )
    return _waves("hanayo", v_shape(ranks, chunks), microbatches, ranks)


def _waves(name: str, placement: Placement, microbatches: int, group: int) -> Table:
    """`group`: how many microbatches of a route follow each other two slots apart."""
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(placement.ranks)]
    for microbatch in range(microbatches):
        before, place = divmod(microbatch // len(placement.routes), group)
        start = 2 * placement.stages * before + _APART * place
        for stage in range(placement.stages):
            row = slots[placement.rank_of(stage, microbatch)]
            row.append((start + stage, forward(stage, microbatch)))
            row.append((start + 2 * placement.stages - 1 - stage, backward(stage, microbatch)))
    rows = [[action for _, action in sorted(row, key=lambda each: each[0])] for row in slots]
    return table_of(name, placement, microbatches, rows)
