"""How long an order takes, transfers and compute alike, in ns: the simulator's figures, faster.

Only times: who hides behind whom is the simulator's to say. Streams that share links are taken to
have them to themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stablehlo_tools.overlap.scheduling.problem import COMPUTE, Problem


@dataclass(frozen=True, slots=True)
class Timing:
    """When each task begins, by id: compute runs, transfers start to move, waits are over.

    `reached` is when the device comes to each place of the order.
    """

    begin: Sequence[float]
    reached: Sequence[float]
    total: float


def time_order(problem: Problem, order: Iterable[int], buckets: Sequence[Sequence[int]]) -> Timing:
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
        elif end[task] < 0:
            bucket = bucket_of.get(task, (task,))
            at = max(clock, free[stream])
            free[stream] = at + bucket_ns(problem, bucket)
            for member in bucket:
                begin[member], end[member] = at, free[stream]
    return Timing(begin, reached, max([clock, *free]))


def bucket_ns(problem: Problem, bucket: Sequence[int]) -> float:
    """How long a bucket is under way: the latency once, all the rest."""
    latency = problem.latency[bucket[0]]
    return latency + sum(problem.ns[start] - latency for start in bucket)


def most_in_flight(problem: Problem, order: Sequence[int]) -> tuple[int, int]:
    """The most transfers that are issued and not yet waited for: of all, and of one stream."""
    flying = [0] * len(problem.streams)
    landed: set[int] = set()
    most = each = 0
    for task in order:
        start = problem.starts[task]
        if problem.stream[task] != COMPUTE:
            flying[problem.stream[task]] += 1
        elif start is not None and start not in landed:
            landed.add(start)
            flying[problem.stream[start]] -= 1
        most, each = max(most, sum(flying)), max([each, *flying])
    return most, each


def room_before(problem: Problem, order: Sequence[int]) -> list[tuple[float, int]]:
    """For each task how much compute follows, itself included, before which critical transfer.

    A transfer is critical if less compute than half of it stands between what it needs and what
    needs it: whatever else is done, it is exposed.
    """
    before = [0.0] * problem.size  # how much compute stands before each task
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
