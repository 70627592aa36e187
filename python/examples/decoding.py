"""A loop that generates tokens on eight devices, exported: `python decoding.py decode.jax_export`.

Weights are divided over the eight devices by heads and hidden units, the cache by heads.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH, HEADS, DEPTH, WIDTH, LAYERS, LENGTH, VOCABULARY = 32, 32, 128, 4096, 8, 2048, 32_000
WHOLE = P()
END = 2  # the token that ends a text


def decode(weights: Any, cache: Any, token: jax.Array, start: jax.Array) -> Any:
    """Generates tokens from position `start` on, until all texts end or the cache is full."""

    def layer(hidden: jax.Array, of_layer: Any, position: jax.Array) -> tuple[jax.Array, Any]:
        w, keys, values = of_layer
        query, key, value = (jnp.einsum("bd,dhe->bhe", hidden, w[name]) for name in "qkv")
        keys = lax.dynamic_update_index_in_dim(keys, key, position, 1)
        values = lax.dynamic_update_index_in_dim(values, value, position, 1)
        scores = jnp.einsum("bhe,bshe->bhs", query, keys) / DEPTH**0.5
        scores = jnp.where(jnp.arange(LENGTH) <= position, scores, -1e9)
        read = jnp.einsum("bhs,bshe->bhe", jax.nn.softmax(scores), values)
        hidden = hidden + jnp.einsum("bhe,hed->bd", read, w["o"])
        return hidden + jax.nn.silu(hidden @ w["up"]) @ w["down"], (keys, values)

    def step(state: Any) -> Any:
        cache, token, position, ended = state
        hidden, cache = lax.scan(
            lambda h, each: layer(h, each, position),
            weights["embedding"][token],
            (weights["layers"], *cache),
        )
        token = jnp.argmax(hidden @ weights["head"], axis=-1).astype(jnp.int32)
        return cache, token, position + 1, ended | (token == END)

    def goes_on(state: Any) -> jax.Array:
        return (state[2] < LENGTH) & ~jnp.all(state[3])

    ended = jnp.zeros(BATCH, bool)
    return lax.while_loop(goes_on, step, (cache, token, start, ended))[:3]


def exported() -> export.Exported:
    """The loop for eight devices. No array is made: shapes and shardings are enough."""
    mesh = AbstractMesh((8,), ("model",), axis_types=(AxisType.Auto,))

    def array(*sizes: int, axes: P = WHOLE, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, axes))

    heads = P(None, None, "model")
    layers = {
        **{name: array(LAYERS, WIDTH, HEADS, DEPTH, axes=heads) for name in "qkv"},
        "o": array(LAYERS, HEADS, DEPTH, WIDTH, axes=P(None, "model")),
        "up": array(LAYERS, WIDTH, 4 * WIDTH, axes=heads),
        "down": array(LAYERS, 4 * WIDTH, WIDTH, axes=P(None, "model")),
    }
    weights = {
        "embedding": array(VOCABULARY, WIDTH),
        "head": array(WIDTH, VOCABULARY, axes=P(None, "model")),
        "layers": layers,
    }
    by_heads = P(None, None, None, "model")
    cache = (array(LAYERS, BATCH, LENGTH, HEADS, DEPTH, axes=by_heads),) * 2
    token, start = array(BATCH, dtype=jnp.int32), array(dtype=jnp.int32)
    shardings = jax.tree.map(lambda each: each.sharding, (cache, token, start))
    stepped = jax.jit(decode, donate_argnums=1, out_shardings=shardings)
    return export.export(stepped, platforms=["cuda"])(weights, cache, token, start)


def main() -> None:
    """Writes the artifact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.parse_args().output.write_bytes(exported().serialize())


if __name__ == "__main__":
    main()
