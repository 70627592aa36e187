"""The example: a run by ranks has the losses of the export, also when it is begun again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unhurried import COMPILED_QUICKLY

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_mpmd.py"
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")
LONG = 300


def trained(*words: str) -> Any:
    """What the example says, as JSON; None where it ended with a fault."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *words, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(COMPILED_QUICKLY)},
        timeout=900,
        check=False,
    )
    return json.loads(done.stdout) if done.stdout else None


def check(answer: Any, steps: int, first: int = 0) -> None:
    """Both curves are there, whole, and the same within what the example allows."""
    assert answer["same"], answer
    assert answer["first_step"] == first
    assert len(answer["loss_exported"]) == steps
    assert len(answer["loss_ranks"]) == steps - first
    last = answer["loss_exported"][first:]
    assert answer["loss_ranks"] == pytest.approx(last, rel=2e-2)
    assert answer["loss_exported"][-1] < answer["loss_exported"][0]


@pytest.mark.soak  # 20 s of compiling; test_processes and test_training run both ways by default
@pytest.mark.parametrize("words", [(), ("--in-one",)])
def test_a_short_run(words: tuple[str, ...], tmp_path: Path):
    page = tmp_path / "page.html"
    check(trained("--steps", "12", "--page", str(page), *words), 12)
    assert page.read_text().count("<polyline") == 2


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_long_run(schedule: str, ranks: int):
    check(trained("--steps", str(LONG), "--schedule", schedule, "--ranks", str(ranks)), LONG)


@pytest.mark.soak
def test_a_run_that_dies_goes_on_under_another_schedule(tmp_path: Path):
    """And under another number of ranks."""
    saving = ("--save", str(tmp_path), "--every", "40", "--steps", "120")
    assert trained(*saving, "--die-at", "100", "--silence", "5") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_40", "step_80"]
    going = ("--resume", str(tmp_path / "step_80"), "--steps", "120")
    check(trained(*going, "--ranks", "4", "--schedule", "zb-v"), 120, first=80)
