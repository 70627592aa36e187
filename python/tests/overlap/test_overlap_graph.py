"""`overlap-graph`: schedules that the rules accept, the table, and refusals that leave no file."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from scheduler_graphs import check, peak_bytes, total_ns
from tree import FIXTURES

from stablehlo_tools.cli.main import main
from stablehlo_tools.overlap.graph_file import read_graph

GRAPHS = FIXTURES / "overlap"
FORWARD = GRAPHS / "llama2d_2_fwd.json.gz"
GIB = 2**30


def _small(path: Path, **changes: Any) -> Path:
    """A chain with two collectives beside it that one bucket hides; ns, bytes."""
    nodes: list[dict[str, Any]] = [
        {"kind": "input", "storages": [0], "allocs": [0], "persistent": True},
        {"kind": "collective_start", "ns": 60, "deps": [0], "storages": [1], "allocs": [1]},
        {"kind": "wait", "start": 1, "deps": [1], "storages": [1]},
        {"kind": "collective_start", "ns": 60, "deps": [0], "storages": [2], "allocs": [2]},
        {"kind": "wait", "start": 3, "deps": [3], "storages": [2]},
        {"kind": "compute", "ns": 100, "deps": [0], "storages": [3], "allocs": [3]},
        {"kind": "output", "deps": [2, 4, 5]},
    ]
    for number, node in enumerate(nodes):
        node["id"] = number
        if node["kind"] == "collective_start":
            node |= {"group": "dp", "coll": "ag", "coll_bytes": GIB, "dtype": "f32"}
    graph = {"nodes": nodes, "storages": [GIB] * 4, "cost_model": {"dp_lat": 2e-8}}
    path.write_text(json.dumps(graph | changes))
    return path


def _run(*words: str | Path) -> int:
    try:
        return main(["overlap-graph", *map(str, words)])
    except SystemExit as stop:
        return int(stop.code or 0)


def _schedule_in(path: Path) -> tuple[list[int], list[list[int]]]:
    content = json.loads(path.read_text())
    return content["order"], content["buckets"]


def test_the_schedule_is_what_the_table_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "schedule.json"
    assert _run(FORWARD, "-o", output, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    graph = read_graph(FORWARD)
    order, buckets = _schedule_in(output)
    check(graph, order, buckets)
    assert facts["total_ms"] == pytest.approx(total_ns(graph, order, buckets) / 1e6)
    assert facts["peak_gib"] == peak_bytes(graph, order) / GIB <= facts["limit_gib"]
    assert facts["limit_gib"] == pytest.approx(facts["peak_before_gib"] + 1)
    assert (facts["collectives"], facts["hidden_before"]) == (34, 0)
    assert facts["hidden"] > 0
    assert facts["floor_ms"] <= facts["total_ms"] < facts["before_ms"]


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    graph = _small(tmp_path / "graph.json")
    assert _run(graph, "-o", tmp_path / "schedule.json") == 0
    printed = re.sub(r" +", " ", capsys.readouterr().out).replace(" \n", "\n")
    assert "floor 0.000 ms unbucketed; after is 16.7% below it" in printed
    assert "collectives 2 1 1 buckets of 2" in printed
    assert "hidden 0 1" in printed
    assert "peak 4.000 GiB 4.000 GiB limit 5.000 GiB, the peak before + 1 GiB" in printed


def test_the_options_reach_the_scheduler(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    graph, output = _small(tmp_path / "graph.json"), tmp_path / "schedule.json"
    assert _run(graph, "-o", output, "--json", "--no-buckets") == 0
    assert json.loads(capsys.readouterr().out)["total_ms"] == pytest.approx(120e-6)
    assert _run(graph, "-o", output, "--json", "--memory-limit", "4.5") == 0
    assert json.loads(capsys.readouterr().out)["limit_gib"] == 4.5
    words = ("--no-compute-reorder", "--in-flight", "1")
    assert _run(graph, "-o", output, "--json", *words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["buckets"] == 1
    assert facts["total_ms"] == pytest.approx(100e-6)


def test_what_could_be_hidden_is_counted_as_pytorch_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    graph, output = _small(tmp_path / "graph.json"), tmp_path / "schedule.json"
    assert _run(graph, "-o", output, "--json", "--no-buckets") == 0
    facts = json.loads(capsys.readouterr().out)
    names = ("potentially_hidden", "hidden_in_part_before", "hidden_in_part", "hidden")
    assert [facts[name] for name in names] == [2, 0, 2, 1]
    assert _run(graph, "-o", output) == 0
    assert re.search(r"partly +0 +2 +of 2 that could be", capsys.readouterr().out)


def test_compute_that_hides_less_in_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    totals: dict[float, float] = {}
    for factor in (0.5, 1.0, 2.0):
        output = tmp_path / f"{factor}.json"
        words = ("--json", "--compute-overlap-multiplier", str(factor))
        assert _run(FORWARD, "-o", output, *words) == 0
        facts = json.loads(capsys.readouterr().out)
        graph = read_graph(FORWARD)
        order, buckets = _schedule_in(output)
        check(graph, order, buckets)
        assert facts["total_ms"] == pytest.approx(total_ns(graph, order, buckets) / 1e6)
        assert facts["total_ms"] <= facts["before_ms"] == pytest.approx(19.392, abs=0.01)
        totals[factor] = facts["total_ms"]
    assert totals[1.0] <= min(totals.values()) * 1.001
    assert len({round(total, 6) for total in totals.values()}) > 1


def test_the_limit_that_an_error_names_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "schedule.json"
    assert _run(FORWARD, "-o", output, "--memory-limit", "1") == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{FORWARD}: error: ")
    assert told.count("\n") == 1
    assert not output.exists()
    enough = told.split(" GiB is enough")[0].split()[-1]
    assert _run(FORWARD, "-o", output, "--memory-limit", enough) == 0
    order, _ = _schedule_in(output)
    assert peak_bytes(read_graph(FORWARD), order) <= float(enough) * GIB


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory-limit", "much"], "--memory-limit: 'much' is not a number"),
        (["--memory-limit", "-1"], "--memory-limit: '-1' is not a number from 0 up"),
        (["--memory-limit", "nan"], "--memory-limit: 'nan' is not a number from 0 up"),
        (["--in-flight", "0"], "--in-flight: '0' is not a whole number from 1 up"),
        (["--in-flight", "1.5"], "--in-flight: '1.5' is not a whole number from 1 up"),
        (
            ["--compute-overlap-multiplier", "0"],
            "--compute-overlap-multiplier: '0' is not a positive number",
        ),
        (["--exact"], "no option is called '--exact'"),
        (["--time-limit", "5"], "no option is called '--time-limit'"),
    ],
)
def test_usage(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "schedule.json"
    assert _run(FORWARD, "-o", output, *words) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "invalid JSON"),
        ('{"nodes": [], "storages": null}', "the storages of a task graph must be a list"),
        ("[]", "a task graph must be an object with a list of nodes"),
        ('{"nodes": [{"id": 1, "kind": "input"}]}', "node 0 has id 1"),
        ('{"nodes": [{"id": 0, "kind": "loop"}]}', "cannot have kind 'loop'"),
        ('{"nodes": [{"id": 0, "kind": "compute", "deps": [0]}]}', "node 0: deps names 0"),
    ],
)
def test_bad_graphs(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    graph, output = tmp_path / "graph.json", tmp_path / "schedule.json"
    graph.write_text(text)
    assert _run(graph, "-o", output) == 2
    told = capsys.readouterr().err
    assert message in told
    assert str(graph) in told
    assert told.count("\n") == 1
    assert not output.exists()


def test_a_missing_graph_and_a_missing_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert _run(tmp_path / "none.json", "-o", tmp_path / "schedule.json") == 2
    assert "none.json" in capsys.readouterr().err
    assert _run(FORWARD, "-o", tmp_path / "none" / "schedule.json") == 2
    assert "no directory" in capsys.readouterr().err


def test_gzipped_or_not(tmp_path: Path):
    plain = _small(tmp_path / "graph.json")
    packed = tmp_path / "graph.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    outputs = [tmp_path / "a.json", tmp_path / "b.json"]
    for graph, output in zip((plain, packed), outputs, strict=True):
        assert _run(graph, "-o", output) == 0
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
