"""Orders that fit in memory: what the scheduler starts from, and what it can always fall back on.

While a task runs, all is alive that something before it made and something after it uses, where
"before" and "after" are what the dependences force. The most of that over the tasks is a bound; an
order that needs no more than that is the leanest.

A schedule in the making has a `Reserve`: what has run, and all the rest in the order of a plan that
is known to fit. Each task that runs before its turn is taken out of the plan, which changes what is
alive between now and its turn; it may run if all of that stays within the limit. So the plan fits
at any time, and the schedule can always be completed: the next task of the plan may always run.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from stablehlo_tools.diagnostics import GIB
from stablehlo_tools.overlap.scheduling.problem import COMPUTE, Problem

type Bytes = npt.NDArray[np.float64]
_WINDOW = 24  # ready tasks that are compared at a time
_ROUNDS = 6
_SLACKS = (0.0, 1e-4, 1e-2)  # of the peak: what a task may take that moves up with givers
_DIGITS = 6


class Plan:
    """An order that respects the dependences, and what is alive at each of its positions."""

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self.order = order
        self.turn = [0] * problem.size
        for position, task in enumerate(order):
            self.turn[task] = position
        # The positions at which each storage is used, ascending.
        uses: list[list[int]] = [[] for _ in problem.sizes]
        for position, task in enumerate(order):
            for storage in problem.reads[task]:
                uses[storage].append(position)
        self.uses = uses
        self.profile = _profile(problem, order, self.uses)
        before = sum(problem.sizes[u] for u in problem.before)
        self.peak = max(before, float(self.profile.max(initial=0.0)))


def plain_plan(problem: Problem) -> Plan:
    """The graph's own order, with each transfer issued right before it is waited for.

    That takes no more memory than the graph's order does, and nothing overlaps.
    """
    order = list(problem.inputs)
    issued = set(order)
    for task in range(problem.size):
        start = problem.starts[task]
        if start is not None and start not in issued:
            issued.add(start)
            order.append(start)
        users = problem.users[task]
        only_waited_for = bool(users) and all(problem.starts[user] == task for user in users)
        if task not in issued and (problem.stream[task] == COMPUTE or not only_waited_for):
            issued.add(task)
            order.append(task)
    return Plan(problem, order)


def lean_plan(problem: Problem, plan: Plan, limit: float) -> Plan:
    """A plan within a limit, from a plan to begin with; the leanest that is found, if none is.

    Tasks that free memory move up and tasks that take it move down, by turns; then a pass takes of
    the tasks that are ready the one that leaves least alive.
    """
    best = plan
    for attempt in _attempts(problem, plan):
        if attempt.peak < best.peak:
            best = attempt
        if best.peak <= limit:
            break
    return best


def _attempts(problem: Problem, plan: Plan) -> Iterator[Plan]:
    current = plan
    for round_ in range(_ROUNDS):
        slack = plan.peak * _SLACKS[round_ % len(_SLACKS)]
        net = taken(problem, current)
        key = list(current.turn)
        for task in reversed(current.order):
            users = problem.users[task]
            if users and net[task] > 0:
                key[task] = min(key[user] for user in users)
        current = Plan(
            problem, (sorted(current.order, key=lambda task: (key[task], current.turn[task])))
        )
        yield current
        # Each task that frees memory, or takes at most `slack`, moves to the last it depends on:
        # what frees most often depends on others that take next to nothing.
        net = taken(problem, current)
        key = list(current.turn)
        for task in current.order:
            deps = problem.deps[task]
            if deps and net[task] <= slack:
                key[task] = max(key[dep] for dep in deps)
        current = Plan(
            problem, sorted(current.order, key=lambda task: (key[task], current.turn[task]))
        )
        yield current
    for _ in range(_ROUNDS):
        current = Plan(problem, _least_alive(problem, current))
        yield current


def taken(problem: Problem, plan: Plan) -> list[float]:
    """What each task takes less what it frees, in bytes."""
    net = [sum(problem.sizes[u] for u in allocs) for allocs in problem.allocs]
    for storage, uses in enumerate(plan.uses):
        if uses and storage not in problem.kept:
            net[plan.order[uses[-1]]] -= problem.sizes[storage]
    return net


def _least_alive(problem: Problem, plan: Plan) -> list[int]:
    """An order that always takes, of the ready tasks that come next, the one that frees most."""
    reserve = Reserve(problem, plan, plan.peak)
    left = [len(deps) for deps in problem.deps]
    ready = sorted(plan.turn[task] for task in range(problem.size) if not left[task])
    order: list[int] = []
    while ready:
        window = [plan.order[turn] for turn in ready[:_WINDOW]]
        fitting = [task for task in window if reserve.fits(task)]
        task = min(fitting, key=lambda task: (reserve.net(task), plan.turn[task]))
        ready.remove(plan.turn[task])
        reserve.run(task)
        order.append(task)
        for user in problem.users[task]:
            left[user] -= 1
            if not left[user]:
                insort(ready, plan.turn[user])
    return order


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


def least_bytes(problem: Problem) -> float:
    """No order of the tasks needs fewer bytes than this at its peak."""
    kept = _bits(problem.kept)
    made = [_bits(allocs) for allocs in problem.allocs]
    used = [_bits(reads) | kept for reads in problem.reads]
    before = _bits(problem.before)
    for task in range(problem.size):
        made[task] |= before
        for dep in problem.deps[task]:
            made[task] |= made[dep]
    for task in reversed(range(problem.size)):
        for user in problem.users[task]:
            used[task] |= used[user]
    sizes = np.array(problem.sizes, np.float64)
    least = _total(before, sizes)
    for task in range(problem.size):
        alive = _total(made[task] & used[task], sizes)
        least = max(least, alive + problem.within[task])
    return least


def _bits(storages: Iterable[int]) -> int:
    bits = 0
    for storage in storages:
        bits |= 1 << storage
    return bits


def _total(bits: int, sizes: Bytes) -> float:
    """The bytes of a set of storages."""
    packed = np.frombuffer(bits.to_bytes(len(sizes) // 8 + 1, "little"), np.uint8)
    return float(np.unpackbits(packed, bitorder="little")[: len(sizes)] @ sizes)


def gib(count: float) -> str:
    """Bytes in GiB with six digits, rounded up: as a limit it is enough."""
    if not count:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(count / GIB)) + 1 - _DIGITS)
    digits = math.ceil(count / GIB / unit)
    while float(f"{digits * unit:.{_DIGITS}g}") * GIB < count:
        digits += 1
    return f"{digits * unit:.{_DIGITS}g}"


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
            uses = self._plan.uses[storage]
            last = self._last[storage]
            while last >= 0 and uses[last] > since:
                last -= 1
            self._last[storage] = last
            if since < 0:
                self._alive -= problem.sizes[storage]
        if turn == self._next:
            position, done = self._next, self._done
            while done[position]:
                position += 1
            self._next = position
        if self._most > self._limit and more:
            self._most = max(self._alive, float(profile[self._next :].max(initial=0.0)))

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
