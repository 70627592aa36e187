"""Moves the phases of a repeated building block ahead, each in turn into the first gap it fits.

This is serial schedule generation: in the order of their slots, each phase starts as soon as its
rank has a gap behind what it waits for, and nothing placed before it is moved. A forward also needs
room: from where it goes to the end of its rank's row. At the end there is always room, for there
the row holds what the block holds. With equal times no phase starts later than its slot, because
nothing before it has taken that slot, so the bubble is the block's at most, for any number of
microbatches.
"""

from __future__ import annotations

from collections import deque
from math import inf

from stablehlo_tools.schedules.generators.v_search.blocks import FORWARDS, LEGS, Place, before
from stablehlo_tools.schedules.generators.v_search.problem import Problem, Rows

_GROWTH = (1, 1, 0, 0, -1, -1)  # of the activations alive, by phase


def inserted(problem: Problem, put_off: bool) -> Rows:
    """The rows found. Weight gradients come where a forward needs their room and last of all.

    Without `put_off` those before the last forward of their rank keep their turns.
    """
    return _Insertion(problem, put_off).rows()


class _Insertion:
    def __init__(self, problem: Problem, put_off: bool) -> None:
        ranks, microbatches = problem.ranks, problem.microbatches
        self._problem = problem
        self._put_off = put_off
        self._lines = [_Line(limit) for limit in problem.limits]
        self._ends = [[[0] * microbatches for _ in range(ranks)] for _ in range(LEGS)]
        self._waits = [
            [before(Place(phase, rank), ranks) for rank in range(ranks)]
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
            while not self._placed(phase, rank, microbatch):
                self._placed(*self._next_open(rank))
            self._forwards[rank] -= phase < FORWARDS
        for rank in range(problem.ranks):
            while self._open[rank]:
                self._placed(*self._next_open(rank))
        return [line.steps for line in self._lines]

    def _next_open(self, rank: int) -> tuple[int, int, int]:
        phase, microbatch = self._open[rank].popleft()
        return phase, rank, microbatch

    def _placed(self, phase: int, rank: int, microbatch: int) -> bool:
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


class _Line:
    """The steps of one rank, in the order of their times."""

    def __init__(self, limit: int) -> None:
        self.steps: list[tuple[int, int]] = []
        self._limit = limit
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._alive = 0  # behind the last step
        self._idle = 0  # no gap ends later

    def place(self, phase: int, microbatch: int, ready: int, ticks: int) -> int | None:
        """Places a step as early as it can be; None where the limit leaves no room for it."""
        last = self._ends[-1] if self._ends else 0
        if ready < self._idle:
            found = self._earliest(_GROWTH[phase], ready, ticks)
        else:
            fits = self._alive + _GROWTH[phase] <= self._limit
            found = (len(self.steps), max(ready, last)) if fits else None
        if found is None:
            return None
        position, start = found
        if start > last:
            self._idle = start
        self.steps.insert(position, (phase, microbatch))
        self._starts.insert(position, start)
        self._ends.insert(position, start + ticks)
        self._alive += _GROWTH[phase]
        return start + ticks

    def _earliest(self, growth: int, ready: int, ticks: int) -> tuple[int, int] | None:
        """The first position that fits, looked for from the last step back, and when it starts."""
        found = None
        position, alive = len(self.steps), self._alive
        following: float = inf
        while alive + max(growth, 0) <= self._limit:
            preceding = self._ends[position - 1] if position else 0
            start = max(preceding, ready)
            if start + ticks <= following:
                found = (position, start)
            if preceding <= ready:
                break
            position -= 1
            following = self._starts[position]
            alive -= _GROWTH[self.steps[position][0]]
        return found
