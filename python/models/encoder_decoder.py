"""A T5-like encoder and decoder, data × model: cross attention, relative positions, padding.

Heads, feed-forward and vocabulary are split over `model`. Token 0 is padding: no query looks at it
in the source, and it has no part in the loss, whose mean is over the tokens that are left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import optax

from models import layers
from models.network import Metrics, Network
from models.program import Array, Tree

DATA, MODEL = "data", "model"
FARTHEST = 128  # relative positions from there on share a bucket


@dataclass(frozen=True)
class EncoderDecoderConfig(Network):
    """Sizes of the model, of the batch and of the mesh; `layers` in the encoder and as many in the
    decoder."""

    layers: int = 2
    d_model: int = 32
    heads: int = 4
    head_size: int = 8
    d_feed_forward: int = 64
    buckets: int = 8
    vocabulary: int = 96
    batch: int = 8
    source: int = 20
    target: int = 12
    data: int = 4
    model: int = 2

    family: ClassVar[str] = "encoder-decoder"

    def axes(self) -> dict[str, int]:
        return {DATA: self.data, MODEL: self.model}

    def full(self) -> Self:
        """T5 v1.1 Large."""
        return replace(
            self,
            layers=24,
            d_model=1024,
            heads=16,
            head_size=64,
            d_feed_forward=2816,
            buckets=32,
            vocabulary=32_128,
            batch=512,
            source=512,
            target=114,
            dtype="bfloat16",
            data=16,
            model=4,
        )

    def inputs(self) -> dict[str, Array]:
        return {
            "source": Array((self.batch, self.source), (DATA,), "int32", self.vocabulary),
            "target": Array((self.batch, self.target), (DATA,), "int32", self.vocabulary),
        }

    def output_axes(self) -> tuple[Any, ...]:
        return DATA, None, MODEL

    def weights(self) -> Tree:
        width, inner = self.d_model, self.d_feed_forward
        heads = (self.heads, self.head_size)
        column = (None, MODEL)
        attention = {
            "scale": Array((width,)),
            **{name: Array((width, *heads), column) for name in ("query", "key", "value")},
            "output": Array((*heads, width), (MODEL,)),
        }
        feed_forward = {
            "scale": Array((width,)),
            "gate": Array((width, inner), column),
            "up": Array((width, inner), column),
            "down": Array((inner, width), (MODEL,)),
        }
        encoder = {"attention": attention, "feed_forward": feed_forward}
        stack = {"distances": Array((self.buckets, self.heads), column), "scale": Array((width,))}
        return {
            "embedding": Array((self.vocabulary, width), (MODEL,)),
            "encoder": stack | {"layers": [encoder] * self.layers},
            "decoder": stack | {"layers": [encoder | {"cross": attention}] * self.layers},
            "unembedding": Array((width, self.vocabulary), column),
        }

    def forward(self, parameters: Tree, batch: Tree) -> jax.Array:
        """Logits of the target, (batch, target, vocabulary)."""
        weights = self.cast(parameters)
        source, target = batch["source"], batch["target"]
        present = (source != 0)[:, None, :]  # (batch, one for all queries, source)
        encoded = self._encoded(weights, source, present)
        before = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
        hidden = self._embedded(weights, before)
        decoder = weights["decoder"]
        bias = self._bias(decoder["distances"], self.target, both_ways=False)
        causal = layers.causal_mask(self.target)
        for layer in decoder["layers"]:
            hidden = self._attended(hidden, layer["attention"], mask=causal, bias=bias)
            hidden = self._attended(hidden, layer["cross"], encoded, mask=present)
            hidden = self._fed_forward(hidden, layer["feed_forward"])
        hidden = layers.rms_norm(hidden, decoder["scale"])
        return self.constrain(hidden @ weights["unembedding"], DATA, None, MODEL)

    def loss(self, parameters: Tree, batch: Tree) -> tuple[jax.Array, Metrics]:
        logits, target = self.forward(parameters, batch).astype(jnp.float32), batch["target"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        counted = (target != 0).astype(jnp.float32)
        right = (logits.argmax(-1) == target) * counted
        count = jnp.maximum(counted.sum(), 1.0)
        metrics = {"accuracy": right.sum() / count, "tokens": counted.sum()}
        return (losses * counted).sum() / count, metrics

    def _encoded(self, weights: Tree, source: jax.Array, present: jax.Array) -> jax.Array:
        encoder = weights["encoder"]
        bias = self._bias(encoder["distances"], self.source, both_ways=True)
        hidden = self._embedded(weights, source)
        for layer in encoder["layers"]:
            hidden = self._attended(hidden, layer["attention"], mask=present, bias=bias)
            hidden = self._fed_forward(hidden, layer["feed_forward"])
        return layers.rms_norm(hidden, encoder["scale"])

    def _embedded(self, weights: Tree, tokens: jax.Array) -> jax.Array:
        return self.constrain(jnp.take(weights["embedding"], tokens, axis=0), DATA)

    def _attended(
        self,
        hidden: jax.Array,
        weights: Tree,
        memory: jax.Array | None = None,
        *,
        mask: jax.Array,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """The residual stream after attention to itself, or to a memory; T5 scales no scores."""
        normed = layers.rms_norm(hidden, weights["scale"])
        query, key, value = (
            self.constrain(jnp.einsum("bsd,dnh->bsnh", read, weights[name]), DATA, None, MODEL)
            for name, read in (
                ("query", normed),
                ("key", normed if memory is None else memory),
                ("value", normed if memory is None else memory),
            )
        )
        mixed = layers.attention(query, key, value, mask=mask, bias=bias, scale=1.0)
        output = jnp.einsum("bsnh,nhd->bsd", mixed, weights["output"])
        return self.constrain(hidden + output, DATA)

    def _fed_forward(self, hidden: jax.Array, weights: Tree) -> jax.Array:
        normed = layers.rms_norm(hidden, weights["scale"])
        inner = jax.nn.gelu(normed @ weights["gate"]) * (normed @ weights["up"])
        return self.constrain(hidden + inner @ weights["down"], DATA)

    def _bias(self, distances: jax.Array, length: int, *, both_ways: bool) -> jax.Array:
        """(1, heads, length, length): what a score gains by the distance of key and query."""
        relative = jnp.arange(length) - jnp.arange(length)[:, None]
        bucket = _bucket(relative, self.buckets, both_ways=both_ways)
        return jnp.take(distances, bucket, axis=0).transpose(2, 0, 1)[None]


def _bucket(relative: jax.Array, buckets: int, *, both_ways: bool) -> jax.Array:
    """T5's buckets: one each for near distances, logarithmic beyond; half for what lies ahead."""
    first = jnp.zeros_like(relative)
    if both_ways:
        buckets //= 2
        first = jnp.where(relative > 0, buckets, 0)
        distance = jnp.abs(relative)
    else:
        distance = jnp.maximum(-relative, 0)
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(FARTHEST / exact)
    far = jnp.minimum(exact + (ratio * (buckets - exact)).astype(jnp.int32), buckets - 1)
    return first + jnp.where(distance < exact, distance, far)
