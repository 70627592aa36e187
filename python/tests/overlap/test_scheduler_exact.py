"""The solver is as good as brute force; the scheduler is close to the solver's optimum."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from overlap_solver import NothingFitsError, least_memory, solve_graph
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

from stablehlo_tools.overlap.scheduling.memory_plans import gib, least_bytes
from stablehlo_tools.overlap.scheduling.scheduler import ScheduleLimits, schedule
from stablehlo_tools.overlap.scheduling.scheduling_problem import problem_of
from stablehlo_tools.overlap.task_graph import TaskGraph
from stablehlo_tools.overlap.task_memory import memory_profile

GIB = 2**30
# Of each family the mean and the largest loss that are allowed, with and without a tight limit.
BOUNDS = [
    ("layered", 0.04, 0.2),
    ("sharded_weights", 0.01, 0.05),
    ("backward_chain", 0.05, 0.08),
    ("tangled", 0.12, 0.3),
]
SECONDS = 600.0  # a graph; most take a tenth of one


def _loss(graph: TaskGraph, limits: ScheduleLimits) -> float | None:
    """How much longer the scheduler's order takes than the best, relative; None if unproven."""
    best = solve_graph(graph, limits, SECONDS)
    check(graph, best.order, best.buckets)
    assert best.total_ns == pytest.approx(total_ns(graph, best.order, best.buckets))
    assert peak_bytes(graph, best.order) <= limits.memory
    if limits.in_flight is not None:
        assert most_in_flight(graph, best.order, best.buckets) <= limits.in_flight
    assert best.bound_ns <= best.total_ns
    if not best.proven:
        return None
    assert best.bound_ns == pytest.approx(best.total_ns)
    return schedule(graph, limits).total_ns / best.total_ns - 1 if best.total_ns else 0.0


def _losses(family: str, room: float, seeds: range) -> list[float]:
    losses: list[float] = []
    for seed in seeds:
        graph = drawn(family, seed)
        loss = _loss(graph, ScheduleLimits(memory=room * memory_profile(graph).peak_bytes))
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
    assert _loss(graph, ScheduleLimits(in_flight=in_flight)) is not None


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
    assert (needed.enough, needed.bound) == (least, least)
    assert least_bytes(problem) <= least
    for limit in (least, least + 2, float("inf")):
        best = min(total_ns(graph, o, ()) for o in orders if peak_bytes(graph, o) <= limit)
        optimum = solve_graph(graph, ScheduleLimits(memory=limit, buckets=False))
        assert optimum.proven
        assert optimum.total_ns == best


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
    single = solve_graph(graph.done(), ScheduleLimits(buckets=False))
    optimum = solve_graph(graph.done())
    assert (single.total_ns, optimum.total_ns) == (5 + 3 * 20, 15 + 15 + 15)
    assert [len(bucket) for bucket in optimum.buckets] == [3]


def test_an_order_exists_for_the_least_memory_but_not_for_less():
    graph = drawn("backward_chain", 4)
    least = least_memory(problem_of(graph))
    assert least.enough == least.bound
    assert solve_graph(graph, ScheduleLimits(memory=least.enough)).proven
    with pytest.raises(NothingFitsError):
        solve_graph(graph, ScheduleLimits(memory=least.enough * 0.999))


def test_the_same_schedule_every_time():
    graph = drawn("layered", 5)
    assert solve_graph(graph) == solve_graph(graph)


def test_graphs_without_tasks_and_without_time():
    empty = solve_graph(Graph().done())
    assert (empty.order, empty.proven, empty.bound_ns) == ((), True, 0)
    graph = Graph()
    graph.output(graph.compute(0, size=3))
    assert solve_graph(graph.done()).total_ns == 0


def test_too_little_time_leaves_the_scheduler_s_order_and_a_bound():
    graph = drawn("layered", 6)
    best = solve_graph(graph, seconds=1e-6)
    assert best.total_ns <= schedule(graph).total_ns
    assert not best.proven
    assert best.bound_ns <= best.total_ns


@pytest.mark.parametrize("count", [1, 100, 7 * GIB // 3, GIB, 8652411904, 2**43 + 1])
def test_gib_rounds_up_to_six_digits(count: int):
    printed = float(gib(count)) * GIB
    assert count <= printed <= count * (1 + 1.1e-5)
