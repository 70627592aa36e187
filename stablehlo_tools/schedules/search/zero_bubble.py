"""Zero bubble (arXiv 2401.10241): weight gradients run when their rank would idle.

No step depends on a weight gradient; it only frees memory of its rank. So it can run whenever its
rank would idle. `fill` inserts weight gradients into an order of forwards and input gradients. If
the input of a step arrives after its rank is free, pending weight gradients run first, the oldest
before others. As many run as end in time, and one more if the `Policy` allows it.

`best_within` makes ZB-1p and ZB-2p, the best zero-bubble schedule within a memory limit. It chooses
the order of forwards and input gradients (alternating after a warm-up, or greedy) and the places of
the weight gradients. The shortest longest span wins, then the shortest makespan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.generators.by_rule import zb_h1, zb_h2
from stablehlo_tools.schedules.search.orders import (
    GreedyScheduler,
    OrderDraft,
    OrderTurns,
    greedies,
    turns,
)
from stablehlo_tools.schedules.setting import Costs
from stablehlo_tools.schedules.table import Action, ActionKind, Table, loop, table_of
from stablehlo_tools.schedules.table_simulator import peak_bytes, simulate

_ROUNDED = 1 + 1e-9  # sums of bytes may be off by as much
# The choice that is best for 3p microbatches, or for 2048 forwards of all ranks, is best for more.
_STEADY = 3
_SHOWN = 2048


def best_within(
    name: str, ranks: int, microbatches: int, costs: Costs, room: Sequence[float]
) -> Table:
    """Returns the best schedule of one stage per rank whose activations fit `room` bytes per rank.

    Raises ToolError, naming the rank and its least memory, if one cannot hold one microbatch.
    """
    for rank, (of_rank, least) in enumerate(zip(room, costs.activation, strict=True)):
        if of_rank < least:
            raise ToolError(
                f"{name}: rank {rank} has room for {max(0.0, of_rank):g} of activations, but one "
                f"microbatch needs {least:g}"
            )
    few = min(microbatches, max(_STEADY * ranks, _SHOWN // ranks))
    # All orders with the scouting policies, and all policies with the best of them.
    orders = (*turns(ranks, few, 1, costs, room), *greedies(loop(ranks), costs, room))
    choices = [*_policy_choices(orders, SCOUTS, few, costs, room)]
    best = min(choices, key=lambda choice: choice[:2])
    choices += _policy_choices([best.order], POLICIES, few, costs, room)
    for choice in sorted(choices, key=lambda choice: choice[:2]):
        draft = choice.order.draft(microbatches)
        if draft is None:
            continue
        filled = fill(draft, microbatches, costs, room, choice.policy)
        if filled is not None:
            tables = [table_of(name, loop(ranks), microbatches, filled.rows)]
            # ZB-H1 and ZB-H2, if they fit.
            for by_rule in (zb_h1(ranks, microbatches), zb_h2(ranks, microbatches)):
                held = peak_bytes(by_rule, replace(costs, weights=(0.0,) * ranks))
                if all(part <= most * _ROUNDED for part, most in zip(held, room, strict=True)):
                    tables.append(replace(by_rule, name=name))
            timelines = (simulate(table, costs) for table in tables)
            return min(timelines, key=lambda one: (round(one.span, 9), one.makespan)).table
    raise AssertionError("one microbatch at a time always fits")


class _PolicyChoice(NamedTuple):
    """An order and a policy, and the span and makespan that result."""

    span: float
    makespan: float
    order: OrderTurns | GreedyScheduler
    policy: Policy


def _policy_choices(
    orders: Sequence[OrderTurns | GreedyScheduler],
    policies: Sequence[Policy],
    microbatches: int,
    costs: Costs,
    room: Sequence[float],
) -> Iterator[_PolicyChoice]:
    drafts = ((order, order.draft(microbatches)) for order in orders)
    for (order, draft), policy in product(drafts, policies):
        filled = None if draft is None else fill(draft, microbatches, costs, room, policy)
        if filled is not None:
            yield _PolicyChoice(filled.span, filled.makespan, order, policy)


@dataclass(frozen=True)
class Policy:
    """The weight gradients that may delay the next step.

    slack: the share of a weight gradient's time that may exceed the gap: 0 for none, 1 for any gap.
    even: if set, not if some other rank has idled at least as long as this one would by idling now.
    """

    slack: float = 0.0
    even: bool = True


POLICIES = tuple(
    Policy(slack, even) for slack, even in product((0.0, 0.25, 0.5, 0.75, 1.0), (True, False))
)


SCOUTS = (Policy(0.0, True), Policy(0.75, True))  # the policies that rank the orders


@dataclass(frozen=True)
class Filled:
    """The rows, weight gradients in; the makespan; the longest span of a rank."""

    rows: list[list[Action]]
    makespan: float
    span: float


def fill(
    draft: OrderDraft, microbatches: int, costs: Costs, room: Sequence[float], policy: Policy
) -> Filled | None:
    """Fills the orders of a draft with weight gradients.

    `room` is the bytes of activations that each rank may hold. Returns None if the orders need more
    or cannot run. Linear in the actions.
    """
    run = _Filling(draft, microbatches, costs, room, policy)
    return run.result() if run.run() else None


class _Filling:
    """The state of a run; data are named as stage x microbatches + microbatch."""

    def __init__(
        self,
        draft: OrderDraft,
        microbatches: int,
        costs: Costs,
        room: Sequence[float],
        policy: Policy,
    ) -> None:
        placement = draft.placement
        ranks = placement.ranks
        self._routes = placement.routes
        self._orders = draft.orders
        self._microbatches = microbatches
        self._last = placement.stages - 1
        self._costs = costs
        self._room = [part * _ROUNDED for part in room]
        self._policy = policy
        data = placement.stages * microbatches
        self._forwards: list[float | None] = [None] * data  # when made
        self._gradients: list[float | None] = [None] * data
        self._waiting: dict[tuple[bool, int], int] = {}
        self._clocks = [0.0] * ranks
        self._begun = [0.0] * ranks
        self._idled = [0.0] * ranks
        self._most_idled = 0.0
        self._held = [0.0] * ranks
        self._pending: list[deque[Action]] = [deque() for _ in range(ranks)]
        self._at = [0] * ranks
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]

    def result(self) -> Filled:
        """Returns the filled rows, the makespan and the longest span."""
        spans = (end - begin for end, begin in zip(self._clocks, self._begun, strict=True))
        return Filled(self.rows, max(self._clocks), max(spans))

    def run(self) -> bool:
        """Fills all orders; returns False if one deadlocks or exceeds the memory."""
        runnable = list(reversed(range(len(self._orders))))
        while runnable:
            rank = runnable.pop()
            order = self._orders[rank]
            while self._at[rank] < len(order):
                action = order[self._at[rank]]
                arrival = self._arrival(rank, action)
                if arrival is None:
                    break
                if not self._make_room(rank, action):
                    return False
                self._fill_gap(rank, arrival)
                made = self._take(rank, action, arrival)
                self._at[rank] += 1
                woken = self._waiting.pop(made, None)
                if woken is not None:
                    runnable.append(woken)
        for rank, pending in enumerate(self._pending):
            for _ in range(len(pending)):
                self._weight_gradient(rank)
        return all(at == len(order) for at, order in zip(self._at, self._orders, strict=True))

    def _arrival(self, rank: int, action: Action) -> float | None:
        """Returns the arrival time of a step's input; if unknown, None, and the rank waits."""
        kind, stage, microbatch = action
        forward = kind is ActionKind.FORWARD
        if stage == (0 if forward else self._last):
            return 0.0
        source = stage - 1 if forward else stage + 1
        made = self._forwards if forward else self._gradients
        datum = source * self._microbatches + microbatch
        there = made[datum]
        if there is None:
            self._waiting[forward, datum] = rank
            return None
        route = self._routes[microbatch % len(self._routes)]
        return there if route[source] == rank else there + self._costs.communication

    def _make_room(self, rank: int, action: Action) -> bool:
        kind, stage, _ = action
        if kind is ActionKind.BACKWARD:
            return True
        grows = self._costs.kept[stage] - self._costs.activation[stage]
        if kind is ActionKind.FORWARD:
            grows = self._costs.activation[stage]
        while self._held[rank] + grows > self._room[rank]:
            if not self._pending[rank]:
                return False
            self._weight_gradient(rank)
        return True

    def _fill_gap(self, rank: int, arrival: float) -> None:
        pending = self._pending[rank]
        times = self._costs.weight_gradient
        # Those that end before the input arrives delay nothing.
        while pending and self._clocks[rank] + times[pending[0].stage] <= arrival:
            self._weight_gradient(rank)
        gap = arrival - self._clocks[rank]
        if not pending or gap <= 0:
            return
        if gap < (1 - self._policy.slack) * times[pending[0].stage]:
            return
        if self._policy.even and gap <= self._most_idled - self._idled[rank]:
            return
        self._weight_gradient(rank)

    def _weight_gradient(self, rank: int) -> None:
        action = self._pending[rank].popleft()
        self._clocks[rank] += self._costs.weight_gradient[action.stage]
        self._held[rank] -= self._costs.kept[action.stage]
        self.rows[rank].append(action)

    def _take(self, rank: int, action: Action, arrival: float) -> tuple[bool, int]:
        """Runs a step of the order; returns True for a forward, and the datum that it produces."""
        kind, stage, microbatch = action
        costs, row = self._costs, self.rows[rank]
        start = max(self._clocks[rank], arrival)
        if not row:
            self._begun[rank] = start
        else:
            self._idled[rank] += start - self._clocks[rank]
            self._most_idled = max(self._most_idled, self._idled[rank])
        row.append(action)
        datum = stage * self._microbatches + microbatch
        if kind is ActionKind.FORWARD:
            end = start + costs.forward[stage]
            self._held[rank] += costs.activation[stage]
            self._forwards[datum] = end
        elif kind is ActionKind.BACKWARD:
            end = start + costs.backward[stage]
            self._held[rank] -= costs.activation[stage]
            self._gradients[datum] = end
        else:
            end = start + costs.input_gradient[stage]
            self._held[rank] += costs.kept[stage] - costs.activation[stage]
            self._gradients[datum] = end
            self._pending[rank].append(Action(ActionKind.WEIGHT_GRADIENT, stage, microbatch))
        self._clocks[rank] = end
        return kind is ActionKind.FORWARD, datum
