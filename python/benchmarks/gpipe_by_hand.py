"""What another schedule is worth to a GPipe step that is written by hand on three axes.

    python python/benchmarks/gpipe_by_hand.py

Eight layers of width 4096 with a vocabulary of 32,000, on 8 H100: data 2 by tensor 2 by stage 2,
all manual in one jax.shard_map, eight microbatches of one sequence of 2048 a device. Time and
memory are those of XLA:GPU's schedule.
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

STAGES, LAYERS, MICROBATCHES, SAMPLES = 2, 4, 8, 2
LENGTH, WIDTH, HEADS, VOCABULARY = 2048, 4096, 32, 32_000
ONCE = "partition,pipeline-collectives{direction=once}"
Weights = Mapping[str, Any]


def main() -> None:
    """Prints a line for each schedule."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.jax_export")
        path.write_bytes(bytes(exported().serialize()))
        base, peak = scheduled(path)
        print(f"as exported               {base:8.1f} ms, peak {peak:5.1f} GiB", flush=True)
        for schedule in ("eager-1f1b", "1f1b"):
            options = f"axis=stage microbatches={MICROBATCHES} schedule={schedule}"
            after = Path(folder, f"{schedule}.jax_export")
            pipeline = f"fold-pipeline,expand-pipeline{{{options}}},{ONCE}"
            run_tool("opt", path, "-p", pipeline, "-o", after)
            ms, peak = scheduled(after)
            print(
                f"{schedule:25} {ms:8.1f} ms, of the export {ms / base:.3f}, peak {peak:5.1f} GiB",
                flush=True,
            )


def exported() -> export.Exported:
    """The loss, and the weights after a step of gradient descent."""
    mesh = AbstractMesh((2, 2, STAGES), ("data", "model", "stage"), axis_types=(AxisType.Auto,) * 3)
    columns, rows = P("stage", None, "model"), P("stage", "model")
    layers = dict.fromkeys(("q", "k", "v", "up"), columns) | {"o": rows, "down": rows}
    specs = {"layers": layers, "words": P(), "head": P()}
    tokens = P(None, "data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, tokens), out_specs=(P(), specs))

    def shape(sizes: tuple[int, ...], spec: P, kind: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, kind, sharding=NamedSharding(mesh, spec))

    count, inner = STAGES * LAYERS, (HEADS, WIDTH // HEADS)
    sizes = dict.fromkeys("qkv", (WIDTH, *inner))
    sizes |= {"o": (*inner, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    stacks = {name: shape((count, *own), layers[name]) for name, own in sizes.items()}
    words, head = shape((VOCABULARY, WIDTH), P()), shape((WIDTH, VOCABULARY), P())
    given = shape((MICROBATCHES, SAMPLES, LENGTH), tokens, jnp.int32)
    weights = {"layers": stacks, "words": words, "head": head}
    return export.export(jax.jit(mapped), platforms=["cuda"])(weights, given)


def step(weights: Weights, tokens: jax.Array) -> Any:
    """What a device runs, with its layers, heads and samples."""
    is_last = lax.axis_index("stage") == STAGES - 1

    def loss(weights: Weights) -> jax.Array:
        y = pipeline(weights["layers"], weights["words"][tokens])
        scores = jax.nn.log_softmax(_normalised(y) @ weights["head"])
        own = -jnp.mean(jnp.take_along_axis(scores, tokens[..., None], -1))
        return jnp.where(is_last, own, 0.0)

    value, gradients = jax.value_and_grad(loss)(weights)
    value = lax.pmean(lax.psum(value, "stage"), "data")
    return value, jax.tree.map(lambda w, g: w - 0.05 * g, weights, gradients)


def pipeline(layers: Weights, x: jax.Array) -> jax.Array:
    """GPipe: microbatches go from stage to stage, one a tick."""
    is_first = lax.axis_index("stage") == 0

    def tick(arriving: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.where(is_first, x[jnp.minimum(t, MICROBATCHES - 1)], arriving)
        y = lax.scan(lambda h, w: (layer(h, w), None), y, layers)[0]
        return lax.ppermute(y, "stage", [(k, (k + 1) % STAGES) for k in range(STAGES)]), y

    start = lax.pcast(jnp.zeros_like(x[0]), ("stage",), to="varying")
    return lax.scan(tick, start, jnp.arange(MICROBATCHES + STAGES - 1))[1][STAGES - 1 :]


def layer(x: jax.Array, w: Weights) -> jax.Array:
    """Attention and a feed-forward block, of which a device has some heads and features."""
    h = _normalised(x)
    q, k, v = (jnp.einsum("btd,dhc->bthc", h, w[name]) for name in "qkv")
    scores = jnp.einsum("bthc,bshc->bhts", q, k) * (WIDTH // HEADS) ** -0.5
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, jnp.asarray(-1e9, scores.dtype)))
    mixed = jnp.einsum("bhts,bshc->bthc", shares, v)
    x = x + lax.psum(jnp.einsum("bthc,hcd->btd", mixed, w["o"]), "model")
    return x + lax.psum(jax.nn.gelu(_normalised(x) @ w["up"]) @ w["down"], "model")


def _normalised(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


if __name__ == "__main__":
    main()
