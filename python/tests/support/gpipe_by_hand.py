"""Training steps of GPipe pipelines as they are written by hand, in a `jax.shard_map` that checks
nothing: around it, or inside of it, the gradients are taken."""

from __future__ import annotations

from typing import Any

from gpipe_programs import (  # first: sets up the devices
    LENGTH,
    STAGE,
    WIDTH,
    Array,
    Case,
    Sizes,
    attention,
    batch,
    dense,
    descended,
    descending,
    of_last,
    placed,
    ring,
    scanned,
    weights_of,
)

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def by_hand(
    sizes: Sizes,
    *,
    inside: bool = False,
    data: str = "",
    explicit: bool = False,
    leave: str = "psum",
    sharded: bool = False,
    scored: bool = False,
    cut: str = "",
) -> Case:
    """One layer a stage, and the weights after a step of gradient descent.

    `inside`: `jax.value_and_grad` stands in the shard_map. `data`: a manual axis for the samples
    stands "outer" or "inner" to that of the stages. `explicit`: the axes of the mesh are explicit.
    `leave`: the last rank's outputs go to all ranks by a masked "psum" or an "all_gather" of which
    they are taken, or they are a "slice" of what all ranks leave.
    `scored`: the loss is taken in the shard_map, gradients around it.
    `sharded`: there are two layers a stage, one with each device along the axis for the samples.
    `cut`: a device cuts its samples itself, "in order" or "strided"; else microbatches enter.
    """
    count, samples = sizes.stages, sizes.microbatches
    names = {"": (STAGE,), "outer": ("data", STAGE), "inner": (STAGE, "data")}[data]
    extents = tuple(count if name == STAGE else 2 for name in names)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    on = jax.make_mesh(extents, names, axis_types=(kind,) * len(names))
    weights, x = (
        weights_of("dense", count * (1 + sharded)),
        batch(sizes).reshape(*([-1] if cut else [samples, sizes.samples]), WIDTH),
    )

    def parts(x: Array) -> Array:
        if cut == "strided":
            return x.reshape(-1, samples, WIDTH).swapaxes(0, 1)
        return x.reshape(samples, -1, WIDTH)

    def joined(y: Array) -> Array:
        if cut == "strided":
            y = y.swapaxes(0, 1)
        return y.reshape(-1, WIDTH) if cut else y

    def pipeline(w: Array, x: Array) -> Array:
        rank, x = lax.axis_index(STAGE), parts(x)
        if sharded:
            w = lax.all_gather(w, "data", axis=0, tiled=True)

        def tick(arriving: Array, t: Array) -> tuple[Array, Array]:
            y = jnp.where(rank == 0, x[jnp.minimum(t, samples - 1)], arriving)
            for own in w:
                y = dense(y, own)
            return lax.ppermute(y, STAGE, ring(count)), y

        ticks = jnp.arange(samples + count - 1)
        return joined(lax.scan(tick, jnp.zeros_like(x[0]), ticks)[1][count - 1 :])

    def outputs(w: Array, x: Array) -> Array:
        y = pipeline(w, x)
        if leave == "slice":
            return y[None]
        if leave == "all_gather":
            return lax.all_gather(y, STAGE)[count - 1]
        return of_last(y)

    def score(w: Array, x: Array) -> Array:
        return jnp.square(outputs(w, x)).mean()

    def local_step(w: Array, x: Array) -> Any:
        def loss(w: Array) -> Array:
            own = jnp.square(pipeline(w, x)).mean()
            return jnp.where(lax.axis_index(STAGE) == count - 1, own, 0.0)

        value, gradient = jax.value_and_grad(loss)(w)
        value = lax.psum(value, STAGE)
        if data:
            value, gradient = lax.pmean((value, gradient), "data")
        return value, descended(w, gradient)

    inner = P(*([] if cut else [None]), "data") if data else P()
    layers = P((STAGE, "data")) if sharded else P(STAGE)
    outer = P(STAGE, *inner) if leave == "slice" else inner
    leaving: Any = (P(), P(STAGE)) if inside else P() if scored else outer
    mapped = jax.shard_map(
        local_step if inside else score if scored else outputs,
        mesh=on,
        in_specs=(layers, inner),
        out_specs=leaving,
        check_vma=False,
    )

    def loss(w: Array, x: Array) -> Array:
        y = mapped(w, x)
        if scored:
            return y
        return jnp.square(y[-1] if leave == "slice" else y).mean()

    step = jax.jit(mapped if inside else descending(loss))
    made = export.export(step)(*placed((weights, x), on, (layers, inner)))
    plain = descending(lambda w, x: jnp.square(scanned(dense, w, x)).mean())
    return Case(made, plain, (weights, x))


def decoder_by_hand(*, inside: bool) -> Case:
    """A small language model, with its embedding and its head around the pipeline, that takes
    microbatches of tokens. `inside`: all of it stands in the shard_map, gradients too."""
    stages, each, samples, vocabulary = 4, 2, 6, 12
    on = jax.make_mesh((stages,), (STAGE,), axis_types=(AxisType.Auto,))
    random = np.random.default_rng(3)
    tokens = random.integers(0, vocabulary, (samples, 2, LENGTH)).astype(np.int32)
    parameters = {
        "layers": weights_of("attention", stages * each),
        "embedding": random.normal(size=(vocabulary, WIDTH)).astype(np.float32),
        "head": random.normal(size=(WIDTH, vocabulary)).astype(np.float32),
    }
    specs = {"layers": P(STAGE), "embedding": P(), "head": P()}
    layer = jax.checkpoint(attention)

    def entropy(h: Array, head: Array, tokens: Array) -> Array:
        logits = jax.nn.log_softmax(h @ head)
        return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()

    def pipeline(w: Any, x: Array) -> Array:
        rank = lax.axis_index(STAGE)

        def tick(arriving: Array, t: Array) -> tuple[Array, Array]:
            fed = x[jnp.clip(t, 0, samples - 1)]
            y = scanned(layer, w, jnp.where(rank == 0, fed, arriving))
            return lax.ppermute(y, STAGE, ring(stages, closed=False)), y

        ticks = jnp.arange(samples + stages - 1)
        return lax.scan(tick, jnp.zeros_like(x[0]), ticks)[1][stages - 1 :]

    def outputs(w: Any, x: Array) -> Array:
        return of_last(pipeline(w, x))

    def local_step(p: dict[str, Any], tokens: Array) -> Any:
        def loss(p: dict[str, Any]) -> Array:
            h = pipeline(p["layers"], p["embedding"][tokens])
            is_last = lax.axis_index(STAGE) == stages - 1
            return jnp.where(is_last, entropy(h, p["head"], tokens), 0.0)

        value, gradient = jax.value_and_grad(loss)(p)
        for name in ("embedding", "head"):
            gradient[name] = lax.psum(gradient[name], STAGE)
        return lax.psum(value, STAGE), descended(p, gradient)

    mapped: Any = jax.shard_map(
        local_step if inside else outputs,
        mesh=on,
        in_specs=(specs, P()) if inside else (P(STAGE), P()),
        out_specs=(P(), specs) if inside else P(),
        check_vma=False,
    )

    def stepping(forward: Any) -> Any:
        def loss(p: dict[str, Any], tokens: Array) -> Array:
            h = forward(p["layers"], p["embedding"][tokens])
            return entropy(h, p["head"], tokens)

        return descending(loss)

    step = jax.jit(mapped if inside else stepping(mapped))
    made = export.export(step)(*placed((parameters, tokens), on, (specs, P())))
    return Case(made, stepping(lambda w, x: scanned(layer, w, x)), (parameters, tokens))
