"""Training steps as people write them: a scan over microbatches, in it one over layers, FSDP by
hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.export import Exported
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HIDDEN, BATCH, MICROBATCHES = 4, 16, 32, 8, 3
SHAPES = (
    {"in": (LAYERS, WIDTH, HIDDEN), "out": (LAYERS, HIDDEN, WIDTH)},
    (MICROBATCHES, BATCH, WIDTH),
    (MICROBATCHES, BATCH, WIDTH),
)
SPECS = ({"in": P(None, "data", "model"), "out": P(None, "model", "data")}, P(None, "data"))


def layer(hidden: Any, weights: Any) -> Any:
    """A residual block whose weights are gathered along `data` and divided over `model`."""
    up = lax.all_gather(weights["in"], "data", axis=0, tiled=True)
    down = lax.all_gather(weights["out"], "data", axis=1, tiled=True)
    return hidden + lax.psum(jnp.tanh(hidden @ up) @ down, "model"), None


def exported(*, remat: bool = False, unroll: int = 1) -> Exported:
    """The step on 4 x 2 devices."""
    body = jax.checkpoint(layer) if remat else layer

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return jnp.sum((lax.scan(body, x, weights, unroll=unroll)[0] - y) ** 2)

    def step(weights: Any, xs: Any, ys: Any) -> Any:
        def micro(total: Any, batch: Any) -> Any:
            gradients = jax.grad(loss)(weights, *batch)
            return jax.tree.map(jnp.add, total, gradients), None

        gradients, _ = lax.scan(micro, jax.tree.map(jnp.zeros_like, weights), (xs, ys))
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients)

    mesh = Mesh(jax.devices()[:8], ("devices",)).devices.reshape(4, 2)
    sharded = jax.shard_map(
        step,
        mesh=Mesh(mesh, ("data", "model")),
        in_specs=(*SPECS, SPECS[1]),
        out_specs=SPECS[0],
        check_vma=False,
    )
    shapes = jax.tree.map(
        lambda sizes: jax.ShapeDtypeStruct(sizes, jnp.float32),
        SHAPES,
        is_leaf=lambda each: isinstance(each, tuple) and isinstance(each[0], int),
    )
    return export.export(jax.jit(sharded))(*shapes)
