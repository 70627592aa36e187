"""The oracle of the overlap scheduler: the optimum of a small graph, by OR-Tools CP-SAT.

The solver proves graphs of some thirty tasks in seconds. It counts loops as the scheduler does, as
compute of a known time, and ignores that streams share links.

Each task has a place in the order and a time at which the device starts it. For every two tasks
without a dependence, a literal says which comes first; that one ends before the other begins. A
transfer moves at or after its issue. Transfers of one stream move one after the other in the order
of their places. Memory and transfers in flight are counted over places instead of times, because
many tasks take no time. The starts of a bucket have consecutive places and one transfer.

Times in the model may be later than the order makes them, but never earlier. So the least makespan
of the model is that of the best order. Times are rounded down to 1/1000 ns, bytes up to integers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from ortools.sat.python import cp_model
from scheduler_graphs import most_in_flight

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.scheduling.memory_plans import MemoryPlan
from stablehlo_tools.overlap.scheduling.scheduler import OverlapSchedule, ScheduleLimits, schedule
from stablehlo_tools.overlap.scheduling.scheduling_problem import (
    COMPUTE,
    OverlapProblem,
    problem_of,
)
from stablehlo_tools.overlap.scheduling.timing import time_order
from stablehlo_tools.overlap.task_graph import TaskGraph

_UNIT = 1000  # of the model's time in a nanosecond


class Optimum(NamedTuple):
    """An order with its buckets, whether it is the fastest, and a lower bound of the total in ns.

    The bound of a proven order may be below its total by 1/1000 ns for each task, by rounding.
    """

    order: Sequence[int]
    buckets: Sequence[Sequence[int]]
    total_ns: float
    proven: bool
    bound_ns: float


class LeastMemory(NamedTuple):
    """The bytes that some order needs, and a lower bound for all orders."""

    enough: float
    bound: float


class NothingFitsError(Exception):
    """No order is within the limits."""


def solve_graph(
    graph: TaskGraph, limits: ScheduleLimits | None = None, seconds: float = 60.0
) -> Optimum:
    """Returns the best order and buckets within the limits, or the best after so many seconds.

    The solver begins with the result of `schedule`, so the total is never larger. A proven total is
    the same each time. Raises NothingFitsError if no order fits, and TimeoutError if the solver
    found none in time.
    """
    limits = ScheduleLimits() if limits is None else limits
    assert limits.moments is None, "the solver issues transfers at any moment"
    assert limits.at_once is None, "the solver limits only the transfers of each stream"
    problem = problem_of(graph, keep_compute=not limits.reorder_compute)
    known = _scheduled(graph, limits)
    most = sum(problem.ns) if known is None else known.total_ns
    query = Query(limits.memory, limits.in_flight, limits.buckets)
    model = OverlapModel(problem, query, most)
    if known is not None:
        model.hint(known.order, known.buckets)
    answer = model.solve(seconds)
    found: list[Optimum] = []
    if known is not None:
        found.append(Optimum(known.order, known.buckets, most, answer.proven, answer.bound))
    if answer.order is not None:
        total = time_order(problem, answer.order, answer.buckets).total
        found.append(Optimum(answer.order, answer.buckets, total, answer.proven, answer.bound))
    if not found:
        if answer.proven:
            raise NothingFitsError
        raise TimeoutError(f"the solver found no order in {seconds:g} s")
    best = min(found, key=lambda each: each.total_ns)
    return best._replace(bound_ns=min(best.bound_ns, best.total_ns))


def least_memory(problem: OverlapProblem, seconds: float = 60.0) -> LeastMemory:
    """Returns the least memory of all orders. Raises TimeoutError if the solver found no order."""
    answer = OverlapModel(problem, Query(None), sum(problem.ns)).solve(seconds)
    if answer.order is None:
        raise TimeoutError(f"the solver found no order in {seconds:g} s")
    return LeastMemory(MemoryPlan(problem, answer.order).peak, answer.bound)


def _scheduled(graph: TaskGraph, limits: ScheduleLimits) -> OverlapSchedule | None:
    """The scheduler's result; None if it finds none or exceeds the transfers in flight."""
    try:
        found = schedule(graph, limits)
    except ToolError:
        return None
    in_flight = most_in_flight(graph, found.order, found.buckets)
    return found if limits.in_flight is None or in_flight <= limits.in_flight else None


@dataclass(frozen=True, slots=True)
class Query:
    """The limits of a model: bytes, transfers of each stream in flight, whether to make buckets.

    With `memory` None the model minimizes memory instead of time.
    """

    memory: float | None
    in_flight: int | None = None
    buckets: bool = False


@dataclass(slots=True)
class Answer:
    """The order and buckets that the solver found, if any, and a lower bound.

    `bound` is in ns, or in bytes if the model minimizes memory. `proven`: the order is the best, or
    there is none.
    """

    order: list[int] | None
    buckets: list[list[int]]
    bound: float
    proven: bool


@dataclass(slots=True)
class _Variables:
    """Each task's place and start time; when each transfer moves and lands."""

    place: list[cp_model.IntVar]
    at: list[cp_model.IntVar]
    moves: dict[int, cp_model.IntVar] = field(default_factory=dict[int, cp_model.IntVar])
    landed: dict[int, cp_model.IntVar] = field(default_factory=dict[int, cp_model.IntVar])
    # Whether a start is in the bucket named after another; the latter is then in its own.
    joins: dict[tuple[int, int], cp_model.IntVar] = field(
        default_factory=dict[tuple[int, int], cp_model.IntVar]
    )


class OverlapModel:
    """The constraints of one problem."""

    def __init__(self, problem: OverlapProblem, asked: Query, horizon: float) -> None:
        """`horizon`: the total of some order, in ns."""
        self._problem = problem
        self._asked = asked
        self._model = cp_model.CpModel()
        self._ns = [int(ns * _UNIT) for ns in problem.ns]
        self._horizon = math.ceil(horizon * _UNIT)
        self._after = _reachable(problem)
        self._leaders = _leaders(problem, self._after) if asked.buckets else {}
        self._variables = self._all_variables()
        self._order_tasks()
        self._order_transfers()
        for leader in self._buckets():
            self._bucket(leader)
        self._limit_in_flight()
        self._objective = self._limit_memory() if asked.memory is None else self._makespan()
        if asked.memory is not None:
            self._limit_memory()
        self._model.minimize(self._objective)

    def hint(self, order: Sequence[int], buckets: Sequence[Sequence[int]]) -> None:
        """Starts the solver from an order."""
        model, own = self._model, self._variables
        timing = time_order(self._problem, order, buckets)
        for position, task in enumerate(order):
            model.add_hint(own.place[task], position)
            begin = timing.reached[position]
            if self._problem.starts[task] is not None:
                begin = timing.begin[task]
            model.add_hint(own.at[task], int(begin * _UNIT))
        for task, moves in own.moves.items():
            model.add_hint(moves, int(timing.begin[task] * _UNIT))
        leader = {task: min(bucket) for bucket in buckets for task in bucket}
        for (task, first), joins in own.joins.items():
            model.add_hint(joins, leader.get(task, task) == first)

    def solve(self, seconds: float) -> Answer:
        """Returns the best order that the solver finds in so many seconds."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        solver.parameters.max_time_in_seconds = seconds
        status = solver.solve(self._model)
        scale = 1 if self._asked.memory is None else _UNIT
        bound = solver.best_objective_bound / scale
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Answer(None, [], bound, status == cp_model.INFEASIBLE)
        own = self._variables
        order = sorted(range(self._problem.size), key=lambda task: solver.value(own.place[task]))
        buckets: dict[int, list[int]] = {}
        for (task, first), joins in own.joins.items():
            if solver.boolean_value(joins):
                buckets.setdefault(first, []).append(task)
        several = [sorted(bucket) for bucket in buckets.values() if len(bucket) > 1]
        return Answer(order, several, bound, status == cp_model.OPTIMAL)

    def _all_variables(self) -> _Variables:
        model, problem, horizon = self._model, self._problem, self._horizon
        tasks = range(problem.size)
        own = _Variables(
            [model.new_int_var(0, problem.size - 1, f"place {task}") for task in tasks],
            [model.new_int_var(0, horizon, f"at {task}") for task in tasks],
        )
        for task in tasks:
            if problem.stream[task] != COMPUTE:
                own.moves[task] = model.new_int_var(0, horizon, f"moves {task}")
                own.landed[task] = model.new_int_var(0, horizon, f"landed {task}")
        for task, leaders in self._leaders.items():
            for first in leaders:
                own.joins[task, first] = model.new_bool_var(f"{task} joins {first}")
        return own

    def _over(self, task: int) -> cp_model.LinearExprT:
        """When the device finishes a task."""
        at = self._variables.at[task]
        return at if self._problem.stream[task] != COMPUTE else at + self._ns[task]

    def _order_tasks(self) -> None:
        """Runs one task at a time on the device, and each wait after the landing."""
        model, problem, own = self._model, self._problem, self._variables
        for task in range(problem.size):
            for dep in problem.deps[task]:
                self._follow(dep, task, ())
            start = problem.starts[task]
            if start is not None:
                model.add(own.at[task] >= own.landed[start])
        self._first: dict[tuple[int, int], cp_model.IntVar] = {}
        for one, other in combinations(range(problem.size), 2):
            if self._after[one] >> other & 1:
                continue
            first = model.new_bool_var(f"{one} before {other}")
            self._first[one, other] = first
            self._follow(one, other, (first,))
            self._follow(other, one, (first.negated(),))
        model.add_no_overlap(
            model.new_fixed_size_interval_var(own.at[task], ns, f"compute {task}")
            for task, ns in enumerate(self._ns)
            if problem.stream[task] == COMPUTE and ns
        )

    def _follow(self, one: int, other: int, where: Sequence[cp_model.BoolVarT]) -> None:
        own = self._variables
        self._model.add(own.place[one] + 1 <= own.place[other]).only_enforce_if(*where)
        self._model.add(self._over(one) <= own.at[other]).only_enforce_if(*where)

    def _order_transfers(self) -> None:
        """Moves the transfers of a stream one after the other, in the order of their issue."""
        model, problem, own = self._model, self._problem, self._variables
        by_stream: dict[int, list[int]] = {}
        for task, moves in own.moves.items():
            model.add(moves >= own.at[task])
            by_stream.setdefault(problem.stream[task], []).append(task)
            if task not in self._leaders:
                model.add(own.landed[task] == moves + self._ns[task])
        for tasks in by_stream.values():
            model.add_no_overlap(self._transfer(t) for t in tasks if t not in self._leaders)
            for one, other in combinations(tasks, 2):
                separate = self._separate(one, other)
                first = self._first.get((one, other))
                before = [] if first is None else [first]
                landed = model.add(own.landed[one] <= own.moves[other])
                landed.only_enforce_if(*before, *separate)
                if first is not None:
                    landed = model.add(own.landed[other] <= own.moves[one])
                    landed.only_enforce_if(first.negated(), *separate)

    def _transfer(self, task: int) -> cp_model.IntervalVar:
        moves = self._variables.moves[task]
        return self._model.new_fixed_size_interval_var(moves, self._ns[task], f"transfer {task}")

    def _separate(self, one: int, other: int) -> list[cp_model.BoolVarT]:
        """Literals that are true if two starts are not in one bucket."""
        model, joins = self._model, self._variables.joins
        common = [
            first for first in self._leaders.get(one, ()) if first in self._leaders.get(other, ())
        ]
        if not common:
            return []
        together = model.new_bool_var(f"{one} with {other}")
        for first in common:
            here, there = joins[one, first], joins[other, first]
            model.add_bool_or(here.negated(), there.negated(), together)
            model.add_implication(together, here).only_enforce_if(there)
            model.add_implication(together, there).only_enforce_if(here)
        for first in set(self._leaders[one]) ^ set(self._leaders[other]):
            owner = one if (one, first) in joins else other
            model.add_implication(together, joins[owner, first].negated())
        return [together.negated()]

    def _buckets(self) -> Iterator[int]:
        """Makes each start join one bucket; yields the starts that may name a bucket."""
        model, own = self._model, self._variables
        for task, leaders in self._leaders.items():
            model.add_exactly_one(own.joins[task, first] for first in leaders)
            for first in leaders:
                model.add_implication(own.joins[task, first], own.joins[first, first])
            yield task

    def _bucket(self, leader: int) -> None:
        """Gives the starts of a bucket one transfer and consecutive places."""
        model, problem, own = self._model, self._problem, self._variables
        members = [task for task, first in own.joins if first == leader]
        latency = int(problem.latency[leader] * _UNIT)
        size = sum(own.joins[task, leader] for task in members)
        ns = latency + sum((self._ns[t] - latency) * own.joins[t, leader] for t in members)
        place = model.new_int_var(0, problem.size - 1, f"place of bucket {leader}")
        for task in members:
            joins = own.joins[task, leader]
            model.add(own.at[task] == own.at[leader]).only_enforce_if(joins)
            model.add(own.moves[task] == own.moves[leader]).only_enforce_if(joins)
            model.add(own.landed[task] == own.moves[leader] + ns).only_enforce_if(joins)
            model.add(own.place[task] >= place).only_enforce_if(joins)
            model.add(own.place[task] < place + size).only_enforce_if(joins)
        for one, other in combinations(members, 2):
            if not _independent(self._after, one, other):
                model.add_bool_or(
                    own.joins[one, leader].negated(), own.joins[other, leader].negated()
                )

    def _limit_in_flight(self) -> None:
        """Limits the transfers in flight; a bucket is one, until the first wait for it."""
        limit = self._asked.in_flight
        if limit is None:
            return
        by_stream: dict[int, list[cp_model.IntervalVar]] = {}
        for task in self._variables.moves:
            by_stream.setdefault(self._problem.stream[task], []).append(self._flight(task))
        for flights in by_stream.values():
            self._model.add_cumulative(flights, [1] * len(flights), limit)

    def _flight(self, task: int) -> cp_model.IntervalVar:
        """The places from the issue of a transfer to its wait; none if another names its bucket."""
        model, own, size = self._model, self._variables, self._problem.size
        members = [other for other, first in own.joins if first == task]
        ends = [self._wait_place(task)]
        for other in (other for other in members if other != task):
            end = model.new_int_var(0, size, f"wait for {other} of bucket {task}")
            joins = own.joins[other, task]
            model.add(end == self._wait_place(other)).only_enforce_if(joins)
            model.add(end == size).only_enforce_if(joins.negated())
            ends.append(end)
        end = model.new_int_var(0, size, f"wait for bucket {task}")
        model.add_min_equality(end, ends)
        length = model.new_int_var(0, size, f"flight {task}")
        begin, name = own.place[task], f"in flight {task}"
        if members:
            return model.new_optional_interval_var(begin, length, end, own.joins[task, task], name)
        return model.new_interval_var(begin, length, end, name)

    def _wait_place(self, start: int) -> cp_model.LinearExprT:
        problem = self._problem
        waits = [user for user in problem.users[start] if problem.starts[user] == start]
        return self._first_place(waits) if waits else problem.size

    def _first_place(self, tasks: Sequence[int]) -> cp_model.IntVar:
        first = self._model.new_int_var(0, self._problem.size, "first place")
        self._model.add_min_equality(first, [self._variables.place[task] for task in tasks])
        return first

    def _limit_memory(self) -> cp_model.IntVar:
        """Limits the bytes alive at every place; returns the limit."""
        problem, own, model = self._problem, self._variables, self._model
        most = sum(math.ceil(size) for size in problem.sizes)
        most += sum(math.ceil(inside) for inside in problem.within)
        limit = model.new_int_var(0, most, "memory")
        memory = self._asked.memory
        if memory is not None:
            if memory >= most:
                return limit
            model.add(limit == math.floor(memory))
        model.add(limit >= sum(math.ceil(problem.sizes[u]) for u in problem.before))
        intervals: list[cp_model.IntervalVar] = []
        sizes: list[int] = []
        for storage, made_by, used_by in _storages(problem):
            begin = 0 if made_by is None else own.place[made_by]
            end = problem.size
            if storage not in problem.kept and used_by:
                end = self._last_place(used_by)
            intervals.append(self._interval(begin, end, f"storage {storage}"))
            sizes.append(math.ceil(problem.sizes[storage]))
        for task, inside in enumerate(problem.within):
            if inside:
                place = own.place[task]
                intervals.append(self._interval(place, place + 1, f"within {task}"))
                sizes.append(math.ceil(inside))
        model.add_cumulative(intervals, sizes, limit)
        return limit

    def _last_place(self, tasks: Sequence[int]) -> cp_model.IntVar:
        """The place after the last of some tasks."""
        last = self._model.new_int_var(0, self._problem.size, "last place")
        self._model.add_max_equality(last, [self._variables.place[task] + 1 for task in tasks])
        return last

    def _interval(
        self, begin: cp_model.LinearExprT, end: cp_model.LinearExprT, name: str
    ) -> cp_model.IntervalVar:
        size = self._model.new_int_var(0, self._problem.size, f"places of {name}")
        return self._model.new_interval_var(begin, size, end, name)

    def _makespan(self) -> cp_model.IntVar:
        total = self._model.new_int_var(0, self._horizon, "total")
        for task in range(self._problem.size):
            self._model.add(total >= self._over(task))
        for landed in self._variables.landed.values():
            self._model.add(total >= landed)
        return total


def _reachable(problem: OverlapProblem) -> list[int]:
    """Returns the tasks that must follow each task, as a set of bits."""
    after = [0] * problem.size
    for task in reversed(range(problem.size)):
        for user in problem.users[task]:
            after[task] |= after[user] | 1 << user
    return after


def _independent(after: Sequence[int], one: int, other: int) -> bool:
    return not (after[one] >> other & 1 or after[other] >> one & 1)


def _leaders(problem: OverlapProblem, after: Sequence[int]) -> dict[int, list[int]]:
    """Returns for each start those up to itself that may share its bucket."""
    by_key: dict[Hashable, list[int]] = {}
    for task in range(problem.size):
        if problem.stream[task] != COMPUTE and problem.latency[task]:
            by_key.setdefault(problem.bucket_keys[task], []).append(task)
    return {
        task: [t for t in tasks if t <= task and (t == task or _independent(after, t, task))]
        for tasks in by_key.values()
        if len(tasks) > 1
        for task in tasks
    }


def _storages(problem: OverlapProblem) -> Iterator[tuple[int, int | None, list[int]]]:
    """Yields each storage, the task that makes it (None: an input), and the tasks that use it."""
    uses: list[list[int]] = [[] for _ in problem.sizes]
    for task, read in enumerate(problem.reads):
        for storage in read:
            uses[storage].append(task)
    for storage in problem.before:
        yield storage, None, uses[storage]
    for task, made in enumerate(problem.allocs):
        for storage in made:
            yield storage, task, uses[storage]
