"""The scheduler: an order and buckets of a task graph that hide its communication, within memory.

A forward pass (`forward`) is guided by the time that a backward schedule puts after each task
(`timing`). The scheduler runs many passes. They vary the guiding times, also with the results of
earlier passes, with and without buckets. They vary the ways to build buckets, each better for some
graphs (`_WAYS`). They also run compute that allocates memory early or just before its use
(`Lateness`). Each candidate is timed as a whole, buckets included, and the shortest is kept. Small
graphs get more variants. The same graph always gives the same schedule.

Finally, transfers are issued later if that saves memory and costs no time. A forward pass issues
each as soon as its stream is free. Here it moves to the last place from which it neither ends after
the first use of its result nor delays the next transfer of its stream. Its wait moves to that first
use, which keeps the transfer's operands live until then. So only transfers with results larger than
their operands move: gathers do, reductions stay early.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

from stablehlo_tools.diagnostics import GIB, ToolError
from stablehlo_tools.overlap.bounds import floor
from stablehlo_tools.overlap.scheduling.forward_pass import (
    ForwardRules,
    ForwardSchedule,
    Moments,
    forward,
)
from stablehlo_tools.overlap.scheduling.memory_plans import (
    MemoryPlan,
    gib,
    lean_plan,
    least_bytes,
    net_bytes,
    plain_plan,
)
from stablehlo_tools.overlap.scheduling.scheduling_problem import (
    COMPUTE,
    OverlapProblem,
    problem_of,
)
from stablehlo_tools.overlap.scheduling.timing import (
    bucket_ns,
    heads,
    longest_tails,
    most_in_flight,
    room_before,
    tails,
    time_order,
)
from stablehlo_tools.overlap.task_graph import TaskGraph

_ROUNDS = 3
_FEW = 500  # graphs of up to so many tasks get more variants
_VERY_FEW = 100  # graphs of up to so many tasks get many more
_SHAKES = 40
_STRENGTH = 0.3  # share of the longest chain
_SAME = 1e-4  # share of the total: smaller gains are not searched for
_EARLY = 0.08  # share of the total time: the lead of compute over its latest moment
_LITTLE = 1e-3  # share of the peak: tasks that allocate no more may run at any time


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    """The limits of a schedule.

    `memory` is the most live bytes at any time. At most `in_flight` transfers of one stream, and
    `at_once` of one communication domain, are issued and not yet waited for. `buckets`: collectives
    may be merged. `reorder_compute`: compute may leave the graph's order. `moments`: the places at
    which transfers may be issued (default: anywhere).

    `compute_overlap_multiplier` is the share of the time of compute that the plan counts on to hide
    transfers. Below 1, each transfer gets more compute beside it than its time needs, for devices
    on which both compete for memory and cores. Totals use the graph's own times.
    """

    memory: float = float("inf")
    in_flight: int | None = None
    at_once: int | None = None
    buckets: bool = True
    reorder_compute: bool = True
    moments: Moments | None = None
    compute_overlap_multiplier: float = 1.0


@dataclass(frozen=True, slots=True)
class OverlapSchedule:
    """An order of all tasks and its buckets; ns and bytes, of the graph's own order as well."""

    order: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    total_ns: float
    peak_bytes: float
    before_ns: float
    before_bytes: float
    floor_ns: float

    @property
    def gap(self) -> float:
        """(total - floor) / floor, with the floor of the unbucketed graph; 0 if the floor is 0."""
        return self.total_ns / self.floor_ns - 1 if self.floor_ns else 0.0


def schedule(
    graph: TaskGraph, limits: ScheduleLimits | None = None, *, in_loop: bool = False
) -> OverlapSchedule:
    """Schedules a graph; `in_loop`: it is the body of a loop.

    The result is never slower than the graph's own order, if that is within the limits. Raises
    ToolError if no order is found within the memory limit, and states the least memory found.
    """
    limits = ScheduleLimits() if limits is None else limits
    scale = limits.compute_overlap_multiplier
    keep = not limits.reorder_compute
    problem = problem_of(graph, in_loop=in_loop, keep_compute=keep, compute_scale=scale)
    search = _OrderSearch(problem, limits)
    best, own = search.run(), search.own
    if scale != 1.0:
        # The multiplier only guides the plan: both orders are timed again with the graph's times.
        problem = problem_of(graph, in_loop=in_loop, keep_compute=keep)
        best, own = (_time_candidate(problem, found.order, found.buckets) for found in (best, own))
        if own.total < best.total and search.allows(own):
            best = own
    return OverlapSchedule(
        order=best.order,
        buckets=best.buckets,
        total_ns=best.total,
        peak_bytes=search.peak(best),
        before_ns=own.total,
        before_bytes=search.own_peak,
        floor_ns=floor(graph).ns,
    )


@dataclass(frozen=True, slots=True)
class _BucketPolicy:
    """The parameters of a pass with buckets.

    `lead` names the guiding times. `patience` is in latencies of the slowest collective. `late`:
    compute that allocates memory runs late. `by_use` is `ForwardRules.by_use`. `gives` names the
    lead that the times of this pass become.
    """

    lead: str
    patience: float
    late: bool = False
    by_use: bool = False
    gives: str = ""


# Of all combinations these eight lose least against the best of all, on forward, backward and joint
# graphs of 2 to 32 layers, two batches and several links (`overlap_peers.py --held-out`).
_WAYS = (
    _BucketPolicy("chain", 1),
    _BucketPolicy("chain", 1, by_use=True),
    _BucketPolicy("order", 80),
    _BucketPolicy("order again", 15),
    _BucketPolicy("order", 5, late=True, by_use=True, gives="order, bucketed"),
    _BucketPolicy("order, bucketed", 1, late=True),
    _BucketPolicy("order, bucketed", 1, late=True, by_use=True),
    _BucketPolicy("order, bucketed", 160),
)


@dataclass(frozen=True, slots=True)
class _OrderCandidate:
    order: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    total: float


@dataclass(frozen=True)
class _Lead:
    """Guiding end times of tasks, and the results of a backward schedule by them, cached."""

    problem: OverlapProblem
    ends: Sequence[float]
    lateness: Lateness | None

    @cached_property
    def tail(self) -> Sequence[float]:
        """The ns that have to follow each task."""
        return tails(self.problem, self.ends)

    @cached_property
    def not_before(self) -> Sequence[float] | None:
        """The earliest moments of tasks that allocate memory; None if memory is not short."""
        return None if self.lateness is None else self.lateness.not_before(self.tail)


class _OrderSearch:
    """The best candidate so far, and the state that all passes share."""

    def __init__(self, problem: OverlapProblem, limits: ScheduleLimits) -> None:
        self._problem = problem
        self._limits = limits
        self._rules = ForwardRules(
            limits.memory, limits.in_flight, limits.at_once, moments=limits.moments
        )
        self.own = _time_candidate(problem, range(problem.size), ())
        self.own_peak = MemoryPlan(problem, self.own.order).peak
        self._plan = self._fitting_plan()
        self._lateness = Lateness(problem, self._plan) if isfinite(limits.memory) else None
        self._best = _time_candidate(problem, self._plan.order, ())
        if self.allows(self.own):
            self._keep(self.own)

    def allows(self, candidate: _OrderCandidate) -> bool:
        """Returns True if a candidate is within the limits."""
        if self.peak(candidate) > self._limits.memory:
            return False
        if not self._limits_flights:
            return True
        most, each = most_in_flight(self._problem, candidate.order)
        in_flight, at_once = self._limits.in_flight, self._limits.at_once
        return (at_once is None or most <= at_once) and (in_flight is None or each <= in_flight)

    @property
    def _limits_flights(self) -> bool:
        return self._limits.in_flight is not None or self._limits.at_once is not None

    def run(self) -> _OrderCandidate:
        """Tries all leads and ways."""
        # Guiding end times: the start that the longest chain allows; the end in the graph's order;
        # the end that the longest chain allows.
        finish = heads(self._problem)
        begin = [end - ns for end, ns in zip(finish, self._problem.ns, strict=True)]
        order = [float(task) for task in range(self._problem.size)]
        ends = {"chain": begin, "order": order, "chain's end": finish}
        leads = {name: self._lead(each) for name, each in ends.items()}
        passes = {name: self._try(lead, self._rules, late=True) for name, lead in leads.items()}
        leads |= {f"{name} again": self._lead(done.ends) for name, done in passes.items()}
        best = min(passes, key=lambda name: passes[name].total)
        self._try(leads[f"{best} again"], self._rules)
        if self._problem.size <= _FEW:
            self._vary(leads[best])
        if self._limits.at_once is not None:
            # Keeps slots free for transfers that the best schedule so far cannot hide.
            lead = leads[best]
            for _ in range(_ROUNDS):
                room = room_before(self._problem, self._best.order)
                lead = self._lead(self._try(lead, replace(self._rules, room=room)).ends)
        latency = max(self._problem.latency, default=0.0)
        if self._limits.buckets and latency:
            for way in _WAYS:
                rules = replace(self._rules, patience=way.patience * latency, by_use=way.by_use)
                done = self._try(leads[way.lead], rules, late=way.late)
                if way.gives:
                    leads[way.gives] = self._lead(done.ends)
        self._delay()
        return self._best

    def _lead(self, ends: Sequence[float]) -> _Lead:
        return _Lead(self._problem, ends, self._lateness)

    def _vary(self, lead: _Lead) -> None:
        """Tries rules that are better for some graphs and worse for others."""
        self._try(lead, replace(self._rules, compute_first=True))
        self._try(lead, replace(self._rules, look_again=True))
        longest = forward(self._problem, self._plan, longest_tails(self._problem), self._rules)
        self._keep(_OrderCandidate(tuple(longest.order), _tuples(longest.buckets), longest.total))
        if self._problem.size <= _VERY_FEW:
            # Tries randomly changed leads, from fixed seeds.
            scale = max(heads(self._problem), default=0.0)
            for seed in range(_SHAKES):
                chance = random.Random(seed)
                shaken = [at + chance.uniform(-1, 1) * scale * _STRENGTH for at in lead.ends]
                rules = replace(self._rules, look_again=seed % 2 > 0, compute_first=seed % 4 > 1)
                plan = MemoryPlan(self._problem, self._best.order) if seed % 3 else self._plan
                first = self._try(self._lead(shaken), rules, plan)
                self._try(self._lead(first.ends), rules, plan)

    def _try(
        self,
        lead: _Lead,
        rules: ForwardRules,
        plan: MemoryPlan | None = None,
        *,
        late: bool = False,
    ) -> ForwardSchedule:
        """Runs one backward and one forward pass; `plan` is the fallback (default: the leanest).

        `late`: compute that allocates memory runs just before its use, if memory is short.
        """
        if late:
            rules = replace(rules, not_before=lead.not_before)
        pass_ = forward(self._problem, plan or self._plan, lead.tail, rules)
        self._keep(_OrderCandidate(tuple(pass_.order), _tuples(pass_.buckets), pass_.total))
        return pass_

    def _delay(self) -> None:
        # Waits move to the first use, which keeps more transfers in flight.
        if self._limits_flights:
            return
        best = self._best
        # Moves transfers as late as possible without costing time; buckets stay together.
        order = _Delay(self._problem, best.order, best.buckets).order()
        later = _time_candidate(self._problem, order, best.buckets)
        same = later.total <= best.total * (1 + _SAME / 100)
        if same and self.peak(later) <= self.peak(best):
            self._best = later

    def _keep(self, candidate: _OrderCandidate) -> None:
        if candidate.total < self._best.total:
            self._best = candidate

    def peak(self, candidate: _OrderCandidate) -> float:
        """Returns the most live bytes at any time."""
        return MemoryPlan(self._problem, candidate.order).peak

    def _fitting_plan(self) -> MemoryPlan:
        """A plan within the memory limit."""
        plan = plain_plan(self._problem)
        if plan.peak <= self._limits.memory:
            return plan
        # If compute must keep its order, the plain plan is the only fallback.
        if self._limits.reorder_compute:
            plan = lean_plan(self._problem, plan, self._limits.memory)
        if plan.peak <= self._limits.memory:
            return plan
        raise ToolError(
            "found no order that fits in "
            f"{self._limits.memory / GIB:.6g} GiB: {gib(plan.peak)} GiB is enough, and "
            f"less than {least_bytes(self._problem) / GIB:.6g} GiB is not"
        )


def _time_candidate(
    problem: OverlapProblem, order: Sequence[int], buckets: Sequence[Sequence[int]]
) -> _OrderCandidate:
    return _OrderCandidate(
        tuple(order), _tuples(buckets), time_order(problem, order, buckets).total
    )


def _tuples(buckets: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(bucket) for bucket in buckets)


class _Delay:
    """Moves transfers, the last of the order first."""

    def __init__(
        self, problem: OverlapProblem, order: Sequence[int], buckets: Sequence[Sequence[int]]
    ) -> None:
        self._problem = problem
        self._order = order
        self._bucket_of = {start: tuple(bucket) for bucket in buckets for start in bucket}
        self._timing = time_order(problem, order, buckets)
        self._place = {task: place for place, task in enumerate(order)}
        # No task may be inserted between the starts of a bucket.
        self._opening = {self._place[start]: self._place[b[0]] for b in buckets for start in b}
        self._last_use = {u: place for place, task in enumerate(order) for u in problem.reads[task]}
        self._before: dict[int, list[int]] = {}  # by position, the tasks that move right before it
        self._moved: set[int] = set()
        # For the next transfer of each stream: its latest start and its position.
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
                self._before[place] = [*bucket, *self._before.get(place, ())]
                self._moved.update(bucket)
                self._before.setdefault(first_use, []).extend(waits)
                self._moved.update(waits)
        self._next_begin[stream], self._next_place[stream] = begin, place

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


def _bytes(problem: OverlapProblem, storages: set[int]) -> float:
    return sum(problem.sizes[u] for u in sorted(storages))


class Lateness:
    """The earliest moments of compute that allocates memory: shortly before its result is used.

    Much of a backward pass depends only on the forward pass: masks, casts, recomputation. If it ran
    immediately, its results would leave no memory for early gathers and for buckets.
    """

    def __init__(self, problem: OverlapProblem, plan: MemoryPlan) -> None:
        self._problem = problem
        self._taken = net_bytes(problem, plan)
        self._little = plan.peak * _LITTLE

    def not_before(self, tail: Sequence[float]) -> list[float]:
        """Returns the earliest moment of each task, in ns; `tail` is the ns that follow each.

        A task that frees memory may run at any time. A task that allocates as much as it frees is
        as late as its users.
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
