"""Training steps of GPipe pipelines as they are written by hand, in a `jax.shard_map` that checks
nothing: around it, or inside of it, the gradients are taken."""

from __future__ import annotations

from typing import Any

from gpipe_programs import (  # first: sets up the devices
    STAGE,
    Array,
    Case,
    Sizes,
    batch,
    dense,
    ring,
    weights_of,
)

import jax  # isort: skip
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

RATE = 0.1


def by_hand(
    sizes: Sizes,
    *,
    inside: bool = False,
    data: str = "",
    explicit: bool = False,
    masked: bool = True,
    sharded: bool = False,
) -> Case:
    """One layer a stage, and the weights after a step of gradient descent.

    `inside`: `jax.value_and_grad` stands in the shard_map. `data`: a manual axis for the samples
    stands "outer" or "inner" to that of the stages. `explicit`: the axes of the mesh are explicit.
    `masked`: the last rank's outputs go to all ranks, or a slice of what all have left is taken.
    `sharded`: there are two layers a stage, one with each device along the axis for the samples.
    """
    count, samples = sizes.stages, sizes.microbatches
    names = {"": (STAGE,), "outer": ("data", STAGE), "inner": (STAGE, "data")}[data]
    extents = tuple(count if name == STAGE else 2 for name in names)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    on = jax.make_mesh(extents, names, axis_types=(kind,) * len(names))
    weights, x = (
        weights_of("dense", count * (1 + sharded)),
        batch(sizes).reshape(samples, sizes.samples, -1),
    )

    def pipeline(w: Array, x: Array) -> Array:
        rank = lax.axis_index(STAGE)
        if sharded:
            w = lax.all_gather(w, "data", axis=0, tiled=True)

        def tick(arriving: Array, t: Array) -> tuple[Array, Array]:
            y = jnp.where(rank == 0, x[jnp.minimum(t, samples - 1)], arriving)
            for own in w:
                y = dense(y, own)
            return lax.ppermute(y, STAGE, ring(count)), y

        return lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(samples + count - 1))[1][count - 1 :]

    def outputs(w: Array, x: Array) -> Array:
        y = pipeline(w, x)
        if not masked:
            return y[None]
        return lax.psum(jnp.where(lax.axis_index(STAGE) == count - 1, y, 0.0), STAGE)

    def local_step(w: Array, x: Array) -> Any:
        def loss(w: Array) -> Array:
            own = jnp.square(pipeline(w, x)).mean()
            return jnp.where(lax.axis_index(STAGE) == count - 1, own, 0.0)

        value, gradient = jax.value_and_grad(loss)(w)
        value = lax.psum(value, STAGE)
        if data:
            value, gradient = lax.pmean((value, gradient), "data")
        return value, w - RATE * gradient

    inner = P(None, "data") if data else P()
    layers = P((STAGE, "data")) if sharded else P(STAGE)
    outer = inner if masked else P(STAGE, *inner)
    leaving: Any = (P(), P(STAGE)) if inside else outer
    mapped = jax.shard_map(
        local_step if inside else outputs,
        mesh=on,
        in_specs=(layers, inner),
        out_specs=leaving,
        check_vma=False,
    )

    def step(w: Array, x: Array) -> Any:
        def loss(w: Array) -> Array:
            y = mapped(w, x)
            return jnp.square(y if masked else y[-1]).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return value, w - RATE * gradient

    def plain(w: Array, x: Array) -> Any:
        def loss(w: Array) -> Array:
            return jnp.square(lax.scan(lambda h, own: (dense(h, own), None), x, w)[0]).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return value, w - RATE * gradient

    kinds = [
        jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(on, spec))
        for value, spec in ((weights, layers), (x, inner))
    ]
    made = export.export(jax.jit(mapped if inside else step))(*kinds)
    return Case(made, plain, (weights, x))
