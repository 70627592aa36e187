"""How `expand-mpmd` grows: its time and the size of what it writes, on a model of 32 layers.

    python python/benchmarks/expand_mpmd.py

8 ranks, 16 to 128 microbatches, three schedules. Time is that of the whole command's work, as a
multiple of that of the first row. Size is that of all programs, for each action of the schedule.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
from jax import export, lax

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.mpmd.expansion import Expansion, ExpansionRequest, expand_mpmd
from stablehlo_tools.schedules.table import actions_of

LAYERS, WIDTH, HEADS, SAMPLES = 32, 256, 4, 2
RANKS = 8
MICROBATCHES = (16, 32, 64, 128)
SCHEDULES = (("1f1b", 1), ("zb-h1", 1), ("interleaved-1f1b", 4))
Tree = dict[str, jax.Array]


def attention(layer: Tree, x: jax.Array) -> jax.Array:
    """Self-attention of `(samples, positions, width)`, all heads at once."""
    shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
    query, key, value = (jnp.reshape(x @ layer[name], shape) for name in ("query", "key", "value"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(shape[-1])
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    return jnp.reshape(mixed, x.shape) @ layer["output"]


def block(x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
    """One layer."""
    x = x + attention(layer, x)
    return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"], None


def loss(parameters: dict[str, Tree], tokens: jax.Array) -> jax.Array:
    """The mean negative log likelihood of the next token."""
    x = parameters["ends"]["embedding"][tokens[:, :-1]]
    x, _ = lax.scan(block, x, parameters["layers"])
    scores = jax.nn.log_softmax(x @ parameters["ends"]["head"])
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))


def step(parameters: dict[str, Tree], tokens: jax.Array) -> tuple[dict[str, Tree], jax.Array]:
    """A step of gradient descent over `(microbatches, samples, positions)` tokens."""

    def accumulate(
        total: tuple[dict[str, Tree], jax.Array], part: jax.Array
    ) -> tuple[tuple[dict[str, Tree], jax.Array], None]:
        value, gradients = jax.value_and_grad(loss)(parameters, part)
        return (jax.tree.map(jnp.add, total[0], gradients), total[1] + value), None

    empty = (jax.tree.map(jnp.zeros_like, parameters), jnp.zeros(()))
    (gradients, value), _ = lax.scan(accumulate, empty, tokens)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, parameters, gradients), value


def exported(microbatches: int) -> export.Exported:
    """The step, exported for this many microbatches."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    square = {name: array(LAYERS, WIDTH, WIDTH) for name in ("query", "key", "value", "output")}
    wide = {"up": array(LAYERS, WIDTH, 4 * WIDTH), "down": array(LAYERS, 4 * WIDTH, WIDTH)}
    ends = {"embedding": array(1024, WIDTH), "head": array(WIDTH, 1024)}
    tokens = jax.ShapeDtypeStruct((microbatches, SAMPLES, 65), jnp.int32)
    return export.export(jax.jit(step))({"layers": square | wide, "ends": ends}, tokens)


def size_of(expansion: Expansion) -> int:
    """Bytes of all programs as text."""
    return sum(len(str(module)) for module in expansion.modules)


def main() -> None:
    """Print the table."""
    hardware = load_hardware("h100")
    print("schedule           microbatches  actions   time      size  bytes an action")
    first = 0.0
    for name, chunks in SCHEDULES:
        for microbatches in MICROBATCHES:
            loaded = artifact.from_exported(exported(microbatches))
            request = ExpansionRequest(name, RANKS, hardware, chunks if chunks > 1 else None)
            start = time.perf_counter()
            expansion = expand_mpmd(loaded, request)
            taken = time.perf_counter() - start
            first = first or taken
            rows = expansion.manifest.table.rows
            actions = sum(len(list(actions_of(row))) for row in rows)
            size = size_of(expansion)
            print(
                f"{name:18} {microbatches:12} {actions:8} {taken / first:6.1f} "
                f"{size / 2**20:5.2f} MiB {size / actions:16.0f}"
            )


if __name__ == "__main__":
    main()
