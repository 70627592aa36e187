"""The figures of README and docs are those that the tool draws today."""

import json
from pathlib import Path

import pytest

from docs import drawings, figures
from stablehlo_tools.cli.main import main

KNOWN = json.loads(figures.DRAWN_OF.read_text())
AGAIN = "out of date: run `python python/docs/figures.py {}`"


@pytest.mark.parametrize("name", figures.SCHEDULES)
def test_a_schedule_is_drawn_as_its_page_is(name: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main([*figures.words_of(name), "-o", str(page)]) == 0
    drawn = figures.digest([page.read_bytes()])
    assert drawn == KNOWN[f"schedule-{name}.png"], AGAIN.format("schedules")


def test_the_page_of_optimize_looks_as_it_does() -> None:
    assert figures.look() == KNOWN["optimize.png"], AGAIN.format("optimize")


@pytest.mark.parametrize("name", figures.LANES)
def test_timelines_look_as_their_pages_do(name: str) -> None:
    assert figures.look() == KNOWN[f"lanes-{name}.png"], AGAIN.format("lanes")


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_drawing_is_the_one_of_the_script(name: str) -> None:
    there = (figures.FIGURES / name).read_text(encoding="utf-8")
    assert there == drawings.written(name), "run `python python/docs/drawings.py`"


def test_every_figure_is_drawn_and_used() -> None:
    drawn = {path.name for path in figures.FIGURES.glob("*.png")}
    assert drawn == set(KNOWN)
    there = {path.name for path in figures.FIGURES.iterdir()} - {figures.DRAWN_OF.name}
    pages = [figures.ROOT / "README.md", *(figures.ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [name for name in there if f"figures/{name}" not in text] == []


def test_another_page_is_told_apart_but_not_another_version() -> None:
    one, other = b"stablehlo-tools 0.2.0 <p>1</p>", b"stablehlo-tools 0.3.1.dev2 <p>1</p>"
    assert figures.digest([one]) == figures.digest([other])
    assert figures.digest([one]) != figures.digest([one.replace(b">1<", b">2<")])
