"""Gradients that a scan gives as rows, which a sum adds up, are running sums of the ranks."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.proof.proving import prove
from stablehlo_tools.mpmd.proof.rank_memory import RankMemory
from stablehlo_tools.mpmd.rank_set import load, write

WIDTH, LAYERS = 32, 4
Weights = list[jax.Array]


def _memory(room: Path, microbatches: int) -> list[RankMemory]:
    def loss(weights: Weights, x: jax.Array) -> jax.Array:
        for layer in weights:
            x = jnp.tanh(x @ layer)
        return jnp.sum(x**2)

    def step(weights: Weights, batch: jax.Array) -> tuple[Weights, jax.Array]:
        def body(carry: None, x: jax.Array) -> tuple[None, tuple[jax.Array, Weights]]:
            return carry, jax.value_and_grad(loss)(weights, x)

        _, (losses, rows) = lax.scan(body, None, batch)
        means = [jnp.mean(row, 0) for row in rows]
        return [w - 0.1 * g for w, g in zip(weights, means, strict=True)], jnp.sum(losses)

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    batch = jax.ShapeDtypeStruct((microbatches, 2, WIDTH), jnp.float32)
    exported = artifact.from_exported(jax.export.export(jax.jit(step))(weights, batch))
    expanded = expand_mpmd(exported, ExpansionRequest("zb-h1", 2, load_hardware("h100")))
    directory = room / str(microbatches)
    write(directory, expanded.manifest, expanded.modules)
    proof = prove(load(directory))
    assert not proof.findings
    return list(proof.memory)


def test_the_peak_does_not_grow_with_the_microbatches(tmp_path: Path):
    few, many = _memory(tmp_path, 4), _memory(tmp_path, 16)
    for one, other in zip(few, many, strict=True):
        batch = other.arguments - one.arguments
        assert batch in (0, 12 * 2 * WIDTH * 4)  # of a rank that reads it
        assert other.peak == one.peak + batch
