"""A dense Llama-style decoder in plain `jit`: the mesh alone says how it is sharded.

    fsdp > 1    batch and weights are split over `fsdp`
    model > 1   heads, feed-forward and vocabulary are split over `model`, and the residual stream
                along the sequence (tensor and sequence parallel)
    stage > 1   nothing: an axis that expand-pipeline lays the layers of a scan on

RMSNorm, rotary positions, grouped key and value heads, SwiGLU, cross-entropy on shifted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax

from models import layers
from models.network import Metrics, Network
from models.program import Array, Tree

FSDP, MODEL, STAGE = "fsdp", "model", "stage"


@dataclass(frozen=True)
class DecoderConfig(Network):
    """Sizes of the model, of the batch and of the mesh. The defaults are tiny and complete.

    `scan_layers` runs one stacked layer in a `lax.scan`; `remat` recomputes each in the backward
    pass, all of it but what `policy` keeps: the name of one of jax.checkpoint_policies.
    """

    layers: int = 2
    d_model: int = 64
    heads: int = 16
    key_value_heads: int = 8
    head_size: int = 4
    d_feed_forward: int = 128
    vocabulary: int = 128
    rope_base: float = 10_000.0
    batch: int = 8
    sequence: int = 32
    scan_layers: bool = False
    remat: bool = False
    policy: str = "nothing_saveable"
    fsdp: int = 4
    model: int = 2
    stage: int = 1

    family: ClassVar[str] = "decoder"

    def axes(self) -> dict[str, int]:
        return {STAGE: self.stage, FSDP: self.fsdp, MODEL: self.model}

    def full(self) -> Self:
        """Llama 3 8B, 4,096 tokens a sequence; fsdp × model is 8 × 8, or 64 × 1 without `model`."""
        return replace(
            self,
            layers=32,
            d_model=4096,
            heads=32,
            key_value_heads=8,
            head_size=128,
            d_feed_forward=14_336,
            vocabulary=128_256,
            rope_base=500_000.0,
            batch=64,
            sequence=4096,
            dtype="bfloat16",
            fsdp=8 if self.model > 1 else 64,
            model=8 if self.model > 1 else 1,
        )

    def inputs(self) -> dict[str, Array]:
        return {"tokens": Array((self.batch, self.sequence), (FSDP,), "int32", self.vocabulary)}

    def output_axes(self) -> tuple[Any, ...]:
        return FSDP, None, MODEL

    def weights(self) -> Tree:
        width, inner, size = self.d_model, self.d_feed_forward, self.head_size
        column, row = (FSDP, MODEL), (MODEL, FSDP)
        layer = {
            "attention_scale": Array((width,)),
            "query": Array((width, self.heads, size), column),
            "key": Array((width, self.key_value_heads, size), column),
            "value": Array((width, self.key_value_heads, size), column),
            "output": Array((self.heads, size, width), (MODEL, None, FSDP)),
            "feed_forward_scale": Array((width,)),
            "gate": Array((width, inner), column),
            "up": Array((width, inner), column),
            "down": Array((inner, width), row),
        }
        stacked = {name: array.stacked(self.layers) for name, array in layer.items()}
        return {
            "embedding": Array((self.vocabulary, width), row),
            "layers": stacked if self.scan_layers else [layer] * self.layers,
            "final_scale": Array((width,)),
            "unembedding": Array((width, self.vocabulary), column),
        }

    def forward(self, parameters: Tree, batch: Tree) -> jax.Array:
        """Logits, (batch, sequence, vocabulary)."""
        weights = self.cast(parameters)
        hidden = self._residual(jnp.take(weights["embedding"], batch["tokens"], axis=0))
        layer = self._checkpointed() if self.remat else self._layer
        if self.scan_layers:
            hidden, _ = lax.scan(lambda x, w: (layer(x, w), None), hidden, weights["layers"])
        else:
            for weights_of_layer in weights["layers"]:
                hidden = layer(hidden, weights_of_layer)
        hidden = layers.rms_norm(hidden, weights["final_scale"])
        return self.constrain(hidden @ weights["unembedding"], FSDP, None, MODEL)

    def loss(self, parameters: Tree, batch: Tree) -> tuple[jax.Array, Metrics]:
        return layers.next_token_loss(self.forward(parameters, batch), batch["tokens"]), {}

    def _checkpointed(self) -> Callable[[jax.Array, Tree], jax.Array]:
        return jax.checkpoint(self._layer, policy=getattr(jax.checkpoint_policies, self.policy))

    def _layer(self, hidden: jax.Array, weights: Tree) -> jax.Array:
        hidden = self._residual(hidden + self._attention(hidden, weights))
        normed = layers.rms_norm(hidden, weights["feed_forward_scale"])
        inner = jax.nn.silu(normed @ weights["gate"]) * (normed @ weights["up"])
        inner = self.constrain(inner, FSDP, None, MODEL)
        return self._residual(hidden + inner @ weights["down"])

    def _attention(self, hidden: jax.Array, weights: Tree) -> jax.Array:
        normed = layers.rms_norm(hidden, weights["attention_scale"])
        query, key, value = (
            self.constrain(
                jnp.einsum("bsd,dnh->bsnh", normed, weights[name]), FSDP, None, MODEL, None
            )
            for name in ("query", "key", "value")
        )
        angles = layers.rotation(self.sequence, self.head_size, self.rope_base)
        mixed = layers.attention(
            layers.rotated(query, angles),
            layers.rotated(key, angles),
            value,
            mask=layers.causal_mask(self.sequence),
        )
        return jnp.einsum("bsnh,nhd->bsd", mixed, weights["output"])

    def _residual(self, hidden: jax.Array) -> jax.Array:
        return self.constrain(hidden, FSDP, MODEL, None)
