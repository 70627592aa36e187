"""Orders of forwards and gradients, to be filled with weight gradients: `GreedyScheduler` and
`OrderTurns`.

`GreedyScheduler` is list scheduling: whenever a rank is free, it runs a step that is ready. Its
flags decide if a gradient or a forward that fits in memory comes first. A weight gradient runs if
no other step is ready, or if it frees memory. That suits tight memory: microbatches then travel in
waves, and no fixed alternation of forward and backward fits. Memory cannot cause a deadlock: a rank
starts a forward only if enough remains for all other forwards there of the oldest microbatch. All
microbatches need the same memory, so the memory that the oldest frees suffices for the next.

`OrderTurns` runs a number of forwards ahead on each rank of a loop placement, and then alternates
forwards and gradients.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from stablehlo_tools.schedules.generators.by_rule import alternate, groups, visits
from stablehlo_tools.schedules.setting import Costs
from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    Placement,
    Table,
    actions_of,
    backward,
    forward,
    input_gradient,
    loop,
    table_of,
)

_ROUNDED = 1 + 1e-9  # sums of bytes may be off by as much
_DELAYS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)  # delays of the first gradient, in forwards' times
_STEEPNESS = (1, 2, 3, 0)  # forwards ahead for each rank before the last


@dataclass(frozen=True)
class OrderDraft:
    """The forwards and the input (or full) gradients of every rank, in order."""

    placement: Placement
    orders: tuple[tuple[Action, ...], ...]

    @property
    def actions(self) -> int:
        """The number of actions, which determines the cost of filling."""
        return sum(map(len, self.orders))


def draft_from_table(table: Table) -> OrderDraft:
    """The order of a table's forwards and gradients, every gradient split."""
    orders = tuple(
        tuple(
            convert_gradient(action, full=False)
            for action in actions_of(row)
            if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
        )
        for row in table.rows
    )
    return OrderDraft(table.placement, orders)


def one_at_a_time(placement: Placement, microbatches: int) -> Table:
    """Returns an order with each microbatch complete before the next: the least possible memory."""
    route = placement.routes[0]
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for i in range(microbatches):
        for stage, rank in enumerate(route):
            rows[rank].append(forward(stage, i))
        for stage, rank in reversed(list(enumerate(route))):
            rows[rank].append(backward(stage, i))
    return table_of("one at a time", placement, microbatches, rows)


def merge_gradients(draft: OrderDraft, microbatches: int, split: int) -> OrderDraft:
    """Returns the draft with full gradients, except for the last `split` microbatches."""
    orders = tuple(
        tuple(
            convert_gradient(action, action.microbatch < microbatches - split) for action in order
        )
        for order in draft.orders
    )
    return OrderDraft(draft.placement, orders)


def convert_gradient(action: Action, full: bool) -> Action:
    """The action, with a gradient made full or the input's only."""
    if action.kind is ActionKind.FORWARD:
        return action
    return Action(ActionKind.BACKWARD if full else ActionKind.INPUT_GRADIENT, *action[1:])


@dataclass(frozen=True)
class GreedyScheduler:
    """List scheduling on a placement with one route, within `room` bytes of activations per rank.

    If several steps are ready, `gradient` prefers gradients to forwards. `deep` prefers the
    forwards of later stages and the gradients of earlier ones.
    """

    placement: Placement
    costs: Costs
    room: tuple[float, ...]
    gradient: bool
    deep: bool

    def draft(self, microbatches: int) -> OrderDraft | None:
        """Returns the orders for so many microbatches; None if a rank cannot hold one."""
        for stages, room in zip(self.placement.held, self.room, strict=True):
            if sum(self.costs.activation[stage] for stage in stages) > room * _ROUNDED:
                return None
        run = _GreedyRun(self, microbatches)
        run.run()
        return OrderDraft(self.placement, tuple(map(tuple, run.orders)))


def greedies(
    placement: Placement, costs: Costs, room: Sequence[float]
) -> Iterator[GreedyScheduler]:
    """Yields `GreedyScheduler` with every combination of flags that matters on a placement."""
    for gradient, deep in product((True, False), (True, False)):
        if deep or placement.chunks > 1:
            yield GreedyScheduler(placement, costs, tuple(room), gradient, deep)


class _GreedyRun:
    """The state of a run: arrived inputs, and each rank's memory and time when it is free."""

    def __init__(self, asked: GreedyScheduler, microbatches: int) -> None:
        placement, self._gradient_first = asked.placement, asked.gradient
        ranks, stages = placement.ranks, placement.stages
        self._route = placement.routes[0]
        self._costs = asked.costs
        self._room = [part * _ROUNDED for part in asked.room]
        self._stages = [own[::-1] if asked.deep else own for own in placement.held]
        # The arrival times of each stage's next inputs, in the order of microbatches.
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
        """Processes the events in the order of their times."""
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
            # Another stage may have memory left even if the preferred one has none.
            inputs = self._inputs
            come = (own for own in self._stages[rank] if inputs[own] and inputs[own][0] <= now)
            forward = next((own for own in come if self._has_room(rank, own)), None)
        if gradient is not None and (self._gradient_first or forward is None):
            self._run_gradient(rank, gradient, now)
        elif forward is not None:
            self._inputs[forward].popleft()
            end = now + self._costs.forward[forward]
            self.orders[rank].append(Action(ActionKind.FORWARD, forward, self._forwards[forward]))
            self._forwards[forward] += 1
            self._held[rank] += self._costs.activation[forward]
            if forward + 1 < len(self._route):
                self._hand_on(self._inputs, rank, forward + 1, end)
            else:
                self._hand_on(self._returns, rank, forward, end)
            self._busy(rank, end)
        elif self._pending[rank]:
            self._weight_gradient(rank, now)

    def _ready(self, data: list[deque[float]], stages: Sequence[int], now: float) -> int | None:
        for stage in stages:
            if data[stage] and data[stage][0] <= now:
                return stage
        return None

    def _has_room(self, rank: int, stage: int) -> bool:
        activation = self._costs.activation
        started = [(self._forwards[own], own) for own in self._stages[rank]]
        # Reserves memory for the stages of a rank that are behind the others in microbatches.
        # Otherwise stages that are ahead could use it, and other ranks would wait forever.
        oldest = min(count for count, _ in started)
        reserved = 0.0
        if self._forwards[stage] != oldest:
            reserved = sum(activation[own] for count, own in started if count == oldest)
        return self._held[rank] + activation[stage] + reserved <= self._room[rank]

    def _run_gradient(self, rank: int, stage: int, now: float) -> None:
        self._returns[stage].popleft()
        end = now + self._costs.input_gradient[stage]
        self.orders[rank].append(Action(ActionKind.INPUT_GRADIENT, stage, self._gradients[stage]))
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


@dataclass(frozen=True)
class OrderTurns:
    """Chunks a rank, least microbatches a group, forwards ahead by rank, and whether to split."""

    chunks: int
    group: int
    ahead: tuple[int, ...]
    split: bool = True

    def draft(self, microbatches: int) -> OrderDraft:
        """Returns the orders for so many microbatches."""
        ranks = len(self.ahead)
        gradient = input_gradient if self.split else backward
        orders: list[tuple[Action, ...]] = []
        for rank, ahead in enumerate(self.ahead):
            order = visits(ranks, microbatches, self.chunks, rank, self.group)
            orders.append(tuple(alternate(*order, ahead, gradient)))
        return OrderDraft(loop(ranks, self.chunks), tuple(orders))


def turns(
    ranks: int,
    microbatches: int,
    chunks: int,
    costs: Costs,
    room: Sequence[float],
    split: bool = True,
) -> Iterator[OrderTurns]:
    """Yields promising `OrderTurns`; with several chunks also in smaller groups, to save memory."""
    if chunks == 1:
        for ahead in warm_ups(ranks, microbatches, costs, room):
            yield OrderTurns(1, ranks, ahead, split)
        return
    for group in sorted({ranks, max(1, ranks // 2), 1}, reverse=True):
        least = (chunks - 1) * max(groups(group, microbatches)) + 1
        for steepness in _STEEPNESS:
            ahead = tuple(least + steepness * (ranks - 1 - rank) for rank in range(ranks))
            yield OrderTurns(chunks, group, ahead, split)


def warm_ups(
    ranks: int, microbatches: int, costs: Costs, room: Sequence[float]
) -> list[tuple[int, ...]]:
    """Returns choices of the forwards ahead by rank, with one stage per rank.

    As many as fit in memory and end before the first gradient arrives, or somewhat later. Each rank
    runs more than the next one, because otherwise the next would wait for its forwards.
    """
    choices = {_warm_up(ranks, microbatches, costs, room, delay): None for delay in _DELAYS}
    pairs = zip(room, costs.activation, strict=True)
    most = [int(min(microbatches, part / size)) if size else microbatches for part, size in pairs]
    for steepness in _STEEPNESS:
        to_last = (1 + steepness * (ranks - 1 - rank) for rank in range(ranks))
        choices[tuple(max(1, min(both)) for both in zip(most, to_last, strict=True))] = None
    return [*choices]


def _warm_up(
    ranks: int, microbatches: int, costs: Costs, room: Sequence[float], delay: float
) -> tuple[int, ...]:
    ahead = [1] * ranks
    begins = [0.0]
    for stage in range(ranks - 1):
        begins.append(begins[-1] + costs.forward[stage] + costs.communication)
    gradient = 0.0  # the end of the first input gradient of the next rank
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
