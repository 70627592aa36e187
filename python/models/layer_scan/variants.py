"""Networks whose layers do something out of the ordinary: random numbers, experts, inner loops,
caches, sums over the layers, statistics over the batch.

Each function takes the options and returns a `Network`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from models import layers
from models.layer_scan.networks import (
    CLASSES,
    classifier,
    decoder_layer_weights,
    embedded,
    embeddings,
    language_model,
    self_attention,
    swiglu,
    unembedded,
)
from models.layer_scan.options import (
    DATA,
    HEAD_SIZE,
    HEADS,
    INNER,
    MODEL,
    VOCABULARY,
    WIDTH,
    LayerScan,
    Loss,
    Network,
    token_loss,
    tokens_input,
)
from models.program import Array, Tree

EXPERTS, STATE, CHUNK = 4, 4, 2
SEED = Array((), (), "uint32", 1000)


def dropped(x: jax.Array, key: jax.Array) -> jax.Array:
    """Zeroes a tenth of the elements at random and scales the others up."""
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)


def split_dropout(o: LayerScan) -> Network:
    """A key is carried through the layers, each of which splits it."""
    weights = {"layers": o.stacked(decoder_layer_weights()), **embeddings()}

    def logits(weights: Tree, batch: Tree) -> jax.Array:
        seen, angles = layers.causal_mask(o.sequence), layers.rotation(o.sequence, HEAD_SIZE, 100.0)

        def layer(carry: tuple[jax.Array, jax.Array], w: Tree) -> tuple[Any, None]:
            hidden, key = carry
            key, first, second = jax.random.split(key, 3)
            hidden = hidden + dropped(self_attention(hidden, w, seen, angles), first)
            return (hidden + dropped(swiglu(hidden, w), second), key), None

        start = (embedded(weights, batch), jax.random.key(batch["seed"]))
        (hidden, _), _ = o.scan(layer, start, weights["layers"])
        return unembedded(hidden, weights)

    return language_model(o, weights, logits, seed=SEED)


def _keyed_dropout(o: LayerScan, *, by_sample: bool) -> Network:
    block = {"up": Array((WIDTH, INNER), (None, MODEL)), "down": Array((INNER, WIDTH), (MODEL,))}
    weights = {"blocks": o.stacked(block), "head": Array((WIDTH, CLASSES))}
    inputs = {"inputs": Array((o.batch, WIDTH), (DATA,)), "seed": SEED}

    def masked(x: jax.Array, key: jax.Array) -> jax.Array:
        if not by_sample:
            return dropped(x, key)
        return jax.vmap(dropped)(
            x, jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(x)))
        )

    def layer(x: jax.Array, given: tuple[Tree, jax.Array]) -> tuple[jax.Array, None]:
        w, key = given
        return x + masked(jax.nn.relu(x @ w["up"]), key) @ w["down"], None

    def forward(weights: Tree, batch: Tree) -> jax.Array:
        keys = jax.random.split(jax.random.key(batch["seed"]), o.layers)
        return o.scan(layer, batch["inputs"], (weights["blocks"], keys))[0] @ weights["head"]

    return classifier(o, weights, inputs, forward)


def keyed_dropout(o: LayerScan) -> Network:
    """The loop goes over a key for each layer besides the weights."""
    return _keyed_dropout(o, by_sample=False)


def sample_dropout(o: LayerScan) -> Network:
    """Each sample of each layer has a key of its own, by the sample's number in the batch."""
    return _keyed_dropout(o, by_sample=True)


def _experts(o: LayerScan, *, balanced: bool) -> Network:
    layer_weights = {
        "scale": Array((WIDTH,)),
        "router": Array((WIDTH, EXPERTS)),
        "up": Array((EXPERTS, WIDTH, INNER), (MODEL,)),
        "down": Array((EXPERTS, INNER, WIDTH), (MODEL,)),
    }
    weights = {"layers": o.stacked(layer_weights), **embeddings()}

    def layer(carry: tuple[jax.Array, jax.Array], w: Tree) -> tuple[Any, None]:
        hidden, uneven = carry
        normed = layers.rms_norm(hidden, w["scale"])
        chances = jax.nn.softmax(normed @ w["router"])
        highest, chosen = lax.top_k(chances, 2)
        routed = (
            jax.nn.one_hot(chosen, EXPERTS) * (highest / highest.sum(-1, keepdims=True))[..., None]
        )
        inner = jax.nn.silu(jnp.einsum("bsd,edf->bsef", normed, w["up"]))
        mixed = jnp.einsum("bsef,efd,bske->bsd", inner, w["down"], routed)
        if balanced:
            share, chance = (routed > 0).mean((0, 1, 2)), chances.mean((0, 1))
            uneven = uneven + EXPERTS * (share * chance).sum()
        return (hidden + mixed, uneven), None

    def run(weights: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        start = (embedded(weights, batch), jnp.float32(0))
        (hidden, uneven), _ = o.scan(layer, start, weights["layers"])
        return unembedded(hidden, weights), uneven

    def loss(weights: Tree, batch: Tree) -> Loss:
        logits, uneven = run(weights, batch)
        value, metrics = token_loss(o, logits, batch)
        return (
            (value + 0.01 * uneven, metrics | {"uneven": uneven}) if balanced else (value, metrics)
        )

    def forward(weights: Tree, batch: Tree) -> Any:
        return run(weights, batch) if balanced else run(weights, batch)[0]

    results = (o.sharding(DATA), o.sharding()) if balanced else o.sharding(DATA)
    return Network(weights, tokens_input(o), forward, results, loss)


def experts(o: LayerScan) -> Network:
    """The two best experts of each token, computed densely: no sample touches another."""
    return _experts(o, balanced=False)


def balanced_experts(o: LayerScan) -> Network:
    """The same with a loss for uneven use, a product of two means over the whole batch."""
    return _experts(o, balanced=True)


def batch_norm(o: LayerScan) -> Network:
    """Each layer takes mean and variance over the batch: no part of it can go first."""
    block = {"scale": Array((WIDTH,)), "mix": Array((WIDTH, WIDTH))}
    weights = {"blocks": o.stacked(block), "head": Array((WIDTH, CLASSES))}

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        centred = x - x.mean(0)
        normed = centred * lax.rsqrt(jnp.square(centred).mean(0) + 1e-3) * w["scale"]
        return x + jax.nn.relu(normed @ w["mix"]), None

    def forward(weights: Tree, batch: Tree) -> jax.Array:
        return o.scan(layer, batch["inputs"], weights["blocks"])[0] @ weights["head"]

    return classifier(o, weights, {"inputs": Array((o.batch, WIDTH), (DATA,))}, forward)


def decode(o: LayerScan) -> Network:
    """One more token: the caches (layers, batch, length, …) go through the loop as xs and ys.

    Each example has its own position, and its new key and value go there.
    """
    weights = {"layers": o.stacked(decoder_layer_weights()), **embeddings()}
    cache = Array((o.layers, o.batch, o.sequence, 2, HEAD_SIZE), (None, DATA))
    inputs = {
        "tokens": Array((o.batch,), (DATA,), "int32", VOCABULARY),
        "positions": Array((o.batch,), (DATA,), "int32", o.sequence),
        "keys": cache,
        "values": cache,
    }

    def forward(weights: Tree, batch: Tree) -> Tree:
        position = batch["positions"]
        here = jnp.arange(o.sequence) == position[:, None]
        seen = (jnp.arange(o.sequence) <= position[:, None])[:, None]

        def layer(hidden: jax.Array, x: tuple[Tree, jax.Array, jax.Array]) -> tuple[Any, Any]:
            w, keys, values = x
            normed = layers.rms_norm(hidden, w["attention_scale"])
            query = jnp.einsum("bsd,dnh->bsnh", normed, w["query"])
            key, value = (jnp.einsum("bsd,dnh->bsnh", normed, w[n]) for n in ("key", "value"))
            keys = jnp.where(here[:, :, None, None], key, keys)
            values = jnp.where(here[:, :, None, None], value, values)
            mixed = layers.attention(query, keys, values, mask=seen)
            hidden = hidden + jnp.einsum("bsnh,nhd->bsd", mixed, w["output"])
            return hidden + swiglu(hidden, w), (keys, values)

        caches = (batch["keys"], batch["values"])
        hidden = embedded(weights, batch)[:, None]
        hidden, (keys, values) = o.scan(layer, hidden, (weights["layers"], *caches))
        logits = unembedded(hidden[:, 0], weights)
        return {"logits": logits, "keys": keys, "values": values}

    caches = o.sharding(None, DATA)
    results = {"logits": o.sharding(DATA), "keys": caches, "values": caches}
    return Network(weights, inputs, forward, results)


def mamba(o: LayerScan) -> Network:
    """Each layer is a recurrence over time, a loop of its own."""
    layer_weights = {
        "scale": Array((WIDTH,)),
        "inward": Array((WIDTH, 2 * INNER), (None, MODEL)),
        "pace": Array((INNER,), (MODEL,)),
        "selection": Array((INNER, 2 * STATE), (MODEL,)),
        "rates": Array((INNER, STATE), (MODEL,)),
        "outward": Array((INNER, WIDTH), (MODEL,)),
    }
    weights = {"layers": o.stacked(layer_weights), **embeddings(tied=True)}

    def recurrence(w: Tree, inner: jax.Array) -> jax.Array:
        drive, readout = jnp.split(inner @ w["selection"], 2, axis=-1)
        pace = jax.nn.softplus(inner * w["pace"])

        def step(state: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            inner, pace, drive, readout = now
            state = jnp.exp(-pace[..., None] * jnp.exp(w["rates"])) * state
            state = state + (pace * inner)[..., None] * drive[:, None]
            return state, (state * readout[:, None]).sum(-1)

        over_time = tuple(x.swapaxes(0, 1) for x in (inner, pace, drive, readout))
        first = jnp.zeros((inner.shape[0], INNER, STATE))
        return lax.scan(step, first, over_time)[1].swapaxes(0, 1)

    def layer(hidden: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        inner, gate = jnp.split(layers.rms_norm(hidden, w["scale"]) @ w["inward"], 2, axis=-1)
        return hidden + (recurrence(w, jax.nn.silu(inner)) * jax.nn.silu(gate)) @ w["outward"], None

    def logits(weights: Tree, batch: Tree) -> jax.Array:
        hidden, _ = o.scan(layer, embedded(weights, batch), weights["layers"])
        return unembedded(hidden, weights)

    return language_model(o, weights, logits)


def chunked_attention(o: LayerScan) -> Network:
    """Each layer goes over keys and values in chunks, in a loop with a running maximum and sum."""
    layer_weights = {
        "inward": Array((WIDTH, 3, HEADS, HEAD_SIZE), (None, None, MODEL)),
        "outward": Array((HEADS, HEAD_SIZE, WIDTH), (MODEL,)),
    }
    weights = {"layers": o.stacked(layer_weights), **embeddings()}
    chunks = o.sequence // CHUNK

    def chunked(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        def cut(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(x.shape[0], chunks, CHUNK, *x.shape[2:]), 1, 0)

        def step(carry: tuple[jax.Array, ...], now: tuple[jax.Array, ...]) -> tuple[Any, None]:
            highest, total, mixed = carry
            key, value, first = now
            scores = jnp.einsum("bqnh,bknh->bnqk", query, key) * HEAD_SIZE**-0.5
            seen = jnp.arange(o.sequence)[:, None] >= first + jnp.arange(CHUNK)
            scores = jnp.where(seen, scores, layers.MASKED)
            higher = jnp.maximum(highest, scores.max(-1))
            shares, fade = jnp.exp(scores - higher[..., None]), jnp.exp(highest - higher)
            mixed = mixed * fade[..., None] + jnp.einsum("bnqk,bknh->bnqh", shares, value)
            return (higher, total * fade + shares.sum(-1), mixed), None

        shape = (query.shape[0], HEADS, o.sequence)
        start = (jnp.full(shape, layers.MASKED), jnp.zeros(shape), jnp.zeros((*shape, HEAD_SIZE)))
        over = (cut(key), cut(value), CHUNK * jnp.arange(chunks))
        (_, total, mixed), _ = lax.scan(step, start, over)
        return (mixed / total[..., None]).swapaxes(1, 2)

    def layer(hidden: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        normed = hidden * lax.rsqrt(jnp.square(hidden).mean(-1, keepdims=True) + 1e-6)
        query, key, value = jnp.moveaxis(jnp.einsum("bsd,dcnh->bscnh", normed, w["inward"]), 2, 0)
        return hidden + jnp.einsum("bsnh,nhd->bsd", chunked(query, key, value), w["outward"]), None

    def logits(weights: Tree, batch: Tree) -> jax.Array:
        hidden, _ = o.scan(layer, embedded(weights, batch), weights["layers"])
        return unembedded(hidden, weights)

    return language_model(o, weights, logits)


def summed_penalty(o: LayerScan) -> Network:
    """A scalar goes through the layers, to which each adds a penalty summed over its tokens."""
    weights = {"layers": o.stacked(decoder_layer_weights()), **embeddings()}

    def run(weights: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        seen, angles = layers.causal_mask(o.sequence), layers.rotation(o.sequence, HEAD_SIZE, 100.0)

        def layer(carry: tuple[jax.Array, jax.Array], w: Tree) -> tuple[Any, None]:
            hidden, penalty = carry
            hidden = hidden + self_attention(hidden, w, seen, angles)
            hidden = hidden + swiglu(hidden, w)
            return (hidden, penalty + jnp.square(jax.nn.logsumexp(hidden, -1)).sum()), None

        start = (embedded(weights, batch), jnp.float32(0))
        (hidden, penalty), _ = o.scan(layer, start, weights["layers"])
        return unembedded(hidden, weights), penalty / (o.batch // o.accumulate * o.sequence)

    def loss(weights: Tree, batch: Tree) -> Loss:
        logits, penalty = run(weights, batch)
        value, metrics = token_loss(o, logits, batch)
        return value + 1e-3 * penalty, {**metrics, "cross_entropy": value, "penalty": penalty}

    return Network(weights, tokens_input(o), run, (o.sharding(DATA), o.sharding()), loss)


def raw_arrays(o: LayerScan) -> Network:
    """In the manner of a short script: one array of weights, NumPy names, losses in the layers."""
    weights = {"W": o.stacked(Array((WIDTH, WIDTH), (None, MODEL))), "v": Array((WIDTH,))}
    inputs = {"x": Array((o.batch, WIDTH), (DATA,))}
    if o.training:
        inputs["y"] = Array((o.batch,), (DATA,))

    def forward(weights: Tree, batch: Tree) -> jax.Array:
        h, _ = o.scan(lambda h, w: (jnp.tanh(jnp.dot(h, w)) + h, None), batch["x"], weights["W"])
        return jnp.dot(h, weights["v"])

    def loss(weights: Tree, batch: Tree) -> Loss:
        errors = optax.huber_loss(forward(weights, batch), batch["y"])
        return jnp.sum(errors) / o.batch, {}

    return Network(weights, inputs, forward, o.sharding(DATA), loss)


def read_twice(o: LayerScan) -> Network:
    """Layers with a backward of their own, whose loop reads one stack under two names."""
    weights = o.stacked({"square": Array((WIDTH, WIDTH), (None, MODEL))})
    inputs = {name: Array((o.batch, WIDTH), (DATA,)) for name in ("inputs", "targets")}

    @jax.custom_vjp
    def through(stack: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0]

    def ahead(stack: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
            y = jnp.tanh(h @ w)
            return y, (h, y)

        y, (taken, made) = lax.scan(layer, x, stack)
        return y, (stack, taken, made)

    def back(kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        stack, taken, made = kept

        def layer(g: jax.Array, of: Any) -> tuple[jax.Array, jax.Array]:
            w, h, y, same = of
            g = g * (1 - y * same)
            return g @ w.T, h.T @ g

        g, gradients = lax.scan(layer, g, (stack, taken, made, made), reverse=True)
        return gradients, g

    through.defvjp(ahead, back)

    def forward(weights: Tree, batch: Tree) -> jax.Array:
        return through(weights["square"], batch["inputs"])

    def loss(weights: Tree, batch: Tree) -> Loss:
        errors = forward(weights, batch) - batch["targets"]
        return jnp.square(errors).mean(), {}

    return Network(weights, inputs, forward, o.sharding(DATA), loss)
