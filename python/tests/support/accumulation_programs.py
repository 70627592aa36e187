"""Small training steps and forward passes on a whole batch, of every form that one writes.

    step = STEPS["masked-adam"]
    exported = step.export()

Each takes a batch of eight samples, on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.export import Exported

BATCH, LENGTH, VOCABULARY, WIDTH = 8, 6, 11, 8
_NUMBERS = np.random.default_rng(0)


@dataclass(frozen=True)
class Step:
    """A program, arguments for it, and why no microbatch can run by itself, if so."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    refused: str = ""

    def export(self) -> Exported:
        """The program for one device."""
        return export.export(jax.jit(self.function))(*self.arguments)


STEPS: dict[str, Step] = {}


def _step(*arguments: Any, refused: str = "") -> Callable[[Any], Any]:
    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        STEPS[function.__name__.replace("_", "-")] = Step(function, arguments, refused)
        return function

    return keep


def _floats(*shape: int) -> np.ndarray:
    return _NUMBERS.normal(size=shape).astype(np.float32)


def _small(*shape: int) -> np.ndarray:
    """Weights of layers in a row: larger ones would amplify what is rounded."""
    return _floats(*shape) * np.float32(0.3)


def _integers(limit: int, *shape: int) -> np.ndarray:
    return _NUMBERS.integers(0, limit, size=shape).astype(np.int32)


_MLP = [_floats(6, 16), _floats(16), _floats(16, 5)]
_X, _Y, _LABELS = _floats(BATCH, 6), _floats(BATCH, 5), _integers(5, BATCH)
_DECODER = {
    "embedding": _small(VOCABULARY, WIDTH),
    "layers": [
        {name: _small(WIDTH, WIDTH) for name in ("query", "key", "value", "up", "down")}
        for _ in range(2)
    ],
}
_TOKENS, _NEXT = (_integers(VOCABULARY, BATCH, LENGTH) for _ in range(2))


def _mlp(weights: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ weights[0] + weights[1]) @ weights[2]


def _squared(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((_mlp(weights, x) - y) ** 2)


def _logits(weights: Any, tokens: jax.Array) -> jax.Array:
    """Layers in a Python loop, with the embedding once more as the head."""
    x = weights["embedding"][tokens]
    for w in weights["layers"]:
        scores = jnp.einsum("btd,bsd->bts", x @ w["query"], x @ w["key"]) / WIDTH
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), dtype=bool))
        x = x + jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ (x @ w["value"])
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    return x @ weights["embedding"].T


def _losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -chosen[..., 0]


def _zeros(tree: Any) -> Any:
    return jax.tree.map(np.zeros_like, tree)


@_step(_DECODER, _zeros(_DECODER), _zeros(_DECODER), _TOKENS, _NEXT, _floats(BATCH, LENGTH) ** 2)
def masked_adam(weights: Any, first: Any, second: Any, tokens: Any, labels: Any, mask: Any) -> Any:
    def loss(weights: Any) -> jax.Array:
        return jnp.sum(_losses(_logits(weights, tokens), labels) * mask) / jnp.sum(mask)

    value, gradients = jax.value_and_grad(loss)(weights)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), gradients)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, gradients)
    weights = jax.tree.map(
        lambda w, m, v: w - 1e-3 * m / (jnp.sqrt(v) + 1e-3), weights, first, second
    )
    return value, norm, weights, first, second


@_step(_DECODER, _TOKENS, _NEXT)
def metrics(weights: Any, tokens: Any, labels: Any) -> Any:
    counted = labels != 0

    def loss(weights: Any) -> tuple[jax.Array, jax.Array]:
        logits = _logits(weights, tokens)
        return jnp.sum(_losses(logits, labels) * counted) / jnp.sum(counted), logits

    (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
    guesses = jnp.argmax(logits, -1)
    right = jnp.sum((guesses == labels) * counted)
    flags = jnp.any(jnp.isnan(logits)), jnp.all(logits < 100)
    return value, gradients, right, counted.sum(), guesses, logits.max(), flags


@_step(_DECODER, _TOKENS, _integers(LENGTH, BATCH))
def lengths(weights: Any, tokens: Any, lengths: Any) -> Any:
    counted = jnp.arange(LENGTH) < lengths[:, None]

    def loss(weights: Any) -> jax.Array:
        losses = jnp.where(counted, _losses(_logits(weights, tokens), tokens), 0)
        return jnp.sum(losses) / jnp.maximum(counted.sum(), 1)

    return jax.value_and_grad(loss)(weights)


@_step(_MLP, _X, _Y)
def squared_errors(weights: Any, x: Any, y: Any) -> Any:
    return jax.value_and_grad(_squared)(weights, x, y)


@_step(_MLP, _X, _Y)
def input_gradients(weights: Any, x: Any, y: Any) -> Any:
    return jax.grad(_squared, argnums=(0, 1))(weights, x, y)


@_step(_MLP, _X.T.copy(), _Y.T.copy())
def batch_last(weights: Any, x: Any, y: Any) -> Any:
    return jax.grad(lambda w: jnp.mean((_mlp(w, x.T).T - y) ** 2))(weights)


@_step(_MLP, _X, _LABELS, _floats(5))
def class_weights(weights: Any, x: Any, labels: Any, importance: Any) -> Any:
    chosen = importance[labels] ** 2
    return jax.grad(lambda w: jnp.sum(_losses(_mlp(w, x), labels) * chosen) / jnp.sum(chosen))(
        weights
    )


@_step(_MLP, _X, _Y)
def hessian_product(weights: Any, x: Any, y: Any) -> Any:
    ones = jax.tree.map(jnp.ones_like, weights)
    return jax.jvp(jax.grad(lambda w: _squared(w, x, y)), (weights,), (ones,))[1]


@_step(_MLP, _X, _Y)
def gradient_penalty(weights: Any, x: Any, y: Any) -> Any:
    def loss(weights: Any) -> jax.Array:
        slopes = jax.grad(lambda x: _mlp(weights, x).sum())(x)
        return _squared(weights, x, y) + jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)

    return jax.grad(loss)(weights)


@_step(_MLP, _X, _Y)
def clipped_each(weights: Any, x: Any, y: Any) -> Any:
    each = jax.vmap(lambda x, y: jax.grad(_squared)(weights, x, y))(x, y)
    squares = [jnp.square(g).reshape(BATCH, -1).sum(-1) for g in jax.tree.leaves(each)]
    norms = jnp.sqrt(sum(squares))
    scales = jnp.minimum(1, 1 / norms)
    return jax.tree.map(lambda g: jnp.einsum("b,b...->...", scales, g), each), norms


@_step(_MLP, _X, _Y)
def rematerialised(weights: Any, x: Any, y: Any) -> Any:
    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(x @ jnp.exp(w) + b)

    def loss(weights: Any) -> jax.Array:
        x_ = layer(x, weights[0], weights[1])
        x_ = layer(x_, weights[2] @ weights[2].T, weights[1])
        return jnp.mean((x_ @ weights[2] - y) ** 2)

    return jax.grad(loss)(weights)


@_step(_MLP, _X, _Y)
def half_precision(weights: Any, x: Any, y: Any) -> Any:
    def loss(weights: Any) -> jax.Array:
        cast = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
        return jnp.mean((_mlp(cast, x.astype(jnp.bfloat16)).astype(jnp.float32) - y) ** 2)

    return jax.grad(loss)(weights)


@_step(_MLP, _X, _Y, np.array([3, 4], np.uint32))
def dropout(weights: Any, x: Any, y: Any, key: Any) -> Any:
    def loss(weights: Any) -> jax.Array:
        hidden = jnp.tanh(x @ weights[0] + weights[1])
        kept = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.5, hidden.shape)
        return jnp.mean(((hidden * kept) @ weights[2] - y) ** 2)

    return jax.grad(loss)(weights)


@_step(_DECODER, _TOKENS, _NEXT)
def preferences(weights: Any, chosen: Any, rejected: Any) -> Any:
    """Two batches in one forward pass, whose outcomes are compared sample by sample."""
    both = jnp.concatenate([chosen, rejected])

    def margins(weights: Any) -> jax.Array:
        scores = -_losses(_logits(weights, both)[:, :-1], both[:, 1:]).sum(-1)
        return scores[:BATCH] - scores[BATCH:]

    def loss(weights: Any) -> tuple[jax.Array, jax.Array]:
        found = margins(weights)
        return -jax.nn.log_sigmoid(found).mean(), (found > 0).mean()

    return jax.value_and_grad(loss, has_aux=True)(weights)


@_step(_MLP, _X, _Y)
def normalised_inputs(weights: Any, x: Any, y: Any) -> Any:
    return jax.grad(_squared)(weights, (x - x.mean(0)) / x.std(0), y)


@_step({"kernel": _floats(3, 3, 3, 4), "head": _floats(4, 5)}, _floats(BATCH, 8, 8, 3), _LABELS)
def images(weights: Any, x: Any, labels: Any) -> Any:
    def loss(weights: Any) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        convolved = lax.conv_general_dilated(
            x, weights["kernel"], (1, 1), "SAME", dimension_numbers=numbers
        )
        pooled = lax.reduce_window(
            jax.nn.relu(convolved), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
        return _losses(pooled.mean((1, 2)) @ weights["head"], labels).mean()

    return jax.grad(loss)(weights)


@_step(_MLP, _X, _Y)
def orthogonalised(weights: Any, x: Any, y: Any) -> Any:
    """An optimizer that multiplies matrices, with more work than the model."""

    def update(g: jax.Array) -> jax.Array:
        if g.ndim == 2:
            g = g / jnp.linalg.norm(g)
            for _ in range(3):
                g = 1.5 * g - 0.5 * g @ (g.T @ g)
        return g

    return jax.tree.map(update, jax.grad(_squared)(weights, x, y))


@_step(_MLP, _floats(2, BATCH, 6), _floats(2, BATCH, 5))
def accumulated_already(weights: Any, x: Any, y: Any) -> Any:
    def add(total: Any, batch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.grad(_squared)(weights, *batch)), None

    return lax.scan(add, jax.tree.map(jnp.zeros_like, weights), (x, y))[0]


@_step(_MLP, _X, _Y, np.float32(0.5), np.int32(3))
def skipped_updates(weights: Any, x: Any, y: Any, rate: Any, number: Any) -> Any:
    loss, gradients = jax.value_and_grad(_squared)(weights, x, y)
    rate, finite = rate * jnp.minimum(1.0, number / 10), jnp.isfinite(loss)
    new = jax.tree.map(lambda w, g: jnp.where(finite, w - rate * g, w), weights, gradients)
    return new, number + 1, lax.cond(loss > 1, lambda: loss * 2, lambda: loss)


@_step(_MLP, _X)
def reductions(weights: Any, x: Any) -> Any:
    y = _mlp(weights, x)
    return y.max(0), y.min(), jnp.prod(y / 3, 0), y.var(0), jnp.sort(y[:, 0]), jnp.linalg.norm(y)


@_step(_MLP, _X, _Y, refused="dot_general")
def batch_norm(weights: Any, x: Any, y: Any) -> Any:
    def loss(weights: Any) -> jax.Array:
        hidden = x @ weights[0]
        hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-5)
        return jnp.mean((jnp.tanh(hidden) @ weights[2] - y) ** 2)

    return jax.grad(loss)(weights)


@_step(_MLP, _X, refused="dot_general")
def contrastive(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> jax.Array:
        hidden = _mlp(weights, x)
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(hidden @ hidden.T)))

    return jax.grad(loss)(weights)


@_step(_MLP, _X, _Y, refused="sort")
def hardest_samples(weights: Any, x: Any, y: Any) -> Any:
    def loss(weights: Any) -> jax.Array:
        return lax.top_k(jnp.mean((_mlp(weights, x) - y) ** 2, -1), 3)[0].mean()

    return jax.grad(loss)(weights)


@_step(
    _MLP,
    _X[:7],
    _Y[:7],
    refused="4 microbatches do not divide the batch: x (argument 3) and y (argument 4) have 7 "
    "rows; take 7 microbatches, or a batch of a multiple of 4",
)
def seven_samples(weights: Any, x: Any, y: Any) -> Any:
    return jax.grad(_squared)(weights, x, y)


@_step(_floats(6, 4), _X, _floats(BATCH) ** 2, _floats(BATCH))
def proximal_policy(w: Any, x: Any, mask: Any, advantages: Any) -> Any:
    """PPO: advantages are normalised over all samples, which no gradient passes through."""
    mean = jnp.sum(advantages * mask) / jnp.sum(mask)
    spread = jnp.sum((advantages - mean) ** 2 * mask) / jnp.sum(mask)
    normal = (advantages - mean) * lax.rsqrt(spread + 1e-8)

    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w)[:, 0] * normal * mask) / jnp.sum(mask)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - gradient, value


@_step(_floats(8, 8), _floats(8, 8), _floats(8, 8), refused="stablehlo.reduce needs all samples")
def free_bits(encoder: Any, decoder: Any, x: Any) -> Any:
    """A VAE with a batch of the type of its weights: the maximum is of the mean of all samples."""

    def loss(weights: Any) -> jax.Array:
        z = jnp.tanh(x @ weights[0])
        divergence = 0.5 * jnp.sum(z**2, axis=-1)
        return jnp.mean((z @ weights[1] - x) ** 2) + jnp.maximum(jnp.mean(divergence), 0.1)

    value, gradients = jax.value_and_grad(loss)((encoder, decoder))
    return jax.tree.map(lambda w, g: w - 0.1 * g, (encoder, decoder), gradients), value
