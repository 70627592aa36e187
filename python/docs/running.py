"""Runs the snippets of a page in a folder of their own, against what the page says they print.

Elapsed seconds, versions and sizes of files that hold a version are no part of the comparison; `…`
stands for anything within a line, and alone on a line for any lines.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from docs.snippets import Command, Kind, Snippet, commands_of

LEFT_OUT = "…"
_ROOT = Path(__file__).parents[2]
_SHARED = ("python", "docs", "Makefile", "pyproject.toml")  # a clone, as far as pages need one
_NORMALISED = (
    (re.compile(r"\b\d+\.\d+\.\d+(\.\w+)*\b"), "VERSION"),
    (re.compile(r"(?<![\d.,])\d+(\.\d+)? s\b"), "TIME s"),
)
_ENDED_BADLY = 2  # and above: bad input, a signal; 1 is an answer
_PATIENCE = 1200.0  # seconds, for what only a hang reaches

# Reads a JSON list of [source, ...], a line each, runs them and answers with what they printed.
_INTERPRETER = """
import contextlib, io, json, sys, traceback
asked, answers, names = sys.stdin, sys.stdout, {"__name__": "__main__"}
for line in asked:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            source, mode = json.loads(line)
            exec(compile(source, "<page>", mode), names)
        except BaseException as error:
            print("".join(traceback.format_exception_only(error)), end="")
            failed = True
        else:
            failed = False
    answers.write(json.dumps([printed.getvalue(), failed]) + "\\n")
    answers.flush()
"""


class MismatchError(AssertionError):
    """A snippet did something else than its page says."""


def environment(cache: Path) -> dict[str, str]:
    """Of the commands: this interpreter's programs, no accelerator, answers kept in `cache`."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "JAX_PLATFORMS": "cpu",
        "NO_COLOR": "1",
        "COLUMNS": "80",
        "STABLEHLO_TOOLS_CACHE": str(cache),
    }


class Runner:
    """The snippets of one page: a folder, the environment, an interpreter when one is needed."""

    def __init__(self, page: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._page, self._folder, self._environment = page, folder, environment
        self._interpreter: subprocess.Popen[str] | None = None
        for name in _SHARED:
            (folder / name).symlink_to(_ROOT / name)

    def run(self, snippet: Snippet) -> None:
        """Runs one snippet; raises MismatchError, with the page and the line."""
        match snippet.kind:
            case Kind.CONSOLE:
                for command in commands_of(snippet):
                    self._run_command(command, checked=not snippet.hidden)
            case Kind.FILE:
                path = self._folder / snippet.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(snippet.text, encoding="utf-8")
            case Kind.PYTHON:
                printed, failed = self._interpret(snippet.text, "exec")
                if failed:
                    raise MismatchError(f"{self._page}:{snippet.line}: {printed}")
            case Kind.SESSION:
                self._run_session(snippet)
            case Kind.SYNOPSIS | Kind.SHOWN:
                pass

    def close(self) -> None:
        """Ends the interpreter."""
        if self._interpreter is not None:
            self._interpreter.communicate(timeout=_PATIENCE)

    def _run_command(self, command: Command, *, checked: bool) -> None:
        done = subprocess.run(
            ["bash", "-c", command.words],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
        printed = done.stdout.replace(f"{self._folder}/", "")
        tells_of_it = any("error" in line for line in command.printed)
        bad = done.returncode >= _ENDED_BADLY and not tells_of_it
        bad = bad or (done.returncode != 0 and not command.printed)
        lines = printed.splitlines()
        shorter = [line for line in lines if not line.startswith("wrote ")]  # may be left out
        is_as_shown = agrees(command.printed, lines) or agrees(command.printed, shorter)
        if bad or (checked and not is_as_shown):
            self._complain(command.line, command.words, command.printed, printed, done.returncode)

    def _run_session(self, snippet: Snippet) -> None:
        for example in doctest.DocTestParser().get_examples(snippet.text):
            printed, _ = self._interpret(example.source, "single")
            if not agrees(example.want.splitlines(), printed.splitlines()):
                line = snippet.line + example.lineno
                self._complain(line, example.source, example.want.splitlines(), printed, 0)

    def _interpret(self, source: str, mode: str) -> tuple[str, bool]:
        if self._interpreter is None:
            self._interpreter = subprocess.Popen(
                [sys.executable, "-c", _INTERPRETER],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        asked, answers = self._interpreter.stdin, self._interpreter.stdout
        assert asked is not None
        assert answers is not None
        asked.write(json.dumps([source, mode]) + "\n")
        asked.flush()
        printed, failed = json.loads(answers.readline())
        return printed.replace(f"{self._folder}/", ""), failed

    def _complain(
        self, line: int, words: str, expected: Iterable[str], printed: str, code: int
    ) -> None:
        said = "\n".join(f"    {each}" for each in expected) or "    (nothing)"
        got = "\n".join(f"    {each}" for each in printed.splitlines()) or "    (nothing)"
        raise MismatchError(
            f"{self._page}:{line}: {words}\n  the page says\n{said}\n"
            f"  exit code {code}, and it prints\n{got}"
        )


def agrees(expected: Iterable[str], printed: Iterable[str]) -> bool:
    """Whether lines are what a page says, times and versions apart."""
    pattern = "".join(map(_pattern, expected))
    text = "".join(f"{_normalised(line.rstrip())}\n" for line in _without_blank_ends(printed))
    return re.fullmatch(pattern, text) is not None


def _without_blank_ends(lines: Iterable[str]) -> list[str]:
    kept = list(lines)
    while kept and not kept[-1].strip():
        kept.pop()
    while kept and not kept[0].strip():
        kept.pop(0)
    return kept


def _pattern(line: str) -> str:
    if line.strip() == LEFT_OUT:
        return r"(?:[^\n]*\n)*?"
    parts = _normalised(line.rstrip()).split(LEFT_OUT)
    return r"[^\n]*?".join(map(re.escape, parts)) + r"\n"


def _normalised(line: str) -> str:
    for found, put in _NORMALISED:
        line = found.sub(put, line)
    return line
