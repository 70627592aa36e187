"""The recipe of a generated test, stated in the test, and the command that remakes its input."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stablehlo_tools.diagnostics import ToolError, first_line, naming
from stablehlo_tools.files.atomic import check_writable, read_input

MADE_BY = "Made by: stablehlo-tools make-test "
UPDATED_BY = "After a wanted change: stablehlo-tools make-test --update "
_PLAIN = re.compile(r"[\w.,=/-]+")
_OUTPUT = re.compile(r"%t[\w.-]*")


@dataclass(frozen=True)
class Recipe:
    """The arguments of `make-test`. Exactly one of `source` and `producer` is given."""

    pipeline: str
    full: bool = False
    source: str | None = None  # the file name of the input, which the test contains
    producer: str | None = None  # the command of a RUN line that makes the input
    brief: bool = False
    cost: str | None = None  # the hardware for which the cost is bounded

    @property
    def made_by(self) -> str:
        """The comment that states the recipe."""
        words = [self.source] if self.source else ["--producer", self.producer or ""]
        words += ["-p", self.pipeline, *(["--full"] if self.full else [])]
        words += ["--brief"] if self.brief else []
        words += [f"--cost={self.cost}"] if self.cost is not None else []
        return MADE_BY + " ".join(quote_for_shell(word) for word in words)

    @property
    def input(self) -> str:
        """The name of the input in RUN lines. Raises ToolError if the producer names no output."""
        if self.producer is None:
            return "%s"
        output = _OUTPUT.search(self.producer)
        if output is None:
            raise ToolError(
                f"the producer {self.producer!r} must name its output file: write it as %t and a "
                "suffix, such as %t.jax_export"
            )
        return output[0]


def quote_for_shell(word: str) -> str:
    """Quotes a word for a shell, in the style of the suite."""
    if _PLAIN.fullmatch(word):
        return word
    return f"'{word}'" if "'" not in word else shlex.quote(word)


def recipe_of(text: str, name: str) -> Recipe:
    """Returns the recipe that a test states. Raises ToolError if it states none."""
    with naming(name):
        line = next((line for line in text.splitlines() if MADE_BY in line), None)
        if line is None:
            raise ToolError(
                "make-test did not write this test, so its input and its checks cannot be separated"
            )
        try:
            words = shlex.split(line.partition(MADE_BY)[2])
        except ValueError as error:
            raise ToolError(f"the line 'Made by:' cannot be read: {error}") from None
        fields: dict[str, Any] = {}
        while words:
            word = words.pop(0)
            if word in ("--full", "--brief"):
                fields[word.removeprefix("--")] = True
            elif word.startswith("--cost="):
                fields["cost"] = word.removeprefix("--cost=")
            elif word in ("-p", "--producer") and words:
                fields["pipeline" if word == "-p" else "producer"] = words.pop(0)
            elif not word.startswith("-"):
                fields["source"] = word
            else:
                raise ToolError(f"the line 'Made by:' cannot be read: {word!r}")
        if "pipeline" not in fields or ("source" in fields) == ("producer" in fields):
            raise ToolError("the line 'Made by:' lacks the pipeline, or the input or its producer")
        return Recipe(**fields)


def check_replaceable(path: str, recipe: Recipe) -> None:
    """Raises ToolError if a test cannot be written, or would replace a file of another origin."""
    suffixes = (".mlir",) if recipe.producer is None else (".mlir", ".test")
    if Path(path).suffix not in suffixes:
        raise ToolError(
            f"output {path!r}: a test of this kind is called {' or '.join(suffixes)}",
            instead=(path, str(Path(path).with_suffix(suffixes[0]))),
        )
    check_writable(path)
    if Path(path).exists() and MADE_BY not in read_input(path)[0].decode(errors="replace"):
        raise ToolError(f"cannot replace {path!r}: make-test did not write it")


def run_producer(recipe: Recipe, test: str | os.PathLike[str]) -> bytes:
    """Runs the producer as lit would for this test, and returns the bytes of its output file.

    Raises ToolError if it fails, or writes no output.
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
    """Returns the config that the nearest lit.cfg.py sets. Raises ToolError if it fails."""
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
