"""Runs a V-shaped pipeline: a free rank takes what comes first in an order, of what can run.

This is parallel schedule generation. A stage's forwards wait while its activations are at a cap, so
that no rank runs out of room for what others wait for: the first stage never takes the last room of
a rank, so its second stage can always go on, and the oldest microbatch with it. Where phases differ
much in time this finds better orders than moving each into a gap of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from stablehlo_tools.schedules.generators.v_search.blocks import FORWARDS, LEGS, Place, before
from stablehlo_tools.schedules.generators.v_search.problem import Problem, Rows


class Order(NamedTuple):
    """What comes first, and how much room it may take.

    keys: of each rank and phase for microbatch 0; for the next one `period` more. The lowest first.
    caps: the most activations of each rank's first and second stage.
    """

    keys: Sequence[Sequence[float]]
    period: float
    caps: Sequence[tuple[int, int]]


def by_slots(problem: Problem) -> Order:
    """By the slots of the block, either stage held to what it has there."""
    caps = [
        (min(first, limit - 1), second)
        for (first, second), limit in zip(problem.block.peaks, problem.limits, strict=True)
    ]
    return Order(problem.block.slots, len(problem.ticks), caps)


def by_times(problem: Problem, strides: Sequence[int]) -> Order:
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
    return Order(keys, sum(mean), caps)


def dispatched(problem: Problem, order: Order) -> Rows:
    """The rows that come of an order."""
    run = _Run(problem, order)
    run.run()
    return run.rows


class _Run:
    def __init__(self, problem: Problem, order: Order) -> None:
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
        self._after: dict[Place, Place] = {}
        for phase in range(LEGS):
            for rank in range(ranks):
                source = before(Place(phase, rank), ranks)
                if source is not None:
                    self._after[source] = Place(phase, rank)

    def run(self) -> None:
        """Takes every phase, in the order of the times at which ranks are free and data arrive."""
        free = [0] * self._problem.ranks
        events = [(0, 0)]  # a time, and a rank that may have something to take
        while events:
            now, rank = heappop(events)
            phase = self._choice(rank, now) if now >= free[rank] else None
            if phase is None:
                continue
            end = free[rank] = now + self._problem.ticks[phase][rank]
            microbatch = self._take(rank, phase)
            heappush(events, (end, rank))
            target = self._after.get(Place(phase, rank))
            if target is not None:
                there = end + self._problem.hop * (target.rank != rank)
                self._ready[target.rank][target.phase][microbatch] = there
                heappush(events, (there, target.rank))

    def _take(self, rank: int, phase: int) -> int:
        microbatch = self._next[rank][phase]
        self._next[rank][phase] += 1
        self.rows[rank].append((phase, microbatch))
        if phase < FORWARDS:
            self._alive[rank][phase] += 1
        elif phase >= LEGS:
            self._alive[rank][LEGS + 1 - phase] -= 1
        return microbatch

    def _choice(self, rank: int, now: int) -> int | None:
        """What a free rank takes, if anything: a weight gradient where a forward needs the room.

        Without such need a weight gradient fills a gap, unless the gap is shorter than half of it.
        """
        best = blocked = soon = inf
        chosen = None
        following, keys, period = self._next[rank], self._order.keys[rank], self._order.period
        for phase in range(LEGS):
            microbatch = following[phase]
            if microbatch == self._problem.microbatches:
                continue
            ready = self._ready[rank][phase][microbatch]
            key = keys[phase] + period * microbatch
            if ready > now:
                soon = min(soon, ready)
            elif phase < FORWARDS and not self._has_room(rank, phase):
                blocked = min(blocked, key)
            elif key < best:
                best, chosen = key, phase
        weight = self._open_weight(rank)
        if weight is None or (chosen is not None and best < blocked):
            return chosen
        if chosen is None and 2 * (soon - now) < self._problem.ticks[weight][rank]:
            return None
        return weight

    def _has_room(self, rank: int, stage: int) -> bool:
        alive = self._alive[rank]
        limit = self._problem.limits[rank]
        return alive[stage] < self._order.caps[rank][stage] and sum(alive) < limit

    def _open_weight(self, rank: int) -> int | None:
        """The weight gradient whose turn comes first, of those whose input gradient is done."""
        done, keys = self._next[rank], self._order.keys[rank]
        still = [
            (keys[phase] + self._order.period * done[phase], phase)
            for phase in range(LEGS, len(done))
            if done[phase] < done[phase - 2]
        ]
        return min(still)[1] if still else None
