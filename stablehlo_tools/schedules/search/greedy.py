"""List scheduling of a pipeline: every rank, whenever it is free, takes what is there.

Of what is there, a gradient or a forward that memory has room for goes first, as the `Priority`
says; a weight gradient runs where there is nothing else, or where it makes room. That suits tight
memory, where microbatches travel in waves and no fixed turns of forward and backward fit.

Memory cannot lead into a dead end: a rank starts a forward only if the oldest microbatch that has
forwards left there still finds room for all of them. All microbatches take the same room, so what
the oldest one gives back is enough for the next.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from stablehlo_tools.schedules.actions import Action, Kind
from stablehlo_tools.schedules.costs import Costs
from stablehlo_tools.schedules.placement import Placement
from stablehlo_tools.schedules.search.drafts import Draft

_ROUNDED = 1 + 1e-9  # sums of bytes may be off by as much


@dataclass(frozen=True)
class Priority:
    """Which of several steps that are there goes first.

    gradient: a gradient before a forward. deep: of forwards that of the latest stage, of gradients
    that of the earliest.
    """

    gradient: bool
    deep: bool


@dataclass(frozen=True)
class Greedy:
    """List scheduling on a placement of one route, within `room` bytes of activations a rank."""

    placement: Placement
    costs: Costs
    room: tuple[float, ...]
    priority: Priority

    def draft(self, microbatches: int) -> Draft | None:
        """The orders for so many microbatches; None where a rank cannot hold one."""
        for stages, room in zip(self.placement.held, self.room, strict=True):
            if sum(self.costs.activation[stage] for stage in stages) > room * _ROUNDED:
                return None
        run = _Greedy(self, microbatches)
        run.run()
        return Draft(self.placement, tuple(map(tuple, run.orders)))


def greedies(placement: Placement, costs: Costs, room: Sequence[float]) -> Iterator[Greedy]:
    """Every priority that makes a difference on a placement."""
    for gradient, deep in product((True, False), (True, False)):
        if deep or placement.chunks > 1:
            yield Greedy(placement, costs, tuple(room), Priority(gradient, deep))


class _Greedy:
    """The state of a run: what has come, what each rank holds, when it is free."""

    def __init__(self, asked: Greedy, microbatches: int) -> None:
        placement, self._priority = asked.placement, asked.priority
        ranks, stages = placement.ranks, placement.stages
        self._route = placement.routes[0]
        self._costs = asked.costs
        self._room = [part * _ROUNDED for part in asked.room]
        self._stages = [own[::-1] if self._priority.deep else own for own in placement.held]
        # Of each stage: when its next inputs come, in the order of microbatches.
        self._inputs: list[deque[float]] = [deque() for _ in range(stages)]
        self._returns: list[deque[float]] = [deque() for _ in range(stages)]
        self._inputs[0].extend([0.0] * microbatches)
        self._forwards = [0] * stages  # how many have been started
        self._gradients = [0] * stages
        self._pending: list[deque[int]] = [deque() for _ in range(ranks)]
        self._held = [0.0] * ranks
        self._free = [0.0] * ranks
        self._events = [(0.0, rank) for rank in range(ranks)]
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]

    def run(self) -> None:
        """Goes from event to event until nothing is left to do."""
        while self._events:
            now, rank = heapq.heappop(self._events)
            if self._free[rank] <= now:
                self._decide(rank, now)

    def _decide(self, rank: int, now: float) -> None:
        gradient = self._ready(self._returns, self._stages[rank][::-1], now)
        forward = self._ready(self._inputs, self._stages[rank], now)
        blocked = forward is not None and not self._has_room(rank, forward)
        if blocked and self._pending[rank] and gradient is None:
            self._weight_gradient(rank, now)
            return
        if blocked:
            forward = self._other_forward(rank, now)
        if gradient is not None and (self._priority.gradient or forward is None):
            self._run_gradient(rank, gradient, now)
        elif forward is not None:
            self._run_forward(rank, forward, now)
        elif self._pending[rank]:
            self._weight_gradient(rank, now)

    def _ready(self, data: list[deque[float]], stages: Sequence[int], now: float) -> int | None:
        for stage in stages:
            if data[stage] and data[stage][0] <= now:
                return stage
        return None

    def _other_forward(self, rank: int, now: float) -> int | None:
        """A forward that has room, though the one that would go first has none."""
        for stage in self._stages[rank]:
            come = self._inputs[stage] and self._inputs[stage][0] <= now
            if come and self._has_room(rank, stage):
                return stage
        return None

    def _has_room(self, rank: int, stage: int) -> bool:
        activation = self._costs.activation
        started = [(self._forwards[own], own) for own in self._stages[rank]]
        oldest = min(count for count, _ in started)
        reserved = 0.0
        if self._forwards[stage] != oldest:
            reserved = sum(activation[own] for count, own in started if count == oldest)
        return self._held[rank] + activation[stage] + reserved <= self._room[rank]

    def _run_forward(self, rank: int, stage: int, now: float) -> None:
        self._inputs[stage].popleft()
        end = now + self._costs.forward[stage]
        self.orders[rank].append(Action(Kind.FORWARD, stage, self._forwards[stage]))
        self._forwards[stage] += 1
        self._held[rank] += self._costs.activation[stage]
        if stage + 1 < len(self._route):
            self._hand_on(self._inputs, rank, stage + 1, end)
        else:
            self._hand_on(self._returns, rank, stage, end)
        self._busy(rank, end)

    def _run_gradient(self, rank: int, stage: int, now: float) -> None:
        self._returns[stage].popleft()
        end = now + self._costs.input_gradient[stage]
        self.orders[rank].append(Action(Kind.INPUT_GRADIENT, stage, self._gradients[stage]))
        self._gradients[stage] += 1
        self._held[rank] += self._costs.kept[stage] - self._costs.activation[stage]
        self._pending[rank].append(stage)
        if stage:
            self._hand_on(self._returns, rank, stage - 1, end)
        self._busy(rank, end)

    def _weight_gradient(self, rank: int, now: float) -> None:
        stage = self._pending[rank].popleft()
        self._held[rank] -= self._costs.kept[stage]
        self._busy(rank, now + self._costs.weight_gradient[stage])

    def _hand_on(self, data: list[deque[float]], rank: int, stage: int, made: float) -> None:
        receiver = self._route[stage]
        arrival = made if receiver == rank else made + self._costs.communication
        data[stage].append(arrival)
        if receiver != rank:
            heapq.heappush(self._events, (arrival, receiver))

    def _busy(self, rank: int, end: float) -> None:
        self._free[rank] = end
        heapq.heappush(self._events, (end, rank))
