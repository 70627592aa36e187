"""`auto`: the best schedule that the search finds for a setting, and a lower bound on the makespan.

Every named schedule that fits the memory limit is timed, so the result is never slower than any of
them. Their orders of forwards and gradients, and others, are filled with weight gradients under the
limit. Local search then changes the best of these: one step of one rank moves past some neighbours
or, if a full gradient is cheaper than its halves, a gradient is made full or split. The random
changes use a fixed seed, so that the same setting always gives the same schedule.

The lower bound is that of a placement. A full backward counts as an input gradient followed by its
weight gradient, at the cheaper time of the two, so that the bound holds for both. The bound is the
maximum over the ranks:

- a rank cannot start before a microbatch has reached it, and then has all its work to do;
- after its last gradient, the route up to the first stage remains, and weight gradients delayed
  until then need memory;
- before its first gradient it can only run forwards, as many as memory allows;
- each activation occupies memory until its gradient has come back, and part of it until the weight
  gradient. The sum of bytes x time is at most the memory x the makespan.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.generators.named import AUTO, MOST_CHUNKS, buildable
from stablehlo_tools.schedules.search.orders import (
    OrderDraft,
    convert_gradient,
    draft_from_table,
    greedies,
    merge_gradients,
    one_at_a_time,
    turns,
)
from stablehlo_tools.schedules.search.zero_bubble import POLICIES, Policy, fill
from stablehlo_tools.schedules.setting import Costs, ScheduleSetting
from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    Placement,
    Table,
    loop,
    table_of,
    v_shape,
)
from stablehlo_tools.schedules.table_simulator import Timeline, simulate

_FARTHEST = 4  # the most steps that a step is moved past
_TOGGLES = 0.4  # share of changes that toggle a gradient, if full gradients are cheaper
_PATIENCE = 120  # consecutive changes without a gain, per rank
EFFORT = 150_000  # actions to fill, besides those of the named schedules
_PASSES = 12  # times the actions of one draft, if that is more than EFFORT
_RESERVED = 0.3  # share of the effort that is kept for refining the drafts that scouting finds
_SEARCHED = "a search over orders"
_EXACT = 1e-9  # relative: what counts as equal
_SCOUT = Policy(0.75, True)  # the policy that ranks the orders
_REFINED = 4  # drafts that all policies are tried on


def find_best(
    setting: ScheduleSetting,
    effort: int = EFFORT,
    most_chunks: int = MOST_CHUNKS,
    named: Sequence[Table] | None = None,
) -> Best:
    """Searches for the schedule of least makespan, then least memory, within the limit.

    Deterministic. `effort` is the number of actions to try besides those of the named schedules.
    `named` are those schedules if the caller has built them already. Raises ToolError if no
    schedule fits the limit, and states the smallest limit that would.
    """
    if named is None:
        built = (table for entry, table in buildable(setting, most_chunks) if not entry.sliced)
        named = [table for table in built if isinstance(table, Table)]
    search = _AutoSearch(setting, effort, most_chunks)
    for table in named:
        search.offer(table, _origin(table))
    search.offer_least_memory()
    if not search.is_optimal():
        search.scout_named([table for table in named if table.placement.form == "v"])
        search.scout_greedies()
        search.scout_turns()
        search.scout_named([table for table in named if table.placement.form != "v"])
        search.refine()
    return search.best()


@dataclass(frozen=True)
class Best:
    """The best schedule found, with its times, a lower bound on the makespan, and its origin.

    The bound holds for every schedule on the searched placements.
    """

    timeline: Timeline
    bound: float
    origin: str

    @property
    def table(self) -> Table:
        """The schedule."""
        return self.timeline.table

    @property
    def gap(self) -> float:
        """(makespan - bound) / bound; 0 if the bound is 0."""
        return self.timeline.makespan / self.bound - 1 if self.bound else 0.0


class _Scouted(NamedTuple):
    """A draft, its best makespan and the policy that reached it; sorts by makespan, then turn."""

    makespan: float
    turn: int
    draft: OrderDraft
    policy: Policy
    origin: str


def _origin(table: Table) -> str:
    chunks = table.placement.chunks
    return table.name if chunks == 1 else f"{table.name} with {chunks} chunks a rank"


class _AutoSearch:
    """The best so far, the drafts that look good, and the effort left."""

    def __init__(self, setting: ScheduleSetting, effort: int, most_chunks: int) -> None:
        self._setting = setting
        # The chunks a rank to try: one, two, four and so on, as far as the slices can be cut.
        powers = (2**power for power in range(most_chunks.bit_length()))
        cuts = tuple(chunks for chunks in powers if setting.can_be_cut(chunks))
        self._chunks = cuts if setting.chunks is None else (setting.chunks,)
        self._reserved = _RESERVED * effort
        self._effort = max(effort, _PASSES * 2 * setting.ranks * setting.microbatches)
        self._best: Timeline | None = None
        self._origin = ""
        self._bound = min(map(self._bound_of, self._placements()))
        self._scouted: list[_Scouted] = []

    def best(self) -> Best:
        """Returns the best schedule found. Raises ToolError if none fits the memory limit."""
        if self._best is None:
            # The memory of one microbatch at a time, on the rank that needs most.
            least = float("inf")
            for placement in self._placements():
                costs = self._setting.costs(placement.stages)
                each = zip(costs.weights, costs.activation, strict=True)
                sizes = [weights + activation for weights, activation in each]
                most = max(sum(sizes[stage] for stage in own) for own in placement.held)
                least = min(least, most)
            raise ToolError(
                f"no schedule fits a memory limit of {self._setting.limit:g}: a rank's weights and "
                f"the activations of one microbatch need {least:g}"
            )
        table = replace(self._best.table, name=AUTO)
        return Best(replace(self._best, table=table), self._bound, self._origin)

    def offer(self, table: Table, origin: str) -> None:
        """Keeps a table if it fits and is better than the best so far."""
        self._bound = min(self._bound, self._bound_of(table.placement))
        timeline = simulate(table, self._setting.costs(table.stages))
        memory, best = max(timeline.peak_bytes), self._best
        if not self._setting.fits(memory):
            return
        if best is not None and abs(timeline.makespan - best.makespan) <= _EXACT * best.makespan:
            is_better = memory < max(best.peak_bytes) * (1 - _EXACT)
        else:
            is_better = best is None or timeline.makespan < best.makespan
        if is_better:
            self._best, self._origin = timeline, origin

    def offer_least_memory(self) -> None:
        """Offers schedules with the least memory, which fit if any schedule does."""
        for placement in self._placements():
            table = one_at_a_time(placement, self._setting.microbatches)
            self.offer(table, "one microbatch at a time")

    def is_optimal(self) -> bool:
        """Returns True if the best makespan found equals the lower bound."""
        best = self._best
        return best is not None and best.makespan <= self._bound * (1 + _EXACT)

    def scout_named(self, tables: Sequence[Table]) -> None:
        """Scouts the orders of named schedules, those that do not fit the limit included."""
        for table in tables:
            self.scout(draft_from_table(table), f"the order of {_origin(table)}")

    def scout_greedies(self) -> None:
        """Scouts the orders of list scheduling on every placement."""
        for placement in self._placements():
            costs = self._setting.costs(placement.stages)
            for order in greedies(placement, costs, self._setting.room(placement)):
                if not self._may_scout():
                    return
                draft = order.draft(self._setting.microbatches)
                if draft is not None:
                    self._effort -= draft.actions  # list scheduling costs about as much as filling
                    self.scout(draft, _SEARCHED)

    def scout_turns(self) -> None:
        """Scouts the orders of `OrderTurns`, on every loop placement."""
        ranks, microbatches = self._setting.ranks, self._setting.microbatches
        for chunks, split in product(self._chunks, (True, False)):
            costs = self._setting.costs(ranks * chunks)
            room = self._setting.room(loop(ranks, chunks))
            for order in turns(ranks, microbatches, chunks, costs, room, split):
                if not self._may_scout():
                    return
                self.scout(order.draft(microbatches), _SEARCHED)

    def _may_scout(self) -> bool:
        return self._effort > self._reserved

    def scout(self, draft: OrderDraft, origin: str) -> None:
        """Fills a draft with one policy and keeps the result for `refine`."""
        makespan = self._try(draft, _SCOUT, origin) if self._may_scout() else None
        if makespan is not None:
            self._scouted.append(_Scouted(makespan, len(self._scouted), draft, _SCOUT, origin))

    def refine(self) -> None:
        """Tries all policies on the best drafts, and small changes of the very best."""
        ranks, microbatches = self._setting.ranks, self._setting.microbatches
        splits = [split for split in (0, ranks // 2, ranks, 2 * ranks) if split < microbatches]
        best: _Scouted | None = None
        for one in sorted(self._scouted, key=lambda one: one[:2])[:_REFINED]:
            # If full gradients are cheaper, variants with most of them full are tried, too.
            tried = splits if self._merging_pays(one.draft.placement.stages) else []
            variants = [merge_gradients(one.draft, microbatches, split) for split in tried]
            for draft, policy in product([one.draft, *variants], POLICIES):
                makespan = self._try(draft, policy, one.origin)
                if makespan is not None and (best is None or makespan < best.makespan):
                    best = one._replace(makespan=makespan, draft=draft, policy=policy)
        if best is None or self.is_optimal():
            return
        draft, policy, origin = best.draft, best.policy, f"{best.origin}, changed step by step"
        merges = self._merging_pays(draft.placement.stages)
        climb(draft, best.makespan, merges, lambda changed: self._try(changed, policy, origin))

    def _merging_pays(self, stages: int) -> bool:
        costs = self._setting.costs(stages)
        halves = zip(costs.input_gradient, costs.weight_gradient, strict=True)
        pairs = zip(costs.backward, halves, strict=True)
        return any(full < sum(split) * (1 - _EXACT) for full, split in pairs)

    def _try(self, draft: OrderDraft, policy: Policy, origin: str) -> float | None:
        """Fills and offers a draft; returns its makespan, None if it does not fit or time is up."""
        if self._effort <= 0:
            return None
        self._effort -= draft.actions
        setting = self._setting
        costs = setting.costs(draft.placement.stages)
        room = setting.room(draft.placement)
        filled = fill(draft, setting.microbatches, costs, room, policy)
        if filled is None:
            return None
        if self._best is None or filled.makespan < self._best.makespan * (1 - _EXACT):
            table = table_of(AUTO, draft.placement, setting.microbatches, filled.rows)
            self.offer(table, origin)
            # W right after its own I becomes a full backward if that costs less.
            actions = [[step for step in row if isinstance(step, Action)] for row in table.rows]
            rows = [_fused_row(row, costs) for row in actions]
            self.offer(table_of(table.name, table.placement, table.microbatches, rows), origin)
        return filled.makespan

    def _placements(self) -> Iterator[Placement]:
        setting = self._setting
        for chunks in self._chunks:
            yield loop(setting.ranks, chunks)
            if chunks > 1:
                yield v_shape(setting.ranks, chunks)

    def _bound_of(self, placement: Placement) -> float:
        costs = self._setting.costs(placement.stages)
        room = self._setting.room(placement)
        return lower_bound(placement, self._setting.microbatches, costs, room)


def climb(
    draft: OrderDraft, makespan: float, merges: bool, tried: Callable[[OrderDraft], float | None]
) -> None:
    """Changes a draft until too many changes in a row bring no gain.

    With `merges`, gradients are also made full or split. `tried` returns the makespan of a draft,
    None if it cannot run or the effort is spent.
    """
    # A fixed seed: the same setting always gives the same schedule.
    dice = random.Random(0)
    patience = _PATIENCE * len(draft.orders)
    failed = 0
    while failed < patience:
        toggles = merges and dice.random() < _TOGGLES
        changed = (_toggle_random_gradient if toggles else _move_random_step)(draft, dice)
        reached = None if changed is None else tried(changed)
        if changed is None or reached is None or reached > makespan:
            failed += 1
            continue
        # Equal makespans are accepted too, so that the search can cross a plateau.
        failed = 0 if reached < makespan else failed + 1
        draft, makespan = changed, reached


def _toggle_random_gradient(draft: OrderDraft, dice: random.Random) -> OrderDraft | None:
    """Returns the draft with a random gradient made full or split; None if it is a forward."""
    rank = dice.randrange(len(draft.orders))
    order = draft.orders[rank]
    at = dice.randrange(max(1, len(order)))
    if at >= len(order) or order[at].kind is ActionKind.FORWARD:
        return None
    step = convert_gradient(order[at], order[at].kind is ActionKind.INPUT_GRADIENT)
    changed = (*order[:at], step, *order[at + 1 :])
    orders = (*draft.orders[:rank], changed, *draft.orders[rank + 1 :])
    return OrderDraft(draft.placement, orders)


def _move_random_step(draft: OrderDraft, dice: random.Random) -> OrderDraft | None:
    """Returns the draft with a random step moved; None if that breaks the order of a stage."""
    rank = dice.randrange(len(draft.orders))
    order = list(draft.orders[rank])
    if len(order) < 2:
        return None
    start = dice.randrange(len(order))
    end = start + dice.choice((-1, 1)) * dice.randint(1, _FARTHEST)
    if not 0 <= end < len(order):
        return None
    passed = order[end:start] if end < start else order[start + 1 : end + 1]
    if any(_bound(order[start], other) for other in passed):
        return None
    order.insert(end, order.pop(start))
    orders = (*draft.orders[:rank], tuple(order), *draft.orders[rank + 1 :])
    return OrderDraft(draft.placement, orders)


def _bound(one: Action, other: Action) -> bool:
    """Returns True if two steps of a rank must keep their order.

    Steps of one stage must if both are forwards, both are gradients, or their microbatch is equal.
    """
    if one.stage != other.stage:
        return False
    forwards = (one.kind is ActionKind.FORWARD) + (other.kind is ActionKind.FORWARD)
    return forwards != 1 or one.microbatch == other.microbatch


def _fused_row(row: list[Action], costs: Costs) -> list[Action]:
    fused: list[Action] = []
    for step in row:
        twin = Action(ActionKind.INPUT_GRADIENT, step.stage, step.microbatch)
        split = costs.input_gradient[step.stage] + costs.weight_gradient[step.stage]
        cheaper = costs.backward[step.stage] <= split * (1 + _EXACT)
        if step.kind is ActionKind.WEIGHT_GRADIENT and cheaper and fused and fused[-1] == twin:
            fused[-1] = Action(ActionKind.BACKWARD, step.stage, step.microbatch)
        else:
            fused.append(step)
    return fused


def lower_bound(
    placement: Placement, microbatches: int, costs: Costs, room: Sequence[float] | None = None
) -> float:
    """The bound, in the unit of the costs; `room` is the bytes of activations of each rank."""
    rooms = [float("inf")] * placement.ranks if room is None else room
    visits = _visits(placement, microbatches, costs)
    bound = max(_bound_of_rank(own, of_rank) for own, of_rank in zip(visits, rooms, strict=True))
    return bound * min(1.0, costs.overlapped)  # a pair may be shorter than the sum of its parts


def _visits(placement: Placement, microbatches: int, costs: Costs) -> list[list[_Visit]]:
    """The visits of every rank."""
    visits: list[list[_Visit]] = [[] for _ in range(placement.ranks)]
    stages = range(placement.stages)
    pairs = zip(costs.input_gradient, costs.backward, strict=True)
    gradients = [min(split, full) for split, full in pairs]
    weights = [
        max(0.0, min(gradients[s] + costs.weight_gradient[s], costs.backward[s]) - gradients[s])
        for s in stages
    ]
    turns = len(placement.routes)
    for turn, route in enumerate(placement.routes):
        count = len(range(turn, microbatches, turns))
        if not count:
            continue
        hops = [costs.communication * (a != b) for a, b in pairwise(route)]
        reached, left = [0.0], [0.0]
        for stage in stages[1:]:
            reached.append(reached[-1] + costs.forward[stage - 1] + hops[stage - 1])
            left.append(left[-1] + gradients[stage - 1] + hops[stage - 1])
        end = reached[-1] + costs.forward[-1] + left[-1] + gradients[-1]
        for stage in stages:
            visits[route[stage]].append(
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
    return visits


@dataclass(frozen=True)
class _Visit:
    """A stage of a route on a rank: its times, and those of the ways to and from it."""

    count: int  # microbatches that follow the route
    forward: float
    gradient: float
    weights: float
    activation: float
    kept: float
    reached: float  # the earliest start of a forward
    returned: float  # the earliest start of a gradient
    left: float  # the least time on other stages after the end of a gradient

    @property
    def away(self) -> float:
        """The least time from the start of the forward to the end of the gradient."""
        return self.returned + self.gradient - self.reached

    @property
    def occupancy(self) -> float:
        """The least bytes x time that one microbatch occupies."""
        return self.activation * self.away + self.kept * self.weights


def _bound_of_rank(visits: list[_Visit], room: float) -> float:
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
    # The least time for all activations in this memory: by their bytes, and by the number that
    # fits. An activation is away until its gradient has come back.
    occupied = sum(visit.count * visit.occupancy for visit in visits)
    away = sum(visit.count * visit.away for visit in visits)
    at_once = _fitting(room, min(visit.activation for visit in visits))
    least_stay = max(occupied / room if room > 0 else 0.0, away / at_once if at_once else 0.0)
    return max(
        forwards_done + gradients + max(weights, weights - put_off + left), reached + least_stay
    )


def _most(room: float, kinds: list[tuple[float, float]]) -> float:
    """Returns the most time of work that fits in `room` bytes; `kinds` are (time, bytes) pairs."""
    if any(time and not size for time, size in kinds):
        return float("inf")
    by_bytes = max((room * time / size for time, size in kinds if size), default=0.0)
    by_number = _fitting(room, min(size for _, size in kinds)) * max(time for time, _ in kinds)
    return min(by_bytes, by_number)


def _fitting(room: float, size: float) -> float:
    """Returns the number of items of a size that fit, with a tolerance for rounding."""
    if not size or room == float("inf"):
        return float("inf")
    return float(int(max(0.0, room) * (1 + 1e-9) / size))
