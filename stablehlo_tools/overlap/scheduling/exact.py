"""The best schedule of a small graph, proven by a constraint solver (OR-Tools, extra `solver`).

It says how good the scheduler is, and offers the optimum where that can be found: up to some thirty
tasks in seconds. Loops count as the scheduler counts them, as compute of a known time, and streams
that share links as if they had them to themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from stablehlo_tools.diagnostics import ToolError, solver_module
from stablehlo_tools.overlap.bounds import floor
from stablehlo_tools.overlap.scheduling.memory_plans import Plan, gib
from stablehlo_tools.overlap.scheduling.problem import Problem, problem_of
from stablehlo_tools.overlap.scheduling.scheduler import Limits, Schedule, schedule
from stablehlo_tools.overlap.scheduling.timing import time_order
from stablehlo_tools.overlap.task_graph import TaskGraph

if TYPE_CHECKING:
    from stablehlo_tools.overlap.scheduling.exact_model import Answer


_MODEL = "stablehlo_tools.overlap.scheduling.exact_model"


class Exact(NamedTuple):
    """A schedule, whether nothing is faster, and a total, in ns, that nothing is below.

    The solver rounds times down to 1/1000 ns, so the bound of a proven schedule may be below its
    total by as much for each task.
    """

    schedule: Schedule
    proven: bool
    bound_ns: float


class LeastMemory(NamedTuple):
    """The bytes that some order needs, and those that every order needs at least."""

    enough: float
    bound: float


def exact_schedule(graph: TaskGraph, limits: Limits | None = None, seconds: float = 60.0) -> Exact:
    """The best order and buckets of a graph within the limits, or the best found in `seconds`.

    Never slower than what `schedule` finds; a proven total is the same each time. Raises ToolError
    if nothing fits the limits, naming the fewest bytes with which something does, if nothing was
    found in time, and if OR-Tools is not installed.
    """
    limits = Limits() if limits is None else limits
    if limits.moments is not None:
        raise ToolError("an exact schedule issues transfers anywhere: leave out the moments")
    problem = problem_of(graph, keep_compute=not limits.reorder_compute)
    known = _known(graph, limits)
    model = solver_module(_MODEL)
    asked = model.Query(limits.memory, limits.in_flight, limits.at_once, limits.buckets)
    search = model.Model(problem, asked, sum(problem.ns) if known is None else known.total_ns)
    if known is not None:
        search.hint(known.order, known.buckets)
    answer: Answer = search.solve(seconds)
    best = known
    if answer.order is not None:
        solved = _schedule(graph, problem, answer.order, answer.buckets)
        best = solved if known is None or solved.total_ns < known.total_ns else known
    if best is None:
        raise _nothing_fits(problem, limits, answer, seconds)
    return Exact(best, answer.proven, min(answer.bound, best.total_ns))


def least_memory(
    problem: Problem, limits: Limits | None = None, seconds: float = 60.0
) -> LeastMemory | None:
    """How much memory a graph needs at least; None if no order was found.

    Of the limits only those on transfers in flight count.
    """
    limits = Limits() if limits is None else limits
    model = solver_module(_MODEL)
    asked = model.Query(None, limits.in_flight, limits.at_once)
    answer: Answer = model.Model(problem, asked, sum(problem.ns)).solve(seconds)
    if answer.order is None:
        return None
    return LeastMemory(Plan(problem, answer.order).peak, answer.bound)


def _known(graph: TaskGraph, limits: Limits) -> Schedule | None:
    try:
        known = schedule(graph, limits)
    except ToolError:
        return None
    of_stream, of_all = most_in_flight(graph, known.order, known.buckets)
    few = _within(of_stream, limits.in_flight) and _within(of_all, limits.at_once)
    return known if few else None


def _within(count: int, limit: int | None) -> bool:
    return limit is None or count <= limit


def most_in_flight(
    graph: TaskGraph, order: Sequence[int], buckets: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """The most transfers that an order has issued and not yet waited for: of a stream, of all.

    A bucket is one transfer; it is over with the first wait for one of its starts.
    """
    first = {start: bucket[0] for bucket in buckets for start in bucket}
    flying: dict[str, set[int]] = {}
    of_stream = of_all = 0
    for task in (graph.tasks[i] for i in order):
        sent = task.communication
        if sent is not None and first.get(task.id, task.id) == task.id:
            flying.setdefault(sent.stream, set()).add(task.id)
        for transfers in flying.values():
            if task.start is not None:
                transfers.discard(first.get(task.start, task.start))
        of_stream = max([of_stream, *map(len, flying.values())])
        of_all = max(of_all, sum(map(len, flying.values())))
    return of_stream, of_all


def _schedule(
    graph: TaskGraph, problem: Problem, order: Sequence[int], buckets: Sequence[Sequence[int]]
) -> Schedule:
    own = range(problem.size)
    place = {task: position for position, task in enumerate(order)}
    return Schedule(
        order=tuple(order),
        buckets=tuple(tuple(sorted(bucket, key=place.__getitem__)) for bucket in buckets),
        total_ns=time_order(problem, order, buckets).total,
        peak_bytes=Plan(problem, order).peak,
        before_ns=time_order(problem, own, ()).total,
        before_bytes=Plan(problem, own).peak,
        floor_ns=floor(graph).ns,
    )


def _nothing_fits(problem: Problem, limits: Limits, answer: Answer, seconds: float) -> ToolError:
    if not answer.proven:
        return ToolError(f"no order within the limits was found in {seconds:g} seconds")
    least = least_memory(problem, limits, seconds)
    if least is None:
        return ToolError("no order keeps as few transfers in flight as asked")
    asked = f"no order needs as little memory as {limits.memory / 2**30:.6g} GiB"
    if least.bound >= least.enough:
        return ToolError(f"{asked}: the smallest possible limit is {gib(least.enough)} GiB")
    return ToolError(
        f"{asked}: {gib(least.enough)} GiB is enough, and "
        f"less than {least.bound / 2**30:.6g} GiB is not"
    )
