"""A launched process finds modules as `python SCRIPT` does."""

import sys
from pathlib import Path

import pytest

from stablehlo_tools.mpmd.runtime.launched import search_beside


def test_what_lies_beside_the_script_comes_first_and_what_is_installed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package is installed, the first entry is the site-packages that has all else."""
    monkeypatch.setattr(sys, "path", ["/site-packages", "/standard"])
    search_beside(str(tmp_path / "train.py"))
    assert sys.path == [str(tmp_path.resolve()), "/site-packages", "/standard"]
