"""Small programs, of large shapes, that have one thing to be done about them, or nearly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models.devices import mesh

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact

Argument = tuple[tuple[int, ...], Any, P]
LAYERS, WIDTH, HIDDEN, BATCH, LENGTH = 4, 2048, 8192, 64, 512


def exported(
    step: Callable[..., Any],
    *arguments: Argument,
    out: Any = None,
    donate: tuple[int, ...] = (),
    **axes: int,
) -> Artifact:
    """A step on arguments of these shapes, types and specs, for a mesh of these axes."""
    where = mesh(**axes)
    specs = [
        jax.ShapeDtypeStruct(shape, type_, sharding=NamedSharding(where, spec))
        for shape, type_, spec in arguments
    ]
    more = (
        {}
        if out is None
        else {"out_shardings": jax.tree.map(lambda s: NamedSharding(where, s), out)}
    )
    with jax.sharding.set_mesh(where):
        jitted = jax.jit(step, donate_argnums=donate, **more)
        return artifact.from_exported(export.export(jitted, platforms=["cuda"])(*specs))


def layer_scan(*, constrained: bool) -> Artifact:
    """Layers in a scan, weights and batch divided over one axis: FSDP as people begin with it.

    The positions are divided by features, as weights are, and the layers follow them, not the
    batch, unless told so.
    """

    def loss(weights: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
        embedding, positions, up, down = weights
        x = embedding[tokens] + positions

        def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            if constrained:
                x = lax.with_sharding_constraint(x, P("data", None, None))
            return x + jnp.tanh(x @ w[0]) @ w[1], None

        y, _ = lax.scan(layer, x, (up, down))
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def step(weights: tuple[jax.Array, ...], tokens: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, tokens)
        return *(w - g * 1e-3 for w, g in zip(weights, gradients, strict=True)), value

    specs = P("data"), P(None, "data"), P(None, "data", None), P(None, None, "data")
    shapes = (
        (32000, WIDTH),
        (LENGTH, WIDTH),
        (LAYERS, WIDTH, HIDDEN),
        (LAYERS, HIDDEN, WIDTH),
    )
    weights = [(shape, jnp.bfloat16, spec) for shape, spec in zip(shapes, specs, strict=True)]

    def flat(*arguments: jax.Array) -> Any:
        return step(arguments[:-1], arguments[-1])

    tokens = (BATCH, LENGTH), jnp.int32, P("data", None)
    return exported(flat, *weights, tokens, out=(*specs, P()), donate=(0, 1, 2, 3), data=8)


def microbatches(*, reduced_each: bool) -> Artifact:
    """Gradients accumulated over microbatches, and reduced in each of them or once."""

    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        # Of a value that all devices have alike, jax reduces the gradient by itself.
        mine = w if reduced_each else lax.pcast(w, "data", to="varying")

        def one(total: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.grad(lambda w: jnp.sum((part @ w) ** 2))(mine), None

        total, _ = lax.scan(one, jnp.zeros_like(mine), x)
        return w - (total if reduced_each else lax.psum(total, "data"))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.shard_map(local, in_specs=(P(), P(None, "data")), out_specs=P())(w, x)

    return exported(
        step,
        ((WIDTH, WIDTH), jnp.float32, P()),
        ((8, BATCH * LENGTH, WIDTH), jnp.float32, P(None, "data")),
        donate=(0,),
        data=8,
    )


def gathered_weight(*, sent: str) -> Artifact:
    """A bf16 product with a gathered weight, sent as f32, or as the bf16 that it becomes."""

    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        if sent == "bf16":
            w = w.astype(jnp.bfloat16)
        whole = lax.all_gather(w, "data", tiled=True)
        return x @ whole.astype(jnp.bfloat16)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.shard_map(local, in_specs=P("data"), out_specs=P("data"))(w, x)

    shapes = ((WIDTH, HIDDEN), jnp.float32, P("data")), ((8 * 512, WIDTH), jnp.bfloat16, P("data"))
    return exported(step, *shapes, data=8)
