"""Issues transfers as late as they still end in time, where that needs less memory.

The list scheduler issues a transfer as soon as its stream is free. Here each moves to the last
place from which it neither ends after the first use of its result nor delays the next transfer of
its stream. Its wait moves to that first use and keeps alive until then what the transfer reads, so
only those move whose results are larger than that: gathers do, reductions stay early.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from stablehlo_tools.overlap.scheduling.problem import COMPUTE, Problem
from stablehlo_tools.overlap.scheduling.timing import bucket_ns, time_order


def just_in_time(
    problem: Problem, order: Sequence[int], buckets: Sequence[Sequence[int]]
) -> list[int]:
    """The order with its transfers as late as costs no time; buckets stay together."""
    return _Delay(problem, order, buckets).order()


class _Delay:
    """Moves transfers, the last of the order first."""

    def __init__(
        self, problem: Problem, order: Sequence[int], buckets: Sequence[Sequence[int]]
    ) -> None:
        self._problem = problem
        self._order = order
        self._bucket_of = {start: tuple(bucket) for bucket in buckets for start in bucket}
        self._timing = time_order(problem, order, buckets)
        self._place = {task: place for place, task in enumerate(order)}
        # Nothing is put between the starts of a bucket.
        self._opening = {self._place[start]: self._place[b[0]] for b in buckets for start in b}
        self._last_use = _last_uses(problem, order)
        self._before: dict[int, list[int]] = {}  # by place, what moves to right before it
        self._moved: set[int] = set()
        # Of the transfer that is next on each stream: when it begins at the latest, and its place.
        self._next_begin = [self._timing.total] * len(problem.streams)
        self._next_place = [len(order)] * len(problem.streams)

    def order(self) -> list[int]:
        """All tasks, in their new places."""
        for task in reversed(self._order):
            bucket = self._bucket_of.get(task, (task,))
            if self._problem.stream[task] != COMPUTE and task == bucket[-1]:
                self._delay(bucket)
        result: list[int] = []
        for place, task in enumerate(self._order):
            result += self._before.get(place, ())
            if task not in self._moved:
                result.append(task)
        return result

    def _delay(self, bucket: Sequence[int]) -> None:
        stream = self._problem.stream[bucket[0]]
        users = self._problem.users
        waits = [wait for start in bucket for wait in users[start]]
        first_use = min((self._place[user] for wait in waits for user in users[wait]), default=-1)
        first_use = self._opening.get(first_use, first_use)
        begin, place = self._timing.begin[bucket[0]], self._place[bucket[0]]
        if first_use > place and self._makes_more_than_it_keeps(bucket, waits):
            reached = self._timing.reached
            end = min(self._next_begin[stream], reached[first_use])
            latest = end - bucket_ns(self._problem, bucket)
            last = bisect_right(reached, latest) - 1
            at = min(last, first_use, self._next_place[stream])
            at = self._opening.get(at, at)
            if at > self._place[bucket[-1]] + 1:
                begin, place = latest, at
                self._move(bucket, place)
                self._before.setdefault(first_use, []).extend(waits)
                self._moved.update(waits)
        self._next_begin[stream], self._next_place[stream] = begin, place

    def _move(self, bucket: Sequence[int], place: int) -> None:
        self._before[place] = [*bucket, *self._before.get(place, ())]
        self._moved.update(bucket)

    def _makes_more_than_it_keeps(self, bucket: Sequence[int], waits: Sequence[int]) -> bool:
        problem = self._problem
        made = {u for start in bucket for u in problem.allocs[start]}
        kept = {
            u
            for wait in waits
            for u in problem.reads[wait]
            if u not in made and u not in problem.kept and self._last_use[u] == self._place[wait]
        }
        return _bytes(problem, made) > _bytes(problem, kept)


def _bytes(problem: Problem, storages: set[int]) -> float:
    return sum(problem.sizes[u] for u in sorted(storages))


def _last_uses(problem: Problem, order: Sequence[int]) -> Mapping[int, int]:
    return {u: place for place, task in enumerate(order) for u in problem.reads[task]}
