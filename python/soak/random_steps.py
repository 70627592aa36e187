"""Random training steps of one device: layers in a scan or unrolled, with branches, inner loops,
random numbers, gradients of the user's own, and parts that jax.checkpoint recomputes already."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

ROWS, WIDTH = 2, 3
type _Layer = Callable[[jax.Array, Any], jax.Array]


@jax.custom_vjp
def bent(x: jax.Array) -> jax.Array:
    """A square whose gradient is the user's own."""
    return x * x


def _bent_forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x * x, (x, jnp.tanh(x))


def _bent_backward(kept: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array]:
    x, tanh = kept
    return (d * (x + tanh),)


bent.defvjp(_bent_forward, _bent_backward)

_POLICIES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")


def random_step(seed: int) -> export.Exported:
    """A loss and its gradients."""
    draw = random.Random(seed)
    count = draw.randint(2, 4)
    steps = [_step(draw) for _ in range(draw.randint(2, 5))]
    is_scan, has_keys = draw.random() < 0.6, draw.random() < 0.4
    policy = draw.choice([None, None, "", *_POLICIES])
    microbatches = draw.choice([1, 1, 1, 2])

    def layer(x: jax.Array, weights: Any) -> jax.Array:
        for step in steps:
            x = step(x, weights)
        if has_keys:
            x = x * jax.random.bernoulli(weights["key"], 0.7, x.shape)
        return x + 0.5

    chosen: _Layer = layer
    if policy is not None:
        rule = getattr(jax.checkpoint_policies, policy) if policy else None
        chosen = jax.checkpoint(layer, policy=rule, prevent_cse=draw.random() < 0.5)
    is_reverse, unroll = draw.random() < 0.3, draw.choice([1, 1, 2])

    def loss(parameters: Any, keys: jax.Array, x: jax.Array) -> jax.Array:
        stacked = {**parameters, "key": keys}
        if is_scan:
            x, _ = lax.scan(
                lambda x, w: (chosen(x, w), None), x, stacked, reverse=is_reverse, unroll=unroll
            )
        else:
            for number in range(count):
                x = chosen(x, jax.tree.map(lambda leaf, n=number: leaf[n], stacked))
        return jnp.tanh(x).sum()

    def step(parameters: Any, seed: jax.Array, x: jax.Array) -> Any:
        keys = jax.random.split(
            jax.random.wrap_key_data(lax.bitcast_convert_type(seed, jnp.uint32)), count
        )
        gradient = jax.value_and_grad(loss)
        if microbatches == 1:
            return gradient(parameters, keys, x[0])

        def add(sums: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, gradient(parameters, keys, part)), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, parameters))
        return lax.scan(add, zeros, x)[0]

    parameters = {
        "matrix": jax.ShapeDtypeStruct((count, WIDTH, WIDTH), jnp.float32),
        "vector": jax.ShapeDtypeStruct((count, WIDTH), jnp.float32),
    }
    arguments = (
        parameters,
        jax.ShapeDtypeStruct((2,), jnp.int32),
        jax.ShapeDtypeStruct((microbatches, ROWS, WIDTH), jnp.float32),
    )
    return export.export(jax.jit(step), platforms=("cpu",))(*arguments)


def _step(draw: random.Random) -> _Layer:
    """A part of a layer."""
    kinds: list[_Layer] = [
        lambda x, w: x @ w["matrix"],
        lambda x, w: jnp.tanh(x @ w["matrix"]) * x,
        lambda x, w: jnp.sin(x) + w["vector"],
        lambda x, w: x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1.0) * w["vector"],
        lambda x, w: jax.nn.softmax(x @ x.T) @ x,
        lambda x, w: bent(x) @ w["matrix"],
        lambda x, w: lax.cond(x.sum() > 0, lambda y: y @ w["matrix"], jnp.cos, x),
        lambda x, w: lax.scan(lambda c, r: (c * 0.5 + r, jnp.sin(c)), x[0], x)[1],
        lambda x, w: lax.fori_loop(0, 2, lambda _, y: jnp.tanh(y @ w["matrix"]), x),
        lambda x, w: jnp.sort(x, axis=-1),
        lambda x, w: jnp.where(x > 0, x, 0.1 * x),
        lambda x, w: jnp.take(x, jnp.array([1, 0]), axis=0) + x,
    ]
    return draw.choice(kinds)
