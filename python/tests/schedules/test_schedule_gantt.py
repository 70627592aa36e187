"""The chart of a schedule in a terminal and on a page: each step where and as long as it is."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.report import schedule_html
from stablehlo_tools.report.schedule_gantt import FILLINGS, Gantt, axis_step
from stablehlo_tools.report.schedule_html import render_page
from stablehlo_tools.report.schedule_table import to_text
from stablehlo_tools.report.units import figure
from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.generators.by_rule import looped_bfs, one_f_one_b, zb_h1
from stablehlo_tools.schedules.setting import costs, unit_costs
from stablehlo_tools.schedules.table import (
    ActionPair,
    Step,
    backward,
    forward,
    loop,
    table_of,
    v_shape,
)
from stablehlo_tools.schedules.table_simulator import Timeline, simulate

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def _one_f_one_b(ranks: int = 2, microbatches: int = 2) -> Timeline:
    return simulate(one_f_one_b(ranks, microbatches), unit_costs(ranks))


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"r\d+ ", line)]


def _pairs() -> Timeline:
    """Two ranks with two chunks each in a V, and one pair, on rank 0."""
    rows: list[list[Step]] = [
        [forward(0, 0), forward(3, 0), backward(3, 0)],
        [forward(1, 0), forward(2, 0), backward(2, 0), backward(1, 0)],
    ]
    rows[0] += [
        ActionPair(forward(0, 1), backward(0, 0)),
        forward(3, 1),
        backward(3, 1),
        backward(0, 1),
    ]
    rows[1] += [forward(1, 1), forward(2, 1), backward(2, 1), backward(1, 1)]
    return simulate(table_of("pairs", v_shape(2), 2, rows), unit_costs(4))


def test_the_table_of_a_known_schedule():
    assert to_text(_one_f_one_b(), 60) == (
        "1f1b: 2 ranks, 2 stages (loop), 2 microbatches\n"
        "makespan     9, longest span of a rank 9\n"
        "bubble       33.3 % by END, 33.3 % by SPAN\n"
        "activations  2 at most, in stages x microbatches\n"
        "memory       2 at most, weights and activations\n"
        "messages     4, bytes 0\n"
        "\n"
        "   0       2       4       6       8      idle alive held\n"
        "r0 F0--F1--........B0======....B1======  33.3%     2    2\n"
        "r1 ....F0--B0======F1--B1======........  33.3%     1    1\n"
        "\n"
        "F -  forward\n"
        "B =  backward, both gradients\n"
        ".  idle\n"
        "4 columns a time unit\n"
    )


@pytest.mark.parametrize("width", [100, 120, 160])
@pytest.mark.parametrize("colour", [False, True], ids=["plain", "coloured"])
def test_eight_ranks_and_sixteen_microbatches_fit(width: int, colour: bool):
    """Every step is drawn, at its time and of its length, and no line is wider than asked."""
    timeline = _one_f_one_b(8, 16)
    text = ESCAPE.sub("", to_text(timeline, width, colour))
    assert max(map(len, text.splitlines())) <= width
    rows = _rows(text)
    assert len(rows) == 8
    columns = 1 if width < 160 else 2
    assert f"{columns} column" in text
    for rank, row in enumerate(rows):
        chart = row[3 : 3 + 69 * columns]
        for step, start in zip(timeline.table.rows[rank], timeline.starts[rank], strict=True):
            assert step is not None
            assert chart[int(start) * columns] == str(step).strip("0123456789")
        assert len(re.findall("F", chart)) == len(re.findall("B", chart)) == 16
        assert chart.count(".") == columns * round(timeline.idle[rank]) == 21 * columns


def test_colours_change_nothing_but_colours():
    timeline = simulate(zb_h1(4, 8), unit_costs(4))
    plain = to_text(timeline, 100)
    coloured = to_text(timeline, 100, colour=True)
    assert "\x1b" not in plain
    for one, other in zip(_rows(plain), _rows(ESCAPE.sub("", coloured)), strict=True):
        assert one == other
    first = next(line for line in coloured.splitlines() if line.startswith("r0 "))
    backgrounds = {
        letter: set(re.findall(rf"\x1b\[48;5;(\d+)m\x1b\[38;5;\d+m{letter}", first))
        for letter in "FIW"
    }
    assert all(len(found) == 1 for found in backgrounds.values())
    assert len(set.union(*backgrounds.values())) == 3


def test_chunks_have_shades_and_letters_of_their_own():
    timeline = simulate(looped_bfs(2, 2, 3), unit_costs(6))
    row = _rows(to_text(timeline, 160))[0]
    assert re.findall("[FfBb][0-9]", row) == [
        *("F0", "F1", "f0", "f1", "F0", "F1"),
        *("B0", "B1", "b0", "b1", "B0", "B1"),
    ]
    coloured = next(
        line for line in to_text(timeline, 160, colour=True).splitlines() if line.startswith("r0")
    )
    shades = re.findall(r"\x1b\[48;5;(\d+)m\x1b\[38;5;\d+m([Ff])", coloured)
    assert len({shade for shade, _ in shades}) == 3


def test_pairs_show_both_microbatches():
    text = to_text(_pairs(), 120)
    assert "P p #  forward and backward at once" in text
    assert "\n4 columns a time unit\n" in text
    assert re.findall("P1/0#*", _rows(text)[0]) == ["P1/0########"]


def test_blocking_transfers_are_drawn():
    table = with_communication(one_f_one_b(2, 2), late=True)
    timeline = simulate(table, costs(2, communication=1), blocking=True)
    text = to_text(timeline, 100)
    assert ">  send" in text
    assert "<  receive" in text
    sent = {rank: row.count(">") for rank, row in enumerate(_rows(text))}
    assert sent[0]
    assert sent[1]


def test_a_wide_chart_is_broken_into_parts():
    timeline = _one_f_one_b(4, 32)
    text = to_text(timeline, 80)
    rows = _rows(text)
    assert len(rows) == 8
    assert max(map(len, text.splitlines())) <= 80
    drawn = Counter(letter for row in rows for letter in row if letter in "FB")
    assert drawn == {"F": 4 * 32, "B": 4 * 32}
    axis = [line for line in text.splitlines() if line.startswith("   ")]
    ticks = [int(tick) for line in axis for tick in re.findall(r"\d+", line.split("idle")[0])]
    assert ticks == list(range(0, 105, 10))


def test_too_many_steps_are_summarised_with_a_scale():
    timeline = _one_f_one_b(8, 1024)
    text = to_text(timeline, 120)
    rows = _rows(text)
    assert len(rows) == 8
    assert max(len(row) for row in rows) <= 120
    columns = len(rows[0].split()[1])
    assert f"a column is a block of {figure(3093 / columns)} time units" in text
    assert {letter for row in rows for letter in row.split()[1]} <= set("FBMfbm.")
    assert all("MMMMMMMM" in row for row in rows)


def test_blocks_tell_phases_from_their_mixture_and_from_idle_time():
    """GPipe's two halves are pure; between them the first rank is idle."""
    rows = [[forward(rank, i) for i in range(400)] for rank in range(2)]
    rows = [row + [backward(rank, i) for i in range(400)] for rank, row in enumerate(rows)]
    timeline = simulate(table_of("gpipe", loop(2), 400, rows), costs(2, communication=200))
    gantt = Gantt(timeline, 100)
    assert gantt.in_blocks
    chart = "".join(cell.character for cell in gantt.row(0))
    assert re.fullmatch(r"F+[fm]?\.+b?B+\.?", chart), chart
    assert len(chart) == 100


def test_steps_without_a_column_are_counted():
    uneven = costs(2, forward=[10, 10], input_gradient=10, weight_gradient=10)
    tiny = costs(2, forward=[10, 10], input_gradient=[10, 0.01], weight_gradient=[10, 0.01])
    assert not Gantt(simulate(one_f_one_b(2, 40), uneven), 4000).hidden
    gantt = Gantt(simulate(one_f_one_b(2, 4), tiny), 100)
    assert gantt.hidden == 4
    assert gantt.in_blocks  # four of sixteen are too many to leave out


def test_steps_of_no_time_are_no_trouble():
    timeline = simulate(one_f_one_b(2, 2), costs(2, 0, 0, 0))
    text = to_text(timeline, 100)
    assert "makespan     0" in text
    assert render_page(timeline).count('class="rank"') == 2


@pytest.mark.parametrize("width", [1, 40])
def test_narrow_windows_get_a_chart_all_the_same(width: int):
    rows = _rows(to_text(_one_f_one_b(2, 2), width))
    assert len(rows) >= 2
    assert rows[0].startswith("r0 F0")


@pytest.mark.parametrize(
    ("least", "step"),
    [
        (0.003, 0.005),
        (0.01, 0.01),
        (0.7, 1),
        (1, 1),
        (1.1, 2),
        (3, 5),
        (6, 10),
        (10, 10),
        (230, 500),
    ],
)
def test_marks_are_at_round_times(least: float, step: float):
    assert axis_step(least) == pytest.approx(step)


def test_every_phase_has_a_filling():
    assert len(set(FILLINGS.values())) == len(FILLINGS)


class _Elements(HTMLParser):
    """Counts the steps of a page and keeps what its tables say."""

    def __init__(self) -> None:
        super().__init__()
        self.titles: list[str] = []
        self.classes: Counter[str] = Counter()
        self.lefts: list[float] = []
        self.cells: list[str] = []
        self._in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._in_cell = tag == "td"
        if tag == "div" and given.get("class") == "rank":
            self.classes["rank"] += 1
        if tag == "i" and given.get("title"):
            self.titles.append(given["title"] or "")
            self.classes[(given["class"] or "").split()[0]] += 1
            self.lefts.append(float((given["style"] or "").split("%")[0].removeprefix("left:")))

    def handle_data(self, data: str) -> None:
        if self._in_cell and data.strip():
            self.cells.append(data.strip())


def _parsed(page: str) -> _Elements:
    elements = _Elements()
    elements.feed(page)
    elements.close()
    return elements


def test_the_page_has_every_step_and_figure():
    timeline = simulate(zb_h1(4, 8), unit_costs(4))
    elements = _parsed(render_page(timeline))
    assert elements.classes == {"rank": 4, "F": 32, "I": 32, "W": 32}
    assert "0F3, 3 to 4, takes 1" in elements.titles
    assert len(set(elements.titles)) == 96
    assert elements.cells[:4] == ["Makespan", "27", "Longest span of a rank", "27"]
    assert elements.cells[4:8] == ["Bubble by END", "11.1 %", "Bubble by SPAN", "11.1 %"]
    starts = [start for starts in timeline.starts for start in starts]
    assert elements.lefts == pytest.approx([100 * start / 27 for start in starts], abs=1e-4)


def test_the_page_needs_no_network_and_stays_small():
    page = render_page(_one_f_one_b(8, 64))
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<link|src=", page)
    assert "default-src 'none'" in page
    assert "{{" not in page
    assert len(page.encode()) < 300_000


def test_names_are_text_on_the_page():
    name = "</title><script>window.broken = 1</script>{{figures}}"
    table = table_of(name, loop(1), 1, [[forward(0, 0), backward(0, 0)]])
    page = render_page(simulate(table, unit_costs(1)))
    assert "<script>window" not in page
    assert "{{figures}}" in page


def test_too_many_steps_for_a_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(schedule_html, "MOST_STEPS", 7)
    with pytest.raises(ToolError, match="1f1b has 8 steps, but a page shows at most 7"):
        render_page(_one_f_one_b())
