"""A mixture-of-experts decoder: top-2 routing with a capacity, one-hot dispatch and combine.

The mesh is data × expert. The batch is split over both, and so is what the dispatch makes of it;
the experts are split over `expert`. In between lies an all_to_all, and another on the way back.
`MoeConfig` constrains both sides and leaves these to a partitioner; `MoeShardMapConfig` computes
the loss in a `shard_map` and writes them out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from jax import lax

from models import layers
from models.network import Metrics, Network
from models.program import Array, Tree

DATA, EXPERT = "data", "expert"
BOTH = (DATA, EXPERT)
CHOSEN = 2  # experts a token


@dataclass(frozen=True)
class MoeConfig(Network):
    """Sizes of the model, of the batch and of the mesh.

    `capacity` is how many times the mean load an expert takes of one sequence; what is beyond it
    passes by on the residual stream.
    """

    layers: int = 2
    d_model: int = 32
    heads: int = 4
    head_size: int = 8
    experts: int = 8
    d_expert: int = 64
    capacity: float = 1.25
    vocabulary: int = 96
    batch: int = 8
    sequence: int = 24
    data: int = 2
    expert: int = 4

    family: ClassVar[str] = "moe"

    def axes(self) -> dict[str, int]:
        return {DATA: self.data, EXPERT: self.expert}

    def full(self) -> Self:
        """Mixtral 8×7B with as many key and value heads as query heads."""
        return replace(
            self,
            layers=32,
            d_model=4096,
            heads=32,
            head_size=128,
            d_expert=14_336,
            vocabulary=32_000,
            batch=64,
            sequence=4096,
            dtype="bfloat16",
            data=8,
            expert=8,
        )

    def inputs(self) -> dict[str, Array]:
        return {"tokens": Array((self.batch, self.sequence), (BOTH,), "int32", self.vocabulary)}

    def output_axes(self) -> tuple[Any, ...]:
        return (BOTH,)

    def weights(self) -> Tree:
        width, heads = self.d_model, (self.heads, self.head_size)
        up = Array((self.experts, width, self.d_expert), (EXPERT, None, DATA))
        layer = {
            "attention_scale": Array((width,)),
            "query": Array((width, *heads)),
            "key": Array((width, *heads)),
            "value": Array((width, *heads)),
            "output": Array((*heads, width)),
            "expert_scale": Array((width,)),
            "router": Array((width, self.experts)),
            "gate": up,
            "up": up,
            "down": Array((self.experts, self.d_expert, width), (EXPERT, DATA)),
        }
        return {
            "embedding": Array((self.vocabulary, width)),
            "layers": [layer] * self.layers,
            "final_scale": Array((width,)),
        }

    def forward(self, parameters: Tree, batch: Tree) -> jax.Array:
        """Logits, (batch, sequence, vocabulary)."""
        return self._logits(parameters, batch["tokens"])[0]

    def loss(self, parameters: Tree, batch: Tree) -> tuple[jax.Array, Metrics]:
        logits, balance = self._logits(parameters, batch["tokens"])
        loss = layers.next_token_loss(logits, batch["tokens"])
        return loss + 0.01 * balance, {"cross_entropy": loss, "balance": balance}

    def _logits(self, parameters: Tree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits from the embedding's transpose, and the mean over layers of the balance loss."""
        weights = self.cast(parameters)
        hidden = self._local(jnp.take(weights["embedding"], tokens, axis=0))
        balances: list[jax.Array] = []
        for layer in weights["layers"]:
            hidden = self._local(hidden + self._attention(hidden, layer))
            mixed, balance = self._experts(layers.rms_norm(hidden, layer["expert_scale"]), layer)
            hidden = self._local(hidden + mixed)
            balances.append(balance)
        hidden = layers.rms_norm(hidden, weights["final_scale"])
        return hidden @ weights["embedding"].T, jnp.stack(balances).mean()

    def _attention(self, hidden: jax.Array, layer: Tree) -> jax.Array:
        normed = layers.rms_norm(hidden, layer["attention_scale"])
        query, key, value = (
            jnp.einsum("bsd,dnh->bsnh", normed, layer[name]) for name in ("query", "key", "value")
        )
        angles = layers.rotation(self.sequence, self.head_size, 10_000.0)
        mixed = layers.attention(
            layers.rotated(query, angles),
            layers.rotated(key, angles),
            value,
            mask=layers.causal_mask(self.sequence),
        )
        return jnp.einsum("bsnh,nhd->bsd", mixed, layer["output"])

    def _experts(self, hidden: jax.Array, layer: Tree) -> tuple[jax.Array, jax.Array]:
        """Of normed activations: what the experts answer, and the balance loss."""
        logits = hidden.astype(jnp.float32) @ layer["router"].astype(jnp.float32)
        combine, balance = self._routed(jax.nn.softmax(logits, axis=-1))
        dispatch = (combine > 0).astype(hidden.dtype)
        sent = self._to_experts(jnp.einsum("bsec,bsd->ebcd", dispatch, hidden))
        gate = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", sent, self._gathered(layer["gate"], 2)))
        inner = gate * jnp.einsum("ebcd,edf->ebcf", sent, self._gathered(layer["up"], 2))
        answered = jnp.einsum("ebcf,efd->ebcd", inner, self._gathered(layer["down"], 1))
        answered = self._to_tokens(answered)
        return jnp.einsum("bsec,ebcd->bsd", combine.astype(hidden.dtype), answered), balance

    def _routed(self, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Combine weights (batch, sequence, experts, slots), and GShard's balance loss.

        In each sequence an expert's slots go to first choices before second ones, then in order.
        """
        batch, length, experts = gates.shape
        slots = math.ceil(self.capacity * CHOSEN * length / experts)
        weights, chosen = lax.top_k(gates, CHOSEN)
        weights /= weights.sum(-1, keepdims=True)
        wanted = jax.nn.one_hot(
            chosen, experts, dtype=jnp.int32
        )  # (batch, sequence, CHOSEN, experts)
        ranked = wanted.swapaxes(1, 2).reshape(batch, CHOSEN * length, experts)
        place = (jnp.cumsum(ranked, axis=1) - ranked).reshape(batch, CHOSEN, length, experts)
        place = (place.swapaxes(1, 2) * wanted).sum(-1)  # (batch, sequence, CHOSEN)
        slot = jax.nn.one_hot(place, slots)  # a row of zeros for those beyond the capacity
        combine = jnp.einsum("bsk,bske,bskc->bsec", weights, wanted.astype(jnp.float32), slot)
        load = self._mean(wanted[:, :, 0].astype(jnp.float32).mean((0, 1)))
        return combine, experts * (load * self._mean(gates.mean((0, 1)))).sum()

    def _local(self, hidden: jax.Array) -> jax.Array:
        return self.constrain(hidden, BOTH)

    def _to_experts(self, sent: jax.Array) -> jax.Array:
        """(experts, batch, slots, width), from split along the batch to split along the experts."""
        sent = self.constrain(sent, None, BOTH)
        return self.constrain(sent, EXPERT, DATA)

    def _to_tokens(self, answered: jax.Array) -> jax.Array:
        answered = self.constrain(answered, EXPERT, DATA)
        return self.constrain(answered, None, BOTH)

    def _gathered(self, weight: jax.Array, axis: int) -> jax.Array:
        del axis  # a partitioner finds out
        return weight

    def _mean(self, over_batch: jax.Array) -> jax.Array:
        return over_batch


@dataclass(frozen=True)
class MoeShardMapConfig(MoeConfig):
    """The same model and the same values, with what each device does written out."""

    partitioned_by: ClassVar[Literal["jit", "shard_map"]] = "shard_map"

    def forward(self, parameters: Tree, batch: Tree) -> jax.Array:
        """Logits, (batch, sequence, vocabulary)."""
        return self._mapped(super().forward, self.spec(BOTH))(parameters, batch)

    def loss(self, parameters: Tree, batch: Tree) -> tuple[jax.Array, Metrics]:
        loss = super().loss

        def local(parameters: Tree, batch: Tree) -> tuple[jax.Array, Metrics]:
            return jax.tree.map(self._mean, loss(parameters, batch))

        return self._mapped(local, self.spec())(parameters, batch)

    def _mapped(self, local: Any, results: Any) -> Any:
        program = self.described((self.weights(), self.inputs()))
        specs = jax.tree.map(lambda shape: shape.sharding.spec, program)
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=results)

    def _local(self, hidden: jax.Array) -> jax.Array:
        return hidden

    def _to_experts(self, sent: jax.Array) -> jax.Array:
        return lax.all_to_all(sent, EXPERT, split_axis=0, concat_axis=1, tiled=True)

    def _to_tokens(self, answered: jax.Array) -> jax.Array:
        return lax.all_to_all(answered, EXPERT, split_axis=1, concat_axis=0, tiled=True)

    def _gathered(self, weight: jax.Array, axis: int) -> jax.Array:
        return lax.all_gather(weight, DATA, axis=axis, tiled=True)

    def _mean(self, over_batch: jax.Array) -> jax.Array:
        return lax.pmean(over_batch, BOTH)
