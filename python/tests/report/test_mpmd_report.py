"""Reports of sets of rank programs: the terminal, the page, and the trace."""

from __future__ import annotations

import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from proof_programs import write_expanded

from stablehlo_tools.cli import main as command_line
from stablehlo_tools.diagnostics import duration, size
from stablehlo_tools.mpmd.proof.proving import prove, set_report
from stablehlo_tools.mpmd.rank_set import load
from stablehlo_tools.mpmd.set_report import SetReport
from stablehlo_tools.report.mpmd_report import render_set, set_trace, to_page
from stablehlo_tools.schedules.table import ActionKind, actions_of


@cache
def report_of(schedule: str) -> SetReport:
    """The report of a proven set."""
    with TemporaryDirectory() as room:
        loaded = load(write_expanded(Path(room), schedule, 2, 4))
    return set_report(prove(loaded), "a set", "0")


class Cells(HTMLParser):
    """The cells of the tables of a page, by the table's name."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.name = ""
        self.is_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.is_cell = tag in ("td", "th")
        if tag == "table":
            self.name = dict(attrs).get("id") or ""
            self.tables[self.name] = []
        elif tag == "tr" and self.name:
            self.tables[self.name].append([])

    def handle_data(self, data: str) -> None:
        if self.is_cell and self.name:
            self.tables[self.name][-1].append(data)

    def handle_endtag(self, tag: str) -> None:
        self.is_cell = False
        self.name = "" if tag == "table" else self.name


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_every_message_is_counted(schedule: str):
    report = report_of(schedule)
    sent = sum(row.sends for row in report.ranks)
    assert report.messages == sent == sum(row.receives for row in report.ranks)
    assert report.bytes > 0


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_the_page_shows_messages_and_memory(schedule: str):
    report = report_of(schedule)
    tables = Cells(render_set(report)).tables
    assert len(tables["messages"]) == 1 + len(report.links)
    assert [row[0] for row in tables["memory"]] == ["Rank", "0", "1"]
    assert render_set(report).count('<svg class="curve"') == 2


def test_the_page_has_units_for_every_time_and_amount():
    report = report_of("1f1b")
    page = render_set(report)
    tables = Cells(page).tables
    makespan = duration(report.timeline.makespan * 1e3)
    assert f'<p class="lead">{makespan} a step, ' in page
    assert "time units" not in page
    times, amounts = re.compile(r"[\d.,]+ (ns|us|ms|s)"), re.compile(r"[\d.,]+ ([KMGT]i)?B")
    for _, *cells in tables["costs"][1:]:
        assert all(times.fullmatch(cell) for cell in cells[:4])
        assert all(amounts.fullmatch(cell) for cell in cells[4:])
    for row in tables["per-rank"][1:]:
        assert times.fullmatch(row[2])
        assert amounts.fullmatch(row[5])
    marks = re.findall(r'<span style="left:[\d.]+%">([^<]*)</span>', page)
    assert len(marks) > 2
    assert all(times.fullmatch(mark) for mark in marks)
    assert re.search(r'title="0F0, 0 ns to [\d.]+ [num]s, takes [\d.]+ [num]s"', page)


def test_the_card_has_the_peak_that_is_proven_and_the_machine():
    report = report_of("1f1b")
    peak = max(report.ranks, key=lambda row: row.peak)
    page = render_set(report)
    assert f"<dt>Peak memory</dt><dd><strong>{size(peak.peak)}</strong>" in page
    assert f"<dt>Runs on</dt><dd><strong>{report.hardware}</strong>" in page


def test_the_text_has_the_chart_and_the_tables():
    text = to_page(report_of("1f1b"), 100)
    assert "r0 F0" in text
    assert "proven: 1f1b: 2 ranks, 2 stages (loop), 4 microbatches" in text
    assert "rank  stages" in text


def test_a_set_that_is_not_proven_shows_what_is_wrong_and_no_memory():
    with TemporaryDirectory() as room:
        directory = write_expanded(Path(room), "1f1b", 2, 4)
        path = directory / "rank_0.mlir"
        path.write_text(path.read_text().replace("handle = 1,", "handle = 99,"))
        report = set_report(prove(load(directory)), "a set", "0")
    page = render_set(report)
    assert "not proven" in page
    assert "the manifest has no such channel" in page
    assert "memory" not in Cells(page).tables


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_the_trace_has_a_slice_for_each_phase_and_an_arrow_for_each_message(schedule: str):
    report = report_of(schedule)
    events = set_trace(report)["traceEvents"]
    rows = [list(actions_of(row)) for row in report.timeline.table.rows]
    phases = sum(action.kind.is_compute for row in rows for action in row)
    sends = sum(
        a.kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD) for row in rows for a in row
    )
    assert sum(event["ph"] == "X" for event in events) == phases
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert len(starts) == sends
    assert all(starts[number] <= ends[number] for number in starts)


def test_the_command_draws_a_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    directory = str(write_expanded(tmp_path / "set", "1f1b", 2, 3))
    assert command_line.main(["report", directory]) == 0
    assert "proven: 1f1b" in capsys.readouterr().out
    for name in ("page.html", "trace.json"):
        assert command_line.main(["report", directory, "-o", str(tmp_path / name)]) == 0
    assert "<svg" in (tmp_path / "page.html").read_text()
    trace: dict[str, Any] = json.loads((tmp_path / "trace.json").read_text())
    assert trace["traceEvents"]
    assert command_line.main(["report", directory, "--hardware", "h100"]) == 2
