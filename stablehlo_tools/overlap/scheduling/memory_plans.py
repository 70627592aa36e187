"""Orders that fit in memory: the scheduler's starting point, and its fallback at any time.

While a task runs, every storage is live that one of its ancestors makes and one of its descendants
uses. The maximum of their bytes over all tasks is a lower bound on the peak of any order. An order
that reaches it is the leanest.

A partial schedule has a `Reserve`: the tasks that have run, and the others in the order of a plan
that is known to fit. A task that runs before its turn is removed from the plan, which changes the
live bytes between now and its turn. It may run if these stay within the limit. So the plan fits at
any time and the schedule can always be completed: the next task of the plan may always run.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from stablehlo_tools.diagnostics import GIB
from stablehlo_tools.overlap.scheduling.scheduling_problem import COMPUTE, OverlapProblem

type Bytes = npt.NDArray[np.float64]
_WINDOW = 24  # ready tasks that are compared at a time
_ROUNDS = 6
# Shares of the peak that a task may allocate and still move up with tasks that free memory.
_SLACKS = (0.0, 1e-4, 1e-2)
_DIGITS = 6


class MemoryPlan:
    """An order that respects the dependences, and the live bytes at each of its positions."""

    def __init__(self, problem: OverlapProblem, order: Sequence[int]) -> None:
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


def plain_plan(problem: OverlapProblem) -> MemoryPlan:
    """Returns the graph's own order, with each transfer issued right before its wait.

    It needs no more memory than the graph's order, and no transfer overlaps with compute.
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
    return MemoryPlan(problem, order)


def lean_plan(problem: OverlapProblem, plan: MemoryPlan, limit: float) -> MemoryPlan:
    """Improves a plan until it is within a limit; returns the leanest found if none is.

    Alternately moves tasks that free memory up and tasks that allocate it down. Then a pass always
    runs the ready task that leaves the fewest live bytes.
    """
    best = plan
    for attempt in _attempts(problem, plan):
        if attempt.peak < best.peak:
            best = attempt
        if best.peak <= limit:
            break
    return best


def _attempts(problem: OverlapProblem, plan: MemoryPlan) -> Iterator[MemoryPlan]:
    current = plan
    for round_ in range(_ROUNDS):
        slack = plan.peak * _SLACKS[round_ % len(_SLACKS)]
        net = net_bytes(problem, current)
        key = list(current.turn)
        for task in reversed(current.order):
            users = problem.users[task]
            if users and net[task] > 0:
                key[task] = min(key[user] for user in users)
        current = MemoryPlan(
            problem, (sorted(current.order, key=lambda task: (key[task], current.turn[task])))
        )
        yield current
        # Each task that frees memory, or allocates at most `slack`, moves right after its last
        # dependence: tasks that free much often depend on tasks that allocate very little.
        net = net_bytes(problem, current)
        key = list(current.turn)
        for task in current.order:
            deps = problem.deps[task]
            if deps and net[task] <= slack:
                key[task] = max(key[dep] for dep in deps)
        current = MemoryPlan(
            problem, sorted(current.order, key=lambda task: (key[task], current.turn[task]))
        )
        yield current
    for _ in range(_ROUNDS):
        current = MemoryPlan(problem, _least_alive(problem, current))
        yield current


def net_bytes(problem: OverlapProblem, plan: MemoryPlan) -> list[float]:
    """Returns the bytes that each task allocates minus the bytes it frees."""
    net = [sum(problem.sizes[u] for u in allocs) for allocs in problem.allocs]
    for storage, uses in enumerate(plan.uses):
        if uses and storage not in problem.kept:
            net[plan.order[uses[-1]]] -= problem.sizes[storage]
    return net


def _least_alive(problem: OverlapProblem, plan: MemoryPlan) -> list[int]:
    """Returns an order that always runs the task that frees most of the next ready tasks."""
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


def _profile(problem: OverlapProblem, order: Sequence[int], uses: Sequence[Sequence[int]]) -> Bytes:
    """Returns the live bytes while the task at each position runs."""
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


def least_bytes(problem: OverlapProblem) -> float:
    """Returns a lower bound on the peak bytes of any order of the tasks."""
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
    """Returns bytes in GiB with six digits, rounded up, so that the text works as a limit."""
    if not count:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(count / GIB)) + 1 - _DIGITS)
    digits = math.ceil(count / GIB / unit)
    while float(f"{digits * unit:.{_DIGITS}g}") * GIB < count:
        digits += 1
    return f"{digits * unit:.{_DIGITS}g}"


class Reserve:
    """The live bytes at each position of a plan; at most `limit`, if the plan fits."""

    def __init__(self, problem: OverlapProblem, plan: MemoryPlan, limit: float) -> None:
        self._problem = problem
        self._plan = plan
        self._limit = limit
        self._next = 0
        self._done = bytearray(problem.size + 1)
        self._last = [len(uses) - 1 for uses in plan.uses]
        self._profile = plan.profile.copy()
        self._most = plan.peak  # an upper bound on the live bytes if the rest runs as planned
        self._alive = sum(problem.sizes[u] for u in problem.before)

    @property
    def next(self) -> int:
        """The task whose turn it is."""
        return self._plan.order[self._next]

    def fits(self, task: int, beside: int | None = None) -> bool:
        """Returns True if a ready task may run now and leave the memory that `beside` allocates."""
        problem = self._problem
        more = sum(problem.sizes[u] for u in problem.allocs[task])
        if beside is not None:
            more += sum(problem.sizes[u] for u in problem.allocs[beside])
        inside = problem.within[task]
        # Cheap test first: `_most` bounds the rest of the plan without a scan of the profile.
        if self._most + more + inside <= self._limit or not (more or inside):
            return True
        turn = self._plan.turn[task]
        if turn == self._next:
            return True
        if self._alive + more + inside > self._limit:
            return False
        between = self._profile[self._next : turn]
        # Without the frees of the task this is an upper bound, so it is tried first.
        if float(between.max()) + more <= self._limit:
            return True
        between = between + more
        for storage, since in self._ends(task):
            begin = max(0, since + 1 - self._next)
            between[begin:] -= problem.sizes[storage]
        return float(between.max()) <= self._limit

    def net(self, task: int) -> float:
        """Returns the live bytes after a task minus those before it."""
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
        """Returns the storages that a task uses last, and the previous use's position or -1."""
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
