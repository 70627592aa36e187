"""Runs the command that makes the input of a test, as its RUN line does."""

from __future__ import annotations

import os
import runpy
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

from stablehlo_tools.diagnostics import ToolError, first_line
from stablehlo_tools.files.atomic import read_input
from stablehlo_tools.testing.recipe import Recipe


def produced(recipe: Recipe, test: str | os.PathLike[str]) -> bytes:
    """Runs the producer as lit would for this test, and returns what it made.

    Raises ToolError where it fails, or makes nothing.
    """
    config = _lit_config(Path(test).absolute().parent)
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory) / "test"
        known = [*config.substitutions, ("%S", Path(test).absolute().parent), ("%t", here)]
        command = recipe.producer or ""
        for name, value in known:
            command = command.replace(str(name), str(value))
        result = subprocess.run(
            ["/bin/sh", "-c", command],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, **config.environment},
        )
        if result.returncode:
            told = [line for line in result.stderr.splitlines() if line.strip()]
            why = told[-1].strip() if told else f"exit code {result.returncode}"
            raise ToolError(f"the producer {recipe.producer!r} failed: {first_line(why)}")
        return read_input(str(here) + recipe.input.removeprefix("%t"))[0]


def _lit_config(directory: Path) -> SimpleNamespace:
    """What the nearest lit.cfg.py sets; it may only set, as the suite's own does."""
    config = SimpleNamespace(
        environment={"PATH": os.environ.get("PATH", "")}, substitutions=[], available_features=set()
    )
    folders = [directory, *directory.parents]
    file = next((d / "lit.cfg.py" for d in folders if (d / "lit.cfg.py").is_file()), None)
    if file is not None:
        try:
            runpy.run_path(str(file), init_globals={"config": config})
        except Exception as error:  # the file may do anything
            why = f"{type(error).__name__}: {error}"
            raise ToolError(f"{str(file)!r} cannot be read: {first_line(why)}") from None
    return config
