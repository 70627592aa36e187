"""Times of an order, and the time that has to follow each task, in ns, as in the simulator.

The backward schedule is built from its end: a task is placed as late as its users and its stream
allow. If several compete for a stream, the one that a given forward schedule ends last comes last.
Alternating forward and backward schedules, each guided by the previous one, is known from
resource-constrained project scheduling (justification; Valls, Ballestín, Quintanilla 2005).

Only the simulator determines which compute hides which transfer. Streams that share links are timed
as if they did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from stablehlo_tools.overlap.scheduling.scheduling_problem import COMPUTE, OverlapProblem


def heads(problem: OverlapProblem) -> list[float]:
    """The longest chain of dependences that ends with each task, in ns."""
    finish = [0.0] * problem.size
    for task, deps in enumerate(problem.deps):
        finish[task] = problem.ns[task] + max([finish[dep] for dep in deps], default=0.0)
    return finish


def longest_tails(problem: OverlapProblem) -> list[float]:
    """The longest chain of dependences that begins with each task, in ns."""
    tail = [0.0] * problem.size
    for task in reversed(range(problem.size)):
        behind = [tail[user] for user in problem.users[task]]
        tail[task] = problem.ns[task] + max(behind, default=0.0)
    return tail


def tails(problem: OverlapProblem, ends: Sequence[float]) -> list[float]:
    """Returns the ns from the start of each task to the end, by a backward schedule.

    `ends` are the guiding end times; the latest is placed first.
    """
    ns, stream, deps = problem.ns, problem.stream, problem.deps
    left = [len(users) for users in problem.users]
    tail = [0.0] * problem.size
    waiting: list[list[tuple[float, int]]] = [[] for _ in range(len(problem.streams) + 1)]
    busy = [False] * len(waiting)
    over: list[tuple[float, int]] = []  # the starts of placed tasks, counted from the end
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


@dataclass(frozen=True, slots=True)
class TaskTiming:
    """The times of an order, in ns.

    `begin` has, by id, the start of compute and of transfers, and the end of waits. `reached` is
    the time at which the device comes to each position of the order.
    """

    begin: Sequence[float]
    reached: Sequence[float]
    total: float


def time_order(
    problem: OverlapProblem, order: Iterable[int], buckets: Sequence[Sequence[int]]
) -> TaskTiming:
    """Times an order of all tasks, with buckets of collective starts."""
    bucket_of: Mapping[int, Sequence[int]] = {start: b for b in buckets for start in b}
    begin = [0.0] * problem.size
    end = [-1.0] * problem.size  # of transfers
    free = [0.0] * len(problem.streams)
    reached: list[float] = []
    clock = 0.0
    for task in order:
        reached.append(clock)
        stream, start = problem.stream[task], problem.starts[task]
        if start is not None:
            clock = max(clock, end[start])
            begin[task] = clock
        elif stream == COMPUTE:
            begin[task] = clock
            clock += problem.ns[task]
        # The first start of a bucket times all its members.
        elif end[task] < 0:
            bucket = bucket_of.get(task, (task,))
            at = max(clock, free[stream])
            free[stream] = at + bucket_ns(problem, bucket)
            for member in bucket:
                begin[member], end[member] = at, free[stream]
    return TaskTiming(begin, reached, max([clock, *free]))


def bucket_ns(problem: OverlapProblem, bucket: Sequence[int]) -> float:
    """Returns the ns of a bucket: its latency once, plus the rest of every member."""
    latency = problem.latency[bucket[0]]
    return latency + sum(problem.ns[start] - latency for start in bucket)


def most_in_flight(problem: OverlapProblem, order: Sequence[int]) -> tuple[int, int]:
    """The most transfers issued and not yet waited for: of one domain, and of one stream."""
    flying = [0] * len(problem.streams)
    of_domain = [0] * (1 + max(problem.domain, default=0))
    landed: set[int] = set()
    most = each = 0
    for task in order:
        start = problem.starts[task]
        if problem.stream[task] != COMPUTE:
            flying[problem.stream[task]] += 1
            of_domain[problem.domain[task]] += 1
        elif start is not None and start not in landed:
            landed.add(start)
            flying[problem.stream[start]] -= 1
            of_domain[problem.domain[start]] -= 1
        most, each = max([most, *of_domain]), max([each, *flying])
    return most, each


def room_before(problem: OverlapProblem, order: Sequence[int]) -> list[tuple[float, int]]:
    """Returns, for each task, the ns of compute from it to the next critical transfer, and which.

    A transfer is critical if the compute between its inputs and its first use is less than half of
    its time, so that it is exposed in any case.
    """
    before = [0.0] * problem.size  # ns of compute before each task
    after = [0.0] * problem.size
    now = 0.0
    for task in order:
        before[task] = now
        computes = problem.stream[task] == COMPUTE and problem.starts[task] is None
        now += problem.ns[task] if computes else 0.0
        after[task] = now
    room = [(float("inf"), -1)] * problem.size
    wall, needed_by = float("inf"), -1
    for task in reversed(order):
        start = problem.starts[task]
        if start is not None:
            ready = max((after[dep] for dep in problem.deps[start]), default=0.0)
            needed = min((before[user] for user in problem.users[task]), default=now)
            if needed - ready < problem.ns[start] / 2:
                wall, needed_by = before[task], start
        room[task] = wall - before[task], needed_by
    return room
