"""The scheduler where transfers can be issued at some moments only, and few at a time."""

from __future__ import annotations

import pytest
from scheduler_graphs import FAMILIES, check, drawn
from task_graphs import Graph

from stablehlo_tools.overlap.scheduling.forward_pass import Moments
from stablehlo_tools.overlap.scheduling.scheduler import ScheduleLimits, schedule
from stablehlo_tools.overlap.task_graph import TaskGraph, TaskKind


def _layers(count: int) -> tuple[TaskGraph, list[int]]:
    """Layers of 100 ns, each of which needs a gather of 150 ns of its weights; their compute."""
    graph = Graph()
    layers: list[int] = []
    before = graph.input(1)
    for _ in range(count):
        gather = graph.start(150, graph.input(1), size=8)
        layers.append(graph.compute(200, before, graph.wait(gather), size=1))
        before = layers[-1]
    graph.output(before)
    return graph.done(), layers


def _in_flight(graph: TaskGraph, order: tuple[int, ...]) -> int:
    """The most transfers that are issued and not yet waited for."""
    now = most = 0
    for task in order:
        now += graph.tasks[task].kind is TaskKind.COLLECTIVE_START
        most = max(most, now)
        now -= graph.tasks[task].kind is TaskKind.WAIT
    return most


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_more_transfers_at_once(family: str, at_once: int):
    for seed in range(8):
        graph = drawn(family, seed)
        scheduled = schedule(graph, ScheduleLimits(at_once=at_once, buckets=False))
        check(graph, scheduled.order, scheduled.buckets)
        assert _in_flight(graph, scheduled.order) <= at_once


def test_transfers_hide_one_at_a_time():
    graph, _ = _layers(6)
    scheduled = schedule(graph, ScheduleLimits(at_once=1))
    assert scheduled.total_ns == 150 + 6 * 200
    assert _in_flight(graph, scheduled.order) == 1


def test_transfers_wait_for_a_moment():
    graph, layers = _layers(6)
    every_other = Moments(frozenset(layers[::2]), frozenset())
    scheduled = schedule(graph, ScheduleLimits(at_once=1, moments=every_other))
    # Beside layers 0, 2, 4 the next gather hides; those of layers 2 and 4 find no moment.
    assert scheduled.total_ns == 150 + 6 * 200 + 2 * 150


def test_moments_before_and_behind_compute():
    graph, layers = _layers(6)
    before, behind = (
        Moments(frozenset(layers), frozenset()),
        Moments(frozenset(), frozenset(layers)),
    )
    for moments in (before, behind):
        assert schedule(graph, ScheduleLimits(at_once=1, moments=moments)).total_ns == 150 + 6 * 200


def test_slots_stay_free_for_what_cannot_be_hidden():
    """A long transfer that nobody needs soon does not stand before one on the critical chain."""
    graph = Graph()
    late = graph.start(1000, graph.input(1), size=1, stream="far")
    chain = graph.input(1)
    for _ in range(4):
        chain = graph.compute(100, chain, size=1)
        chain = graph.wait(graph.start(50, chain, size=1, stream="near"))
    long = graph.compute(1100, chain, size=1)
    graph.output(graph.compute(10, long, graph.wait(late), size=1))
    scheduled = schedule(graph.done(), ScheduleLimits(at_once=1))
    assert scheduled.total_ns == 4 * 150 + 1100 + 10
