"""A makespan that no schedule of a placement is below.

A full backward counts as an input gradient with its weight gradient right behind it, whichever is
cheaper, so that the bound holds for both. Each bound looks at one rank:

- it cannot start before a microbatch has reached it, and then has all its work to do;
- its last gradient has the way up to the first stage before it, and weight gradients that are put
  off until then must find room;
- before its first gradient it can only run forwards, as many as find room;
- each activation takes room until its gradient has come back, and part of it until the weight
  gradient: bytes x time of all of them fit into its room x the time that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stablehlo_tools.schedules.costs import Costs
from stablehlo_tools.schedules.table import Placement


def lower_bound(
    placement: Placement, microbatches: int, costs: Costs, room: Sequence[float] | None = None
) -> float:
    """The bound, in the unit of the costs; `room` is the bytes of activations of each rank."""
    work = _Work(placement, microbatches, costs)
    ranks = range(placement.ranks)
    rooms = [float("inf")] * placement.ranks if room is None else room
    bound = max(_of_rank(work, rank, rooms[rank]) for rank in ranks)
    return bound * min(1.0, costs.overlapped)  # a pair may take less than its parts


@dataclass(frozen=True)
class _Visit:
    """A stage of a route on a rank: its times, and those of the ways to and from it."""

    count: int  # microbatches that take the route
    forward: float
    gradient: float
    weights: float
    activation: float
    kept: float
    reached: float  # the earliest start of a forward
    returned: float  # the earliest start of a gradient
    left: float  # what follows the end of a gradient at least, on other stages

    @property
    def away(self) -> float:
        """The least time from the start of the forward to the end of the gradient."""
        return self.returned + self.gradient - self.reached

    @property
    def occupancy(self) -> float:
        """Bytes x time that one microbatch takes at least."""
        return self.activation * self.away + self.kept * self.weights


class _Work:
    """The visits of every rank."""

    def __init__(self, placement: Placement, microbatches: int, costs: Costs) -> None:
        self.visits: list[list[_Visit]] = [[] for _ in range(placement.ranks)]
        turns = len(placement.routes)
        for turn, route in enumerate(placement.routes):
            count = len(range(turn, microbatches, turns))
            if count:
                self._add(route, count, costs)

    def _add(self, route: Sequence[int], count: int, costs: Costs) -> None:
        stages = range(len(route))
        pairs = zip(costs.input_gradient, costs.backward, strict=True)
        gradients = [min(split, full) for split, full in pairs]
        weights = [
            max(0.0, min(gradients[s] + costs.weight_gradient[s], costs.backward[s]) - gradients[s])
            for s in stages
        ]
        hops = [costs.communication * (a != b) for a, b in pairwise(route)]
        reached, left = [0.0], [0.0]
        for stage in stages[1:]:
            reached.append(reached[-1] + costs.forward[stage - 1] + hops[stage - 1])
            left.append(left[-1] + gradients[stage - 1] + hops[stage - 1])
        end = reached[-1] + costs.forward[-1] + left[-1] + gradients[-1]
        for stage in stages:
            self.visits[route[stage]].append(
                _Visit(
                    count,
                    costs.forward[stage],
                    gradients[stage],
                    weights[stage],
                    costs.activation[stage],
                    min(costs.kept[stage], costs.activation[stage]),
                    reached[stage],
                    end - left[stage] - gradients[stage],
                    left[stage] + weights[0] if stage else 0.0,
                )
            )


def _of_rank(work: _Work, rank: int, room: float) -> float:
    visits = work.visits[rank]
    if not visits:
        return 0.0
    forwards = sum(visit.count * visit.forward for visit in visits)
    gradients = sum(visit.count * visit.gradient for visit in visits)
    weights = sum(visit.count * visit.weights for visit in visits)
    reached = min(visit.reached for visit in visits)
    returned = min(visit.returned for visit in visits)
    ahead = min(forwards, _most(room, [(v.forward, v.activation) for v in visits]))
    put_off = min(weights, _most(room, [(v.weights, v.kept) for v in visits]))
    forwards_done = max(reached + forwards, returned + forwards - ahead)
    left = min(visit.left for visit in visits)
    return max(
        forwards_done + gradients + max(weights, weights - put_off + left),
        reached + _least_stay(visits, room),
    )


def _least_stay(visits: list[_Visit], room: float) -> float:
    """The time that all activations need in the room: by their bytes, and by how many fit at once.

    Away is an activation whose gradient has not come back.
    """
    occupied = sum(visit.count * visit.occupancy for visit in visits)
    away = sum(visit.count * visit.away for visit in visits)
    at_once = _fitting(room, min(visit.activation for visit in visits))
    return max(occupied / room if room > 0 else 0.0, away / at_once if at_once else 0.0)


def _most(room: float, kinds: list[tuple[float, float]]) -> float:
    """The most time that work of these times and bytes can be in so many bytes."""
    if any(time and not size for time, size in kinds):
        return float("inf")
    by_bytes = max((room * time / size for time, size in kinds if size), default=0.0)
    by_number = _fitting(room, min(size for _, size in kinds)) * max(time for time, _ in kinds)
    return min(by_bytes, by_number)


def _fitting(room: float, size: float) -> float:
    """How many of a size fit; rounding does not cost one."""
    if not size or room == float("inf"):
        return float("inf")
    return float(int(max(0.0, room) * (1 + 1e-9) / size))
