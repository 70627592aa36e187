"""Sets that `expand-mpmd` writes of a small step, for the tests of their proof and of reports.

The step has what hand-made sets lack: every layer reads the first one's input as well, so that
messages have two tensors; the gradient is clipped by its norm, so that the finish has rounds and
messages; weights are stacked by layer.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.rank_set import write

LAYERS, WIDTH, ROWS = 4, 8, 2
Weights = dict[str, jax.Array]


def write_expanded(
    directory: Path, schedule: str, ranks: int, microbatches: int = 3, chunks: int | None = None
) -> Path:
    """Writes the rank programs of the step under a schedule of the catalogue."""
    request = ExpansionRequest(schedule, ranks, load_hardware("h100"), chunks=chunks)
    expanded = expand_mpmd(step(microbatches).copy(), request)
    write(directory, expanded.manifest, expanded.modules)
    return directory


@cache
def step(microbatches: int) -> Artifact:
    """The exported step, which adds up the gradients of its microbatches."""

    def loss(weights: Weights, x: jax.Array) -> jax.Array:
        first = jnp.tanh(x @ weights["first"])

        def layer(h: jax.Array, each: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ each + first), None

        return jnp.sum(lax.scan(layer, first, weights["layers"])[0] ** 2)

    def update(weights: Weights, batch: jax.Array) -> tuple[Weights, jax.Array]:
        def add(
            sums: tuple[Weights, jax.Array], x: jax.Array
        ) -> tuple[tuple[Weights, jax.Array], None]:
            value, gradient = jax.value_and_grad(loss)(weights, x)
            return (jax.tree.map(jnp.add, sums[0], gradient), sums[1] + value), None

        zeros = (jax.tree.map(jnp.zeros_like, weights), jnp.zeros(()))
        (gradient, total), _ = lax.scan(add, zeros, batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
        scale = 0.1 * jnp.minimum(1.0, 1.0 / norm)
        return jax.tree.map(lambda w, g: w - scale * g, weights, gradient), total

    weights = {
        "first": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        "layers": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
    }
    batch = jax.ShapeDtypeStruct((microbatches, ROWS, WIDTH), jnp.float32)
    return artifact.from_exported(jax.export.export(jax.jit(update))(weights, batch))
