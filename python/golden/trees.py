"""The two trees: copies of `stablehlo_tools` as a commit, or the working tree, has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "stablehlo_tools"


@dataclass(frozen=True)
class Tree:
    """A directory with the package in it; `key` is the hash that git has for its contents."""

    directory: Path
    key: str
    name: str

    @property
    def module(self) -> str:
        """The module whose `main` is the command."""
        project = tomllib.loads((self.directory / "pyproject.toml").read_text())["project"]
        return project["scripts"]["stablehlo-tools"].partition(":")[0]


def of_commit(commit: str, cache: Path) -> Tree:
    """The package as a commit has it."""
    return _copied(commit, _git("rev-parse", "--short", commit), cache)


def of_working_tree(cache: Path) -> Tree:
    """The package as it lies in the working tree, committed or not."""
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "GIT_INDEX_FILE": f"{directory}/index"}
        _git("read-tree", "HEAD", environment=environment)
        _git("add", "--all", PACKAGE, "pyproject.toml", environment=environment)
        tree = _git("write-tree", environment=environment)
    return _copied(tree, "the working tree", cache)


def default_base() -> str:
    """Where the branch left `main`; on `main` itself the commit before, or HEAD if it is edited."""
    head = _git("rev-parse", "HEAD")
    try:
        base = _git("merge-base", "HEAD", "main")
    except subprocess.CalledProcessError:
        base = head
    if base != head:
        return base
    edited = _git("status", "--porcelain", "--", PACKAGE)
    return head if edited else _git("rev-parse", "HEAD~1")


def _copied(tree: str, name: str, cache: Path) -> Tree:
    key = _git("rev-parse", f"{tree}:{PACKAGE}")
    directory = cache / "trees" / key[:16]
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{key[:16]}.", dir=directory.parent))
        archive = subprocess.run(
            ["git", "archive", tree, PACKAGE, "pyproject.toml"],
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        subprocess.run(["tar", "-x", "-C", part], input=archive, check=True)
        # Commands start children, which would each compile the package.
        subprocess.run([sys.executable, "-m", "compileall", "-q", part / PACKAGE], check=True)
        try:
            part.rename(directory)
        except OSError:  # another run was first
            shutil.rmtree(part)
    return Tree(directory, key, name)


def _git(*words: str, environment: dict[str, str] | None = None) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()
