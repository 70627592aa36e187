"""Memory of a schedule in the making: what has run, and all the rest in an order known to fit.

The rest stands in the order of a plan. Each task that runs before its turn is taken out of the
plan, which changes what is alive between now and its turn; it may run if all of that stays within
the limit. So the plan fits at any time, and the schedule can always be completed: the next task
of the plan may always run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stablehlo_tools.overlap.scheduling.problem import Problem

type Bytes = npt.NDArray[np.float64]


class Plan:
    """An order that respects the dependences, and what is alive at each of its positions."""

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self.order = order
        self.turn = [0] * problem.size
        for position, task in enumerate(order):
            self.turn[task] = position
        self.uses = _uses(problem, order)
        self.profile = _profile(problem, order, self.uses)
        before = sum(problem.sizes[u] for u in problem.before)
        self.peak = max(before, float(self.profile.max(initial=0.0)))


class Reserve:
    """What is alive at each position of a plan, in bytes; at most `limit`, if the plan is."""

    def __init__(self, problem: Problem, plan: Plan, limit: float) -> None:
        self._problem = problem
        self._plan = plan
        self._limit = limit
        self._next = 0
        self._done = bytearray(problem.size + 1)
        self._last = [len(uses) - 1 for uses in plan.uses]
        self._profile = plan.profile.copy()
        self._most = plan.peak  # at least as much as will be alive, if the rest goes as planned
        self._alive = sum(problem.sizes[u] for u in problem.before)

    @property
    def next(self) -> int:
        """The task whose turn it is."""
        return self._plan.order[self._next]

    def fits(self, task: int, beside: int | None = None) -> bool:
        """Whether a task that is ready may run now, and leaves what another allocates."""
        problem = self._problem
        more = sum(problem.sizes[u] for u in problem.allocs[task])
        if beside is not None:
            more += sum(problem.sizes[u] for u in problem.allocs[beside])
        inside = problem.within[task]
        if self._most + more + inside <= self._limit or not (more or inside):
            return True
        turn = self._plan.turn[task]
        if turn == self._next:
            return True
        if self._alive + more + inside > self._limit:
            return False
        between = self._profile[self._next : turn]
        if float(between.max()) + more <= self._limit:
            return True
        between = between + more
        for storage, since in self._ends(task):
            begin = max(0, since + 1 - self._next)
            between[begin:] -= problem.sizes[storage]
        return float(between.max()) <= self._limit

    def net(self, task: int) -> float:
        """By how many bytes more is alive after a task than before it."""
        sizes = self._problem.sizes
        freed = sum(sizes[storage] for storage, since in self._ends(task) if since < 0)
        return sum(sizes[u] for u in self._problem.allocs[task]) - freed

    def run(self, task: int) -> None:
        """Runs a task that fits."""
        problem, profile = self._problem, self._profile
        turn = self._plan.turn[task]
        more = sum(problem.sizes[u] for u in problem.allocs[task])
        self._done[turn] = 1
        ends = self._ends(task)
        if turn != self._next:
            if more:
                profile[self._next : turn] += more
                self._most += more
            profile[turn] -= problem.within[task]
            for storage, since in ends:
                profile[max(self._next, since + 1) : turn + 1] -= problem.sizes[storage]
        self._alive += more
        for storage, since in ends:
            self._last[storage] = self._last_at_most(storage, since)
            if since < 0:
                self._alive -= problem.sizes[storage]
        if turn == self._next:
            self._advance()
        if self._most > self._limit and more:
            self._most = max(self._alive, float(profile[self._next :].max(initial=0.0)))

    def _advance(self) -> None:
        position, done = self._next, self._done
        while done[position]:
            position += 1
        self._next = position

    def _ends(self, task: int) -> list[tuple[int, int]]:
        """The storages whose last use a task is, and where it is without it; -1: nowhere."""
        plan, done, kept = self._plan, self._done, self._problem.kept
        turn = plan.turn[task]
        ends: list[tuple[int, int]] = []
        for storage in self._problem.reads[task]:
            uses = plan.uses[storage]
            last = self._last[storage]
            if storage in kept or uses[last] != turn:
                continue
            last -= 1
            while last >= 0 and done[uses[last]]:
                last -= 1
            ends.append((storage, uses[last] if last >= 0 else -1))
        return ends

    def _last_at_most(self, storage: int, position: int) -> int:
        uses = self._plan.uses[storage]
        last = self._last[storage]
        while last >= 0 and uses[last] > position:
            last -= 1
        return last


def _uses(problem: Problem, order: Sequence[int]) -> list[list[int]]:
    """The positions at which each storage is used, ascending."""
    uses: list[list[int]] = [[] for _ in problem.sizes]
    for position, task in enumerate(order):
        for storage in problem.reads[task]:
            uses[storage].append(position)
    return uses


def _profile(problem: Problem, order: Sequence[int], uses: Sequence[Sequence[int]]) -> Bytes:
    """The bytes alive while the task at each position runs."""
    steps = np.zeros(len(order) + 1)
    made = dict.fromkeys(problem.before, 0)
    for position, task in enumerate(order):
        for storage in problem.allocs[task]:
            made[storage] = position
    for storage, position in made.items():
        steps[position] += problem.sizes[storage]
        if storage not in problem.kept and uses[storage]:
            steps[uses[storage][-1] + 1] -= problem.sizes[storage]
    return np.cumsum(steps)[:-1] + np.array([problem.within[task] for task in order])
