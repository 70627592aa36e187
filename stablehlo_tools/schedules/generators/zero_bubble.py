"""Zero-bubble schedules by hand: ZB-H1, interleaved or not, and ZB-H2 (arXiv 2401.10241).

The backward is split. Input gradients keep the pipeline going; each rank puts its weight gradients
off, by as much as it got its first input gradient earlier than rank 0 does, and runs them at the
end, where 1F1B idles.
"""

from __future__ import annotations

from stablehlo_tools.schedules.actions import Action, forward, input_gradient, weight_gradient
from stablehlo_tools.schedules.generators.interleaved import Visit, groups, visits
from stablehlo_tools.schedules.placement import loop
from stablehlo_tools.schedules.table import Table, table_of


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
