"""Memory by liveness, the floor, what is independent of a collective, and graph files."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from soaking import first
from task_graphs import Graph, random_graph

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.bounds import floor, floor_of_slots, independence, potentially_hidden
from stablehlo_tools.overlap.graph_file import read_graph, to_graph
from stablehlo_tools.overlap.task_graph import TaskGraph, TaskKind
from stablehlo_tools.overlap.task_memory import TaskPlace, memory_profile


def test_a_storage_lives_to_its_last_use():
    graph = Graph()
    a = graph.input(10)
    b = graph.compute(1, a, size=100)
    c = graph.compute(1, b, size=1000)
    graph.compute(1, c, size=1)
    profile = memory_profile(graph.done())
    assert list(profile.live) == [10, 110, 1100, 1001]
    assert (profile.peak_bytes, profile.peak_at) == (1100, TaskPlace((), c))
    assert [(h.allocated_at.task, h.bytes) for h in profile.alive] == [(c, 1000), (b, 100)]


def test_persistent_inputs_and_outputs_live_for_ever():
    graph = Graph()
    kept = graph.input(10, persistent=True)
    result = graph.compute(1, kept, size=100)
    graph.compute(1, size=1000)
    graph.output(result)
    assert memory_profile(graph.done()).peak_bytes == 1110


def test_what_a_collective_reads_lives_to_its_wait():
    graph = Graph()
    a = graph.compute(1, size=10)
    start = graph.start(5, a, size=100)
    graph.compute(1, size=1000)
    graph.wait(start)
    assert memory_profile(graph.done()).peak_bytes == 1110


def test_a_loop_counts_with_the_peak_of_its_body():
    body = Graph()
    argument = body.input(500)
    inner = body.compute(1, argument, size=70)
    body.compute(1, inner, size=30)
    graph = Graph()
    a = graph.compute(1, size=10)
    loop = graph.loop(body.done(), 3, a, size=1)
    profile = memory_profile(graph.done())
    assert profile.peak_bytes == 10 + 1 + 100  # the body's input lies in what is around it
    assert profile.peak_at == TaskPlace((loop,), 2)
    assert TaskPlace((loop,), inner) in [holding.allocated_at for holding in profile.alive]


@pytest.mark.parametrize("seed", first(30, range(100)))
def test_the_peak_is_what_is_alive_then(seed: int):
    profile = memory_profile(random_graph(random.Random(seed)))
    assert sum(holding.bytes for holding in profile.alive) == pytest.approx(profile.peak_bytes)


def test_the_floor_of_slots_counts_all_links_together_and_domains_apart():
    graph = Graph()
    graph.compute(250)
    body = Graph()
    body.start(30, stream="NVLink")
    body.start(50, stream="InfiniBand")
    graph.loop(body.done(), trips=4)
    assert floor(graph.done()).ns == 250
    assert floor_of_slots(graph.done(), 1) == 4 * (30 + 50)
    assert floor_of_slots(graph.done(), 2) == 250
    loop = graph.tasks[1].loop
    assert loop is not None
    near, far = loop.body.tasks
    assert near.communication is not None
    within = replace(near, communication=replace(near.communication, domain="scale_up"))
    split = replace(loop, body=TaskGraph([within, far]))
    apart = TaskGraph([graph.tasks[0], replace(graph.tasks[1], loop=split)])
    assert floor_of_slots(apart, 1) == 250


def test_the_floor_is_the_busiest_stream_or_the_longest_chain():
    graph = Graph()
    a = graph.compute(10)
    start = graph.start(100, a)
    graph.compute(30)
    b = graph.compute(5, graph.wait(start))
    bound = floor(graph.done())
    assert bound.streams == {"compute": 45, "net": 100}
    assert (bound.critical_path_ns, bound.ns, bound.busiest) == (115, 115, "net")
    assert bound.path == (a, start, start + 2, b)


def test_a_loop_is_bound_by_what_it_carries():
    body = Graph()
    state, step = body.input(), body.input()
    new_state = body.start(20, state, stream="net")
    waited = body.wait(new_state)
    new_step = body.compute(1, step)
    graph = Graph()
    graph.loop(body.done(), 10, carries=[(state, waited), (step, new_step)])
    assert floor(graph.done()).critical_path_ns == 200
    graph = Graph()
    graph.loop(body.done(), 10, carries=[(step, new_step)])  # the collectives could overlap
    assert floor(graph.done()).critical_path_ns == 20
    assert floor(graph.done()).ns == 200  # but for their stream


def _reachable(graph: TaskGraph, start: int, *, forward: bool) -> set[int]:
    reached = {start}
    tasks = graph.tasks if forward else graph.tasks[::-1]
    for task in tasks:
        if forward and reached & set(task.deps):
            reached.add(task.id)
        elif not forward and task.id in reached:
            reached.update(task.deps)
    return reached


@pytest.mark.parametrize("seed", first(20, range(60)))
def test_independence_is_the_compute_neither_before_nor_after(seed: int):
    chance = random.Random(seed)
    graph = Graph()
    graph.compute(1)
    for _ in range(chance.randint(5, 200)):
        deps = chance.sample(range(len(graph.tasks)), k=min(len(graph.tasks), chance.randint(0, 2)))
        if chance.random() < 0.5:
            graph.start(10, *deps)
        else:
            graph.compute(chance.randint(0, 9), *deps)
    done = graph.done()
    around = independence(done, {})
    for task in done.tasks:
        if task.kind is not TaskKind.COLLECTIVE_START:
            continue
        after = _reachable(done, task.id, forward=True)
        before = _reachable(done, task.id, forward=False)
        ns = [t.ns if t.kind is TaskKind.COMPUTE else 0.0 for t in done.tasks]
        got = around[task.id]
        assert got.before_ns == sum(ns[i] for i in before)
        assert got.after_ns == sum(ns[i] for i in after)
        assert got.free_ns == sum(ns) - got.before_ns - got.after_ns
        assert (task.id in potentially_hidden(done)) == (got.after_ns < sum(ns))


def test_the_compute_of_loops_counts_as_independent():
    body = Graph()
    body.compute(5)
    graph = Graph()
    start = graph.start(10)
    loop = graph.loop(body.done(), 4)
    assert independence(graph.done(), {loop: 20.0})[start].free_ns == 20


NODES: list[dict[str, Any]] = [
    {"id": 0, "kind": "input", "ns": 0.0, "deps": [], "storages": [0], "allocs": [0]},
    {"id": 1, "kind": "collective_start", "ns": 5.0, "deps": [0], "group": "dp"},
    {"id": 2, "kind": "wait", "ns": 0.0, "deps": [1], "start": 1},
]


@pytest.mark.parametrize(
    ("node", "change", "message"),
    [
        (1, {"ns": -1}, "node 1: ns is -1: it must be finite and at least 0"),
        (1, {"ns": float("nan")}, "node 1: ns is nan"),
        (1, {"ns": "5"}, "node 1: ns is not a number: '5'"),
        (1, {"ns": True}, "node 1: ns is not a number: True"),
        (1, {"group": None}, "node 1: a collective_start needs its group"),
        (1, {"kind": "compote"}, "node 1: unknown kind 'compote'"),
        (1, {"kind": "loop"}, "node 1: graphs in files are flat"),
        (1, {"id": 7}, "node 1 has id 7"),
        (1, {"deps": [2]}, "node 1: deps names 2, which is not an earlier node"),
        (0, {"storages": [1]}, "node 0: storages names 1, which is not a storage"),
        (0, {"deps": 3}, "node 0: deps is not a list"),
        (2, {"start": None}, "node 2: a wait needs the id of its start"),
        (2, {"start": 0}, "node 2: start 0 is not an earlier collective_start"),
    ],
)
def test_a_bad_node_is_named(node: int, change: dict[str, Any], message: str):
    nodes = [dict(entry) for entry in NODES]
    nodes[node].update(change)
    with pytest.raises(ToolError) as error:
        to_graph({"nodes": nodes, "storages": [8]})
    assert message in str(error.value)


def test_a_file_that_is_no_graph_is_named(tmp_path: Path):
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(gzip.compress(json.dumps({"nodes": NODES}).encode())[:-20])
    wrong = tmp_path / "list.json"
    wrong.write_text("[]")
    for path in (cut, wrong, tmp_path / "missing.json"):
        with pytest.raises(ToolError, match=path.name):
            read_graph(path)


def test_ids_are_places(tmp_path: Path):
    graph = to_graph({"nodes": NODES, "storages": [8]})
    assert [task.id for task in graph.tasks] == [0, 1, 2]
    assert replace(graph.tasks[2], deps=()).start == 1
