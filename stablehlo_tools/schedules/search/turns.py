"""Orders in which, after a warm-up, forwards and gradients take turns, on a loop placement.

One number a rank makes such an order: the forwards that run before its first gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stablehlo_tools.schedules.actions import Action, backward, forward, input_gradient
from stablehlo_tools.schedules.costs import Costs
from stablehlo_tools.schedules.generators.interleaved import groups, visits
from stablehlo_tools.schedules.generators.one_f_one_b import alternating
from stablehlo_tools.schedules.placement import loop
from stablehlo_tools.schedules.search.drafts import Draft

_DELAYS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)  # of a forward's time: how late the first gradient
_STEEPNESS = (1, 2, 3, 0)  # forwards ahead for each rank before the last


@dataclass(frozen=True)
class Turns:
    """Chunks a rank, least microbatches a group, forwards ahead by rank, and whether to split."""

    chunks: int
    group: int
    ahead: tuple[int, ...]
    split: bool = True

    def draft(self, microbatches: int) -> Draft:
        """The orders for so many microbatches."""
        ranks = len(self.ahead)
        gradient = input_gradient if self.split else backward
        orders: list[tuple[Action, ...]] = []
        for rank, ahead in enumerate(self.ahead):
            order = visits(ranks, microbatches, self.chunks, rank, self.group)
            forwards = [forward(*visit) for visit in order[0]]
            gradients = [gradient(*visit) for visit in order[1]]
            orders.append(tuple(alternating(forwards, gradients, ahead)))
        return Draft(loop(ranks, self.chunks), tuple(orders))


def turns(
    ranks: int,
    microbatches: int,
    chunks: int,
    costs: Costs,
    room: Sequence[float],
    split: bool = True,
) -> Iterator[Turns]:
    """Turns worth a try; with several chunks also in smaller groups, which need less memory."""
    if chunks == 1:
        for ahead in warm_ups(ranks, microbatches, costs, room):
            yield Turns(1, ranks, ahead, split)
        return
    for group in sorted({ranks, max(1, ranks // 2), 1}, reverse=True):
        least = (chunks - 1) * max(groups(group, microbatches)) + 1
        for steepness in _STEEPNESS:
            ahead = tuple(least + steepness * (ranks - 1 - rank) for rank in range(ranks))
            yield Turns(chunks, group, ahead, split)


def warm_ups(
    ranks: int, microbatches: int, costs: Costs, room: Sequence[float]
) -> list[tuple[int, ...]]:
    """Forwards ahead by rank, with one stage a rank.

    As many as memory holds and as end before the first gradient comes, or somewhat later. Each rank
    runs more than the next one, else the next would wait for its forwards.
    """
    found = {_warm_up(ranks, microbatches, costs, room, delay): None for delay in _DELAYS}
    pairs = zip(room, costs.activation, strict=True)
    most = [int(min(microbatches, part / size)) if size else microbatches for part, size in pairs]
    for steepness in _STEEPNESS:
        to_last = (1 + steepness * (ranks - 1 - rank) for rank in range(ranks))
        found[tuple(max(1, min(both)) for both in zip(most, to_last, strict=True))] = None
    return [*found]


def _warm_up(
    ranks: int, microbatches: int, costs: Costs, room: Sequence[float], delay: float
) -> tuple[int, ...]:
    ahead = [1] * ranks
    begins = [0.0]
    for stage in range(ranks - 1):
        begins.append(begins[-1] + costs.forward[stage] + costs.communication)
    gradient = 0.0  # when the first input gradient of the rank behind is made
    for rank in reversed(range(ranks)):
        time = costs.forward[rank]
        clock = begins[rank] + time
        arrival = gradient + costs.communication if rank + 1 < ranks else clock
        held = costs.activation[rank]
        while (
            ahead[rank] < microbatches
            and held + costs.activation[rank] <= room[rank]
            and clock + time <= arrival + delay * time
        ):
            ahead[rank] += 1
            clock += time
            held += costs.activation[rank]
        gradient = max(clock, arrival) + costs.input_gradient[rank]
    for rank in range(1, ranks):
        ahead[rank] = min(ahead[rank], max(1, ahead[rank - 1] - 1))
    return tuple(ahead)
