"""`schedule compare`: every schedule in its place, and which to use."""

from __future__ import annotations

import csv
import io
import re

import pytest
from schedule_command_line import SMALL
from schedule_command_line import json_of as _json
from schedule_command_line import printed as _printed

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.schedules.catalogue import ONE_PROGRAM, compare, entries
from stablehlo_tools.schedules.setting import ScheduleSetting, costs, unit_costs

EXISTS = [entry.name for entry in entries() if entry.name != "auto"]  # that one searches for long


def test_compare_is_sorted_and_says_which_to_use(capsys: pytest.CaptureFixture[str]):
    content = _json(capsys, "compare", *SMALL, "--memory-limit", "4")
    rows = content["schedules"]
    keys = [(not row["fits"], row["makespan"], row["memory"]) for row in rows]
    assert keys == sorted(keys)
    assert len({(row["name"], row["chunks"], row["runs_with"]) for row in rows}) == len(rows)
    assert {row["fits"] for row in rows} == {True, False}
    assert all(row["fits"] == (row["memory"] <= 4) for row in rows)
    compared = {row["name"] for row in rows} | {row["name"] for row in content["refused"]}
    assert compared >= set(EXISTS)
    assert content["advice"].startswith(f"use {rows[0]['name']}")


def test_compare_tries_several_chunks(capsys: pytest.CaptureFixture[str]):
    def chunks(*words: str) -> list[int]:
        rows = _json(capsys, "compare", *SMALL, *words)["schedules"]
        return sorted(row["chunks"] for row in rows if row["name"] == "looped-bfs")

    assert chunks() == [2, 4]
    assert chunks("--max-chunks", "2") == [2]
    assert chunks("--max-chunks", "1") == [1]
    assert chunks("--chunks", "3") == [3]


def test_the_search_is_part_of_the_comparison(capsys: pytest.CaptureFixture[str]):
    words = ("compare", "--stages", 2, "--microbatches", 4)
    rows = _json(capsys, *words)["schedules"]
    found = [row for row in rows if row["name"] == "auto"]
    assert [row["makespan"] for row in found] == [min(row["makespan"] for row in rows)]
    assert all(row["name"] != "auto" for row in _json(capsys, *words, "--no-search")["schedules"])
    few = _json(capsys, *words, "--max-chunks", 1)["schedules"]
    assert [row["chunks"] for row in few if row["name"] == "auto"] == [1]


def test_the_search_says_how_near_it_came(capsys: pytest.CaptureFixture[str]):
    words = ("auto", "--stages", 2, "--microbatches", 4)
    content = _json(capsys, *words)
    search, makespan = content["search"], content["metrics"]["makespan"]
    assert 0 < search["bound"] <= makespan
    assert search["gap"] == pytest.approx(makespan / search["bound"] - 1)
    printed = _printed(capsys, *words)
    assert re.search(r"(?m)^found +\S", printed)
    assert re.search(r"(?m)^bound +[\d.]+, no schedule on these placements is faster: ", printed)


def test_compare_prints_a_table(capsys: pytest.CaptureFixture[str]):
    printed = _printed(capsys, "compare", *SMALL, "--memory-limit", "4")
    advice, table, *others = printed.split("\n\n")
    assert re.match(r"use \S+ with 4 chunks, by expand-mpmd: .*; in one program, by ", advice)
    lines = table.splitlines()
    assert re.sub(r" +", " ", lines[0]) == (
        "schedule runs with chunks makespan by END by SPAN alive memory messages fits"
    )
    assert len({len(line) for line in lines}) == 1
    rows = [line.split() for line in lines if line.startswith("1f1b ")]
    figures = ["33", "27.3", "%", "27.3", "%", "4", "4", "48", "yes"]
    # In lock step a rank in its forward waits for those in their backward: 4 ticks of forwards
    # alone, 18 with a backward of 2.
    in_step = ["40", "40.0", "%", "40.0", "%", "4", "4", "176", "yes"]
    assert rows == [
        ["1f1b", "expand-mpmd", "1", *figures],
        ["1f1b", "expand-pipeline", "1", *in_step],
    ]
    assert "circular-forward: forward only" in others[0]
    assert others[-1].startswith("no schedule on the searched placements is faster than 24.75")
    assert "fits" not in _printed(capsys, "compare", *SMALL).splitlines()[2]


def test_the_schedules_of_one_program_are_those_of_expand_pipeline() -> None:
    for entry in entries():
        made = f"expand-pipeline{{schedule={entry.name}}}"
        if entry.name in ONE_PROGRAM:
            Pipeline.parse(made)
        else:
            with pytest.raises(ToolError, match="schedule"):
                Pipeline.parse(made)


def test_one_program_is_as_fast_as_its_ticks() -> None:
    found = compare(ScheduleSetting(4, 8, unit_costs(4)), search=False).candidates
    alone = {(c.name, c.chunks): c for c in found if c.runs_with == "expand-pipeline"}
    per_tick = 1.0 + 2.0  # a forward and a backward
    assert {name for name, _ in alone} == ONE_PROGRAM
    assert alone["gpipe", 1].makespan == (8 + 4 - 1) * per_tick
    assert alone["circular", 2].makespan == (8 * 2 + 4 - 1) * per_tick / 2
    assert alone["1f1b", 1].makespan == 4 * 1.0 + (2 * (8 + 4 - 1) - 4) * 2.0


def test_compare_as_csv(capsys: pytest.CaptureFixture[str]):
    rows = list(csv.DictReader(io.StringIO(_printed(capsys, "compare", *SMALL, "--format", "csv"))))
    named = next(row for row in rows if row["name"] == "1f1b")
    assert float(named["makespan"]) == 33
    assert named["fits"] == "true"


def test_activations_are_counted_in_whole_microbatches():
    """Two chunks a rank hold half as much each: the same memory counts the same."""
    found = {
        (row.name, row.chunks): row
        for row in compare(ScheduleSetting(4, 8, unit_costs(4))).candidates
    }
    assert found["gpipe", 1].activations == found["looped-bfs", 2].activations == 8
    assert found["looped-bfs", 4].activations == found["looped-bfs", 4].memory == 8
    assert not found["1f1b", 1].splits
    assert found["zb-h1", 1].splits


def test_compare_says_what_would_fit_where_nothing_does():
    tight = ScheduleSetting(4, 8, unit_costs(4), limit=0.5)
    compared = compare(tight)
    assert not any(row.fits for row in compared.candidates)
    assert compared.advice == (
        "no schedule fits a memory limit of 0.5: a rank's weights and the activations of one "
        "microbatch need 1"
    )
    assert compare(tight, search=False).advice.startswith("no schedule fits 0.5: the smallest is ")


def test_compare_with_blocking_transfers():
    slow = ScheduleSetting(4, 8, costs(4, communication=1.0))
    beside = {(*row[:2], row.runs_with): row.makespan for row in compare(slow).candidates}
    blocking = {
        (*row[:2], row.runs_with): row.makespan for row in compare(slow, blocking=True).candidates
    }
    assert blocking.keys() == beside.keys()
    assert all(blocking[key] >= beside[key] for key in beside)
    by_rank = "1f1b", 1, "expand-mpmd"
    assert blocking[by_rank] > beside[by_rank]
