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


def room_before(
    problem: Problem, order: Sequence[int], buckets: Sequence[Sequence[int]]
) -> list[tuple[float, int]]:
    """For each task how much compute follows, itself included, before which exposed transfer."""
    timing = time_order(problem, order, buckets)
    room = [(float("inf"), -1)] * problem.size
    left, needed_by = float("inf"), -1
    for place in range(len(order) - 1, -1, -1):
        task = order[place]
        start = problem.starts[task]
        if start is not None:
            stall = timing.begin[task] - timing.reached[place]
            if stall > problem.ns[start] / 2:
                left, needed_by = 0.0, start
        elif problem.stream[task] == COMPUTE:
            left += problem.ns[task]
        room[task] = left, needed_by
    return room
