"""The training step of the how-to pages, exported: `python export_step.py step.jax_export`."""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def step(weights: Any, batch: Any) -> Any:
    """A step down the gradient: layers in a scan, a loss, an update."""

    def layer(hidden: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return hidden + jax.nn.gelu(hidden @ w["up"]) @ w["down"], None

    def loss(weights: Any) -> jax.Array:
        hidden, _ = lax.scan(layer, batch["inputs"], weights)
        return jnp.mean(jnp.square(hidden - batch["targets"]).astype(jnp.float32))

    value, gradients = jax.value_and_grad(loss)(weights)
    return value, jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients)


def exported(layers: int, width: int, rows: int, stages: int, dtype: str) -> export.Exported:
    """The step for eight devices. No array is made: shapes and shardings are enough."""
    mesh = AbstractMesh((stages, 8 // stages), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    of_weights = P("stage") if stages > 1 else P(None, "data")  # a pipeline's, or FSDP

    def array(*sizes: int, axes: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, axes))

    weights = {
        "up": array(layers, width, 4 * width, axes=of_weights),
        "down": array(layers, 4 * width, width, axes=of_weights),
    }
    samples = array(rows, width, axes=P("data"))
    batch = {"inputs": samples, "targets": samples}
    return export.export(jax.jit(step, donate_argnums=0), platforms=["cuda"])(weights, batch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=65536, help="of the batch: tokens, say")
    parser.add_argument("--stages", type=int, default=1, help="of a pipeline; 1: FSDP")
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()
    program = exported(asked.layers, asked.width, asked.rows, asked.stages, asked.dtype)
    asked.file.write_bytes(program.serialize())
