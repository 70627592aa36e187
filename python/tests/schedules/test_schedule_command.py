"""`schedule`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from schedule_command_line import SMALL
from schedule_command_line import json_of as _json
from schedule_command_line import printed as _printed
from schedule_command_line import refused as _refused
from schedule_command_line import run as _run
from schedule_settings import SLICES

from stablehlo_tools.schedules.catalogue import build, entries
from stablehlo_tools.schedules.forms import read_table, to_csv
from stablehlo_tools.schedules.generators.by_rule import one_f_one_b
from stablehlo_tools.schedules.setting import ScheduleSetting, costs
from stablehlo_tools.schedules.table_simulator import simulate

EXISTS = [entry.name for entry in entries() if entry.name != "auto"]  # that one searches for long


@pytest.mark.parametrize("name", EXISTS)
def test_every_name_prints_what_the_simulator_says(capsys: pytest.CaptureFixture[str], name: str):
    content = _json(capsys, name, *SMALL, *_slices(name), "--cost", "2,3,1,0.5", "--message", "4")
    figures = costs(4, 2, 3, 1, communication=0.5, message=4)
    setting = ScheduleSetting(4, 8, figures, sequence_slices=SLICES[name])
    table = build(name, setting)
    timeline = simulate(table, setting.costs_of(table))
    assert content["name"] == table.name
    assert content["metrics"]["makespan"] == timeline.makespan
    assert content["metrics"]["peak_bytes"] == pytest.approx(timeline.peak_bytes)
    assert content["metrics"]["bytes_sent"] == 4 * timeline.messages / table.sequence_slices
    assert content["ranks"] == 4


def test_the_table_is_what_a_name_prints(capsys: pytest.CaptureFixture[str]):
    printed = _printed(capsys, "1f1b", *SMALL, "--width", "100")
    assert printed.startswith("1f1b: 4 ranks, 4 stages (loop), 8 microbatches\nmakespan     33,")
    assert "bubble       27.3 % by END, 27.3 % by SPAN\n" in printed
    assert len(re.findall(r"(?m)^r\d ", printed)) == 4
    assert "\x1b" not in printed


def test_the_csv_is_aligned_and_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    printed = _printed(capsys, "1f1b", "--stages", 2, "--microbatches", 3, "--format", "csv")
    assert printed == "0F0,0F1,,0B0,0F2,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2\n"
    path = tmp_path / "1f1b.csv"
    path.write_text(printed)
    assert _printed(capsys, path, "--format", "csv") == printed


@pytest.mark.parametrize("form", ["csv", "json", "text"])
@pytest.mark.parametrize("name", EXISTS)
def test_files_give_the_figures_of_the_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, form: str
):
    slices = _slices(name)
    options = (*slices, "--cost", "2,3,1,0.5", "--activation", "6,2", "--weights", "10")
    named = _json(capsys, name, *SMALL, *options)
    path = tmp_path / f"{name}.{'txt' if form == 'text' else form}"
    path.write_text(_printed(capsys, name, *SMALL, *options, "--format", form))
    read = _json(capsys, path, *options)
    assert read == named
    assert _run(path, *SMALL, *slices) == 0
    assert capsys.readouterr().out


def _slices(name: str) -> tuple[str | int, ...]:
    """What a schedule of slices takes besides."""
    slices = SLICES[name]
    return () if slices is None else ("--slices", slices)


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    content = to_csv(one_f_one_b(2, 3)).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert _json(capsys, "-")["metrics"]["makespan"] == 12


def test_options_reach_the_costs(capsys: pytest.CaptureFixture[str]):
    words = ("--cost", "4,2,6,1", "--activation", "8,2", "--weights", "32", "--overlapped", "0.9")
    content = _json(capsys, "looped-bfs", *SMALL, "--chunks", 2, *words, "--message", "3")
    assert content["costs"] == {
        "forward": [2] * 8,
        "input_gradient": [1] * 8,
        "weight_gradient": [3] * 8,
        "backward": [4] * 8,
        "communication": 1,
        "overlapped": 0.9,
        "activation": [4] * 8,
        "kept": [1] * 8,
        "weights": [16] * 8,
        "message": 3,
    }
    assert content["placement"]["form"] == "loop"
    assert content["stages"] == 8


def test_uneven_costs_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "costs.json"
    figures = {"forward": [1, 2, 1, 1], "input_gradient": 1, "weight_gradient": [1, 1, 1, 3]}
    path.write_text(json.dumps({**figures, "communication": 0.25, "weights": 5}))
    content = _json(capsys, "1f1b", *SMALL, "--costs", path)
    assert content["costs"]["forward"] == [1, 2, 1, 1]
    assert content["costs"]["backward"] == [2, 2, 2, 4]
    assert content["costs"]["communication"] == 0.25
    assert content["costs"]["weights"] == [5, 5, 5, 5]
    halves = _json(capsys, "1f1b", "--stages", 2, "--microbatches", 8, "--costs", path)
    assert halves["costs"]["forward"] == [3, 2]


def test_blocking_transfers_take_both_ranks(capsys: pytest.CaptureFixture[str]):
    words = ("1f1b", *SMALL, "--cost", "1,1,1,0.5")
    overlapped = _json(capsys, *words)
    blocking = _json(capsys, *words, "--communication", "blocking")
    assert blocking["metrics"]["makespan"] > overlapped["metrics"]["makespan"]
    assert blocking["metrics"]["messages"] == overlapped["metrics"]["messages"] == 48
    cells = [cell for row in blocking["rows"] for cell in row]
    assert sum("SEND" in cell for cell in cells) == sum("RECV" in cell for cell in cells) == 48


def test_transfers_are_written_where_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    words = ("1f1b", *SMALL, "--format", "csv")
    assert "SEND" not in _printed(capsys, *words)
    path = tmp_path / "transfers.csv"
    path.write_text(_printed(capsys, *words, "--transfers"))
    assert path.read_text().count("SEND_") == path.read_text().count("RECV_") == 48
    assert _json(capsys, path)["metrics"]["makespan"] == 33


def test_invalid_files_are_told_and_end_with_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    path, output = tmp_path / "bad.csv", tmp_path / "out.html"
    path.write_text("0F0,0F0,0B0\n1F0,1B0\n")
    assert _run(path, "-o", output) == 1
    told = capsys.readouterr()
    assert told.err == ""
    assert re.fullmatch(rf"{re.escape(str(path))}: rank 0, step 1: 0F0 .*\n", told.out)
    assert not output.exists()
    assert _run(path, "--format", "json") == 1
    content = json.loads(capsys.readouterr().out)
    assert content["valid"] is False
    assert [content["violations"][0][key] for key in ("rank", "step", "action")] == [0, 1, "0F0"]


def test_files_with_too_few_buffers(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Where both ranks send first, rendezvous has them wait for each other, a buffer does not."""
    path = tmp_path / "facing.csv"
    path.write_text(
        "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    assert _run(path) == 1
    assert "rank 0" in capsys.readouterr().out
    path.write_text(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    assert _run(path) == 1
    assert "rank 0" in capsys.readouterr().out
    assert _run(path, "--buffers", 1) == 0


def test_memory_limits(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert _run("1f1b", *SMALL, "--memory-limit", "4") == 0
    capsys.readouterr()
    message = _refused(capsys, "1f1b", *SMALL, "--memory-limit", "3")
    assert "1f1b: rank 0 needs 4, and the limit is 3; schedule compare lists" in message
    path = tmp_path / "1f1b.csv"
    path.write_text(to_csv(one_f_one_b(4, 8)))
    assert _run(path, "--memory-limit", "3") == 1
    assert "the limit is 3 (C15)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("suffix", "begins"),
    [
        (".html", b"<!doctype html>"),
        (".json", b'{\n "name": "1f1b"'),
        (".csv", b"0F0,0F1"),
        (".txt", b"schedule 1f1b, loop of 4 ranks x 1"),
        (".out", b"1f1b: 4 ranks"),
    ],
)
def test_the_suffix_of_the_output_picks_the_form(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str, begins: bytes
):
    output = tmp_path / f"out{suffix}"
    assert _printed(capsys, "1f1b", *SMALL, "-o", output) == ""
    assert output.read_bytes().startswith(begins)
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
    assert _printed(capsys, "1f1b", *SMALL, "-o", output, "--format", "csv") == ""
    assert output.read_bytes().startswith(b"0F0,0F1")


def test_a_dash_is_standard_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert _printed(capsys, "1f1b", *SMALL, "-o", "-", "--format", "csv").startswith("0F0,0F1")
    assert not list(tmp_path.iterdir())


def test_colours_only_where_they_are_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    words = ("1f1b", *SMALL)
    assert "\x1b[" in _printed(capsys, *words, "--color", "always")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in _printed(capsys, *words)
    assert "\x1b[" not in _printed(capsys, *words, "--color", "never")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in _printed(capsys, *words)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[" not in _printed(capsys, *words)


def test_the_width_is_the_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "90")
    printed = _printed(capsys, "1f1b", "--stages", 8, "--microbatches", 100)
    assert max(map(len, printed.split("\n\n")[1].splitlines())) == 90


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nosuch", *SMALL), "no schedule or file is called 'nosuch'; known"),
        (("1f1b",), "schedule 1f1b needs --stages P, the number of ranks, and --microbatches M"),
        (("compare", "--stages", "4"), "schedule compare needs --stages P"),
        (("1f1b", "--stages", "0", "--microbatches", "1"), "'0' is not a whole number from 1 up"),
        (("1f1b", "--stages", "4", "--microbatches", "0"), "'0' is not a whole number from 1 up"),
        (("1f1b", "--stages", "4", "--microbatches", "-3"), "'-3' is not a whole number from 1 up"),
        (("1f1b", "--stages", "four", "--microbatches", "8"), "'four' is not a whole number"),
        (("1f1b", "--stages", "4.0", "--microbatches", "8"), "'4.0' is not a whole number"),
        (("1f1b", *SMALL, "--chunks", "3"), "1f1b has 1 chunk a rank, not 3"),
        (("1f1b", *SMALL, "--cost", "1,1"), "'1,1' is not F,B,W,C or F,B,W"),
        (("1f1b", *SMALL, "--cost", "1,x,1,0"), "'x' is not a number"),
        (("1f1b", *SMALL, "--cost", "1,-1,1,0"), "'-1' is not a number from 0 up"),
        (("1f1b", *SMALL, "--cost", "1,nan,1,0"), "'nan' is not a number from 0 up"),
        (("1f1b", *SMALL, "--cost", "1,inf,1,0"), "'inf' is not a number from 0 up"),
        (("1f1b", *SMALL, "--memory-limit", "-1"), "'-1' is not a number from 0 up"),
        (("1f1b", *SMALL, "--activation", "1,2,3"), "'1,2,3' is not A or A,K"),
        (("1f1b", *SMALL, "--width", "0"), "'0' is not a whole number from 1 up"),
        (("1f1b", *SMALL, "--costs", "nosuch.json"), "nosuch.json: error: cannot read the file"),
        (("1f1b", *SMALL, "--costs", "x", "--cost", "1,1,1"), "--costs FILE already states --cost"),
        (("1f1b", *SMALL, "--format", "svg"), "invalid choice: 'svg'"),
        (("1f1b", *SMALL, "-o", "/nosuch/out.json"), "cannot write '/nosuch/out.json'"),
        (("compare", *SMALL, "--format", "html"), "schedule compare prints table, json, csv"),
        (("nosuch.csv",), "nosuch.csv: error: cannot read the file: No such file"),
    ],
    ids=lambda value: "-".join(value).strip("-") if isinstance(value, tuple) else "",
)
def test_refusals(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str):
    assert said in _refused(capsys, *words)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", "costs must be an object with at least the keys forward, input_gradient"),
        ('{"forward": 1, "input_gradient": 1}', "the costs have no weight_gradient"),
        ('{"forward": [1, "x"]}', "the costs have no input_gradient and no weight_gradient"),
        ('{"forwards": 1}', "unknown key 'forwards'; costs have forward"),
        ('{"forward": [1, "x"], "input_gradient": 1, "weight_gradient": 1}', "forward[1]: 'x'"),
        ('{"forward": true, "input_gradient": 1, "weight_gradient": 1}', "forward: True is no"),
        (
            '{"forward": -1, "input_gradient": 1, "weight_gradient": 1}',
            "forward: -1 is out of range",
        ),
        (
            '{"forward": [1, 1], "input_gradient": [1], "weight_gradient": 1}',
            "the lists have different lengths: forward 2, input_gradient 1",
        ),
        ('{"forward": [], "input_gradient": 1, "weight_gradient": 1}', "the lists are empty"),
        (
            '{"forward": [1, 1, 1], "input_gradient": 1, "weight_gradient": 1}',
            "3 figures do not fit 4 stages",
        ),
        (
            '{"forward": 1, "input_gradient": 1, "weight_gradient": 1, "message": [1]}',
            "message: [1] is not a number",
        ),
        ('{"forward": }', "costs.json:1:13: error: invalid JSON"),
    ],
    ids=[
        *("list", "missing", "missing-two", "unknown", "entry", "bool", "negative"),
        *("lengths", "empty", "slices", "scalar", "syntax"),
    ],
)
def test_refused_cost_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, said: str
):
    path = tmp_path / "costs.json"
    path.write_text(content)
    assert said in _refused(capsys, "1f1b", *SMALL, "--costs", path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--stages", "3"), "--stages 3: the schedule in the file has 4"),
        (("--microbatches", "3"), "--microbatches 3: the schedule in the file has 8"),
        (("--chunks", "2"), "--chunks 2: the schedule in the file has 1"),
    ],
    ids=["stages", "microbatches", "chunks"],
)
def test_files_of_another_size_than_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], said: str
):
    path = tmp_path / "1f1b.csv"
    path.write_text(to_csv(one_f_one_b(4, 8)))
    assert said in _refused(capsys, path, *words)


def test_an_old_output_survives_a_refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    output = tmp_path / "out.json"
    output.write_text("old")
    _refused(capsys, "1f1b", *SMALL, "--chunks", 5, "-o", output)
    assert output.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_the_command_loads_no_mlir(tmp_path: Path):
    path = tmp_path / "1f1b.csv"
    path.write_text(to_csv(one_f_one_b(2, 3)))
    script = (
        "import sys\n"
        "from stablehlo_tools.cli.main import main\n"
        "for words in (['1f1b', '--stages', '2', '--microbatches', '3'],\n"
        f"              [{str(path)!r}, '--format', 'json'],\n"
        "              ['compare', '--stages', '2', '--microbatches', '3']):\n"
        "    assert main(['schedule', *words]) == 0\n"
        "print(*sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules)),\n"
        "      file=sys.stderr)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert finished.stdout
    assert finished.stderr.split() == []


def test_written_files_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    output = tmp_path / "out.json"
    assert _printed(capsys, "1f1b", *SMALL, "-o", output) == ""
    assert read_table(str(output)).rows == one_f_one_b(4, 8).rows
