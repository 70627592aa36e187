"""Sets of small training steps for tests of the runtime, and the steps that they were made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpmd_steps import LENGTH, Step, optimizer

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.rank_set import write


def write_set(
    directory: Path, step: Step, schedule: str, ranks: int, chunks: int | None = None
) -> Path:
    """A set in a new directory below this one."""
    request = ExpansionRequest(schedule, ranks, load_hardware("h100"), chunks)
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


def odd_step(state: Any, *, batch: Any, rate: Any) -> Any:
    """A step with named data, several results in a dictionary, weights of bf16, and leaves of the
    state that nothing reads, or that no step changes, or that it makes anew."""
    weights = state["weights"]

    def loss(weights: Any, rows: Any) -> jax.Array:
        hidden, _ = lax.scan(
            lambda x, w: (jnp.tanh(x @ w), None), rows["x"].astype(jnp.bfloat16), weights
        )
        return jnp.mean((hidden.astype(jnp.float32) - rows["y"]) ** 2)

    def add(sums: Any, rows: Any) -> tuple[Any, None]:
        found = jax.value_and_grad(loss)(weights, rows)
        return jax.tree.map(jnp.add, sums, found), None

    rows = jax.tree.map(lambda a: a.reshape(4, -1, *a.shape[1:]), batch)
    (total, gradient), _ = lax.scan(add, (jnp.zeros(()), jnp.zeros_like(weights)), rows)
    moved = weights - rate * gradient.astype(jnp.float32) / 4
    after = {
        "weights": moved.astype(weights.dtype),
        "frozen": state["frozen"],
        "calls": state["calls"] + 1,
        "anew": jnp.full(2, 7.0),
    }
    return {"loss": total / 4, "next_rate": rate * 2, "state": after}


def odd_arguments() -> tuple[Any, Any]:
    """Its state, and its data by name."""
    rng = np.random.default_rng(0)
    state = {
        "weights": jnp.asarray(0.3 * rng.standard_normal((4, 16, 16)), jnp.bfloat16),
        "frozen": np.arange(3, dtype=np.float32),
        "calls": np.int32(0),
        "anew": np.zeros(2, np.float32),
    }
    batch = {name: rng.standard_normal((8, 16)).astype(np.float32) for name in ("x", "y")}
    return state, {"batch": batch, "rate": np.float32(0.1)}
