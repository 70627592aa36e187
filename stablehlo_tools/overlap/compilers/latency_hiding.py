"""The order that XLA's latency-hiding scheduler gives a graph: a list scheduler from the end.

From what is ready (all that uses it stands behind it already) it takes first the end of a
collective, if fewer of its communication domain are open than may be, and of several the one that
the longest chain of collectives leads to; then the start of one that
has been open for as long as it takes; then compute, the last of the text first; and only then goes
back to where an open collective has taken long enough. So a collective ends right before its first
user, and begins no earlier than it has to: but what is left over when all compute is placed begins
at the start of the program, where nothing hides it.

How long a collective takes is here what the compiler believes, which is `patience` times what the
cost model says. (xla/service/latency_hiding_scheduler.cc, of which this has what decides on
machines of one kind of link: no memory limit, no scheduling groups.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from stablehlo_tools.overlap.memory import memory_profile
from stablehlo_tools.overlap.scheduling.problem import COMPUTE, Problem


def latency_hiding_order(
    problem: Problem, at_once: int | None, patience: float, *, operands_first: bool = False
) -> list[int]:
    """All tasks, first to last; at most `at_once` collectives of a communication domain are open,
    None for any number. `operands_first`: the text is one in which operands come before what reads
    them, and these in the order of the results, not that of the program."""
    return _Backwards(problem, at_once, patience, operands_first).order()


class _Backwards:
    """What stands behind already, and what is ready to stand before it."""

    def __init__(
        self, problem: Problem, at_once: int | None, patience: float, operands_first: bool
    ) -> None:
        self._problem = problem
        self._at_once = at_once
        self._patience = patience
        self._left = [len(users) for users in problem.users]
        self._since = [0.0] * problem.size  # from when on a task may stand, counted from the end
        self._now = 0.0
        domains = 1 + max(problem.domain, default=0)
        self._open = [0] * domains
        self._ends: list[list[tuple[float, int]]] = [[] for _ in range(domains)]
        self._depth = _async_depths(problem, patience)
        self._place_of = _post_order(problem) if operands_first else range(problem.size)
        self._compute: list[tuple[int, int]] = []
        self._starts: list[tuple[float, int]] = []

    def order(self) -> list[int]:
        """All tasks."""
        for task, left in enumerate(self._left):
            if not left:
                self._ready(task)
        placed: list[int] = []
        while len(placed) < self._problem.size:
            task = self._next()
            placed.append(task)
            self._place(task)
        placed.reverse()
        return placed

    def _ready(self, task: int) -> None:
        problem = self._problem
        start = problem.starts[task]
        if start is not None:
            heappush(self._ends[problem.domain[start]], (-self._depth[start], -task))
        elif problem.stream[task] == COMPUTE:
            heappush(self._compute, (-self._place_of[task], task))
        else:
            heappush(self._starts, (self._since[task], -task))

    def _next(self) -> int:
        free = [
            ends
            for ends, open_ in zip(self._ends, self._open, strict=True)
            if ends and (self._at_once is None or open_ < self._at_once)
        ]
        if free:
            return -heappop(min(free))[1]
        if self._starts and (self._starts[0][0] <= self._now or not self._compute):
            return -heappop(self._starts)[1]
        return heappop(self._compute)[1]

    def _place(self, task: int) -> None:
        problem = self._problem
        start = problem.starts[task]
        self._now = max(self._now, self._since[task])
        if start is not None:
            self._open[problem.domain[start]] += 1
        elif problem.stream[task] == COMPUTE:
            self._now += problem.ns[task]
        else:
            self._open[problem.domain[task]] -= 1
        for dep in problem.deps[task]:
            takes = self._patience * problem.ns[dep] if dep == start else 0.0
            self._since[dep] = max(self._since[dep], self._now + takes)
            self._left[dep] -= 1
            if not self._left[dep]:
                self._ready(dep)


def _post_order(problem: Problem) -> Sequence[int]:
    """The place of each task in the order that needs less memory: operands before what reads them,
    in their order or those first that more is needed for."""
    users = [len(users) - 1.0 for users in problem.users]
    sizes = [sum(problem.sizes[u] for u in made) for made in problem.allocs]
    for task, deps in enumerate(problem.deps):
        users[task] += sum(users[dep] for dep in deps)
        sizes[task] += sum(sizes[dep] for dep in deps)
    orders = [
        _visited(problem, lambda deps: deps),
        _visited(problem, lambda deps: sorted(deps, key=lambda d: (-users[d], -sizes[d]))),
    ]
    order = min(orders, key=lambda order: memory_profile(problem.graph, order).peak_bytes)
    place = [0] * problem.size
    for position, task in enumerate(order):
        place[task] = position
    return place


def _visited(problem: Problem, ordered: Callable[[Sequence[int]], Sequence[int]]) -> list[int]:
    """All tasks, operands before what reads them, from the end."""
    order: list[int] = []
    seen = [False] * problem.size
    for root in reversed(range(problem.size)):
        pending = [root]
        while pending:
            task = pending[-1]
            before = [] if seen[task] else [d for d in ordered(problem.deps[task]) if not seen[d]]
            if before:
                pending += reversed(before)
                continue
            pending.pop()
            if not seen[task]:
                seen[task] = True
                order.append(task)
    return order


def _async_depths(problem: Problem, patience: float) -> list[float]:
    """How long the longest chain of collectives takes that leads to each task, itself left out if
    it is a start."""
    depth = [0.0] * problem.size
    for task, deps in enumerate(problem.deps):
        start = problem.starts[task]
        depth[task] = max((depth[dep] for dep in deps), default=0.0)
        if start is not None:
            depth[task] += patience * problem.ns[start]
    return depth
