"""A process for each rank, over loopback: the same run, and what all say of one that is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_runs import first_state, trained, write_set
from training_worker import STEP, STEPS
from unhurried import COMPILED_QUICKLY

from stablehlo_tools import mpmd

WORKER = Path(__file__).parents[2] / "support" / "training_worker.py"
RANKS = 2
LATEST = 90.0  # seconds from the start, with compiling, on a busy machine
# What the others say of the one that was harmed; it is rank 1, or rank 0 of a coordinator.
SAID = {
    "dies": r"no sign of rank 1 for \d+ s; its last activity: ",
    "raises": r"rank 1 failed after sharing results of step 2: ValueError: a file of the data",
    "killed": r"no sign of rank 1 for \d+ s; its last activity: ",
    "stopped": r"no sign of rank 1 for \d+ s; its last activity: ",
    "hangs": r"rank 0 has waited for \d+ s in .*; the last rank is 1, for \d+ s in: ",
    "exits": r"rank 1 ended after sharing results of step 2, without closing the job",
    "closes": r"rank 1 closed the job after step 2, but rank 0 is in step 3",
    "out-of-memory": r"rank 1 failed after sharing results of step 2: \w+: RESOURCE_EXHAUSTED",
    "other-shape": r"rank 1 failed in step 3: \[2\] is int32\[3, 5\], but the set has tensor<8x5",
    "other-set": r"rank 1 has another set than rank 0: ",
    "never-loads": r"rank 1 did not load a set within 8 s",
    "coordinator-stopped": r"rank 0, which coordinates the job, has not answered for \d+ s",
    "coordinator-killed": r"rank 0, which coordinates the job, ended; jax ended rank 1 for that",
}
QUICK = ("dies", "other-set")


def run(directory: Path, fault: str, ranks: int = RANKS) -> tuple[int, str, str, float]:
    """A job: its exit code, what came out, and seconds."""
    step = write_set(directory, STEP, "1f1b", ranks)
    words = ["run-mpmd", str(step), "--train", str(WORKER), str(step), fault, str(directory)]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "stablehlo_tools.cli.main", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(COMPILED_QUICKLY)},
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr, time.monotonic() - began


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_run_is_that_of_the_original(ranks: int, tmp_path: Path):
    code, _, errors, _ = run(tmp_path, "none", ranks)
    assert code == 0, errors
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ranks"] == ranks
    assert found["losses"] == pytest.approx(trained(STEP, STEPS)[1], rel=2e-5)


@pytest.mark.parametrize(
    "fault", [f if f in QUICK else pytest.param(f, marks=pytest.mark.soak) for f in SAID]
)
def test_every_rank_ends_and_says_whose_fault_it_was(fault: str, tmp_path: Path):
    code, _, errors, seconds = run(tmp_path, fault)
    harmed = 0 if fault.startswith("coordinator") else 1
    others = "\n".join(line for line in errors.splitlines() if line.startswith(f"{1 - harmed}: "))
    assert code == 1, errors
    assert re.search(SAID[fault], others), errors
    assert others.count("error: ") == 1, errors
    assert seconds < LATEST
    if fault not in ("other-set", "never-loads"):  # what was written before is whole
        with mpmd.load(tmp_path / f"1f1b-{RANKS}") as job:
            state = job.restore(tmp_path / "at_2", step=2)
            assert len(job.gather(state)) == len(first_state(STEP))
