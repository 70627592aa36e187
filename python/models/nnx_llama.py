"""A Llama-like language model as users of flax.nnx write it, fsdp × model by annotations.

Every kernel says by `nnx.with_partitioning` how it is split; the shardings of the whole state, the
optimizer's moments among it, come from there. The step merges model and optimizer, takes
`nnx.value_and_grad` and lets `nnx.Optimizer` update both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import optax
from flax import nnx
from jax.sharding import use_abstract_mesh

from models import layers
from models.config import Config, Parts
from models.network import Metrics
from models.program import Array, Tree

FSDP, MODEL = "fsdp", "model"


@dataclass(frozen=True)
class NnxLlamaConfig(Config):
    """Sizes of the model, of the batch and of the mesh."""

    layers: int = 2
    d_model: int = 64
    heads: int = 8
    key_value_heads: int = 4
    d_feed_forward: int = 128
    vocabulary: int = 128
    batch: int = 8
    sequence: int = 32
    fsdp: int = 4
    model: int = 2

    family: ClassVar[str] = "nnx-llama"

    def axes(self) -> dict[str, int]:
        return {FSDP: self.fsdp, MODEL: self.model}

    def full(self) -> Self:
        """Llama 3 8B, 4,096 tokens a sequence."""
        return replace(
            self,
            layers=32,
            d_model=4096,
            heads=32,
            key_value_heads=8,
            d_feed_forward=14_336,
            vocabulary=128_256,
            batch=64,
            sequence=4096,
            dtype="bfloat16",
            fsdp=8,
            model=8,
        )

    def inputs(self) -> dict[str, Array]:
        return {"tokens": Array((self.batch, self.sequence), (FSDP,), "int32", self.vocabulary)}

    def linear(self, entering: int, leaving: int, *axes: Any, rngs: nnx.Rngs) -> nnx.Linear:
        """A projection without a bias, its kernel split along these axes."""
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), tuple(self.spec(*axes)))
        return nnx.Linear(
            entering, leaving, use_bias=False, kernel_init=init, dtype=self.dtype, rngs=rngs
        )

    def _forward_pass(self) -> Parts:
        definition, state = self._abstract(lambda: Llama(self, nnx.Rngs(0)))

        def forward(state: Tree, batch: Tree) -> jax.Array:
            return nnx.merge(definition, _entries(state))(batch["tokens"])

        return _named(state), forward, self.sharding(FSDP, None, MODEL)

    def _training_step(self) -> Parts:
        def create() -> dict[str, Any]:
            model = Llama(self, nnx.Rngs(0))
            return {
                "model": model,
                "optimizer": nnx.Optimizer(model, self.update_rule(), wrt=nnx.Param),
            }

        definition, state = self._abstract(create)

        def step(state: Tree, batch: Tree) -> tuple[Tree, Metrics]:
            both = nnx.merge(definition, _entries(state))
            model, optimizer = both["model"], both["optimizer"]
            loss, gradients = nnx.value_and_grad(_loss)(model, batch["tokens"])
            optimizer.update(model, gradients)
            norm = optax.tree.norm(nnx.as_pure(gradients))
            return _named(nnx.state(both)), {"loss": loss, "gradient_norm": norm}

        named = _named(state)
        shardings = jax.tree.map(lambda shape: shape.sharding, named)
        return named, step, (shardings, self.sharding())

    def _abstract(self, create: Any) -> tuple[Any, Any]:
        """Definition and state, as shapes, of what `create` makes; the mesh completes them with the
        shardings that the annotations ask for."""
        with use_abstract_mesh(self.mesh):
            return nnx.split(nnx.eval_shape(create))


class Llama(nnx.Module):
    """Tokens (batch, sequence) to logits (batch, sequence, vocabulary)."""

    def __init__(self, config: NnxLlamaConfig, rngs: nnx.Rngs) -> None:
        width, vocabulary = config.d_model, config.vocabulary
        rows = tuple(config.spec(MODEL, FSDP))
        self.config = config
        self.embed = nnx.Embed(
            vocabulary,
            width,
            dtype=config.dtype,
            embedding_init=nnx.with_partitioning(nnx.initializers.normal(0.02), rows),
            rngs=rngs,
        )
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.norm = _norm(config, rngs)
        self.unembed = config.linear(width, vocabulary, FSDP, MODEL, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        hidden = self.config.constrain(self.embed(tokens), FSDP)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.config.constrain(self.unembed(self.norm(hidden)), FSDP, None, MODEL)


class Layer(nnx.Module):
    """Attention and SwiGLU, each on its norm of the residual stream."""

    def __init__(self, config: NnxLlamaConfig, rngs: nnx.Rngs) -> None:
        width, inner = config.d_model, config.d_feed_forward
        self.config = config
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.feed_forward_norm = _norm(config, rngs)
        self.gate = config.linear(width, inner, FSDP, MODEL, rngs=rngs)
        self.up = config.linear(width, inner, FSDP, MODEL, rngs=rngs)
        self.down = config.linear(inner, width, MODEL, FSDP, rngs=rngs)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        normed = self.feed_forward_norm(hidden)
        inner = nnx.silu(self.gate(normed)) * self.up(normed)
        return self.config.constrain(hidden + self.down(inner), FSDP)


class Attention(nnx.Module):
    """Causal, with rotary positions; several query heads share a key and a value head."""

    def __init__(self, config: NnxLlamaConfig, rngs: nnx.Rngs) -> None:
        width = config.d_model
        self.head_size = width // config.heads
        key_value = config.key_value_heads * self.head_size
        self.query = config.linear(width, width, FSDP, MODEL, rngs=rngs)
        self.key = config.linear(width, key_value, FSDP, MODEL, rngs=rngs)
        self.value = config.linear(width, key_value, FSDP, MODEL, rngs=rngs)
        self.output = config.linear(width, width, MODEL, FSDP, rngs=rngs)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        batch, length, _ = hidden.shape
        query, key, value = (
            projection(hidden).reshape(batch, length, -1, self.head_size)
            for projection in (self.query, self.key, self.value)
        )
        angles = layers.rotation(length, self.head_size, 10_000.0)
        mixed = layers.attention(
            layers.rotated(query, angles),
            layers.rotated(key, angles),
            value,
            mask=layers.causal_mask(length),
        )
        return self.output(mixed.reshape(batch, length, -1))


def _loss(model: Llama, tokens: jax.Array) -> jax.Array:
    return layers.next_token_loss(model(tokens), tokens)


def _norm(config: NnxLlamaConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    split = nnx.with_partitioning(nnx.initializers.ones, tuple(config.spec(FSDP)))
    return nnx.RMSNorm(config.d_model, scale_init=split, dtype=config.dtype, rngs=rngs)


def _named(state: Any) -> Tree:
    """A state as dicts with words for keys, which `jax.export` can serialize."""

    def named(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        return {str(name): named(child) for name, child in node.items()}

    return named(nnx.to_pure_dict(state))


def _entries(named: Tree) -> Any:
    """The inverse of `_named`: numbers stand for the entries of a list again."""

    def entries(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        return {
            int(name) if name.isdecimal() else name: entries(child) for name, child in node.items()
        }

    return nnx.State(entries(named))
