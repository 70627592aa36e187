"""Training steps written apart from the zoo, as the users of different libraries write them.

Each function returns an export for eight devices and arguments for it.
"""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.export import Exported, export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = Any
Case = tuple[Exported, tuple[Any, ...]]


def abstract_mesh(**axes: int) -> AbstractMesh:
    """A mesh of any eight devices, axis name to size."""
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def exported(
    function: Any, mesh: AbstractMesh, specs: Tree, results: Tree, arguments: tuple[Any, ...]
) -> Case:
    """The export of a function under partition specs, `results` for its outputs."""

    def shardings(tree: Tree) -> Tree:
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), tree, is_leaf=lambda x: isinstance(x, P)
        )

    jitted = jax.jit(function, in_shardings=shardings(specs), out_shardings=shardings(results))
    arrays = jax.tree.map(np.asarray, arguments)
    return export(jitted)(*arrays), arrays


def replicated(tree: Tree) -> Tree:
    """Specs that split nothing."""
    return jax.tree.map(lambda _: P(), tree)


def state_specs(rule: optax.GradientTransformation, specs: Tree, weights: Tree) -> Tree:
    """Specs of an optimizer's state: what has the shape of a weight is split like it."""
    state = jax.eval_shape(rule.init, weights)

    def placed(leaf: Any, spec: P, weight: Any) -> P:
        return spec if leaf.shape == weight.shape else P()

    return optax.tree.map_params(
        rule, placed, state, specs, weights, transform_non_params=lambda _: P()
    )


class Gpt2Block(nnx.Module):
    """Pre-norm attention with one projection for query, key and value, then a GELU MLP."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(0.2)
        column = nnx.with_partitioning(normal, ("data", "model"))
        row = nnx.with_partitioning(normal, ("model", "data"))
        split_bias = nnx.with_partitioning(nnx.initializers.zeros, ("model",))
        self.heads = heads
        self.ln_1 = nnx.LayerNorm(width, rngs=rngs)
        self.c_attn = nnx.Linear(
            width, 3 * width, kernel_init=column, bias_init=split_bias, rngs=rngs
        )
        self.c_proj = nnx.Linear(width, width, kernel_init=row, rngs=rngs)
        self.ln_2 = nnx.LayerNorm(width, rngs=rngs)
        self.c_fc = nnx.Linear(
            width, 4 * width, kernel_init=column, bias_init=split_bias, rngs=rngs
        )
        self.mlp_proj = nnx.Linear(4 * width, width, kernel_init=row, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        query, key_, value = (
            part.reshape(batch, length, self.heads, -1)
            for part in jnp.split(self.c_attn(self.ln_1(x)), 3, axis=-1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key_) / np.sqrt(width // self.heads)
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
        first, second = jax.random.split(key)
        x = x + dropout(self.c_proj(mixed), first)
        return x + dropout(self.mlp_proj(nnx.gelu(self.c_fc(self.ln_2(x)))), second)


class Gpt2(nnx.Module):
    """Learned positions, and one table for embedding and unembedding."""

    def __init__(self, vocabulary: int, width: int, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(0.2)
        self.wte = nnx.Embed(
            vocabulary,
            width,
            embedding_init=nnx.with_partitioning(normal, ("model", "data")),
            rngs=rngs,
        )
        self.wpe = nnx.Embed(64, width, embedding_init=normal, rngs=rngs)
        self.h_0 = Gpt2Block(width, 4, rngs)
        self.ln_f = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array, key: jax.Array) -> jax.Array:
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        x = self.h_0(dropout(x, key), jax.random.fold_in(key, 1))
        return self.wte.attend(self.ln_f(x))


def dropout(x: jax.Array, key: jax.Array, rate: float = 0.1) -> jax.Array:
    """Zeroes elements at random and scales the others up."""
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def gpt2_step() -> Case:
    """flax.nnx with annotations: dropout, padding, microbatches, clipping, Lion."""
    mesh, microbatches = abstract_mesh(data=4, model=2), 2
    with jax.sharding.use_abstract_mesh(mesh):
        definition, abstract = nnx.split(nnx.eval_shape(lambda: Gpt2(48, 32, nnx.Rngs(0))))
        specs = nnx.to_pure_dict(nnx.get_partition_spec(abstract))
    weights = drawn(nnx.to_pure_dict(abstract), 0)
    rule = optax.chain(optax.clip_by_global_norm(0.5), optax.lion(1e-3, weight_decay=0.1))

    def loss_of(weights: Tree, tokens: jax.Array, lengths: jax.Array, key: jax.Array) -> jax.Array:
        logits = nnx.merge(definition, nnx.State(weights))(tokens[:, :-1], key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        mask = jnp.arange(1, tokens.shape[1]) < lengths[:, None]
        return jnp.sum(losses * mask) / jnp.maximum(mask.sum(), 1)

    def step(weights: Tree, state: Tree, batch: Tree, seed: jax.Array) -> tuple[Any, ...]:
        def accumulate(carry: Tree, given: Tree) -> tuple[Tree, jax.Array]:
            loss, gradients = jax.value_and_grad(loss_of)(
                weights, given["tokens"], given["lengths"], jax.random.key(given["seed"])
            )
            return jax.tree.map(jnp.add, carry, gradients), loss

        zeros = jax.tree.map(jnp.zeros_like, weights)
        given = {**batch, "seed": seed + jnp.arange(microbatches, dtype=jnp.uint32)}
        gradients, losses = lax.scan(accumulate, zeros, given)
        gradients = jax.tree.map(lambda g: g / microbatches, gradients)
        updates, state = rule.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, losses.mean()

    random = np.random.default_rng(0)
    batch = {
        "tokens": random.integers(0, 48, (microbatches, 8, 17)).astype(np.int32),
        "lengths": random.integers(5, 17, (microbatches, 8)).astype(np.int32),
    }
    batch_specs = {"tokens": P(None, "data"), "lengths": P(None, "data")}
    states = state_specs(rule, specs, weights)
    arguments = (weights, rule.init(weights), batch, np.uint32(7))
    return exported(step, mesh, (specs, states, batch_specs, P()), (specs, states, P()), arguments)


class Encoder(nn.Module):
    """BERT-like: learned relative-position bias, post-norm, a head over the vocabulary."""

    vocabulary: int = 40
    width: int = 32
    heads: int = 4

    @nn.compact
    def __call__(self, tokens: jax.Array, attended: jax.Array) -> jax.Array:
        length = tokens.shape[1]
        x = nn.Embed(self.vocabulary, self.width, name="embedder")(tokens)
        distance = jnp.clip(jnp.arange(length)[:, None] - jnp.arange(length), -8, 8) + 8
        bias = self.param("relative_bias", nn.initializers.normal(0.2), (17, self.heads))
        bias = jnp.transpose(bias[distance], (2, 0, 1))[None]
        size = self.width // self.heads
        query, key, value = (
            # A key's bias has no effect, and a gradient that is rounding alone.
            nn.DenseGeneral((self.heads, size), use_bias=part != "key", name=part)(x)
            for part in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) + bias
        weights = jax.nn.softmax(jnp.where(attended[:, None, None], scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        x = nn.LayerNorm()(x + nn.DenseGeneral(self.width, axis=(-2, -1), name="out")(mixed))
        inner = nn.gelu(nn.Dense(4 * self.width, name="wi")(x), approximate=False)
        x = nn.LayerNorm()(x + nn.Dense(self.width, name="wo")(inner))
        return nn.Dense(self.vocabulary, name="head")(x)


RULES = (
    (r"embedder/embedding", P("tp", "fsdp")),
    (r"(query|key|value)/kernel", P("fsdp", "tp", None)),
    (r"(query|key|value)/bias", P("tp", None)),
    (r"out/kernel", P("tp", None, "fsdp")),
    (r"(wi|head)/kernel", P("fsdp", "tp")),
    (r"(wi|head)/bias", P("tp")),
    (r"wo/kernel", P("tp", "fsdp")),
    (r".*", P()),
)


def spec_of(path: tuple[Any, ...], _: Any) -> P:
    """The spec of the first rule that a parameter's name matches."""
    name = "/".join(str(entry.key) for entry in path)
    return next(spec for pattern, spec in RULES if re.search(pattern, name))


def masked_language_step() -> Case:
    """flax.linen with rules on parameter names: masked tokens predicted, Adafactor."""
    mesh, model = abstract_mesh(dp=2, fsdp=2, tp=2), Encoder()
    rule = optax.adafactor(1e-2, min_dim_size_to_factor=16)
    random = np.random.default_rng(1)
    batch = {
        "tokens": random.integers(0, 40, (8, 16)).astype(np.int32),
        "attended": np.arange(16) < random.integers(6, 17, (8, 1)),
        "masked": random.random((8, 16)) < 0.3,
    }
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch["tokens"], batch["attended"])
    weights = drawn(shapes, 2)
    specs = jax.tree_util.tree_map_with_path(spec_of, weights)

    def loss_of(weights: Tree, batch: Tree) -> jax.Array:
        hidden = jnp.where(batch["masked"], 0, batch["tokens"])
        logits: Any = model.apply(weights, hidden, batch["attended"])
        labels = optax.smooth_labels(jax.nn.one_hot(batch["tokens"], 40), 0.1)
        losses = optax.softmax_cross_entropy(logits, labels)
        return jnp.average(losses, weights=batch["masked"].astype(jnp.float32))

    def step(weights: Tree, state: Tree, batch: Tree) -> tuple[Any, ...]:
        loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
        updates, state = rule.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    states = replicated(jax.eval_shape(rule.init, weights))
    rows = jax.tree.map(lambda _: P(("dp", "fsdp")), batch)
    arguments = (weights, rule.init(weights), batch)
    return exported(step, mesh, (specs, states, rows), (specs, states, P()), arguments)


def drawn(shapes: Tree, seed: int) -> Tree:
    """Random weights: about 1 for what scales, 0.2 wide otherwise."""
    random = np.random.default_rng(seed)

    def one(path: tuple[Any, ...], shape: Any) -> np.ndarray[Any, Any]:
        offset = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return (offset + 0.2 * random.normal(size=shape.shape)).astype(shape.dtype)

    return jax.tree_util.tree_map_with_path(one, shapes)
