"""Weights that two stages of a rank share are in its memory once."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.proof.proving import SetProof, prove
from stablehlo_tools.mpmd.rank_set import load, write

VOCABULARY, WIDTH, LAYERS, ROWS = 64, 8, 4, 2
EMBEDDING, LAYER = 4 * VOCABULARY * WIDTH, 4 * WIDTH * WIDTH  # bytes
BATCH = 4 * 4 * ROWS * VOCABULARY  # of four microbatches
Weights = dict[str, jax.Array]


def _proof(directory: Path, schedule: str, *, tied: bool) -> SetProof:
    """That of a step whose embedding is also its output, or has an output of its own."""

    output = "embedding" if tied else "output"

    def loss(weights: Weights, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ weights["embedding"])
        for layer in range(LAYERS):
            h = jnp.tanh(h @ weights[f"layer {layer}"])
        return jnp.sum((jnp.einsum("rw,vw->rv", h, weights[output]) - x) ** 2)

    def step(weights: Weights, batch: jax.Array) -> Weights:
        def add(sums: Weights, x: jax.Array) -> tuple[Weights, None]:
            return jax.tree.map(jnp.add, sums, jax.grad(loss)(weights, x)), None

        sums, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, weights), batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, sums)

    shapes = {f"layer {layer}": (WIDTH, WIDTH) for layer in range(LAYERS)}
    for name in ("embedding", output):
        shapes[name] = (VOCABULARY, WIDTH)
    weights = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    batch = jax.ShapeDtypeStruct((4, ROWS, VOCABULARY), jnp.float32)
    exported = artifact.from_exported(jax.export.export(jax.jit(step))(weights, batch))
    expanded = expand_mpmd(exported, ExpansionRequest(schedule, 2, load_hardware("h100")))
    write(directory, expanded.manifest, expanded.modules)
    proof = prove(load(directory))
    assert not proof.findings
    return proof


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_and_its_gradient_count_once(tied: bool, tmp_path: Path):
    """The first and the last stage, of one rank, also share the batch."""
    proof = _proof(tmp_path, "zb-v", tied=tied)
    first, other = proof.memory
    assert proof.manifest.ranks[0].stages == (0, 3)
    layers = 3 if tied else 2  # one layer and one sum, and the sum of a layer of the other rank
    assert first.weights == (1 if tied else 2) * 2 * EMBEDDING + BATCH + layers * LAYER
    assert other.weights == sum(proof.manifest.stages[stage].weights for stage in (1, 2))
