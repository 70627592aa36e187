"""The pages that are generated from the code say what the code says."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from docs import generate, hardware_page
from stablehlo_tools.cli.commands import COMMANDS
from stablehlo_tools.passes.registry import PASSES


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the pages are written to instead."""
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    return tmp_path


def test_generated_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]):
    status = generate.main(["--check"])
    assert status == 0, capsys.readouterr().err


def test_stale_page_is_found_and_mended(pages: Path, capsys: pytest.CaptureFixture[str]):
    assert generate.main([]) == 0
    page = pages / "reference" / "passes" / "thread-tokens.md"
    page.write_text(page.read_text().replace("`barrier`", "`barriers`"))
    assert generate.main(["--check"]) == 1
    told = capsys.readouterr().err
    assert "-| `form` | `barriers` or `composite` |" in told
    assert "+| `form` | `barrier` or `composite` |" in told
    assert "run `make docs`" in told
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


def test_what_is_written_by_hand_stays(pages: Path):
    assert generate.main([]) == 0
    page = pages / "reference" / "commands" / "verify.md"
    page.write_text(page.read_text() + "\n## By hand\n")
    assert generate.main([]) == 0
    assert page.read_text().endswith("\n## By hand\n")
    assert generate.main(["--check"]) == 0


def test_missing_page_is_out_of_date(pages: Path):
    assert generate.main(["--check"]) == 1


def test_every_command_and_every_pass_has_a_page(pages: Path):
    generate.main([])
    folder = pages / "reference"
    assert {path.stem for path in (folder / "commands").iterdir()} == set(COMMANDS)
    assert {path.stem for path in (folder / "passes").iterdir()} == {*PASSES, "index"}
    page = (folder / "commands" / "inspect.md").read_text()
    assert "- `--at-most FIGURE=NUMBER`: exit with 1 if exposed\\_ns" in page


def test_every_figure_of_a_profile_is_on_the_page_with_its_source():
    page = hardware_page.page()
    sources = dict(re.findall(r'^(\d+)\. <a id="s\1"></a>(.+)$', page, flags=re.MULTILINE))
    assert len(set(sources.values())) == len(sources)
    for profile in hardware_page.PROFILES.glob("*.toml"):
        section = page[page.index(f"## `{profile.stem}`") :].partition("\n## ")[0]
        rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", section, flags=re.MULTILINE))
        figures = list(hardware_page.figures_of(tomllib.loads(profile.read_text())))
        assert len(figures) == profile.read_text().count("value =")
        for figure in figures:
            text = re.escape(f"`{figure.name}` {figure.value}<sup>[")
            number = re.search(text + r"(\d+)\]\(#s\1\)", rows[figure.part])
            assert number, figure
            assert without_links(sources[number[1]]) == figure.source


def without_links(text: str) -> str:
    """A source as the profile has it: addresses instead of links."""
    return re.sub(r"\[[^]]+\]\((https?://[^)]+)\)", r"\1", text)


def test_no_page_says_a_thing_twice():
    """A heading, or a row of a table, that stands twice is a merge that went wrong."""
    docs = generate.DOCS
    twice = {
        f"{page.relative_to(docs)}: {line}"
        for page in docs.rglob("*.md")
        if "reference" not in page.parts
        for line, count in Counter(_headings_and_rows(page.read_text())).items()
        if count > 1
    }
    assert not twice


def _headings_and_rows(text: str) -> list[str]:
    told = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^(?:##? .+|\| `.{30,})$", told, flags=re.MULTILINE)
