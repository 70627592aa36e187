"""The wheel and the sdist: what is in them, and every command with the core dependencies alone.

In that environment there are no compilers for GPU and TPU, no solver, no filecheck: each command
works, or says which extra to install.
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from compat import environments

from stablehlo_tools.cli.doctor import KNOWN

ROOT = Path(__file__).resolve().parents[3]
CLI = ROOT / "lit_tests" / "cli" / "Inputs"
STEP = str(CLI / "two_layers.mlir")
WORKER = str(CLI / "align_order_base.mlir")
TURNED = (str(CLI.parent / "align_order.mlir"), str(CLI / "align_order_turned.mlir"))
GRAPH = str(CLI / "overlap_graph.json")
EXTRA = "try: pip install '.[{}]'  # in a clone of stablehlo-tools"


class Bare(NamedTuple):
    """An environment with the wheel and its core dependencies, and a folder to work in."""

    python: Path
    folder: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command there."""
        command = [self.python, "-P", "-m", "stablehlo_tools", *words]
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=600
        )


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    environments.build_wheel(ROOT, folder)
    return folder


@pytest.fixture(scope="session")
def bare(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    folder = tmp_path_factory.mktemp("bare")
    python = environments.make(folder / "env", environments.required("stablehlo-tools"))
    made = environments.install(python, next(dist.glob("*.whl")))
    assert made.returncode == 0, made.stderr
    (folder / "work").mkdir()
    return Bare(python, folder / "work")


def test_the_wheel_has_what_is_no_module(dist: Path):
    wheel = next(dist.glob("*.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("cost/profiles", "report/page"):
        for path in (ROOT / "stablehlo_tools" / folder).iterdir():
            if path.is_file():
                assert f"stablehlo_tools/{folder}/{path.name}" in names
    assert "stablehlo_tools/py.typed" in names
    assert all(name.startswith(("stablehlo_tools/", "stablehlo_tools-")) for name in names)
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", wheel],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout


def test_a_bare_environment_is_bare(bare: Bare):
    code = (
        "import importlib.util as u\n"
        "print([n for n in ('libtpu', 'jax_plugins', 'ortools', 'filecheck', 'orbax', 'pytest')"
        " if u.find_spec(n)])"
    )
    said = subprocess.run(
        [bare.python, "-P", "-c", code], cwd=bare.folder, capture_output=True, text=True, check=True
    )
    assert said.stdout == "[]\n"


def test_commands_work_without_extras(bare: Bare):
    assert bare.run("--version").stdout.startswith("stablehlo-tools 0.")
    made = bare.run("opt", WORKER, "-p", "thread-tokens", "-o", "out.mlir")
    assert (made.returncode, made.stderr) == (0, "wrote out.mlir\n")
    looked = bare.run("inspect", "out.mlir", "--hardware", "h100")
    assert (looked.returncode, looked.stderr) == (0, "")


def test_a_compiler_that_is_missing_names_its_extra(bare: Bare):
    refused = bare.run("compile", WORKER, "--target", "gpu")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == EXTRA.format("aot")


def test_doctor_knows_the_releases_that_were_seen_to_work():
    page = (ROOT / "docs" / "project" / "compatibility.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) \| [\w ]+ \| (yes|no) \|", page, re.MULTILINE)
    assert len(rows) > len(KNOWN)
    assert tuple(release for release, works in rows if works == "yes") == KNOWN


@pytest.mark.soak
@pytest.mark.parametrize("words", [
    ("doctor",),
    ("completion", "bash"),
    ("report", WORKER, "--hardware", "h100", "-o", "report.html"),
    ("report", WORKER, "--hardware", "h100", "-o", "trace.json"),
    ("compile", WORKER, "--target", "cpu"),
    ("align-order", TURNED[0], TURNED[1], "-o", "aligned"),
    ("verify", WORKER, WORKER),
    ("check-order", WORKER),
    ("schedule", "compare", "--stages", "2", "--microbatches", "4"),
    ("schedule", "1f1b", "--stages", "2", "--microbatches", "4", "-o", "schedule.html"),
    ("overlap-graph", GRAPH, "-o", "schedule.json"),
    ("expand-mpmd", STEP, "--schedule", "1f1b", "--ranks", "2", "-o", "ranks"),
    ("check-mpmd", "ranks"),
    ("run-mpmd", "ranks", STEP),
    ("lower-mpmd", "ranks", "-o", "lowered", "--transfers", "both-ends"),
    ("report", "ranks", "-o", "ranks.html"),
])  # fmt: skip
def test_every_command_without_a_compiler_works(bare: Bare, words: tuple[str, ...]):
    finished = bare.run(*words)
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.soak
@pytest.mark.parametrize(("words", "extra"), [
    (("compile", WORKER, "--target", "tpu"), "aot"),
    (("inspect", WORKER, "--target", "gpu"), "aot"),
    (("optimize", WORKER, "--target", "gpu"), "aot"),
    (("make-test", WORKER, "-p", "thread-tokens", "-o", "test.mlir"), "tests"),
])  # fmt: skip
def test_what_is_missing_is_named(bare: Bare, words: tuple[str, ...], extra: str):
    finished = bare.run(*words)
    assert finished.returncode == 2, finished.stdout
    assert EXTRA.format(extra) in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.soak
def test_the_sdist_makes_the_same_wheel(dist: Path, tmp_path: Path):
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", tmp_path, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    archive = next(tmp_path.glob("*.tar.gz"))
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", archive],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    again = environments.build_wheel(
        tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "wheel"
    )
    names = [sorted(zipfile.ZipFile(each).namelist()) for each in (again, *dist.glob("*.whl"))]
    assert names[0] == names[1]
