"""Runs `schedule` in this process, and looks at what it prints or how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stablehlo_tools.cli.main import main

SMALL = ("--stages", "4", "--microbatches", "8")


def run(*words: str | int | Path) -> int:
    try:
        return main(["schedule", *map(str, words)])
    except SystemExit as stop:
        return int(stop.code or 0)


def printed(capsys: pytest.CaptureFixture[str], *words: str | int | Path) -> str:
    assert run(*words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def json_of(capsys: pytest.CaptureFixture[str], *words: str | int | Path) -> dict[str, Any]:
    return json.loads(printed(capsys, *words, "--format", "json"))


def refused(capsys: pytest.CaptureFixture[str], *words: str | int | Path) -> str:
    assert run(*words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("error:") == 1
    assert "Traceback" not in told.err
    assert "a bug in this tool" not in told.err
    return next(line for line in told.err.splitlines() if "error:" in line)
