"""When compute that takes memory runs at the earliest: shortly before its result is needed.

Much of a backward pass hangs on the forward pass alone: masks, casts, what is computed again. Where
compute waits for a transfer, a schedule would run it at once, and hold its results to where they
are needed; the memory is missing then for gathers that could be issued early, and for buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.overlap.scheduling.memory_plans import Plan, taken
from stablehlo_tools.overlap.scheduling.problem import COMPUTE, Problem

_EARLY = 0.08  # of the whole: how much earlier than at the latest
_LITTLE = 1e-3  # of the peak: what takes no more may run at any time


class Lateness:
    """What takes memory, as one plan has it."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._problem = problem
        self._taken = taken(problem, plan)
        self._little = plan.peak * _LITTLE

    def not_before(self, tail: Sequence[float]) -> list[float]:
        """The earliest moment of each task, in ns; `tail` is how much follows each.

        A task that frees memory may run at any time. One that takes as much as it frees is as late
        as its users are.
        """
        problem, taken = self._problem, self._taken
        whole = max(tail, default=0.0)
        latest = [whole - after for after in tail]
        earliest = [0.0] * problem.size
        for task in reversed(range(problem.size)):
            users = problem.users[task]
            computes = problem.stream[task] == COMPUTE and problem.starts[task] is None
            if not computes or taken[task] < 0:
                continue
            if users:
                needed = min([latest[user] for user in users])
                latest[task] = max(latest[task], needed - problem.ns[task])
            if taken[task] > self._little:
                earliest[task] = latest[task] - _EARLY * whole
        return earliest
