"""One pass over a problem that issues task by task, as the device would run them.

Compute runs in the order of the time that has to follow it, the longest first. A transfer is issued
as late as possible without idling its stream, the most urgent first. It shares a bucket with others
of its kind if that causes no delay. A wait ends together with its transfer, which frees the
transfer's operands. No task runs that would break the memory limit of the reserve; if no other task
fits, the next task of the plan runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from stablehlo_tools.overlap.scheduling.memory_plans import MemoryPlan, Reserve
from stablehlo_tools.overlap.scheduling.scheduling_problem import COMPUTE, OverlapProblem

_ANY = float("inf")
_MOST_REFUSED = 8  # ready compute tasks that one choice may reject


@dataclass(frozen=True, slots=True)
class Moments:
    """The places at which transfers may be issued: right before or after certain compute.

    A transfer that the last task made ready may be issued anywhere. So may any transfer if no
    compute can run.
    """

    before: frozenset[int]
    behind: frozenset[int]


@dataclass(frozen=True, slots=True)
class ForwardRules:
    """The rules by which a pass decides.

    `limit` is in bytes. `in_flight` transfers of a stream, `at_once` of a communication domain, may
    be issued and not yet waited for; a bucket counts as one. `patience` is the delay in ns that a
    bucket may cause to one of its members; None disables buckets. `moments`: the places for
    transfers (default: anywhere). `room`: for each task, the ns for which a slot is free and the
    transfer that needs it next, see `timing.room_before`.

    `compute_first`: no transfer uses the memory of the compute that is to run beside it.
    `look_again`: after short transfers are issued, the chosen compute is reconsidered.
    `not_before`: the earliest moment of each task's compute, unless no other task remains.
    `by_use`: a member's delay in a bucket is measured against the use of its result and against the
    other kinds of its stream, not against its own place on the stream.
    """

    limit: float
    in_flight: int | None = None
    at_once: int | None = None
    patience: float | None = None
    moments: Moments | None = None
    room: Sequence[tuple[float, int]] | None = None
    compute_first: bool = False
    look_again: bool = False
    not_before: Sequence[float] | None = None
    by_use: bool = False


@dataclass(slots=True)
class ForwardSchedule:
    """An order with its buckets, its total time, and the end of each task, in ns."""

    order: list[int] = field(default_factory=list[int])
    buckets: list[list[int]] = field(default_factory=list[list[int]])
    total: float = 0.0
    ends: list[float] = field(default_factory=list[float])


def forward(
    problem: OverlapProblem, plan: MemoryPlan, tail: Sequence[float], rules: ForwardRules
) -> ForwardSchedule:
    """Schedules all tasks; `tail` is the ns that have to follow each."""
    return _ForwardState(problem, plan, tail, rules).run()


class _ForwardState:
    """The state of the device: its clock, its streams, the ready tasks and the free memory."""

    def __init__(
        self, problem: OverlapProblem, plan: MemoryPlan, tail: Sequence[float], rules: ForwardRules
    ) -> None:
        self.problem = problem
        self.tail = tail
        self.rules = rules
        self.reserve = Reserve(problem, plan, rules.limit)
        self.result = ForwardSchedule(ends=[0.0] * problem.size)
        self.clock = 0.0
        self.free = [0.0] * len(problem.streams)  # when each stream becomes idle
        self.horizon = max(tail, default=0.0)
        self._left = [len(deps) for deps in problem.deps]
        self._done = bytearray(problem.size)
        self._in_flight = [0] * len(problem.streams)
        self._open = [0] * (1 + max(problem.domain, default=0))  # in flight, by domain
        self._flying: set[int] = set()  # the first starts of the buckets in flight
        self._landing = [0.0] * problem.size  # when transfers end, by start
        self._room = (_ANY, -1)
        self._beside: int | None = None  # the compute that transfers must leave memory for
        self._ran = 0  # how much compute
        self._ready_after = [0] * problem.size  # by task, how much compute
        self._moment = 0  # after how much compute the last one was
        self._waits: list[tuple[float, int]] = []
        self._compute: list[tuple[float, int]] = []
        self._held: list[tuple[float, int]] = []  # ready compute with its earliest moment
        self._starts: list[dict[Hashable, list[tuple[float, int]]]] = [{} for _ in problem.streams]
        for task, left in enumerate(self._left):
            if not left:
                self._make_ready(task)

    def run(self) -> ForwardSchedule:
        """Runs all tasks."""
        order, size = self.result.order, self.problem.size
        for task in self.problem.inputs:  # available from the start
            if not self._left[task]:
                self._finish(task)
        while len(order) < size:
            task = self._choose()
            if task is None:
                self._stand_still()
            else:
                self._compute_beside(task)
            # Ends the waits for finished transfers.
            while self._waits and self._waits[0][0] <= self.clock:
                wait = heappop(self._waits)[1]
                start = self.problem.starts[wait]
                assert start is not None, "a wait has a start"
                if start in self._flying:
                    self._flying.remove(start)
                    self._in_flight[self.problem.stream[start]] -= 1
                    self._open[self.problem.domain[start]] -= 1
                self.result.ends[wait] = self.clock
                self._finish(wait)
        self.result.total = max([self.clock, *self.free])
        return self.result

    def _make_ready(self, task: int) -> None:
        problem = self.problem
        start, stream = problem.starts[task], problem.stream[task]
        entry = (-self.tail[task], task)
        self._ready_after[task] = self._ran
        if start is not None:
            heappush(self._waits, (self._landing[start], task))
        elif stream == COMPUTE and self._earliest(task) > self.clock:
            heappush(self._held, (self._earliest(task), task))
        elif stream == COMPUTE:
            heappush(self._compute, entry)
        else:
            heappush(self._starts[stream].setdefault(problem.bucket_keys[task], []), entry)

    def _earliest(self, task: int) -> float:
        not_before = self.rules.not_before
        return 0.0 if not_before is None else not_before[task]

    def _let_go(self) -> None:
        task = heappop(self._held)[1]
        if not self._done[task]:
            heappush(self._compute, (-self.tail[task], task))

    def _finish(self, task: int) -> None:
        """Records a task as issued. This may make users of compute ready, but not of a transfer."""
        self._done[task] = 1
        self.reserve.run(task)
        self.result.order.append(task)
        if self.problem.stream[task] == COMPUTE:
            for user in self.problem.users[task]:
                self._arrive(user)

    def _arrive(self, user: int) -> None:
        self._left[user] -= 1
        if not self._left[user]:
            self._make_ready(user)

    def _compute_beside(self, task: int) -> None:
        """Issues transfers, then computes, unless the transfers took the memory for that."""
        moments = self.rules.moments
        if moments is not None and task in moments.before:
            self._moment = self._ran
        if self.rules.room is not None:
            self._room = self.rules.room[task]
        issued = len(self.result.order)
        self._beside = task if self.rules.compute_first else None
        self._feed_streams(self.clock + self.problem.ns[task])
        self._beside = None
        again = self.rules.look_again and len(self.result.order) > issued
        if self.reserve.fits(task) and not (again and self._should_wait(task)):
            self._compute_one(task)
            if moments is not None and task in moments.behind:
                self._moment = self._ran
        else:
            heappush(self._compute, (-self.tail[task], task))

    def _compute_one(self, task: int) -> None:
        self.clock += self.problem.ns[task]
        self.result.ends[task] = self.clock
        self._ran += 1
        self._finish(task)

    def _choose(self) -> int | None:
        """Returns the compute to run now; None if it is better to wait."""
        # Releases the compute whose earliest moment has come.
        while self._held and self._held[0][0] <= self.clock:
            self._let_go()
        heap = self._compute
        refused: list[tuple[float, int]] = []
        chosen = None
        while heap and len(refused) < _MOST_REFUSED:
            entry = heappop(heap)
            task = entry[1]
            if self._done[task]:
                continue
            if self.reserve.fits(task) and not self._should_wait(task):
                chosen = task
                break
            refused.append(entry)
        for entry in refused:
            heappush(heap, entry)
        return chosen

    def _should_wait(self, task: int) -> bool:
        """Returns True if a transfer that ends while a task would run is more urgent than it."""
        ns = self.problem.ns[task]
        if not self._waits or not ns:
            return False
        landing, wait = self._waits[0]
        if landing >= self.clock + ns:
            return False
        late = self.clock + self.tail[task]
        late_other = self.tail[wait]
        first = max(late, self.clock + ns + late_other)
        # The longest compute that uses the result of the wait.
        burst = max([self.problem.ns[user] for user in self.problem.users[wait]], default=0.0)
        return max(landing + late_other, late + landing - self.clock + burst) < first

    def _stand_still(self) -> None:
        """Advances to the end of the next transfer, or else runs the next task of the plan.

        Called if no task can or should run now.
        """
        self._feed_streams(self.clock, dry=True)
        if self._waits:
            self.clock = max(self.clock, self._waits[0][0])
            return
        if self._held:
            self._let_go()
            return
        if len(self.result.order) == self.problem.size:
            return
        # Nothing else fits: the next task of the plan always does.
        task = self.reserve.next
        if self.problem.stream[task] == COMPUTE:
            self._compute_one(task)
        else:
            self._issue(task, [])

    def _feed_streams(self, until: float, *, dry: bool = False) -> None:
        """Issues transfers to the streams that would be idle before `until`, most urgent first.

        With `dry`, no compute is running, and only streams that are already idle count.
        """
        most = _ANY if self.rules.in_flight is None else self.rules.in_flight
        while any(
            self._issue_if_fits(stream, key, dry=dry)
            for _, stream, key in sorted(
                (heap[0], stream, key)
                for stream, heaps in enumerate(self._starts)
                if self._in_flight[stream] < most
                and (self.free[stream] < until or (dry and self.free[stream] <= self.clock))
                for key, heap in heaps.items()
                if heap
            )
        ):
            pass

    def _issue_if_fits(self, stream: int, key: Hashable, *, dry: bool) -> bool:
        """Issues the most urgent transfer of a kind, if memory allows it."""
        heap = self._starts[stream][key]
        task = heap[0][1]
        if not self._done[task]:
            at_once = self.rules.at_once
            if (
                (at_once is not None and self._open[self.problem.domain[task]] >= at_once)
                or self._is_early(task, dry=dry)
                or not self.reserve.fits(task, self._beside)
            ):
                return False
            heappop(heap)
            self._issue(task, heap)
        else:
            heappop(heap)
        return True

    def _is_early(self, start: int, *, dry: bool) -> bool:
        """Returns True if a transfer has to wait for the next moment, or for a more urgent one."""
        if dry:
            return False
        behind = self.rules.moments is not None and self._moment < self._ran
        if behind and self._ready_after[start] <= self._moment:
            return True
        room, needed_by = self._room
        return self.problem.ns[start] > room and self.tail[start] < self.tail[needed_by]

    def _issue(self, first: int, others: list[tuple[float, int]]) -> None:
        """Issues a transfer, with those of its kind that a bucket of them delays by too little."""
        problem, patience = self.problem, self.rules.patience
        stream, latency = problem.stream[first], problem.latency[first]
        end = max(self.clock, self.free[stream]) + problem.ns[first]
        self._finish(first)
        bucket = [first]
        if patience is not None:
            latest = max(end, self._latest_end(first)) + patience
            if self.rules.by_use:
                # The stream has to be free for the ready transfers of its other kinds.
                most = 0.0
                for heap in self._starts[stream].values():
                    while heap and self._done[heap[0][1]]:
                        heappop(heap)
                    if heap and heap is not others:
                        most = max(most, -heap[0][0])
                latest = min(latest, max(end, self.horizon - most) + patience)
            while others:
                task = others[0][1]
                longer = end + problem.ns[task] - latency
                if longer > latest or self._done[task] or not self.reserve.fits(task):
                    break
                heappop(others)
                self._finish(task)
                bucket.append(task)
                end = longer
                latest = min(latest, max(end, self._latest_end(task)) + patience)
        if len(bucket) > 1:
            self.result.buckets.append(bucket)
        self.free[stream] = end
        self._in_flight[stream] += 1
        self._open[problem.domain[first]] += 1
        # A bucket is in flight once, so the first of its starts counts for all.
        self._flying.add(first)
        for task in bucket:
            self._landing[task] = self.result.ends[task] = end
            for user in problem.users[task]:
                self._arrive(user)

    def _latest_end(self, start: int) -> float:
        """Returns the latest end of a transfer with which the whole schedule ends in time."""
        if self.rules.by_use:
            waits = self.problem.users[start]
            return self.horizon - max([self.tail[wait] for wait in waits], default=0.0)
        return self.horizon - self.tail[start] + self.problem.ns[start]
