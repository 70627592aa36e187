"""How much has to follow each task: from its start to the end of a schedule made backwards.

The schedule is built from its end: a task is placed as late as the tasks that need it and its
stream allow. Where several compete for a stream, the one that a given forward schedule ends last
comes last. Repeating forward and backward schedules, each led by the one before, is known from
resource-constrained project scheduling (justification; Valls, Ballestín, Quintanilla 2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from stablehlo_tools.overlap.scheduling.problem import COMPUTE, Problem


def heads(problem: Problem) -> list[float]:
    """The longest chain of dependences that ends with each task, in ns."""
    finish = [0.0] * problem.size
    for task, deps in enumerate(problem.deps):
        finish[task] = problem.ns[task] + max([finish[dep] for dep in deps], default=0.0)
    return finish


def longest_tails(problem: Problem) -> list[float]:
    """The longest chain of dependences that begins with each task, in ns."""
    tail = [0.0] * problem.size
    for task in reversed(range(problem.size)):
        behind = [tail[user] for user in problem.users[task]]
        tail[task] = problem.ns[task] + max(behind, default=0.0)
    return tail


def tails(problem: Problem, ends: Sequence[float]) -> list[float]:
    """The time from the start of each task to the end, in ns; `ends` lead, the latest first."""
    ns, stream, deps = problem.ns, problem.stream, problem.deps
    left = [len(users) for users in problem.users]
    tail = [0.0] * problem.size
    waiting: list[list[tuple[float, int]]] = [[] for _ in range(len(problem.streams) + 1)]
    busy = [False] * len(waiting)
    over: list[tuple[float, int]] = []  # when tasks are placed whole, counted from the end
    ready = [task for task in range(problem.size - 1, -1, -1) if not left[task]]
    now = 0.0
    while True:
        while ready:
            task = ready.pop()
            if ns[task]:
                heappush(waiting[stream[task]], (-ends[task], -task))
                continue
            tail[task] = now
            _release(deps[task], left, ready)
        for number, queue in enumerate(waiting):
            if queue and not busy[number]:
                task = -heappop(queue)[1]
                busy[number] = True
                heappush(over, (now + ns[task], task))
        if not over:
            return tail
        now, task = heappop(over)
        tail[task] = now
        busy[stream[task]] = False
        _release(deps[task], left, ready)


def _release(deps: Sequence[int], left: list[int], ready: list[int]) -> None:
    for dep in deps:
        left[dep] -= 1
        if not left[dep]:
            ready.append(dep)


assert COMPUTE == -1, "the compute stream is the last of the queues"
