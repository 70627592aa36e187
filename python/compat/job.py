"""The job's side of a round trip, for any release of jax: exports a step, and runs an artifact.

    python job.py export STEP       # of eight devices, sharded by NamedSharding
    python job.py run ARTIFACT      # prints the outputs as JSON

It runs in an environment that has jax and no toolkit.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, ROWS, LAYERS = 32, 64, 2


def train_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of gradient descent on layers in a scan."""

    def loss(weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ weight), None

        return jnp.mean(jax.lax.scan(layer, batch, weights)[0] ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


def inputs() -> tuple[jax.Array, jax.Array]:
    """The same arrays in every release, in their shardings."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    draw = np.random.default_rng(0)
    weights = draw.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
    batch = draw.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return (
        jax.device_put(weights, NamedSharding(mesh, P(None, "data"))),
        jax.device_put(batch, NamedSharding(mesh, P("data"))),
    )


def main(command: str, file: str) -> None:
    """Exports to the file, or runs it."""
    if command == "export":
        Path(file).write_bytes(export.export(jax.jit(train_step))(*inputs()).serialize())
    called = export.deserialize(bytearray(Path(file).read_bytes())).call
    outputs = [np.asarray(each).ravel().tolist() for each in jax.jit(called)(*inputs())]
    print(json.dumps(outputs))


if __name__ == "__main__":
    main(*sys.argv[1:])
