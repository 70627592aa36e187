"""Benchmarks find their imports on a path of their own, and the page has all of their results."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
from tree import BENCHMARKS, LIT_TESTS, ROOT

from docs import benchmarks_page


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_imports_are_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ast.parse(path.read_text())
    own = ROOT / "python", LIT_TESTS
    clean = [place for place in sys.path if not any(map(Path(place).is_relative_to, own))]
    monkeypatch.setattr(sys, "path", [str(path.parent), *clean])
    known: dict[str, object] = {"__file__": str(path), "Path": Path, "sys": sys}
    for node in tree.body:
        text = ast.unparse(node)
        if text.startswith(("HERE = ", "sys.path")):
            exec(compile(text, str(path), "exec"), known)
    imported = [
        name
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    ]
    missing = [
        name
        for name in {name.partition(".")[0] for name in imported}
        if name not in sys.builtin_module_names and _place(name) is None
    ]
    assert not missing


def _place(name: str) -> object:
    """Where a module would be loaded from now, whatever is loaded already."""
    loaded = sys.modules.pop(name, None)
    try:
        return importlib.util.find_spec(name)
    finally:
        if loaded is not None:
            sys.modules[name] = loaded


def test_every_result_is_on_the_page_and_names_its_benchmark() -> None:
    listed = [name for names in benchmarks_page.read("index").values() for name in names]
    files = {path.stem for path in benchmarks_page.RESULTS.glob("*.json")}
    assert sorted([*listed, "index"]) == sorted(files)
    page = benchmarks_page.page()
    for name in listed:
        data = benchmarks_page.read(name)
        assert {"what", "command", "unit", "rows"} <= data.keys()
        assert (ROOT / data["command"].split()[1]).is_file()
        cells = [value for row in data["rows"] for value in row.values()]
        assert all(value in page for value in cells if isinstance(value, str))
        assert all(f"{value:,}" in page for value in cells if not isinstance(value, str))


def test_the_tables_of_a_section_share_their_columns() -> None:
    for names in benchmarks_page.read("index").values():
        rows = [row for name in names for row in benchmarks_page.read(name)["rows"]]
        assert len({tuple(row) for row in rows}) == 1
