"""A lower bound on a graph's total that is close to what orders reach, proven stream by stream.

What has to come before a task runs on streams that do one thing at a time: of those tasks, all
that cannot begin before some time have to fit between that time and the task. The same holds from
the end. It is the bound of one machine with heads and tails (Carlier 1982), with
interruptions. Bucketed or not: a transfer counts without its latency where several are added up.
Memory is not limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from stablehlo_tools.overlap.scheduling.scheduling_problem import (
    COMPUTE,
    OverlapProblem,
    problem_of,
)
from stablehlo_tools.overlap.task_graph import TaskGraph

type Times = npt.NDArray[np.float64]
type Related = npt.NDArray[np.bool_]


def best_possible(graph: TaskGraph) -> float:
    """No order and no buckets of a flat graph take less than this, in ns. O(tasks² log tasks)."""
    problem = problem_of(graph)
    if not problem.size:
        return 0.0
    ns = np.array(problem.ns, float)
    stream = np.array(problem.stream)
    work = np.where(stream == COMPUTE, ns, ns - np.array(problem.latency))
    streams = [(stream == number) & (ns > 0) for number in sorted(set(problem.stream))]
    before = _ancestors(problem)
    head = _heads(range(problem.size), problem.deps, before, streams, ns, work)
    tail = _heads(reversed(range(problem.size)), problem.users, before.T, streams, ns, work)
    longest = float((head + ns + tail).max())
    return max(longest, *(_one_machine(head, tail, work, busy) for busy in streams))


def _ancestors(problem: OverlapProblem) -> Related:
    """Whether a task (row) has to come after another (column)."""
    before = np.zeros((problem.size, problem.size), bool)
    for task, deps in enumerate(problem.deps):
        for dep in deps:
            before[task] |= before[dep]
            before[task, dep] = True
    return before


def _heads(
    tasks: Iterable[int],
    neighbours: Sequence[Sequence[int]],
    before: Related,
    streams: Sequence[Related],
    ns: Times,
    work: Times,
) -> Times:
    """When each task can begin, counted from the side that `neighbours` are on."""
    head = np.zeros(len(ns))
    for task in tasks:
        begin = max((head[other] + ns[other] for other in neighbours[task]), default=0.0)
        for busy in streams:
            earlier = np.nonzero(before[task] & busy)[0]
            if len(earlier):
                ranked = earlier[np.argsort(-head[earlier], kind="stable")]
                begin = max(begin, float((head[ranked] + np.cumsum(work[ranked])).max()))
        head[task] = begin
    return head


def _one_machine(head: Times, tail: Times, work: Times, busy: Related) -> float:
    """The bound of one stream: what begins after a time, and what has to follow it."""
    tasks = np.nonzero(busy)[0]
    longest = 0.0
    for begin in np.unique(head[tasks]):
        late = tasks[head[tasks] >= begin]
        ranked = late[np.argsort(-tail[late], kind="stable")]
        longest = max(longest, float((begin + np.cumsum(work[ranked]) + tail[ranked]).max()))
    return longest
