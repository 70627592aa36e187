"""The guard of prose and names counts what it says, and fails on a figure above its limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from style import guard

BAD = '''"""What it does is told here."""


class Plan:
    """A plan."""

    def moved(self) -> str:
        """Whether it was moved."""
        return _text()


def _text() -> str:
    # Nobody reads it, as it came.
    return "the ops behind the loop"
'''
GOOD = '''"""Moves ops out of loops."""


class HoistPlan:
    """Ops to hoist."""

    def move_ops(self) -> str:
        """Returns the moved ops.

            stablehlo.add, behind the loop

        The order is kept.
        """
        return "the ops after the loop"
'''


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project without files of Python, with one page."""
    monkeypatch.setattr(guard, "ROOT", tmp_path)
    for folder in ("stablehlo_tools", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "README.md").write_text("# Good\n\nThe pass moves ops.\n")
    (tmp_path / "CONTRIBUTING.md").write_text("Do it.\n\n```\nnobody reads code\n```\n")
    return tmp_path


def test_a_good_file_has_no_hit(root: Path) -> None:
    (root / "stablehlo_tools" / "good.py").write_text(GOOD)
    tallies = guard.measure(root)
    lines = tallies.pop("lines_per_comment")
    assert not [place for tally in tallies.values() for place in tally.places]
    assert len(lines.places) == 3


def test_each_figure_counts_its_place(root: Path) -> None:
    (root / "stablehlo_tools" / "bad.py").write_text(BAD)
    (root / "stablehlo_tools" / "other.py").write_text("class _Plan:\n    pass\n")
    tallies = guard.measure(root)
    places = [place.split(":") for place in tallies["idioms_in_product"].places]
    assert sorted(int(line) for _, line, *_ in places) == [1, 13, 13, 14]
    assert len(tallies["relative_docstrings"].places) == 2
    assert [place.split()[-1] for place in tallies["bare_names"].places] == ["moved"]
    assert len(tallies["shared_class_names"].places) == 2
    assert [place.split()[-1] for place in tallies["single_use_helpers"].places] == ["_text"]
    assert tallies["lines_per_comment"].figure == len(tallies["lines_per_comment"].places) == 8


def test_a_long_sentence_counts(root: Path) -> None:
    words = " ".join(["word"] * 26)
    path = root / "stablehlo_tools" / "long.py"
    path.write_text(f'"""{words}."""\n')
    assert len(guard.measure(root)["long_sentences"].places) == 1
    path.write_text(f'"""{words[5:]}. Word."""\n')
    assert not guard.measure(root)["long_sentences"].places


def test_a_limit_is_kept_and_follows_the_figure() -> None:
    limits = {"bare_names": 100.0}
    assert guard.judge({"bare_names": 100}, limits) == []
    assert guard.judge({"bare_names": 97}, limits) == []
    assert "more than 100" in guard.judge({"bare_names": 101}, limits)[0]
    assert "fell from 100 to 90" in guard.judge({"bare_names": 90}, limits)[0]


def test_lower_writes_what_fell(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "stablehlo_tools" / "good.py").write_text(GOOD)
    limits = tmp_path / "limits.toml"
    names = guard.measure(root)
    limits.write_text("".join(f"{name} = 50 # a unit\n" for name in names))
    monkeypatch.setattr(guard, "LIMITS", limits)
    assert guard.main([]) == 1
    assert guard.main(["--lower"]) == 0
    assert "bare_names = 0 # a unit" in limits.read_text()
    assert guard.main([]) == 0
