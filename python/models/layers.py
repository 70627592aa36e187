"""What several families of models compute: norms, rotary positions, attention, losses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import lax

MASKED = -1e30


def rms_norm(hidden: jax.Array, scale: jax.Array) -> jax.Array:
    """Over the last axis, computed in float32."""
    wide = hidden.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return (normed * scale).astype(hidden.dtype)


def layer_norm(hidden: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Over the last axis, computed in float32."""
    wide = hidden.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    return (normed * scale + bias).astype(hidden.dtype)


def rotation(length: int, head_size: int, base: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles, each (length, 1, head size / 2)."""
    frequencies = base ** (-jnp.arange(0, head_size, 2) / head_size)
    angles = jnp.arange(length)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotated(heads: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary positions of (batch, length, heads, head size), in two halves as Llama has them."""
    cosine, sine = angles
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, axis=-1).astype(heads.dtype)


def causal_mask(length: int) -> jax.Array:
    """(length, length), True where a query may look at a key."""
    return jnp.arange(length)[:, None] >= jnp.arange(length)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Softmax attention; arrays are (batch, length, heads, head size).

    Query heads may be a multiple of the key and value heads. `mask` and `bias` broadcast to
    (batch, heads, queries, keys).
    """
    batch, length, heads, size = query.shape
    groups = key.shape[2]
    query = query.reshape(batch, length, groups, heads // groups, size)
    scores = jnp.einsum("bqgrh,bkgh->bgrqk", query, key).astype(jnp.float32)
    scores *= size**-0.5 if scale is None else scale
    if bias is not None:
        scores += bias.reshape(-1, groups, heads // groups, *bias.shape[-2:])
    if mask is not None:
        scores = jnp.where(mask.reshape(-1, 1, 1, *mask.shape[-2:]), scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bgrqk,bkgh->bqgrh", weights, value).reshape(batch, length, heads, size)


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each token but the first, given those before it."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1].astype(jnp.float32), tokens[:, 1:]
    ).mean()


def classification(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy with label smoothing, and the accuracy."""
    classes = logits.shape[-1]
    wanted = optax.smooth_labels(jax.nn.one_hot(labels, classes), 0.1)
    loss = optax.softmax_cross_entropy(logits.astype(jnp.float32), wanted).mean()
    return loss, {"accuracy": (logits.argmax(-1) == labels).mean()}
