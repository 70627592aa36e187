"""More programs written apart from the zoo: a diffusion U-Net, a recommender and a sampler.

Each function returns an export for eight devices and arguments for it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from held_out_training import Case, Tree, abstract_mesh, drawn, exported, state_specs
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def shapes_of(tree: Tree) -> Tree:
    """float32 arrays, as shapes."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, np.float32),
        tree,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution of images (batch, height, width, channels)."""
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def group_norm(x: jax.Array, scale: jax.Array, groups: int = 4) -> jax.Array:
    """Each group of channels to mean 0 and variance 1, over all pixels."""
    batch, height, width, channels = x.shape
    grouped = x.reshape(batch, height, width, groups, channels // groups)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    variance = jnp.square(grouped - mean).mean((1, 2, 4), keepdims=True)
    return ((grouped - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape) * scale


def residual(x: jax.Array, time: jax.Array, weights: Tree) -> jax.Array:
    """Two convolutions around the time embedding, and a way past them."""
    inner = conv(jax.nn.silu(group_norm(x, weights["scale_in"])), weights["first"])
    inner = inner + (jax.nn.silu(time) @ weights["time"])[:, None, None]
    inner = conv(jax.nn.silu(group_norm(inner, weights["scale_out"])), weights["second"])
    return inner + jnp.einsum("bhwi,io->bhwo", x, weights["past"])


def block(entering: int, leaving: int, time: int = 32) -> tuple[Tree, Tree]:
    """Shapes and specs of a residual block: channels split over `model`."""
    shapes = {
        "scale_in": (entering,),
        "first": (3, 3, entering, leaving),
        "time": (time, leaving),
        "scale_out": (leaving,),
        "second": (3, 3, leaving, leaving),
        "past": (entering, leaving),
    }
    specs = {
        "scale_in": P(),
        "first": P(None, None, None, "model"),
        "time": P(None, "model"),
        "scale_out": P("model"),
        "second": P(None, None, "model", None),
        "past": P(),
    }
    return shapes, specs


def diffusion_step() -> Case:
    """A U-Net that predicts noise: strides, skips, resizing, self-attention; Adam and an average
    of the weights."""
    mesh, rule = abstract_mesh(data=4, model=2), optax.adam(1e-3)
    parts = {"down": block(8, 8), "middle": block(16, 16), "up": block(24, 8)}
    shapes: Tree = {name: part[0] for name, part in parts.items()}
    specs: Tree = {name: part[1] for name, part in parts.items()}
    shapes |= {"in": (3, 3, 3, 8), "shrink": (3, 3, 8, 16), "qkv": (16, 48), "out": (3, 3, 8, 3)}
    specs |= {"in": P(), "shrink": P(None, None, None, "model"), "qkv": P(), "out": P()}
    weights = drawn(shapes_of(shapes), 3)

    def predicted(weights: Tree, x: jax.Array, when: jax.Array) -> jax.Array:
        waves = when[:, None] * jnp.exp(-jnp.arange(16) / 2.0)
        time = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1)
        fine = residual(conv(x, weights["in"]), time, weights["down"])
        coarse = residual(conv(fine, weights["shrink"], 2), time, weights["middle"])
        pixels = coarse.reshape(x.shape[0], -1, 16)
        query, key, value = jnp.split(pixels @ weights["qkv"], 3, -1)
        attention = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", query, key) / 4)
        coarse = coarse + (attention @ value).reshape(coarse.shape)
        large = jnp.repeat(jnp.repeat(coarse, 2, axis=1), 2, axis=2)
        joined = residual(jnp.concatenate([large, fine], -1), time, weights["up"])
        return conv(joined, weights["out"])

    def step(
        weights: Tree, state: Tree, average: Tree, images: jax.Array, seed: jax.Array
    ) -> tuple[Any, ...]:
        noise_key, time_key = jax.random.split(jax.random.key(seed))
        noise = jax.random.normal(noise_key, images.shape)
        when = jax.random.uniform(time_key, images.shape[:1])
        share = jnp.cos(when * np.pi / 2)[:, None, None, None]
        noisy = share * images + jnp.sqrt(1 - share**2) * noise

        def loss_of(weights: Tree) -> jax.Array:
            return jnp.square(predicted(weights, noisy, when) - noise).mean()

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        updates, state = rule.update(gradients, state)
        weights = optax.apply_updates(weights, updates)
        average = optax.incremental_update(weights, average, 0.01)
        return weights, state, average, loss

    images = np.random.default_rng(3).normal(size=(8, 8, 8, 3)).astype(np.float32)
    states = state_specs(rule, specs, weights)
    arguments = (weights, rule.init(weights), weights, images, np.uint32(5))
    given = (specs, states, specs, P("data"), P())
    return exported(step, mesh, given, (specs, states, specs, P()), arguments)


def recommender_step() -> Case:
    """DLRM: rows of the tables split over all devices, bags summed by segment, products of all
    pairs, two MLPs; a binary loss, Adagrad."""
    mesh, rule, rows = abstract_mesh(batch=2, table=4), optax.adagrad(1e-2), 64
    tables, batch, bag, width = 3, 16, 5, 8
    pairs = tables * (tables + 1) // 2
    shapes = {
        "tables": [(rows, width)] * tables,
        "bottom": [(4, 16), (16, width)],
        "top": [(width + pairs, 16), (16, 1)],
    }
    specs = {
        "tables": [P(("batch", "table"))] * tables,
        "bottom": [P(None, "table"), P("table", None)],
        "top": [P(None, "table"), P("table", None)],
    }
    weights = drawn(shapes_of(shapes), 4)

    def perceptron(x: jax.Array, layers: list[jax.Array]) -> jax.Array:
        for layer in layers[:-1]:
            x = jax.nn.relu(x @ layer)
        return x @ layers[-1]

    def loss_of(weights: Tree, given: Tree) -> jax.Array:
        dense = perceptron(given["dense"], weights["bottom"])
        owner = jnp.repeat(jnp.arange(batch), bag)
        bags = [
            jax.ops.segment_sum(jnp.take(table, ids.reshape(-1), axis=0), owner, batch)
            for table, ids in zip(weights["tables"], given["ids"], strict=True)
        ]
        features = jnp.stack([dense, *bags], axis=1)
        products = jnp.einsum("bic,bjc->bij", features, features)
        one, other = np.triu_indices(tables + 1, 1)
        joined = jnp.concatenate([dense, products[:, one, other]], axis=1)
        logits = perceptron(joined, weights["top"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, given["clicked"]).mean()

    def step(weights: Tree, state: Tree, given: Tree) -> tuple[Any, ...]:
        loss, gradients = jax.value_and_grad(loss_of)(weights, given)
        updates, state = rule.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    random = np.random.default_rng(4)
    given = {
        "dense": random.normal(size=(batch, 4)).astype(np.float32),
        "ids": [random.integers(0, rows, (batch, bag)).astype(np.int32) for _ in range(tables)],
        "clicked": random.integers(0, 2, batch).astype(np.float32),
    }
    split = P(("batch", "table"))
    inputs = {"dense": split, "ids": [split] * tables, "clicked": split}
    states = state_specs(rule, specs, weights)
    arguments = (weights, rule.init(weights), given)
    return exported(step, mesh, (specs, states, inputs), (specs, states, P()), arguments)


def sampler(*, sequence_split: bool = False) -> Case:
    """Decodes in a `while_loop` till every sequence has ended: vocabulary split over `model`, a
    cache of keys and values split by heads or along the sequence, and greedy, top-k and random
    choice side by side. All outputs are integers, but for the cache."""
    mesh = abstract_mesh(data=2, model=4)
    batch, vocabulary, width, heads, longest, prompt = 4, 32, 16, 4, 12, 3
    cached = P("data", "model", None, None) if sequence_split else P("data", None, "model", None)
    shapes = {
        "embedding": (vocabulary, width),
        "qkv": (width, 3, heads, width // heads),
        "out": (heads, width // heads, width),
        "head": (width, vocabulary),
    }
    specs = {
        "embedding": P("model"),
        "qkv": P(None, None, "model"),
        "out": P("model"),
        "head": P(None, "model"),
    }
    weights = jax.tree.map(lambda array: 4 * array, drawn(shapes_of(shapes), 5))

    def logits_of(
        weights: Tree, cache: Tree, token: jax.Array, place: jax.Array
    ) -> tuple[jax.Array, Tree]:
        x = weights["embedding"][token]
        query, key, value = jnp.moveaxis(jnp.einsum("bd,dphk->bphk", x, weights["qkv"]), 1, 0)
        start = (0, place, 0, 0)
        cache = {
            "keys": lax.dynamic_update_slice(cache["keys"], key[:, None], start),
            "values": lax.dynamic_update_slice(cache["values"], value[:, None], start),
        }
        cache = lax.with_sharding_constraint(cache, NamedSharding(mesh, cached))
        scores = jnp.einsum("bhk,bthk->bht", query, cache["keys"])
        scores = jnp.where(jnp.arange(longest) <= place, scores, -jnp.inf)
        mixed = jnp.einsum("bht,bthk->bhk", jax.nn.softmax(scores), cache["values"])
        x = x + jnp.einsum("bhk,hkd->bd", mixed, weights["out"])
        logits = (x / jnp.linalg.norm(x, axis=-1, keepdims=True)) @ weights["head"]
        return lax.with_sharding_constraint(logits, NamedSharding(mesh, P("data", "model"))), cache

    def chosen(logits: jax.Array, key: jax.Array) -> jax.Array:
        greedy = jnp.argmax(logits, -1)
        best, indices = lax.top_k(logits, 5)
        within = jax.random.categorical(jax.random.fold_in(key, 1), best / 0.7)
        of_best = jnp.take_along_axis(indices, within[:, None], 1)[:, 0]
        any_ = jax.random.categorical(key, logits / 1.3)
        kind = jnp.arange(logits.shape[0]) % 3
        return jnp.select([kind == 0, kind == 1], [greedy, of_best], any_).astype(jnp.int32)

    def decode(weights: Tree, cache: Tree, prompts: jax.Array, seed: jax.Array) -> tuple[Any, ...]:
        def unfinished(carry: Tree) -> jax.Array:
            return (carry["place"] < longest - 1) & ~jnp.all(carry["ended"])

        def advance(carry: Tree) -> Tree:
            place = carry["place"]
            token = lax.dynamic_index_in_dim(carry["tokens"], place, 1, keepdims=False)
            logits, cache = logits_of(weights, carry["cache"], token, place)
            drawn_token = chosen(logits, jax.random.fold_in(jax.random.key(seed), place))
            given = lax.dynamic_index_in_dim(carry["tokens"], place + 1, 1, keepdims=False)
            following = jnp.where(place + 1 < prompt, given, drawn_token)
            following = jnp.where(carry["ended"], 0, following)
            return {
                "place": place + 1,
                "cache": cache,
                "tokens": lax.dynamic_update_index_in_dim(carry["tokens"], following, place + 1, 1),
                "ended": carry["ended"] | ((following == 4) & (place + 1 >= prompt)),
            }

        tokens = jnp.zeros((batch, longest), jnp.int32).at[:, :prompt].set(prompts)
        carry = {
            "place": jnp.int32(0),
            "cache": cache,
            "tokens": tokens,
            "ended": jnp.zeros(batch, bool),
        }
        carry = lax.while_loop(unfinished, advance, carry)
        return carry["tokens"], carry["place"], carry["cache"]

    empty = np.zeros((batch, longest, heads, width // heads), np.float32)
    cache = {"keys": empty, "values": empty}
    prompts = np.random.default_rng(5).integers(2, vocabulary, (batch, prompt)).astype(np.int32)
    caches = {"keys": cached, "values": cached}
    arguments = (weights, cache, prompts, np.uint32(3))
    given = (specs, caches, P("data"), P())
    return exported(decode, mesh, given, (P("data"), P(), caches), arguments)


def sequence_split_sampler() -> Case:
    """The sampler with its cache split along the sequence."""
    return sampler(sequence_split=True)
