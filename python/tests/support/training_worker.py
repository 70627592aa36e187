"""What each process of a job runs in tests: a few steps, in which the last rank may come to harm.

training_worker.py SET FAULT OUTPUT       started by `run-mpmd --train`
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from mpmd_steps import Step
from training_runs import batches, first_state

from stablehlo_tools import mpmd

STEP = Step(microbatches=4)
STEPS, BAD = 8, 3
SILENCE, PATIENCE = 4.0, 8.0


def harm(fault: str, job: mpmd.Job, tokens: Any) -> Any:
    """Does what the fault says; the tokens of the step that follows."""
    if fault == "dies":
        os._exit(3)
    if fault in ("killed", "coordinator-killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault in ("stopped", "coordinator-stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises":
        raise ValueError("a file of the data is damaged")
    if fault == "hangs":
        threading.Event().wait()
    if fault == "exits":
        sys.exit(0)
    if fault == "closes":
        job.close()
        threading.Event().wait()
    if fault == "out-of-memory":
        jnp.zeros((1 << 47,), jnp.float32).block_until_ready()
    return tokens[:3] if fault == "other-shape" else tokens


def main(directory: Path, fault: str, output: Path) -> None:
    """Trains, and writes what this process knows."""
    last = jax.process_index() == jax.process_count() - 1
    harmed = jax.process_index() == 0 if fault.startswith("coordinator") else last
    if fault == "other-set" and harmed:
        other = directory.with_name("other")
        shutil.copytree(directory, other)
        (other / "rank_0.mlir").write_text((other / "rank_0.mlir").read_text() + "// changed\n")
        directory = other
    if fault == "never-loads" and harmed:
        threading.Event().wait()
    slack = 15.0 if fault in ("none", "raises") else 1.0  # nothing is lost there: machines are busy
    with mpmd.load(directory, silence=slack * SILENCE, patience=slack * PATIENCE) as job:
        state = job.init(*first_state(STEP))
        losses: list[float] = []
        for number, batch in enumerate(batches(STEP, STEPS)):
            tokens = harm(fault, job, batch) if number == BAD and harmed else batch
            state, results = job.step(state, tokens)
            losses.append(float(job.share(results)["[2]"]))
            if number == 1:
                job.save(output / "at_2", state)
        if job.ranks == (0,):
            found = {"losses": losses, "ranks": jax.process_count()}
            (output / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
