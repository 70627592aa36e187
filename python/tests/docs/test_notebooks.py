"""The notebooks run, and print what is stored in them."""

import shlex
from pathlib import Path

import forked_commands
import nbformat
import pytest
from docs.running import environment
from forked_process import MODULES_FOR_ARTIFACTS
from nbformat.v4 import new_code_cell, new_notebook, new_output
from tree import LIT_TESTS

from docs import notebook_pages, notebooks

NAMES = [path.stem for path in sorted(notebooks.FOLDER.glob("*.ipynb"))]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `stablehlo-tools` that starts loaded. Its environment is one of its own, and
    not a kernel's, which would have to load it anew."""
    found = environment(tmp_path_factory.mktemp("cache"))
    found["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    started = forked_commands.start(
        found, ["stablehlo-tools", "children"], more={"stablehlo-tools": MODULES_FOR_ARTIFACTS}
    )
    program = tmp_path_factory.mktemp("programs") / "stablehlo-tools"
    settings = shlex.join(f"{name}={value}" for name, value in found.items())
    forked = shlex.quote(str(started / program.name))
    program.write_text(f'#!/bin/sh\nexec env -i {settings} {forked} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return program.parent


@pytest.fixture
def begin(forked_children: Path | None) -> str:
    """What lets the tool's child processes of a kernel start in forks, too."""
    if forked_children is None:
        return ""
    return f"""
import sys
from pathlib import Path
sys.path.append({str(LIT_TESTS)!r})
from forked_process import fork_children
fork_children(Path({str(forked_children)!r}))
"""


@pytest.mark.parametrize("name", NAMES)
def test_notebook_prints_what_it_stores(name: str, programs: Path, begin: str):
    path = notebooks.FOLDER / f"{name}.ipynb"
    stored = nbformat.read(path, as_version=4)
    executed = notebooks.executed(path, programs=programs, begin=begin)
    assert notebooks.texts(executed) == notebooks.texts(stored)


@pytest.mark.parametrize(
    "path", sorted(notebooks.FOLDER.glob("*.ipynb")), ids=lambda path: path.stem
)
def test_notebook_is_stored_whole_and_small(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size < 60_000
    told = "".join(notebooks.texts(notebook))
    assert "Warning" not in told
    assert "/tmp" not in told


def test_three_stories():
    assert len(NAMES) == 3


@pytest.mark.parametrize(
    "path", sorted(notebooks.FOLDER.glob("*.ipynb")), ids=lambda path: path.stem
)
def test_a_page_of_the_site_has_all_of_a_notebook(path: Path):
    page = notebook_pages.page(path)
    assert page.startswith("# ")
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.source.strip().splitlines()[-1] in page
        for output in cell.get("outputs", []):
            printed = output.text if output.output_type == "stream" else output.data["text/plain"]
            assert printed.rstrip() in page


def test_a_page_has_no_output_that_is_left_out(tmp_path: Path):
    cell = new_code_cell("figure")
    cell.outputs = [new_output("display_data", data={"image/png": ""})]
    path = tmp_path / "drawn.ipynb"
    nbformat.write(new_notebook(cells=[cell]), path)
    with pytest.raises(ValueError, match="display_data has no text"):
        notebook_pages.page(path)


def test_other_output_is_found(tmp_path: Path):
    cell = new_code_cell("print(1 + 1)")
    cell.outputs = [new_output("stream", name="stdout", text="3\n")]
    path = tmp_path / "wrong.ipynb"
    nbformat.write(new_notebook(cells=[cell]), path)
    assert notebooks.texts(notebooks.executed(path)) == ["2"]
    assert notebooks.texts(nbformat.read(path, as_version=4)) == ["3"]


def test_times_are_no_difference():
    assert notebooks.comparable("compiled in 0.1 s\r\n") == notebooks.comparable(
        "compiled in 3 s \n"
    )
    assert notebooks.comparable("total 3.1 ms") != notebooks.comparable("total 3.2 ms")
