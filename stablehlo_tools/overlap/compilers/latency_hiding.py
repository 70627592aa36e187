"""The order that XLA's latency-hiding scheduler gives a graph: a list scheduler from the end.

A task is ready once all its users are placed after it. The next task is chosen by the first of
these criteria that distinguishes two ready tasks:

- constants that fill memory;
- the end of a collective, if its domain has a free slot; of several, the one with the longest chain
  of collectives before it;
- tasks that need not wait: the start of a collective waits until it was open for its whole time;
- a start, if another collective waits for a slot of its domain;
- the task with the longer chain of collectives before it;
- while a collective is open, the task whose time is closest to its remaining time;
- a task that reads the result of a collective;
- the task that makes more tasks ready;
- the task that is last in the text.

A scheduler that is not `eager` places starts as early as it can, and else follows the text.
Source: xla/service/latency_hiding_scheduler.cc, with `aggressive_scheduling_policies` if it is
eager. Covers the criteria that matter on machines with one kind of link: no memory limit and no
scheduling groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import heappop, heappush
from operator import xor

from stablehlo_tools.overlap.scheduling.scheduling_problem import COMPUTE, OverlapProblem
from stablehlo_tools.overlap.task_graph import Task, TaskKind

_AT_NO_TIME = (TaskKind.VIEW, TaskKind.INPUT, TaskKind.OUTPUT)


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The parameters of a compiler's scheduler.

    At most `at_once` collectives of a communication domain are open; None for any number. `takes`
    is its estimate of a collective's time, in ns.
    """

    at_once: int | None
    takes: Callable[[Task], float]
    eager: bool = True


def latency_hiding_order(
    problem: OverlapProblem, scheduler: Scheduler, text: Sequence[int] | None = None
) -> list[int]:
    """Returns all tasks, first to last. `text` is the text's order (default: the graph's)."""
    return _Backwards(problem, scheduler, text).order()


class _Backwards:
    """The state of the scheduler: the tasks placed from the end, and the ready tasks."""

    def __init__(
        self, problem: OverlapProblem, scheduler: Scheduler, text: Sequence[int] | None
    ) -> None:
        self._problem = problem
        self._eager = scheduler.eager
        tasks = problem.graph.tasks
        self._takes = [0.0 if t.communication is None else scheduler.takes(t) for t in tasks]
        self._left = [len(users) for users in problem.users]
        self._since = [0.0] * problem.size  # the earliest time of a task, counted from the end
        self._now = 0.0
        domains = 1 + max(problem.domain, default=0)
        at_once = scheduler.at_once
        self._free = [float("inf") if at_once is None else float(at_once)] * domains
        # The time of the longest chain of collectives that leads to each task, without the task
        # itself if it is a start.
        self._depth = depth = [0.0] * problem.size
        for task, deps in enumerate(problem.deps):
            start = problem.starts[task]
            depth[task] = max((depth[dep] for dep in deps), default=0.0)
            if start is not None:
                depth[task] = max(depth[task], depth[start] + self._takes[start])
        self._place_of = list(range(problem.size))
        for place, task in enumerate(text or ()):
            self._place_of[task] = place
        self._views: list[int] = []  # tasks without a time
        self._fills: list[int] = []
        self._ends: list[list[tuple[float, int, int]]] = [[] for _ in range(domains)]
        self._starts: list[int] = []
        # The ready compute, ranked, by depth and time. An entry is outdated if its task was placed
        # or has come to make more tasks ready since.
        self._compute: dict[float, dict[float, list[tuple[bool, int, int, int]]]] = {}
        self._depths: list[float] = []  # those of `_compute`, negative
        self._queued: set[int] = set()
        self._waiting = [reduce(xor, users, 0) for users in problem.users]  # the last user's id
        self._frees = [0] * problem.size  # the number of tasks that each would make ready
        for task, left in enumerate(self._left):
            if left == 1:
                self._frees[self._waiting[task]] += 1

    def order(self) -> list[int]:
        """All tasks."""
        for task, left in enumerate(self._left):
            if not left:
                self._ready(task)
        placed: list[int] = []
        while len(placed) < self._problem.size:
            placed.append(self._next())
            self._place(placed[-1])
        return placed[::-1]

    def _ready(self, task: int) -> None:
        problem = self._problem
        start = problem.starts[task]
        seen = problem.graph.tasks[task]
        if start is not None:
            key = (-self._depth[task], -self._place_of[task], task)
            heappush(self._ends[problem.domain[start]], key)
        elif problem.stream[task] != COMPUTE:
            self._starts.append(task)
        elif self._eager and seen.kind in _AT_NO_TIME:
            self._views.append(task)
        elif self._eager and seen.op == "broadcast_in_dim" and not problem.deps[task]:
            self._fills.append(task)
        else:
            self._queued.add(task)
            self._enqueue(task)

    def _enqueue(self, task: int) -> None:
        depth = self._depth[task] if self._eager else 0.0
        if depth not in self._compute:
            self._compute[depth] = {}
            heappush(self._depths, -depth)
        ns = self._ns(task) if self._eager else 0.0
        rank = self._rank(task) if self._eager else (False, 0, -self._place_of[task], task)
        heappush(self._compute[depth].setdefault(ns, []), rank)

    def _next(self) -> int:
        for sure in (self._views, self._fills):
            if sure:
                return sure.pop()
        ends = [of for of, free in zip(self._ends, self._free, strict=True) if of and free > 0]
        if ends:
            return heappop(min(ends))[-1]
        start = min(self._starts, key=self._rank_of_start, default=None)
        if start is not None and (not self._depths or self._goes_first(start)):
            self._starts.remove(start)
            return start
        depth = -self._depths[0]
        alike = self._compute[depth]
        _, rank, ns = self._best(depth, self._left_open() if len(alike) > 1 else None)
        heappop(alike[ns])
        self._queued.remove(rank[-1])
        self._drop_outdated(alike, ns)
        if not alike:
            del self._compute[-heappop(self._depths)]
        return rank[-1]

    def _rank_of_start(self, start: int) -> tuple[float, bool, float, int]:
        later = max(self._since[start] - self._now, 0.0)
        return (later, not self._is_backed_up(start), -self._depth[start], -self._place_of[start])

    def _goes_first(self, start: int) -> bool:
        """Returns True if a start is chosen before all ready compute."""
        if self._since[start] > self._now:
            return False
        if not self._eager or self._is_backed_up(start):
            return True
        depth = -self._depths[0]
        if not self._depth[start] or self._depth[start] != depth:
            return self._depth[start] > depth
        left = self._left_open()
        waste = 0.0 if left is None else abs(left - self._ns(start))
        return (waste, self._rank(start)) < self._best(depth, left)[:2]

    def _is_backed_up(self, start: int) -> bool:
        """Returns True if a collective of the start's domain waits for a free slot."""
        domain = self._problem.domain[start]
        return self._free[domain] <= 0 and bool(self._ends[domain])

    def _best(
        self, depth: float, left: float | None
    ) -> tuple[float, tuple[bool, int, int, int], float]:
        """Returns the first compute of a depth: its time's distance to `left`, its rank, its time.

        `left` is the time for which the first collective is still open. It is None if there is none
        or all compute of the depth has the same time.
        """
        alike = self._compute[depth]
        for ns in list(alike):
            self._drop_outdated(alike, ns)
        return min(
            (0.0 if left is None else abs(left - ns), ranked[0], ns) for ns, ranked in alike.items()
        )

    def _drop_outdated(
        self, alike: dict[float, list[tuple[bool, int, int, int]]], ns: float
    ) -> None:
        ranked = alike[ns]
        while ranked:
            _, frees, _, task = ranked[0]
            if task in self._queued and (not self._eager or -frees == self._frees[task]):
                return
            heappop(ranked)
        del alike[ns]

    def _rank(self, task: int) -> tuple[bool, int, int, int]:
        """Returns the key among tasks with equal chains of collectives: the least comes first."""
        reads_end = any(self._problem.starts[dep] is not None for dep in self._problem.deps[task])
        return (not reads_end, -self._frees[task], -self._place_of[task], task)

    def _left_open(self) -> float | None:
        later = (self._since[start] - self._now for start in self._starts)
        return min((ns for ns in later if ns > 0), default=None)

    def _ns(self, task: int) -> float:
        """Returns the scheduler's estimate of a task's compute in ns: 0 for a loop, if eager."""
        is_loop = self._problem.graph.tasks[task].op == "while"
        computes = self._problem.stream[task] == COMPUTE and not (is_loop and self._eager)
        return self._problem.ns[task] if computes else 0.0

    def _place(self, task: int) -> None:
        problem = self._problem
        start = problem.starts[task]
        self._now = max(self._now, self._since[task]) + self._ns(task)
        if start is not None:
            self._free[problem.domain[start]] -= 1
        elif problem.stream[task] != COMPUTE:
            self._free[problem.domain[task]] += 1
        for dep in problem.deps[task]:
            # Counted from the end, a start comes at least its transfer time after its wait.
            takes = self._takes[dep] if dep == start else 0.0
            self._since[dep] = max(self._since[dep], self._now + takes)
            self._left[dep] -= 1
            self._waiting[dep] ^= task
            if self._left[dep] == 1:
                alone = self._waiting[dep]
                self._frees[alone] += 1
                # Its rank changed. The old entry stays in the heap and counts as outdated.
                if alone in self._queued and self._eager:
                    self._enqueue(alone)
            if not self._left[dep]:
                self._ready(dep)
