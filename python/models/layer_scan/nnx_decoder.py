"""A decoder of flax.nnx whose layers `nnx.vmap` makes in one and `nnx.scan` runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.layer_scan.networks import language_model
from models.layer_scan.options import HEADS, INNER, MODEL, VOCABULARY, WIDTH, LayerScan, Network
from models.program import Array, Tree


class Block(nnx.Module):
    """Pre-norm attention and a GELU MLP."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, INNER, rngs=rngs)
        self.down = nnx.Linear(INNER, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Decoder(nnx.Module):
    """Tokens to logits; the parameters of the blocks are stacked."""

    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = stacked(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        return self.head(self.norm(run(self.embed(tokens), self.blocks)))


def nnx_decoder(o: LayerScan) -> Network:
    """Kernels with a column for each of many outputs are split over `model`."""
    definition, state = nnx.split(nnx.eval_shape(lambda: Decoder(o.layers, nnx.Rngs(0))))
    pure = nnx.to_pure_dict(state)
    weights = jax.tree_util.tree_map_with_path(lambda path, leaf: _described(o, path, leaf), pure)

    def logits(weights: Tree, batch: Tree) -> jax.Array:
        return nnx.merge(definition, nnx.State(weights))(batch["tokens"])

    return language_model(o, weights, logits)


def _described(o: LayerScan, path: tuple[Any, ...], leaf: Any) -> Array:
    names = [entry.key for entry in path]
    axes = (None, MODEL) if names[-2:] == ["up", "kernel"] else ()
    if "blocks" not in names:
        return Array(leaf.shape, axes, str(leaf.dtype))
    return o.stacked(Array(leaf.shape[1:], axes, str(leaf.dtype)))
