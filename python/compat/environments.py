"""Environments that are made in a second: links to packages that are installed here, and no pip.

What lies in such an environment is what it is given, by the names of distributions; nothing else of
this environment can be imported there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

_NAME = re.compile(r"[\w.-]+")
_DROPPED = {"..", "__pycache__", "bin"}


def make(folder: Path, names: Iterable[str]) -> Path:
    """An environment with links to these distributions; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    packages = site_packages(folder)
    for name in names:
        found = metadata.distribution(name)
        for top in {Path(str(each)).parts[0] for each in found.files or ()} - _DROPPED:
            target = packages / top
            if not target.exists():
                target.symlink_to(Path(str(found.locate_file(top))))
    return python


def site_packages(folder: Path) -> Path:
    """Where the packages of an environment lie."""
    return next((folder / "lib").glob("python*/site-packages"))


def install(python: Path, *wanted: str | Path) -> subprocess.CompletedProcess[str]:
    """Installs these, and nothing that they depend on, by the pip of this environment."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    options = ["install", "--quiet", "--no-deps", "--no-compile"]
    return subprocess.run([*pip, *options, *wanted], capture_output=True, text=True, check=False)


def required(name: str) -> set[str]:
    """A distribution's dependencies and theirs, without those of extras; what is not installed here
    is left out."""
    found = set[str]()
    waiting = [name]
    while waiting:
        try:
            listed = metadata.requires(waiting.pop()) or []
        except metadata.PackageNotFoundError:
            continue
        for line in listed:
            word = _NAME.match(line)
            if word is None or "extra ==" in line or word[0].lower() in found:
                continue
            try:
                metadata.version(word[0])
            except metadata.PackageNotFoundError:  # of another platform, or Python
                continue
            found.add(word[0].lower())
            waiting.append(word[0])
    return found


def build_wheel(root: Path, folder: Path) -> Path:
    """The wheel of a tree."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, root]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))
