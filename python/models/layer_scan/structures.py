"""Networks whose loops are put together in other ways: nested, paired, two streams, two models,
one layer many times, weights that the program stacks itself, a depth that only the run knows.

Each function takes the options and returns a `Network`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from models import layers
from models.layer_scan.networks import (
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

PAIR, RANK, SEGMENTS = 2, 2, 3


def dense_weights() -> Tree:
    """Of one layer that `dense` computes."""
    return {
        "scale": Array((WIDTH,)),
        "up": Array((WIDTH, INNER), (None, MODEL)),
        "down": Array((INNER, WIDTH), (MODEL,)),
    }


def dense(x: jax.Array, w: Tree) -> jax.Array:
    """What a layer adds to its residual stream."""
    return jax.nn.silu(layers.rms_norm(x, w["scale"]) @ w["up"]) @ w["down"]


def residual(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
    """A whole layer, as a scan takes it."""
    return x + dense(x, w), None


def features(o: LayerScan, blocks: Tree, run: Any, **more: Array) -> Network:
    """A network over features (batch, width), whose mean square is the loss."""
    inputs = {"inputs": Array((o.batch, WIDTH), (DATA,)), **more}

    def loss(weights: Tree, batch: Tree) -> Loss:
        out = run(weights, batch)
        return jnp.square(out).mean(), {"largest": jnp.abs(out).max()}

    return Network(blocks, inputs, run, o.sharding(DATA), loss)


def _cut(weights: Tree, size: int) -> Tree:
    return jax.tree.map(lambda w: w.reshape(-1, size, *w.shape[1:]), weights)


def nested(o: LayerScan) -> Network:
    """A loop over pairs of layers around one over the two, and only what enters a pair is kept."""

    @jax.checkpoint
    def pair(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        return lax.scan(residual, x, w)

    def run(weights: Tree, batch: Tree) -> jax.Array:
        return o.scan(pair, batch["inputs"], _cut(weights, PAIR))[0]

    return features(o, o.stacked(dense_weights()), run)


def paired(o: LayerScan) -> Network:
    """Layers of two kinds in turn, one of each in an iteration."""

    def pair(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        x = x + dense(x, w["plain"])
        return x + jnp.tanh(dense(x, w["bounded"])), None

    def run(weights: Tree, batch: Tree) -> jax.Array:
        return o.scan(pair, batch["inputs"], weights)[0]

    kinds = {name: o.stacked(dense_weights(), o.layers // PAIR) for name in ("plain", "bounded")}
    return features(o, kinds, run)


def two_streams(o: LayerScan) -> Network:
    """Two activations in the carry, a reversible network, and the input along with them."""

    def layer(carry: tuple[jax.Array, ...], w: Tree) -> tuple[Any, None]:
        first, second, given = carry
        first = first + dense(second, w["one"])
        second = second + dense(first, w["other"]) + 0.1 * given
        return (first, second, given), None

    def run(weights: Tree, batch: Tree) -> jax.Array:
        x = batch["inputs"]
        (first, second, _), _ = o.scan(layer, (x, jnp.zeros_like(x), x), weights)
        return first - second

    return features(o, o.stacked({"one": dense_weights(), "other": dense_weights()}), run)


def universal(o: LayerScan) -> Network:
    """One layer's weights, used in every iteration; the loop goes over nothing."""

    def run(weights: Tree, batch: Tree) -> jax.Array:
        return lax.scan(lambda x, _: residual(x, weights), batch["inputs"], length=o.layers)[0]

    return features(o, dense_weights(), run)


def stacked_inside(o: LayerScan) -> Network:
    """Each layer's weights are arguments of their own, which the program stacks, in bfloat16."""
    listed = {str(number): dense_weights() for number in range(o.layers)}

    def run(weights: Tree, batch: Tree) -> jax.Array:
        each = [weights[str(number)] for number in range(o.layers)]
        stacked = jax.tree.map(lambda *w: jnp.stack(w).astype(jnp.bfloat16), *each)
        inputs = batch["inputs"].astype(jnp.bfloat16)
        return o.scan(residual, inputs, stacked)[0].astype(jnp.float32)

    return features(o, listed, run)


def statistics(o: LayerScan) -> Network:
    """Each layer says how large its activations are: a mean and a maximum over the batch."""
    weights = o.stacked(dense_weights())
    inputs = {"inputs": Array((o.batch, WIDTH), (DATA,))}

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, Tree]:
        added = dense(x, w)
        return x + added, {"mean": jnp.square(added).mean(), "largest": jnp.abs(added).max()}

    def run(weights: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        return o.scan(layer, batch["inputs"], weights)

    def loss(weights: Tree, batch: Tree) -> Loss:
        out, seen = run(weights, batch)
        return jnp.square(out).mean(), seen

    return Network(weights, inputs, run, (o.sharding(DATA), o.sharding()), loss)


def low_rank(o: LayerScan) -> Network:
    """Frozen layers and trained additions of low rank: most weights have no gradient."""
    adapter = {"inward": Array((WIDTH, RANK)), "outward": Array((RANK, WIDTH))}
    weights = {"frozen": o.stacked(dense_weights()), "adapter": o.stacked(adapter)}

    def layer(x: jax.Array, w: tuple[Tree, Tree]) -> tuple[jax.Array, None]:
        frozen, adapter = w
        return x + dense(x, frozen) + x @ adapter["inward"] @ adapter["outward"], None

    def run(weights: Tree, batch: Tree) -> jax.Array:
        both = (lax.stop_gradient(weights["frozen"]), weights["adapter"])
        return o.scan(layer, batch["inputs"], both)[0]

    return features(o, weights, run)


def teacher(o: LayerScan) -> Network:
    """Two models on one batch, the second to become like the first, which is not trained."""
    weights = {"student": o.stacked(dense_weights())}
    inputs = {"inputs": Array((o.batch, WIDTH), (DATA,))}
    taught = {"teacher": o.stacked(dense_weights()), **weights}

    def run(weights: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        wanted, _ = o.scan(residual, batch["inputs"], lax.stop_gradient(weights["teacher"]))
        got, _ = o.scan(residual, batch["inputs"], weights["student"])
        return wanted, got

    def loss(weights: Tree, batch: Tree) -> Loss:
        wanted, got = run(weights, batch)
        chances = jax.nn.softmax(wanted)
        difference = (chances * (jnp.log(chances) - jax.nn.log_softmax(got))).sum(-1)
        return difference.mean(), {"largest": difference.max()}

    return Network(taught, inputs, run, (o.sharding(DATA), o.sharding(DATA)), loss)


def packed(o: LayerScan) -> Network:
    """Several texts in a row: the mask, of each row its own, follows from integers in the batch."""
    weights = {"layers": o.stacked(decoder_layer_weights()), **embeddings()}
    segments = Array((o.batch, o.sequence), (DATA,), "int32", SEGMENTS)

    def logits(weights: Tree, batch: Tree) -> jax.Array:
        angles = layers.rotation(o.sequence, HEAD_SIZE, 10_000.0)
        segments = jnp.sort(batch["segments"], axis=1)
        causal = layers.causal_mask(o.sequence)

        def layer(hidden: jax.Array, w: Tree) -> tuple[jax.Array, None]:
            mask = causal & (segments[:, :, None] == segments[:, None, :])
            hidden = hidden + self_attention(hidden, w, mask, angles)
            return hidden + swiglu(hidden, w), None

        hidden, _ = o.scan(layer, embedded(weights, batch), weights["layers"])
        return unembedded(hidden, weights)

    return language_model(o, weights, logits, segments=segments)


def chunked_loss(o: LayerScan) -> Network:
    """The logits are never there as a whole: a loop over pieces of the sequence sums the loss."""
    weights = {"layers": o.stacked(dense_weights()), **embeddings()}

    def run(weights: Tree, batch: Tree) -> jax.Array:
        hidden, _ = o.scan(residual, embedded(weights, batch), weights["layers"])
        return layers.rms_norm(hidden, weights["final_scale"])

    def loss(weights: Tree, batch: Tree) -> Loss:
        hidden, tokens = run(weights, batch), batch["tokens"]
        pieces = jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(x.shape[0], 4, -1, *x.shape[2:]), 1, 0),
            (hidden, jnp.roll(tokens, -1, axis=1)),
        )

        @jax.checkpoint
        def add(total: jax.Array, piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            hidden, wanted = piece
            logits = hidden @ weights["unembedding"]
            chosen = jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]
            return total + (jax.nn.logsumexp(logits, axis=-1) - chosen).sum(), None

        total, _ = lax.scan(add, jnp.float32(0), pieces)
        return total / tokens.size, {}

    return Network(weights, tokens_input(o), run, o.sharding(DATA), loss)


def cast_before(o: LayerScan) -> Network:
    """All weights are cast once before the loop, and tokens are looked up by a product."""
    weights = {"layers": o.stacked(dense_weights()), "table": Array((VOCABULARY, WIDTH))}

    def logits(weights: Tree, batch: Tree) -> jax.Array:
        weights = o.cast(weights)
        x = jax.nn.one_hot(batch["tokens"], VOCABULARY, dtype=o.dtype) @ weights["table"]
        x, _ = o.scan(residual, x, weights["layers"])
        return jnp.einsum("bsd,vd->bsv", x, weights["table"])

    def loss(weights: Tree, batch: Tree) -> Loss:
        return token_loss(o, logits(weights, batch), batch)

    return Network(weights, tokens_input(o), logits, o.sharding(DATA), loss)


def dynamic_depth(o: LayerScan) -> Network:
    """How many of the layers run is an input."""

    def run(weights: Tree, batch: Tree) -> jax.Array:
        def layer(i: jax.Array, x: jax.Array) -> jax.Array:
            return x + dense(x, jax.tree.map(lambda w: w[i], weights))

        return lax.fori_loop(0, batch["depth"], layer, batch["inputs"])

    depth = Array((), (), "int32", o.layers)
    return features(o, o.stacked(dense_weights()), run, depth=depth)


def until_settled(o: LayerScan) -> Network:
    """Layers run until the whole batch changes little, or all have run."""

    def run(weights: Tree, batch: Tree) -> jax.Array:
        def goes_on(carry: tuple[jax.Array, ...]) -> jax.Array:
            number, _, change = carry
            return (number < o.layers) & (change > 1e-3)

        def layer(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            number, x, _ = carry
            added = dense(x, jax.tree.map(lambda w: w[number], weights))
            return number + 1, x + added, jnp.abs(added).max()

        start = (jnp.int32(0), batch["inputs"], jnp.float32(jnp.inf))
        return lax.while_loop(goes_on, layer, start)[1]

    return features(o, o.stacked(dense_weights()), run)
