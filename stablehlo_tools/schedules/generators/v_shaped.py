"""V-shaped schedules (ZB-V, V-Half, V-Min): a building block, and two ways to make a table of it.

Each rank holds two stages, so that the first and the last stage are on the same rank; the gradients
are split. A building block (arXiv 2405.15362, "Pipeline Parallelism with Controllable Memory"; for
ZB-V also arXiv 2401.10241, section 6) limits the memory of a schedule. Then a deterministic search
finds orders. It keeps the table with the lowest makespan, then the lowest span, then the fewest
activations. Without costs, all phases have equal times. A table exists for any number of ranks and
microbatches, and the limits on memory hold for any costs.

A block states the slot of each of a rank's six phases. It repeats every six slots, once for each
microbatch, and is valid if no rank has two phases in one slot. The lifetime of an activation in the
block determines the number of live activations. A repeated block has gaps at both ends and ignores
times. `insert_phases` and `dispatch_phases` fix both:

`insert_phases` is serial schedule generation. In the order of their slots, each phase moves ahead
into the first gap after its inputs that it fits into; phases already placed do not move. A forward
also needs memory, from its place to the end of its rank's row. At the end there is always enough,
because there the row holds what the block holds. With equal times no phase starts later than its
slot, because no earlier phase occupies that slot. So the bubble is at most the block's, for any
number of microbatches.

`dispatch_phases` is parallel schedule generation. A free rank runs the first phase of an order
that can run. A stage's forwards wait while its activations are at a cap, so that no rank runs out
of memory for phases that others wait for. The first stage never uses the last free activation of a
rank, so its second stage, and with it the oldest microbatch, can always continue. If phases differ
much in time, this finds better orders than `insert_phases`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import permutations
from math import inf
from typing import NamedTuple

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.setting import Costs, unit_costs
from stablehlo_tools.schedules.table import Action, ActionKind, Table, table_of, v_shape
from stablehlo_tools.schedules.table_simulator import simulate

# The phases of a microbatch on a rank: kind, and whether of the rank's first or second stage. The
# first four follow each other: down the ranks, up, down and up again.
PHASES = (
    (ActionKind.FORWARD, 0),
    (ActionKind.FORWARD, 1),
    (ActionKind.INPUT_GRADIENT, 1),
    (ActionKind.INPUT_GRADIENT, 0),
    (ActionKind.WEIGHT_GRADIENT, 1),
    (ActionKind.WEIGHT_GRADIENT, 0),
)
PERIOD = len(PHASES)
FORWARDS = 2  # the first two phases are forwards
LEGS = 4  # the first four phases are the legs of a microbatch's route
_LIVES = ((0, 5), (1, 4))  # by stage: the forward, and the weight gradient that frees it
_RESOLUTION = 1_000_000  # ticks of the longest phase or hop
Rows = Sequence[Sequence[tuple[int, int]]]  # of each rank: phase and microbatch, in order
_GROWTH = (1, 1, 0, 0, -1, -1)  # change of the live activations, by phase
_LARGE = 50_000  # from so many phases on, only the candidate with the best prediction is built
_REHEARSED = 3  # microbatches per rank of the small tables that predict it


def zb_v(ranks: int, microbatches: int, costs: Costs | None = None) -> Table:
    """ZB-V: no bubble by SPAN, with the memory of 1F1B and twice its messages.

    Rank r holds at most min(2p, m + r + 1) activations, each of half of a rank's part of the model.
    If F = I = W (of a stage) and m >= 2p - 1, the makespan is 6mF + (p - 1)F and the span 6mF.
    Raises ToolError if the costs are not for 2p stages.
    """
    limits = tuple(min(2 * ranks, microbatches + rank + 1) for rank in range(ranks))
    return _best("zb-v", microbatches, (4, 2, 4, 2), (1, 1, 1), limits, costs)


def v_half(ranks: int, microbatches: int, costs: Costs | None = None) -> Table:
    """V-Half: half the memory of 1F1B and half its bubble.

    A rank holds at most 2 floor((p + 2) / 2) activations. If F = I = W (of a stage) and m >= p, the
    makespan is 6mF + (3p - 4)F for odd p > 1, and 6mF + (3p - 7)F for even p > 2. With 1F1B it is
    6mF + 6(p - 1)F. Raises ToolError if the costs are not for 2p stages.
    """
    limits = (2 * ((ranks + 2) // 2),) * ranks
    pauses = (1, 1, 2) if ranks % 2 else (1, 4, 2)
    return _best("v-half", microbatches, (2, 1, 2, 1), pauses, limits, costs)


def v_min(ranks: int, microbatches: int, costs: Costs | None = None) -> Table:
    """V-Min: a third of the memory of 1F1B and two thirds of its bubble.

    A rank holds at most 2 floor((p + 4) / 3) activations. If F = I = W, m >= p and p > 1, the
    makespan is 6mF + (4p - 5)F if p = 1 modulo 3, else 6mF + (4p - 7)F. If phases have different
    times, the bubble grows with m, because so little memory leaves no slack. Raises ToolError if
    the costs are not for 2p stages.
    """
    limits = (2 * ((ranks + 4) // 3),) * ranks
    pauses = (1, 1, 1) if ranks % 3 else (1, 3, 1)
    return _best("v-min", microbatches, (1, 1, 1, 1), pauses, limits, costs)


def _best(
    name: str,
    microbatches: int,
    strides: tuple[int, ...],
    pauses: tuple[int, ...],
    limits: tuple[int, ...],
    costs: Costs | None,
) -> Table:
    ranks = len(limits)
    times = unit_costs(2 * ranks) if costs is None else costs
    given = problem(block(ranks, strides, pauses), microbatches, limits, times)
    searches = list(_searches(given, strides))
    if microbatches > _REHEARSED * ranks and PERIOD * ranks * microbatches > _LARGE:
        search = min(searches, key=partial(_predict_merit, given, times))
        return table_from_rows(name, given, search(given))
    tables = [table_from_rows(name, given, search(given)) for search in searches]
    return min(tables, key=lambda table: _merit(table, times))


def _searches(given: VProblem, strides: tuple[int, ...]) -> Iterator[_Search]:
    yield partial(insert_phases, put_off=False)
    yield partial(insert_phases, put_off=True)
    if given.is_even:
        return
    for weight in (2, 3):
        yield lambda problem, weight=weight: insert_phases(
            with_even_times(problem, weight), put_off=False
        )
    yield lambda problem: dispatch_phases(problem, by_slots(problem))
    yield lambda problem: dispatch_phases(problem, by_times(problem, strides))


def _predict_merit(given: VProblem, costs: Costs, search: _Search) -> tuple[float, ...]:
    """Predicts the merit of a search's table by linear extrapolation from two smaller tables.

    With equal times every microbatch adds the same to all tables, so the smaller one suffices.
    """

    def rehearse_search(rounds: int) -> tuple[float, ...]:
        fewer = replace(given, microbatches=rounds * given.ranks)
        return _merit(table_from_rows("rehearsal", fewer, search(fewer)), costs)

    short = rehearse_search(_REHEARSED - 1)
    if given.is_even:
        return short
    left = given.microbatches / given.ranks - _REHEARSED
    return tuple(
        to + (to - of) * left for of, to in zip(short, rehearse_search(_REHEARSED), strict=True)
    )


def _merit(table: Table, costs: Costs) -> tuple[float, ...]:
    """Returns the figures of merit of a table, compared in order; smaller is better."""
    timeline = simulate(table, costs)
    return timeline.makespan, timeline.span, sum(timeline.peak_activations)


class RankPhase(NamedTuple):
    """A phase of a microbatch on a rank."""

    phase: int
    rank: int


def before(place: RankPhase, ranks: int) -> RankPhase | None:
    """Returns the phase that a phase waits for; None for the first of all."""
    phase, rank = place
    if phase >= LEGS:
        return RankPhase(phase - 2, rank)
    last, step = (ranks - 1, 1) if phase % 2 else (0, -1)
    if rank != last:
        return RankPhase(phase, rank + step)
    return RankPhase(phase - 1, rank) if phase else None


def stage_of(place: RankPhase, ranks: int) -> int:
    """The stage whose phase it is: rank r holds stages r and 2p - 1 - r."""
    second = PHASES[place.phase][1]
    return 2 * ranks - 1 - place.rank if second else place.rank


@dataclass(frozen=True)
class VBlock:
    """The slot of each phase of microbatch 0, by rank; microbatch i is 6i slots later."""

    slots: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks, p."""
        return len(self.slots)

    @cached_property
    def peak(self) -> int:
        """The most activations alive on a rank."""
        return max(sum(_alive(row, row[at])) for row in self.slots for at in range(FORWARDS))

    @cached_property
    def peaks(self) -> tuple[tuple[int, int], ...]:
        """The most alive of each rank's first stage, and the same of its second."""
        return tuple((_alive(row, row[0])[0], _alive(row, row[1])[1]) for row in self.slots)

    def in_order(self, microbatches: int) -> Iterator[tuple[RankPhase, int]]:
        """Every phase of every microbatch, slot by slot."""
        turns: list[list[tuple[RankPhase, int]]] = [[] for _ in range(PERIOD)]
        for rank, row in enumerate(self.slots):
            for phase, slot in enumerate(row):
                turns[slot % PERIOD].append((RankPhase(phase, rank), slot))
        for slot in range(max(map(max, self.slots)) + PERIOD * microbatches):
            for place, first in turns[slot % PERIOD]:
                microbatch = (slot - first) // PERIOD
                if 0 <= microbatch < microbatches:
                    yield place, microbatch


def block(ranks: int, strides: tuple[int, ...], pauses: tuple[int, ...]) -> VBlock:
    """Returns the block of four legs.

    On each leg a microbatch reaches the next rank `strides` slots later. Between two legs it waits
    for `pauses` slots on the rank where they meet. The weight gradients fill the two remaining
    slots, each as early as possible.
    """
    slots: list[list[int]] = [[] for _ in range(ranks)]
    start = 0
    for leg, (stride, pause) in enumerate(zip(strides, (*pauses, 0), strict=True)):
        for step in range(ranks):
            rank = ranks - 1 - step if leg % 2 else step
            slots[rank].append(start + stride * step)
        start += stride * (ranks - 1) + pause
    return VBlock(tuple(_with_weights(row) for row in slots))


def _alive(row: tuple[int, ...], slot: int) -> list[int]:
    """The activations of each stage that are alive after a slot of the steady state."""
    return [(slot - row[first]) // PERIOD - (slot - row[last]) // PERIOD for first, last in _LIVES]


def _with_weights(legs: list[int]) -> tuple[int, ...]:
    gradients = legs[FORWARDS:]
    free = sorted(set(range(PERIOD)) - {slot % PERIOD for slot in legs})
    lags = [
        [(turn - slot) % PERIOD for turn, slot in zip(turns, gradients, strict=True)]
        for turns in permutations(free)
    ]
    best = min(lags, key=lambda lag: (max(lag), sum(lag)))
    return (*legs, *(slot + late for slot, late in zip(gradients, best, strict=True)))


@dataclass(frozen=True)
class VProblem:
    """A block to start from, times, and limits.

    ticks: the time of each phase on each rank, an integer of at least 1. Integers make the fit of a
    phase into a gap exact. With at least 1, the order of the times respects the dependences.
    hop: the ticks from one rank to another.
    limits: the most live activations on each rank, no less than those of the block.
    """

    block: VBlock
    microbatches: int
    ticks: tuple[tuple[int, ...], ...]
    hop: int
    limits: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks, p."""
        return self.block.ranks

    @property
    def is_even(self) -> bool:
        """True if all phases have the same time and hops have none."""
        return not self.hop and len({tick for row in self.ticks for tick in row}) == 1


def problem(block: VBlock, microbatches: int, limits: tuple[int, ...], costs: Costs) -> VProblem:
    """The problem at given costs. Raises ToolError for costs of another number of stages."""
    ranks = block.ranks
    if costs.stages != 2 * ranks:
        raise ToolError(
            f"the costs have {costs.stages} stages, but a V of {ranks} ranks has {2 * ranks}"
        )
    times = [costs.forward] * 2 + [costs.input_gradient] * 2 + [costs.weight_gradient] * 2
    longest = max(costs.communication, *map(max, times)) or 1.0

    def ticks(time: float) -> int:
        return round(time / longest * _RESOLUTION)

    return VProblem(
        block,
        microbatches,
        tuple(
            tuple(
                max(1, ticks(time[stage_of(RankPhase(phase, rank), ranks)]))
                for rank in range(ranks)
            )
            for phase, time in enumerate(times)
        ),
        ticks(costs.communication),
        limits,
    )


def with_even_times(problem: VProblem, weight: int) -> VProblem:
    """Returns the problem without hop times and with a time of 2 per phase, `weight` for W.

    Longer weight gradients fit into fewer gaps, which leaves those to phases that others wait for.
    """
    ticks = (2,) * LEGS + (weight,) * (len(PHASES) - LEGS)
    return replace(problem, ticks=tuple((tick,) * problem.ranks for tick in ticks), hop=0)


def table_from_rows(name: str, problem: VProblem, rows: Rows) -> Table:
    """Returns the table of the rows that a search found."""
    ranks = problem.ranks
    actions: list[list[Action]] = []
    for rank, row in enumerate(rows):
        of = [(kind, stage_of(RankPhase(i, rank), ranks)) for i, (kind, _) in enumerate(PHASES)]
        actions.append([Action(*of[phase], microbatch) for phase, microbatch in row])
    return table_of(name, v_shape(ranks, 2), problem.microbatches, actions)


def insert_phases(problem: VProblem, put_off: bool) -> Rows:
    """Returns the rows by serial schedule generation.

    With `put_off`, weight gradients run only if a forward needs their memory, or at the end.
    Without it, those before the last forward of their rank keep their turns.
    """
    return _Insertion(problem, put_off).rows()


class _Insertion:
    def __init__(self, problem: VProblem, put_off: bool) -> None:
        ranks, microbatches = problem.ranks, problem.microbatches
        self._problem = problem
        self._put_off = put_off
        self._lines = [_RankLine(limit) for limit in problem.limits]
        self._ends = [[[0] * microbatches for _ in range(ranks)] for _ in range(LEGS)]
        self._waits = [
            [before(RankPhase(phase, rank), ranks) for rank in range(ranks)]
            for phase in range(len(_GROWTH))
        ]
        self._open: list[deque[tuple[int, int]]] = [deque() for _ in range(ranks)]
        self._forwards = [FORWARDS * microbatches] * ranks

    def rows(self) -> Rows:
        problem = self._problem
        for (phase, rank), microbatch in problem.block.in_order(problem.microbatches):
            if phase >= LEGS and (self._put_off or not self._forwards[rank]):
                self._open[rank].append((phase, microbatch))
                continue
            while not self._place_if_room(phase, rank, microbatch):
                self._place_if_room(*self._next_open(rank))
            self._forwards[rank] -= phase < FORWARDS
        for rank in range(problem.ranks):
            while self._open[rank]:
                self._place_if_room(*self._next_open(rank))
        return [line.steps for line in self._lines]

    def _next_open(self, rank: int) -> tuple[int, int, int]:
        phase, microbatch = self._open[rank].popleft()
        return phase, rank, microbatch

    def _place_if_room(self, phase: int, rank: int, microbatch: int) -> bool:
        """Places a phase, if there is room."""
        ready, first = 0, self._waits[phase][rank]
        if first is not None:
            ready = self._ends[first.phase][first.rank][microbatch]
            ready += self._problem.hop * (first.rank != rank)
        ticks = self._problem.ticks[phase][rank]
        end = self._lines[rank].place(phase, microbatch, ready, ticks)
        if end is not None and phase < LEGS:
            self._ends[phase][rank][microbatch] = end
        return end is not None


class _RankLine:
    """The steps of one rank, in the order of their times."""

    def __init__(self, limit: int) -> None:
        self.steps: list[tuple[int, int]] = []
        self._limit = limit
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._alive = 0  # after the last step
        self._idle = 0  # no gap ends later

    def place(self, phase: int, microbatch: int, ready: int, ticks: int) -> int | None:
        """Places a step as early as possible; returns None if the memory limit forbids it."""
        last = self._ends[-1] if self._ends else 0
        if ready < self._idle:
            gap = self._earliest(_GROWTH[phase], ready, ticks)
        else:
            fits = self._alive + _GROWTH[phase] <= self._limit
            gap = (len(self.steps), max(ready, last)) if fits else None
        if gap is None:
            return None
        position, start = gap
        if start > last:
            self._idle = start
        self.steps.insert(position, (phase, microbatch))
        self._starts.insert(position, start)
        self._ends.insert(position, start + ticks)
        self._alive += _GROWTH[phase]
        return start + ticks

    def _earliest(self, growth: int, ready: int, ticks: int) -> tuple[int, int] | None:
        """The first position that fits, looked for from the last step back, and when it starts."""
        gap = None
        position, alive = len(self.steps), self._alive
        following: float = inf
        while alive + max(growth, 0) <= self._limit:
            preceding = self._ends[position - 1] if position else 0
            start = max(preceding, ready)
            if start + ticks <= following:
                gap = (position, start)
            # No earlier gap can start sooner than the inputs are ready.
            if preceding <= ready:
                break
            position -= 1
            following = self._starts[position]
            alive -= _GROWTH[self.steps[position][0]]
        return gap


class VOrder(NamedTuple):
    """The priorities of phases, and the caps on activations.

    keys: by rank and phase, for microbatch 0; each next microbatch adds `period`. The lowest key
    runs first. caps: the most activations of each rank's first and second stage.
    """

    keys: Sequence[Sequence[float]]
    period: float
    caps: Sequence[tuple[int, int]]


def by_slots(problem: VProblem) -> VOrder:
    """Returns the order of the block's slots, with each stage capped at its peak in the block."""
    caps = [
        (min(first, limit - 1), second)
        for (first, second), limit in zip(problem.block.peaks, problem.limits, strict=True)
    ]
    return VOrder(problem.block.slots, len(problem.ticks), caps)


def by_times(problem: VProblem, strides: Sequence[int]) -> VOrder:
    """By when the legs would reach each rank in the phases' own times, stretched by `strides`.

    The first stage may have one activation more than in the block, and the second all the room.
    """
    ranks = problem.ranks
    mean = [sum(row) / ranks for row in problem.ticks]
    keys: list[list[float]] = [[] for _ in range(ranks)]
    start = 0.0
    for leg, stride in enumerate(strides):
        for step in range(ranks):
            rank = ranks - 1 - step if leg % 2 else step
            keys[rank].append(start + stride * step * mean[leg])
        start += (stride * (ranks - 1) + 1) * mean[leg]
    for key in keys:
        key += [gradient + mean[0] + mean[FORWARDS] for gradient in key[FORWARDS:]]
    caps = [
        (min(first + 1, limit - 1), limit)
        for (first, _), limit in zip(problem.block.peaks, problem.limits, strict=True)
    ]
    return VOrder(keys, sum(mean), caps)


def dispatch_phases(problem: VProblem, order: VOrder) -> Rows:
    """Returns the rows by parallel schedule generation in an order."""
    run = _VRun(problem, order)
    run.run()
    return run.rows


class _VRun:
    def __init__(self, problem: VProblem, order: VOrder) -> None:
        ranks, microbatches = problem.ranks, problem.microbatches
        self.rows: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self._problem = problem
        self._order = order
        self._next = [[0] * len(problem.ticks) for _ in range(ranks)]  # microbatch of each phase
        self._alive = [[0, 0] for _ in range(ranks)]  # of each stage
        self._ready: list[list[list[float]]] = [
            [[inf] * microbatches for _ in range(LEGS)] for _ in range(ranks)
        ]
        self._ready[0][0] = [0] * microbatches
        self._after: dict[RankPhase, RankPhase] = {}
        for phase in range(LEGS):
            for rank in range(ranks):
                source = before(RankPhase(phase, rank), ranks)
                if source is not None:
                    self._after[source] = RankPhase(phase, rank)

    def run(self) -> None:
        """Runs every phase, in the order of the times at which ranks are free and data arrive."""
        free = [0] * self._problem.ranks
        events = [(0, 0)]  # a time, and a rank that may have a phase to run then
        while events:
            now, rank = heappop(events)
            phase = self._choice(rank, now) if now >= free[rank] else None
            if phase is None:
                continue
            end = free[rank] = now + self._problem.ticks[phase][rank]
            microbatch = self._next[rank][phase]
            self._next[rank][phase] += 1
            self.rows[rank].append((phase, microbatch))
            if phase < FORWARDS:
                self._alive[rank][phase] += 1
            elif phase >= LEGS:
                self._alive[rank][LEGS + 1 - phase] -= 1
            heappush(events, (end, rank))
            target = self._after.get(RankPhase(phase, rank))
            if target is not None:
                there = end + self._problem.hop * (target.rank != rank)
                self._ready[target.rank][target.phase][microbatch] = there
                heappush(events, (there, target.rank))

    def _choice(self, rank: int, now: int) -> int | None:
        """Returns the phase that a free rank runs now; None if it waits.

        A weight gradient runs if a forward needs its memory. Otherwise it fills a gap, unless the
        gap is shorter than half of it.
        """
        best = blocked = soon = inf
        chosen = None
        following, keys, period = self._next[rank], self._order.keys[rank], self._order.period
        alive, caps = self._alive[rank], self._order.caps[rank]
        is_full = sum(alive) >= self._problem.limits[rank]
        for phase in range(LEGS):
            microbatch = following[phase]
            if microbatch == self._problem.microbatches:
                continue
            ready = self._ready[rank][phase][microbatch]
            key = keys[phase] + period * microbatch
            if ready > now:
                soon = min(soon, ready)
            elif phase < FORWARDS and (is_full or alive[phase] >= caps[phase]):
                blocked = min(blocked, key)
            elif key < best:
                best, chosen = key, phase
        # The first weight gradient in the order, of those whose input gradient is done.
        still = [
            (keys[phase] + period * following[phase], phase)
            for phase in range(LEGS, len(following))
            if following[phase] < following[phase - 2]
        ]
        weight = min(still)[1] if still else None
        if weight is None or (chosen is not None and best < blocked):
            return chosen
        if chosen is None and 2 * (soon - now) < self._problem.ticks[weight][rank]:
            return None
        return weight


_Search = Callable[[VProblem], Rows]
