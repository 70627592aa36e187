"""Networks whose layers run in a loop, as most people write them: MLP, decoders, encoders.

Each function takes the options and returns a `Network`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from models import layers
from models.layer_scan.options import (
    DATA,
    HEAD_SIZE,
    HEADS,
    INNER,
    KEY_VALUE_HEADS,
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

CLASSES = 10


def language_model(
    o: LayerScan, weights: Tree, logits: Callable[[Tree, Tree], jax.Array], **more: Array
) -> Network:
    """A network that predicts the next token; `more` are inputs besides the tokens."""

    def loss(weights: Tree, batch: Tree) -> Loss:
        return token_loss(o, logits(weights, batch), batch)

    inputs = tokens_input(o) | more
    return Network(weights, inputs, logits, o.sharding(DATA, None, MODEL), loss)


def classifier(
    o: LayerScan, weights: Tree, inputs: dict[str, Array], forward: Callable[[Tree, Tree], Any]
) -> Network:
    """A network that gives scores of classes; its training knows the right ones as `labels`."""
    if o.training:
        inputs["labels"] = Array((o.batch,), (DATA,), "int32", CLASSES)

    def loss(weights: Tree, batch: Tree) -> Loss:
        return layers.classification(forward(weights, batch), batch["labels"])

    return Network(weights, inputs, forward, o.sharding(DATA), loss)


def mlp(o: LayerScan) -> Network:
    """Two dense layers around a GELU, on a residual; squared error."""
    weights = o.stacked(
        {
            "first": Array((WIDTH, INNER), (None, MODEL)),
            "bias": Array((INNER,), (MODEL,)),
            "second": Array((INNER, WIDTH), (MODEL,)),
        }
    )
    names = ("inputs", "targets") if o.training else ("inputs",)
    inputs = {name: Array((o.batch, WIDTH), (DATA,)) for name in names}

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ w["first"] + w["bias"]) @ w["second"], None

    def forward(weights: Tree, batch: Tree) -> jax.Array:
        return o.scan(layer, batch["inputs"], weights)[0]

    def loss(weights: Tree, batch: Tree) -> Loss:
        errors = forward(weights, batch) - batch["targets"]
        return jnp.square(errors).mean(), {"largest": jnp.abs(errors).max()}

    return Network(weights, inputs, forward, o.sharding(DATA), loss)


def decoder_layer_weights() -> Tree:
    """Of one Llama-like layer."""
    column, row = (None, MODEL), (MODEL,)
    return {
        "attention_scale": Array((WIDTH,)),
        "query": Array((WIDTH, HEADS, HEAD_SIZE), column),
        "key": Array((WIDTH, KEY_VALUE_HEADS, HEAD_SIZE), column),
        "value": Array((WIDTH, KEY_VALUE_HEADS, HEAD_SIZE), column),
        "output": Array((HEADS, HEAD_SIZE, WIDTH), row),
        "feed_forward_scale": Array((WIDTH,)),
        "gate": Array((WIDTH, INNER), column),
        "up": Array((WIDTH, INNER), column),
        "down": Array((INNER, WIDTH), row),
    }


def self_attention(hidden: jax.Array, w: Tree, mask: jax.Array, angles: Any) -> jax.Array:
    """With rotary positions and grouped heads, on the norm of the residual stream."""
    normed = layers.rms_norm(hidden, w["attention_scale"])
    query, key, value = (
        jnp.einsum("bsd,dnh->bsnh", normed, w[name]) for name in ("query", "key", "value")
    )
    query, key = layers.rotated(query, angles), layers.rotated(key, angles)
    mixed = layers.attention(query, key, value, mask=mask)
    return jnp.einsum("bsnh,nhd->bsd", mixed, w["output"])


def swiglu(hidden: jax.Array, w: Tree) -> jax.Array:
    """The gated feed-forward part, on the norm of the residual stream."""
    normed = layers.rms_norm(hidden, w["feed_forward_scale"])
    return (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]


def embeddings(tied: bool = False) -> Tree:
    """A table of tokens, the last norm, and the way back to tokens unless the table is that too."""
    weights = {"embedding": Array((VOCABULARY, WIDTH), (MODEL,)), "final_scale": Array((WIDTH,))}
    return weights if tied else weights | {"unembedding": Array((WIDTH, VOCABULARY), (None, MODEL))}


def embedded(weights: Tree, batch: Tree) -> jax.Array:
    """The rows of the tokens in the table."""
    return weights["embedding"][batch["tokens"]]


def unembedded(hidden: jax.Array, weights: Tree) -> jax.Array:
    """The logits of the tokens, by the table where it is tied."""
    hidden = layers.rms_norm(hidden, weights["final_scale"])
    return hidden @ (weights["unembedding"] if "unembedding" in weights else weights["embedding"].T)


def llama(o: LayerScan, *, tied: bool = False) -> Network:
    """Mask and angles are made before the loop and captured; weights are cast in the layer."""
    weights = {"layers": o.stacked(decoder_layer_weights()), **embeddings(tied)}

    def logits(weights: Tree, batch: Tree) -> jax.Array:
        seen = layers.causal_mask(o.sequence)
        angles = layers.rotation(o.sequence, HEAD_SIZE, 10_000.0)

        def layer(hidden: jax.Array, w: Tree) -> tuple[jax.Array, None]:
            w = o.cast(w)
            hidden = o.constrain(hidden + self_attention(hidden, w, seen, angles), DATA)
            return o.constrain(hidden + swiglu(hidden, w), DATA), None

        hidden = jnp.take(weights["embedding"].astype(o.dtype), batch["tokens"], axis=0)
        hidden, _ = o.scan(layer, o.constrain(hidden, DATA), weights["layers"])
        hidden = layers.rms_norm(hidden, weights["final_scale"].astype(o.dtype))
        out = weights["embedding"].T if tied else weights["unembedding"]
        return hidden @ out.astype(o.dtype)

    return language_model(o, weights, logits)


def tied_llama(o: LayerScan) -> Network:
    """One table at both ends of the pipeline: its gradient is the sum of two."""
    return llama(o, tied=True)


def shared_adapter(o: LayerScan) -> Network:
    """Every layer has weights of its own and uses the same adapter, whose gradient they add to."""
    weights = {
        "layers": o.stacked(decoder_layer_weights()),
        "adapter": {"inward": Array((WIDTH, 4)), "outward": Array((4, WIDTH))},
        **embeddings(),
    }

    def logits(weights: Tree, batch: Tree) -> jax.Array:
        shared = weights["adapter"]
        seen, angles = layers.causal_mask(o.sequence), layers.rotation(o.sequence, HEAD_SIZE, 100.0)

        def layer(hidden: jax.Array, w: Tree) -> tuple[jax.Array, None]:
            hidden = hidden + self_attention(hidden, w, seen, angles)
            hidden = hidden + jnp.tanh(hidden @ shared["inward"]) @ shared["outward"]
            return hidden + swiglu(hidden, w), None

        hidden, _ = o.scan(layer, embedded(weights, batch), weights["layers"])
        return unembedded(hidden, weights)

    return language_model(o, weights, logits)


def encoder_decoder(o: LayerScan) -> Network:
    """Two loops; every layer of the second looks at the output of the first."""
    half = o.layers // 2
    across = {name: decoder_layer_weights()[name] for name in ("query", "key", "value", "output")}
    weights = {
        "encoder": o.stacked(decoder_layer_weights(), half),
        "decoder": o.stacked({**decoder_layer_weights(), "across": across}, half),
        "source_embedding": Array((VOCABULARY, WIDTH), (MODEL,)),
        **embeddings(),
    }
    sources = Array((o.batch, o.sequence), (DATA,), "int32", VOCABULARY)

    def logits(weights: Tree, batch: Tree) -> jax.Array:
        angles = layers.rotation(o.sequence, HEAD_SIZE, 10_000.0)
        source, tokens = batch["sources"], batch["tokens"]
        given = source > 0  # (batch, sequence): 0 is padding
        both_ways = given[:, None, :] & jnp.ones((o.sequence, 1), bool)

        def encode(hidden: jax.Array, w: Tree) -> tuple[jax.Array, None]:
            hidden = hidden + self_attention(hidden, w, both_ways, angles)
            return hidden + swiglu(hidden, w), None

        encoded, _ = o.scan(encode, weights["source_embedding"][source], weights["encoder"])

        def decode(hidden: jax.Array, w: Tree) -> tuple[jax.Array, None]:
            hidden = hidden + self_attention(hidden, w, layers.causal_mask(o.sequence), angles)
            hidden = hidden + cross_attention(hidden, encoded, both_ways, w["across"])
            return hidden + swiglu(hidden, w), None

        hidden, _ = o.scan(decode, weights["embedding"][tokens], weights["decoder"])
        return unembedded(hidden, weights)

    return language_model(o, weights, logits, sources=sources)


def cross_attention(hidden: jax.Array, encoded: jax.Array, mask: jax.Array, w: Tree) -> jax.Array:
    """Queries from one sequence, keys and values from the other."""
    query = jnp.einsum("bsd,dnh->bsnh", hidden, w["query"])
    key, value = (jnp.einsum("btd,dnh->btnh", encoded, w[name]) for name in ("key", "value"))
    mixed = layers.attention(query, key, value, mask=mask)
    return jnp.einsum("bsnh,nhd->bsd", mixed, w["output"])


def vit(o: LayerScan) -> Network:
    """Patches, learned positions, layer norms, the mean over patches, smoothed labels."""
    layer_weights = {
        "first_scale": Array((WIDTH,)),
        "first_bias": Array((WIDTH,)),
        "inward": Array((WIDTH, 3, HEADS, HEAD_SIZE), (None, None, MODEL)),
        "outward": Array((HEADS, HEAD_SIZE, WIDTH), (MODEL,)),
        "second_scale": Array((WIDTH,)),
        "second_bias": Array((WIDTH,)),
        "up": Array((WIDTH, INNER), (None, MODEL)),
        "down": Array((INNER, WIDTH), (MODEL,)),
    }
    weights = {
        "patches": Array((12, WIDTH)),
        "positions": Array((o.sequence, WIDTH)),
        "blocks": o.stacked(layer_weights),
        "head": Array((WIDTH, CLASSES)),
    }
    inputs = {"images": Array((o.batch, 2, 2 * o.sequence, 3), (DATA,))}

    def block(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        normed = layers.layer_norm(x, w["first_scale"], w["first_bias"])
        query, key, value = jnp.moveaxis(jnp.einsum("bsd,dcnh->bscnh", normed, w["inward"]), 2, 0)
        mixed = jax.nn.dot_product_attention(query, key, value)
        x = x + jnp.einsum("bsnh,nhd->bsd", mixed, w["outward"])
        normed = layers.layer_norm(x, w["second_scale"], w["second_bias"])
        return x + jax.nn.gelu(normed @ w["up"]) @ w["down"], None

    def forward(weights: Tree, batch: Tree) -> jax.Array:
        images = batch["images"].reshape(o.batch // o.accumulate, 2, o.sequence, 2, 3)
        patches = images.transpose(0, 2, 1, 3, 4).reshape(-1, o.sequence, 12)
        x, _ = o.scan(block, patches @ weights["patches"] + weights["positions"], weights["blocks"])
        return x.mean(1) @ weights["head"]

    return classifier(o, weights, inputs, forward)


def two_stacks(o: LayerScan) -> Network:
    """Dense layers first, others of another kind after them, in two loops of unequal depth."""
    dense = o.layers // 2
    weights = {
        "dense": o.stacked(decoder_layer_weights(), dense),
        "linear": o.stacked({"scale": Array((WIDTH,)), "mix": Array((WIDTH, WIDTH))}, o.layers),
        **embeddings(tied=True),
    }

    def logits(weights: Tree, batch: Tree) -> jax.Array:
        seen, angles = layers.causal_mask(o.sequence), layers.rotation(o.sequence, HEAD_SIZE, 100.0)

        def first(hidden: jax.Array, w: Tree) -> tuple[jax.Array, None]:
            hidden = hidden + self_attention(hidden, w, seen, angles)
            return hidden + swiglu(hidden, w), None

        def second(hidden: jax.Array, w: Tree) -> tuple[jax.Array, None]:
            return hidden + jax.nn.relu(layers.rms_norm(hidden, w["scale"]) @ w["mix"]), None

        hidden, _ = o.scan(first, embedded(weights, batch), weights["dense"])
        hidden, _ = o.scan(second, hidden, weights["linear"])
        hidden = layers.rms_norm(hidden, weights["final_scale"])
        return jnp.einsum("bsd,vd->bsv", hidden, weights["embedding"])

    return language_model(o, weights, logits)


def time_major(o: LayerScan) -> Network:
    """Activations are (sequence, batch, width): the batch is dimension 1 throughout."""
    layer_weights = {
        "inward": Array((WIDTH, 3 * WIDTH), (None, MODEL)),
        "outward": Array((WIDTH, WIDTH), (MODEL,)),
    }
    weights = {"blocks": o.stacked(layer_weights), "head": Array((WIDTH, VOCABULARY))}
    shape = (o.sequence, o.batch)
    inputs = {"features": Array((*shape, WIDTH), (None, DATA))}
    if o.training:
        inputs["labels"] = Array(shape, (None, DATA), "int32", VOCABULARY)

    def block(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        query, key, value = jnp.split(x @ w["inward"], 3, axis=-1)
        scores = jnp.einsum("tbd,sbd->bts", query, key) * WIDTH**-0.5
        scores = jnp.where(layers.causal_mask(o.sequence), scores, -jnp.inf)
        mixed = jnp.einsum("bts,sbd->tbd", jax.nn.softmax(scores), value)
        return x + mixed @ w["outward"], None

    def forward(weights: Tree, batch: Tree) -> jax.Array:
        return o.scan(block, batch["features"], weights["blocks"])[0] @ weights["head"]

    def loss(weights: Tree, batch: Tree) -> Loss:
        chances = jax.nn.log_softmax(forward(weights, batch))
        picked = jnp.take_along_axis(chances, batch["labels"][..., None], axis=-1)[..., 0]
        return -picked.mean(), {"likelihood": picked.sum(0).mean()}

    return Network(weights, inputs, forward, o.sharding(None, DATA), loss)


def alternating_window(o: LayerScan) -> Network:
    """The number of the layer says whether it looks at all that came before, or at a window."""
    weights = {"layers": o.stacked(decoder_layer_weights()), **embeddings()}

    def logits(weights: Tree, batch: Tree) -> jax.Array:
        angles = layers.rotation(o.sequence, HEAD_SIZE, 10_000.0)
        position = jnp.arange(o.sequence)
        near = position[:, None] - position < 3
        causal = layers.causal_mask(o.sequence)

        def layer(hidden: jax.Array, x: tuple[Tree, jax.Array]) -> tuple[jax.Array, None]:
            w, number = x
            mask = causal & (near | (number % 2 == 0))
            hidden = hidden + self_attention(hidden, w, mask, angles)
            return hidden + swiglu(hidden, w), None

        numbered = (weights["layers"], jnp.arange(o.layers))
        hidden, _ = o.scan(layer, embedded(weights, batch), numbered)
        return unembedded(hidden, weights)

    return language_model(o, weights, logits)


def switched(o: LayerScan) -> Network:
    """Every third layer has attention, by `lax.cond` on its number; counted in the carry."""
    weights = {"layers": o.stacked(decoder_layer_weights()), **embeddings()}

    def logits(weights: Tree, batch: Tree) -> jax.Array:
        seen, angles = layers.causal_mask(o.sequence), layers.rotation(o.sequence, HEAD_SIZE, 100.0)

        def layer(carry: tuple[jax.Array, jax.Array], w: Tree) -> tuple[Any, None]:
            hidden, number = carry
            hidden = lax.cond(
                number % 3 == 0,
                lambda x: x + self_attention(x, w, seen, angles),
                lambda x: x,
                hidden,
            )
            return (hidden + swiglu(hidden, w), number + 1), None

        start = (embedded(weights, batch), jnp.int32(0))
        (hidden, _), _ = o.scan(layer, start, weights["layers"])
        return unembedded(hidden, weights)

    return language_model(o, weights, logits)


def hidden_states(o: LayerScan) -> Network:
    """The output of every layer is an output of the program, and a probe of each is trained."""
    block = {"scale": Array((WIDTH,)), "mix": Array((WIDTH, WIDTH))}
    weights = {"blocks": o.stacked(block), "probe": Array((WIDTH, CLASSES))}
    inputs = {"inputs": Array((o.batch, o.sequence, WIDTH), (DATA,))}
    if o.training:
        inputs["labels"] = Array((o.batch,), (DATA,), "int32", CLASSES)

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, jax.Array]:
        x = x + jnp.tanh(layers.rms_norm(x, w["scale"]) @ w["mix"])
        return x, x

    def forward(weights: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        return o.scan(layer, batch["inputs"], weights["blocks"])

    def loss(weights: Tree, batch: Tree) -> Loss:
        last, every = forward(weights, batch)
        guesses = every.mean(2) @ weights["probe"]  # (layers, batch, classes)
        losses = optax.softmax_cross_entropy_with_integer_labels(guesses, batch["labels"][None])
        return losses.mean(), {"size": jnp.square(last).mean(), "by_layer": losses.mean(1)}

    results = (o.sharding(DATA), o.sharding(None, DATA))
    return Network(weights, inputs, forward, results, loss)
