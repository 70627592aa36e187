"""What the command and the simulator once got wrong, or would if nobody looked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stablehlo_tools.cli.main import main
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.catalogue import build
from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.generators.by_rule import zb_h1, zb_h2
from stablehlo_tools.schedules.search.auto import find_best
from stablehlo_tools.schedules.setting import ScheduleSetting, costs, unit_costs
from stablehlo_tools.schedules.table_simulator import simulate

SMALL = ("--stages", "4", "--microbatches", "8")
ONE_BUFFER = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
)


def ran(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Exit code, output and errors of `schedule`."""
    try:
        code = main(["schedule", *map(str, words)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    told = capsys.readouterr()
    return code, told.out, told.err


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one message of a refused command."""
    code, out, error = ran(capsys, *words)
    assert (code, out) == (2, "")
    assert error.count("error:") == 1
    return error


def figures(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    """The JSON that a command prints."""
    code, out, error = ran(capsys, *words, "--format", "json")
    assert code == 0, error
    return json.loads(out)


def test_a_receive_posted_ahead_is_not_part_of_a_span() -> None:
    table = zb_h2(4, 12)
    plain = simulate(table, unit_costs(4))
    assert plain.bubble_of_span == 0
    assert simulate(with_communication(table), unit_costs(4)).spans == plain.spans


@pytest.mark.parametrize(
    ("kept", "activation"), [(1.0, 0.0), (2.0, 1.0)], ids=["of nothing", "more than all"]
)
def test_no_more_is_kept_of_an_activation_than_there_is(kept: float, activation: float) -> None:
    with pytest.raises(ToolError, match="it must be a part of it"):
        costs(2, activation=activation, kept=kept)


def test_figures_whose_sums_would_overflow(capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(capsys, "1f1b", *SMALL, "--cost", "1e200,1,1,0")
    assert "forward: 1e+200 is out of range; give 0 to 1e+100" in told


@pytest.mark.parametrize("ranks", ["999999999", "20000"])
def test_tables_of_enormous_size(capsys: pytest.CaptureFixture[str], ranks: str) -> None:
    told = refusal(capsys, "1f1b", "--stages", ranks, "--microbatches", "20000")
    assert "a table has at most 4,000,000 forwards" in told


def test_a_quoted_name_that_is_no_string(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_text('schedule "a\\q", loop of 1 ranks x 1, 1 microbatches, training\n')
    assert f"{path}:1:12: error: the name is not a JSON string" in refusal(capsys, path)


def test_names_that_a_terminal_would_obey(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    head = 'schedule "a\\u001b[2Jb", loop of 1 ranks x 1, 1 microbatches, training'
    path.write_text(f"{head}\nrank 0: 0F0 0B0\n")
    code, out, _ = ran(capsys, path)
    assert code == 0
    assert out.startswith("a?[2Jb: 1 rank")
    assert "\x1b" not in out


@pytest.mark.parametrize(
    "words",
    [
        ("1f1b", *SMALL, "--buffers", "2"),
        ("1f1b", *SMALL, "--max-chunks", "2"),
        ("1f1b", *SMALL, "--no-search"),
        ("1f1b", *SMALL, "--effort", "2"),
        ("compare", *SMALL, "--transfers"),
    ],
    ids=lambda words: " ".join(words[5:]) if isinstance(words, tuple) else str(words),
)
def test_options_without_effect_are_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert " is only for " in refusal(capsys, *words)


@pytest.mark.parametrize("words", [("--exact",), ("--time-limit", "2")])
def test_the_solver_is_no_option(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    told = refusal(capsys, "auto", *SMALL, *words)
    assert f"no option is called '{words[0]}'" in told


def test_buffers_hold_for_blocking_transfers_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "one_buffer.csv"
    path.write_text(ONE_BUFFER)
    assert ran(capsys, path, "--buffers", "0")[0] == 1
    for words in (("--buffers", "1"), ("--buffers", "1", "--communication", "blocking")):
        assert figures(capsys, path, *words)["metrics"]["makespan"] == 9


def test_single_costs_of_a_file_are_of_a_ranks_share(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table, given = tmp_path / "five.csv", tmp_path / "costs.json"
    table.write_text("0F0,,,3F0,,,3B0,,,0B0\n,1F0,2F0,,,,,2B0,1B0\n,,,,4F0,4B0\n")
    given.write_text('{"forward": 5, "input_gradient": 5, "weight_gradient": 10}')
    content = figures(capsys, table, "--costs", given)
    assert content["costs"]["forward"] == [3] * 5
    assert content["metrics"]["makespan"] == 60


def test_costs_name_a_key_that_stands_twice_and_lists_that_fit_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"forward": 1, "forward": 2}')
    assert f"{path}: error: the key 'forward' appears twice" in refusal(
        capsys, "1f1b", *SMALL, "--costs", path
    )
    three = [1, 2, 3]
    path.write_text(
        json.dumps({"forward": three, "input_gradient": three, "weight_gradient": three})
    )
    told = refusal(capsys, "1f1b", *SMALL, "--costs", path)
    assert f"{path}: error: its lists: 3 figures do not fit 4 stages" in told


def test_the_page_of_a_search_says_how_near_it_came(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "auto.html"
    assert ran(capsys, "auto", "--stages", "2", "--microbatches", "4", "-o", path)[0] == 0
    assert "no schedule on the searched placements is faster than " in path.read_text()


def test_zb_1p_is_never_behind_zb_h1() -> None:
    slices = costs(7, 2, 1, 1, communication=0.1, kept=0.4)
    found = simulate(build("zb-1p", ScheduleSetting(7, 23, slices)), slices)
    by_hand = simulate(zb_h1(7, 23), slices)
    assert (round(found.span, 9), found.makespan) <= (round(by_hand.span, 9), by_hand.makespan)


def test_the_search_mixes_full_and_split_gradients() -> None:
    """All split or all full is slower."""
    slices = costs(
        2, [0.5, 2], 1, [1, 3], backward=[2.4, 2.8], activation=[0, 1], kept=[0, 1], communication=2
    )
    best = find_best(ScheduleSetting(2, 2, slices, chunks=1, limit=1))
    assert best.timeline.makespan == pytest.approx(best.bound) == pytest.approx(14.3)
