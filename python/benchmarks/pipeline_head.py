"""What it is worth to 1F1B that each rank runs a part of the head.

    python python/benchmarks/pipeline_head.py

Eight layers of 2048 x 8192 with a vocabulary of 32,000, on 8 H100: data 2 by stage 4, 32 samples of
1024 tokens in 8 microbatches. Time and memory are those of XLA:GPU's schedule.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scheduled_on_gpu import run_tool, scheduled

LAYERS, WIDTH, INNER, VOCABULARY = 8, 2048, 8192, 32_000
SAMPLES, LENGTH, MICROBATCHES, STAGES = 32, 1024, 8, 4
ONCE = ",partition,pipeline-collectives{direction=once}"
Weights = Mapping[str, Any]


def main() -> None:
    """Prints a line for each schedule."""
    with tempfile.TemporaryDirectory() as folder:
        path, after = Path(folder, "step.jax_export"), Path(folder, "after.jax_export")
        path.write_bytes(bytes(exported().serialize()))
        base = scheduled(path)[0]
        _tell("as exported", path, base)
        for options in (
            "gpipe",
            *(f"{name} head={where}" for name in ("1f1b", "eager-1f1b") for where in _HEADS),
        ):
            for behind in ("", ONCE):
                pipeline = f"expand-pipeline{{microbatches={MICROBATCHES} schedule={options}}}"
                run_tool("opt", path, "-p", pipeline + behind, "-o", after)
                _tell(f"{options}{', once' if behind else ''}", after, base)


_HEADS = ("last", "divided")


def exported() -> export.Exported:
    """The loss, and the weights after a step of gradient descent."""
    mesh = AbstractMesh((2, STAGES), ("data", "stage"), axis_types=(AxisType.Auto,) * 2)

    def shape(sizes: tuple[int, ...], spec: P, kind: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, kind, sharding=NamedSharding(mesh, spec))

    layers = {
        "up": shape((LAYERS, WIDTH, INNER), P("stage")),
        "down": shape((LAYERS, INNER, WIDTH), P("stage")),
        "scale": shape((LAYERS, WIDTH), P("stage")),
    }
    words, head = shape((VOCABULARY, WIDTH), P()), shape((WIDTH, VOCABULARY), P())
    tokens = shape((SAMPLES, LENGTH), P("data"), jnp.int32)
    weights = {"layers": layers, "words": words, "head": head}
    return export.export(jax.jit(step), platforms=["cuda"])(weights, tokens, tokens)


def step(weights: Weights, tokens: jax.Array, labels: jax.Array) -> Any:
    """Gradient descent on the mean cross-entropy."""

    def loss(weights: Weights) -> jax.Array:
        y, _ = lax.scan(layer, weights["words"][tokens], weights["layers"])
        scores = jax.nn.log_softmax((y @ weights["head"]).astype(jnp.float32))
        return -jnp.mean(jnp.sum(scores * jax.nn.one_hot(labels, VOCABULARY), axis=-1))

    value, gradients = jax.value_and_grad(loss)(weights)
    return value, jax.tree.map(lambda w, g: (w - 0.1 * g).astype(w.dtype), weights, gradients)


def layer(x: jax.Array, w: Weights) -> tuple[jax.Array, None]:
    """A feed-forward block."""
    size = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    h = x * lax.rsqrt(size + 1e-6).astype(x.dtype) * w["scale"]
    return x + jax.nn.gelu(h @ w["up"]) @ w["down"], None


def _tell(name: str, path: Path, base: float) -> None:
    ms, peak = scheduled(path)
    print(f"{name:30} {ms:6.1f} ms, of the export {ms / base:.3f}, {peak:5.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
