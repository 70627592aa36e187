"""The optimal reference: as good as brute force; what it says of the scheduler."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from scheduler_graphs import (
    FAMILIES,
    ShapedGraph,
    check,
    drawn,
    most_in_flight,
    peak_bytes,
    total_ns,
)
from task_graphs import Graph

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap import scheduling
from stablehlo_tools.overlap.memory import memory_profile
from stablehlo_tools.overlap.scheduling import exact_model
from stablehlo_tools.overlap.scheduling.exact import exact_schedule, least_memory
from stablehlo_tools.overlap.scheduling.memory_plans import gib, least_bytes
from stablehlo_tools.overlap.scheduling.problem import problem_of
from stablehlo_tools.overlap.scheduling.scheduler import Limits, schedule
from stablehlo_tools.overlap.task_graph import TaskGraph

GIB = 2**30
# Of each family the mean and the largest loss that are allowed, with and without a tight limit.
BOUNDS = [
    ("layered", 0.04, 0.2),
    ("sharded_weights", 0.01, 0.05),
    ("backward_chain", 0.05, 0.08),
    ("tangled", 0.12, 0.3),
]
SECONDS = 600.0  # a graph; most take a tenth of one


def _loss(graph: TaskGraph, limits: Limits) -> float | None:
    """How much longer the scheduler's order takes than the best, relative; None if unproven."""
    exact = exact_schedule(graph, limits, SECONDS)
    best = exact.schedule
    check(graph, best.order, best.buckets)
    assert best.total_ns == pytest.approx(total_ns(graph, best.order, best.buckets))
    assert best.peak_bytes == peak_bytes(graph, best.order) <= limits.memory
    if limits.in_flight is not None:
        assert most_in_flight(graph, best.order, best.buckets) <= limits.in_flight
    assert exact.bound_ns <= best.total_ns
    if not exact.proven:
        return None
    assert exact.bound_ns == pytest.approx(best.total_ns)
    return schedule(graph, limits).total_ns / best.total_ns - 1 if best.total_ns else 0.0


def _losses(family: str, room: float, seeds: range) -> list[float]:
    losses: list[float] = []
    for seed in seeds:
        graph = drawn(family, seed)
        loss = _loss(graph, Limits(memory=room * memory_profile(graph).peak_bytes))
        losses += [] if loss is None else [loss]
    return losses


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize(("family", "mean", "most"), BOUNDS)
def test_the_scheduler_is_close_to_the_best(family: str, mean: float, most: float, tight: bool):
    losses = _losses(family, 1.0 if tight else float("inf"), range(8))
    assert len(losses) >= 7, "the solver proves nearly all"
    assert sum(losses) / len(losses) <= mean
    assert max(losses) <= most


@pytest.mark.soak
@pytest.mark.parametrize("room", [1.0, 1.1, 1.2, float("inf")])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_scheduler_is_close_to_the_best_of_many(family: str, room: float):
    losses = _losses(family, room, range(8, 150))
    assert len(losses) >= 130
    assert sum(losses) / len(losses) <= 0.1


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_few_transfers_in_flight(family: str, in_flight: int):
    graph = drawn(family, 40 + in_flight)
    assert _loss(graph, Limits(in_flight=in_flight)) is not None


def _orders(graph: TaskGraph) -> Iterator[list[int]]:
    """All legal orders."""
    needs = [{*t.deps, *(() if t.start is None else (t.start,))} for t in graph.tasks]

    def complete(order: list[int]) -> Iterator[list[int]]:
        if len(order) == len(needs):
            yield list(order)
        for task, needed in enumerate(needs):
            if task not in order and needed <= set(order):
                yield from complete([*order, task])

    return complete([])


@pytest.mark.parametrize("seed", range(12))
def test_brute_force_finds_nothing_better(seed: int):
    graph = _tiny(seed)
    orders = list(_orders(graph))
    least = min(peak_bytes(graph, order) for order in orders)
    problem = problem_of(graph)
    needed = least_memory(problem)
    assert needed is not None
    assert (needed.enough, needed.bound) == (least, least)
    assert least_bytes(problem) <= least
    for limit in (least, least + 2, float("inf")):
        best = min(total_ns(graph, o, ()) for o in orders if peak_bytes(graph, o) <= limit)
        exact = exact_schedule(graph, Limits(memory=limit, buckets=False))
        assert exact.proven
        assert exact.schedule.total_ns == best


def _tiny(seed: int) -> TaskGraph:
    """Two chains of a few tasks on two streams, with sizes that depend on the seed."""
    graph = ShapedGraph()
    value = graph.input(size=2)
    ends: list[int] = []
    for chain in range(2):
        made = graph.compute(5 + (3 * seed + chain) % 11, value, size=1 + (seed + chain) % 3)
        stream = ("tp", "dp")[(seed + chain) % 2]
        sent = graph.collective(seed % 7, made, kind="all_gather", stream=stream, size=1 + seed % 2)
        ends.append(graph.compute(4 + (seed * (chain + 2)) % 13, sent, size=1))
    graph.output(ends[seed % 2])
    return graph.done()


def test_buckets_are_chosen_with_the_order():
    graph = ShapedGraph()
    value = graph.input(size=1)
    side = [graph.compute(5, value, size=1) for _ in range(3)]
    ends = [graph.collective(5, s, kind="reduce_scatter", stream="dp") for s in side]
    graph.output(*ends)
    apart = exact_schedule(graph.done(), Limits(buckets=False))
    exact = exact_schedule(graph.done())
    assert (apart.schedule.total_ns, exact.schedule.total_ns) == (5 + 3 * 20, 15 + 15 + 15)
    assert [len(bucket) for bucket in exact.schedule.buckets] == [3]


def test_a_limit_that_nothing_fits_is_named():
    graph = drawn("backward_chain", 4)
    with pytest.raises(ToolError, match="the smallest possible limit is") as error:
        exact_schedule(graph, Limits(memory=1))
    named = float(error.value.diagnostic.message.split()[-2])
    assert exact_schedule(graph, Limits(memory=named * GIB)).proven
    with pytest.raises(ToolError, match="the smallest possible limit is"):
        exact_schedule(graph, Limits(memory=named * GIB * 0.999))


def test_the_same_schedule_every_time():
    graph = drawn("layered", 5)
    assert exact_schedule(graph).schedule == exact_schedule(graph).schedule


def test_graphs_without_tasks_and_without_time():
    empty = exact_schedule(Graph().done())
    assert (empty.schedule.order, empty.proven, empty.bound_ns) == ((), True, 0)
    graph = Graph()
    graph.output(graph.compute(0, size=3))
    assert exact_schedule(graph.done()).schedule.total_ns == 0


def test_too_little_time_leaves_the_scheduler_s_order_and_a_bound():
    graph = drawn("layered", 6)
    exact = exact_schedule(graph, seconds=1e-6)
    assert exact.schedule.total_ns <= schedule(graph).total_ns
    assert not exact.proven
    assert exact.bound_ns <= exact.schedule.total_ns


def test_without_the_solver_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, exact_model.__name__)
    monkeypatch.delattr(scheduling, "exact_model")
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ToolError, match=r"pip install '\.\[solver\]'"):
        exact_schedule(drawn("layered", 1))


@pytest.mark.parametrize("count", [1, 100, 7 * GIB // 3, GIB, 8652411904, 2**43 + 1])
def test_gib_rounds_up_to_six_digits(count: int):
    printed = float(gib(count)) * GIB
    assert count <= printed <= count * (1 + 1.1e-5)
