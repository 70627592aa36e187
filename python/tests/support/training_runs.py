"""Sets of small training steps for tests of the runtime, and the steps that they were made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from mpmd_steps import LENGTH, Step, optimizer

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.mpmd.expansion import Request, expand_mpmd
from stablehlo_tools.mpmd.rank_set import write


def write_set(
    directory: Path, step: Step, schedule: str, ranks: int, chunks: int | None = None
) -> Path:
    """A set in a new directory below this one."""
    request = Request(schedule, ranks, load_hardware("h100"), chunks)
    made = expand_mpmd(artifact.from_exported(step.export()), request)
    path = directory / f"{schedule}-{ranks}"
    write(path, made.manifest, made.modules)
    return path


def first_state(step: Step) -> tuple[Any, Any]:
    """Weights, random, and the state of the optimizer."""
    rng = np.random.default_rng(0)

    def random(like: Any) -> np.ndarray:
        return (0.3 * rng.standard_normal(like.shape)).astype(like.dtype)

    weights = jax.tree.map(random, step.weights())
    return weights, jax.tree.map(np.asarray, optimizer().init(weights))


def batches(step: Step, count: int) -> Iterator[np.ndarray]:
    """Tokens, the same ones each time."""
    rng = np.random.default_rng(1)
    for _ in range(count):
        rows = step.microbatches * step.samples
        yield rng.integers(0, step.words, (rows, LENGTH + 1)).astype(np.int32)


def trained(step: Step, count: int) -> tuple[Any, list[float]]:
    """The state behind steps of the original program, and the losses."""
    weights, state = first_state(step)
    call = jax.jit(step.step)
    losses: list[float] = []
    for tokens in batches(step, count):
        weights, state, loss = call(weights, state, tokens)
        losses.append(float(loss))
    return (weights, state), losses
