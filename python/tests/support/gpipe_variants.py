"""Further pipelines: with several chunks of layers on a stage, with values that travel along, with
an embedding and a loss; and training steps of any; see `gpipe_programs`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import gpipe_programs  # first: sets up the devices
from gpipe_programs import (
    STAGE,
    USUAL,
    WIDTH,
    Array,
    Case,
    Sizes,
    batch,
    dense,
    dense_weights,
    exported,
    of_last,
    ring,
    scanned,
    shifted,
    staged,
    varying,
)
from models.devices import mesh

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

TWICE, TWICE_ON_FOUR = Sizes(2, 2, 4, 2, 2), Sizes(4, 2, 4, 2, 2)


def circular(sizes: Sizes = TWICE, *, start: float = np.nan) -> Case:
    """Several chunks of layers on each stage: microbatches go around the ring as many times.

    What comes back to the first stage waits in a buffer until its turn. `start`: what ramp-up
    computes with.
    """
    weights, x = dense_weights(sizes.layers), batch(sizes)
    stages, count = sizes.stages, sizes.microbatches
    ticks = count * sizes.chunks + stages - 1

    def local(weights: Array, x: Array) -> Array:
        rank = lax.axis_index(STAGE)

        def tick(carry: Any, t: Array) -> Any:
            arriving, waiting, outputs = carry
            own = t - rank
            number, chunk = own % count, jnp.clip(own // count, 0, sizes.chunks - 1)
            back = (t - stages) % count
            waiting = jnp.where(
                t >= stages, lax.dynamic_update_index_in_dim(waiting, arriving, back, 0), waiting
            )
            fed = jnp.where(t < count, x[number], waiting[number])
            y = scanned(dense, weights[chunk, 0], jnp.where(rank == 0, fed, arriving))
            done = (rank == stages - 1) & (own >= count * (sizes.chunks - 1))
            written = lax.dynamic_update_index_in_dim(outputs, y, number, 0)
            outputs = jnp.where(done, written, outputs)
            return (lax.ppermute(y, STAGE, ring(stages)), waiting, outputs), None

        first = varying(jnp.full_like(x[0], start))
        waiting, outputs = varying(jnp.full_like(x, start)), varying(jnp.zeros_like(x))
        return of_last(lax.scan(tick, (first, waiting, outputs), jnp.arange(ticks))[0][2])

    def whole(weights: Array, x: Array) -> Array:
        weights = weights.reshape(sizes.chunks, stages, sizes.each, WIDTH, WIDTH)
        mapped = staged(local, stages, P(None, STAGE), P())
        return mapped(weights, x.reshape(count, sizes.samples, WIDTH)).reshape(x.shape)

    case = exported(whole, mesh(stage=stages), (weights, x), (P(), P()))
    return Case(case, partial(scanned, dense), (weights, x))


def gathered(sizes: Sizes = TWICE_ON_FOUR, *, start: float = np.nan) -> Case:
    """The same as one program: each stage picks its chunk of the weights by the tick."""
    weights, x = dense_weights(sizes.layers), batch(sizes)
    stages, count = sizes.stages, sizes.microbatches
    ticks = count * sizes.chunks + stages - 1

    def whole(weights: Array, x: Array) -> Array:
        weights = weights.reshape(sizes.chunks, stages, sizes.each, WIDTH, WIDTH)
        x = x.reshape(count, sizes.samples, WIDTH)

        def tick(carry: Any, t: Array) -> Any:
            state, waiting, outputs = carry
            chunks = jnp.clip((t - jnp.arange(stages)) // count, 0, sizes.chunks - 1)
            back = (t - stages) % count
            waiting = jnp.where(
                t >= stages, lax.dynamic_update_index_in_dim(waiting, state[-1], back, 0), waiting
            )
            fed = jnp.where(t < count, x[t % count], waiting[t % count])
            state = jnp.concatenate([fed[None], state[:-1]])
            own = jax.vmap(lambda w, chunk: w[chunk], in_axes=(1, 0))(weights, chunks)
            state = jax.vmap(partial(scanned, dense))(own, state)
            place = (t - stages + 1) % count
            outputs = lax.dynamic_update_index_in_dim(outputs, state[-1], place, 0)
            return (state, waiting, outputs), None

        first = jnp.full((stages, *x.shape[1:]), start, x.dtype)
        carry = (first, jnp.full_like(x, start), jnp.zeros_like(x))
        return lax.scan(tick, carry, jnp.arange(ticks))[0][2].reshape(-1, WIDTH)

    case = exported(whole, mesh(stage=stages), (weights, x), (P(), P()))
    return Case(case, partial(scanned, dense), (weights, x))


def accompanied(sizes: Sizes = USUAL, *, travels: bool = True, numbered: bool = False) -> Case:
    """Each layer takes a scale of the sample, which travels with it or is looked up by the tick.

    `numbered`: a layer computes with its number too.
    """
    weights, x = dense_weights(sizes.layers), batch(sizes)
    scales = np.random.default_rng(4).uniform(size=(sizes.batch, 1)).astype(np.float32)
    stages, last = sizes.stages, sizes.stages - 1

    def layers(weights: Array, h: Array, scale: Array, first: Any) -> Array:
        def layer(h: Array, given: Any) -> Any:
            w, number = given
            mixed = dense(h, w) * scale
            return mixed / (1.0 + number) if numbered else mixed, None

        numbers = first + jnp.arange(weights.shape[0], dtype=jnp.float32)
        return lax.scan(layer, h, (weights, numbers))[0]

    def local(weights: Array, x: Array, scales: Array) -> Array:
        rank = lax.axis_index(STAGE)
        first = (rank * sizes.each).astype(jnp.float32)

        def tick(carry: Any, t: Array) -> Any:
            h, scale = carry
            entering = jnp.minimum(t, sizes.microbatches - 1)
            own = jnp.clip(t - rank, 0, sizes.microbatches - 1)
            h = jnp.where(rank == 0, x[entering], h)
            scale = jnp.where(rank == 0, scales[entering], scale) if travels else scales[own]
            y = layers(weights, h, scale, first)
            return jax.tree.map(lambda v: lax.ppermute(v, STAGE, ring(stages)), (y, scale)), y

        start = varying(jnp.full_like(x[0], jnp.nan)), varying(jnp.full_like(scales[0], jnp.nan))
        return of_last(lax.scan(tick, start, jnp.arange(sizes.microbatches + last))[1][last:])

    def whole(weights: Array, x: Array, scales: Array) -> Array:
        apart = [v.reshape(sizes.microbatches, sizes.samples, -1) for v in (x, scales)]
        mapped = staged(local, stages, P(STAGE), P(), P())
        return mapped(weights, *apart).reshape(x.shape)

    arguments = (weights, x, scales)
    case = exported(whole, mesh(stage=stages), arguments, (P(STAGE), P(), P()))
    return Case(case, lambda w, h, scale: layers(w, h, scale, jnp.float32(0)), arguments)


def language(sizes: Sizes = USUAL, *, loss: bool = False) -> Case:
    """Tokens are embedded on the first stage, and the last computes logits, within the tick.

    `loss`: of the logits the last stage computes a mean, which leaves by a masked sum.
    """
    random, words = np.random.default_rng(5), 10
    weights = dense_weights(sizes.layers)
    table = random.normal(size=(words, WIDTH)).astype(np.float32)
    tokens = random.integers(words, size=(sizes.batch, 3)).astype(np.int32)
    stages, last = sizes.stages, sizes.stages - 1

    def local(weights: Array, table: Array, tokens: Array) -> Array:
        rank = lax.axis_index(STAGE)

        def tick(arriving: Array, t: Array) -> Any:
            taken = tokens[jnp.minimum(t, sizes.microbatches - 1)]
            h = jnp.where(rank == 0, table[taken], arriving)
            y = scanned(dense, weights, h)
            logits = jnp.where(rank == last, y @ table.T, 0)
            return lax.ppermute(y, STAGE, ring(stages)), logits

        start = varying(jnp.full((sizes.samples, 3, WIDTH), jnp.nan, np.float32))
        logits = lax.scan(tick, start, jnp.arange(sizes.microbatches + last))[1][last:]
        return of_last(jax.nn.logsumexp(logits, -1).mean() if loss else logits)

    def whole(weights: Array, table: Array, tokens: Array) -> Array:
        apart = tokens.reshape(sizes.microbatches, sizes.samples, 3)
        mapped = staged(local, stages, P(STAGE), P(), P())
        found = mapped(weights, table, apart)
        return found if loss else found.reshape(-1, 3, words)

    def plain(weights: Array, table: Array, tokens: Array) -> Array:
        logits = scanned(dense, weights, table[tokens]) @ table.T
        return jax.nn.logsumexp(logits, -1).mean() if loss else logits

    arguments = (weights, table, tokens)
    case = exported(whole, mesh(stage=stages), arguments, (P(STAGE), P(), P()))
    return Case(case, plain, arguments)


def switched(sizes: Sizes = USUAL) -> Case:
    """Stages choose by `cond` and `switch` what they take and what they leave."""
    weights, x = dense_weights(sizes.layers), batch(sizes)
    stages, last = sizes.stages, sizes.stages - 1

    def local(weights: Array, x: Array) -> Array:
        rank = lax.axis_index(STAGE)

        def tick(carry: Any, t: Array) -> Any:
            arriving, outputs = carry
            entering = jnp.minimum(t, sizes.microbatches - 1)
            kind = jnp.where(rank == 0, 0, 1)
            fed = varying(x)
            h = lax.switch(kind, [lambda: fed[entering], lambda: arriving])
            y = scanned(dense, weights, h)
            place = jnp.maximum(t - last, 0)
            outputs = lax.cond(
                (rank == last) & (t >= last),
                lambda: lax.dynamic_update_index_in_dim(outputs, y, place, 0),
                lambda: outputs,
            )
            return (lax.ppermute(y, STAGE, ring(stages)), outputs), None

        start = (varying(jnp.full_like(x[0], jnp.nan)), varying(jnp.zeros_like(x)))
        outputs = lax.scan(tick, start, jnp.arange(sizes.microbatches + last))[0][1]
        return lax.all_gather(outputs, STAGE)[last]

    def whole(weights: Array, x: Array) -> Array:
        mapped = staged(local, stages, P(STAGE), P(), check=False)
        return mapped(weights, x.reshape(sizes.microbatches, sizes.samples, WIDTH)).reshape(x.shape)

    case = exported(whole, mesh(stage=stages), (weights, x), (P(STAGE), P()))
    return Case(case, partial(scanned, dense), (weights, x))


def centred(sizes: Sizes = USUAL, *, start: float = np.nan) -> Case:
    """Layers that subtract the mean over the samples of a microbatch."""
    weights, x = dense_weights(sizes.layers), batch(sizes)

    def layer(h: Array, w: Array) -> Array:
        return dense(h - h.mean(0), w)

    case = shifted(sizes, run=layer, start=start)

    def plain(weights: Array, x: Array) -> Array:
        apart = x.reshape(sizes.microbatches, sizes.samples, WIDTH)
        return jnp.concatenate([scanned(layer, weights, h) for h in apart])

    return Case(case.exported, plain, (weights, x))


def multiplied(sizes: Sizes = USUAL) -> Case:
    """A pipeline whose outputs are masked by a product with zeros and ones."""
    return shifted(sizes, leave="product")


SLOTS = Sizes(4, 2, 8, 2)  # two microbatches for each stage


def streamed(sizes: Sizes = SLOTS) -> Case:
    """Microbatches lie with the stages, as MaxText's do: what is in a stage's slot moves one stage
    on when that slot is read, so that the first stage finds all of them, and what leaves the last
    stage takes the place that is free then. All stages are one program, but for that."""
    weights, x = dense_weights(sizes.layers), batch(sizes)
    stages, slots = sizes.stages, sizes.microbatches // sizes.stages
    on, of_stages = mesh(stage=stages), P(STAGE)

    def moved_on(state: Array) -> Array:
        return lax.ppermute(state, STAGE, ring(stages))

    def streamed_on(buffer: Array, slot: Array, state: Array) -> Array:
        taken = lax.dynamic_index_in_dim(buffer, slot, 1, keepdims=False)
        nearer = lax.ppermute(taken, STAGE, [(b, a) for a, b in ring(stages)])
        number = lax.axis_index(STAGE)
        kept = jnp.where(number == stages - 1, state, nearer)
        return lax.dynamic_update_index_in_dim(buffer, kept, slot, 1)

    shift = jax.shard_map(moved_on, mesh=on, in_specs=of_stages, out_specs=of_stages)
    stream = jax.shard_map(
        streamed_on, mesh=on, in_specs=(of_stages, P(), of_stages), out_specs=of_stages
    )

    def whole(weights: Any, x: Array) -> Array:
        weights = weights.reshape(stages, sizes.each, WIDTH, WIDTH)
        buffer = x.reshape(stages, slots, sizes.samples, WIDTH)
        number = lax.broadcasted_iota(jnp.int32, (stages, sizes.samples, WIDTH), 0)

        def tick(carry: Any, t: Array) -> Any:
            buffer, state = carry
            taken = lax.dynamic_index_in_dim(buffer, t % slots, 1, keepdims=False)
            state = jnp.where(number == 0, taken, state)
            done = jax.vmap(partial(scanned, dense))(weights, state)
            return (stream(buffer, t % slots, done), shift(done)), None

        first = buffer, jnp.zeros((stages, sizes.samples, WIDTH), x.dtype)
        (buffer, _), _ = lax.scan(tick, first, jnp.arange(sizes.microbatches + stages - 1))
        order = (np.arange(slots) + stages - 1) % slots
        return buffer[:, order].reshape(x.shape)

    case = exported(whole, on, (weights, x), (P(STAGE), P()))
    return Case(case, partial(scanned, dense), (weights, x))


STORED, AT_ONCE = Sizes(4, 2, 8, 2, 2), Sizes(4, 2, 4, 2, 2)


def rotated(sizes: Sizes = STORED) -> Case:
    """Microbatches lie with the stages, and go around several times, as MaxText's do: each stage
    gathers its chunk of the weights by the tick. What leaves the last stage enters the first one at
    once, or waits in a storage of its own, one tick later, where there are more microbatches than
    stages."""
    weights, x = dense_weights(sizes.layers), batch(sizes)
    stages, count = sizes.stages, sizes.microbatches
    slots, waits = count // stages, count > stages
    on, of_stages = mesh(stage=stages), P(STAGE)

    def on_stages(function: Any, *specs: Any) -> Any:
        return jax.shard_map(function, mesh=on, in_specs=specs, out_specs=of_stages)

    def around(state: Array) -> Array:
        return lax.ppermute(state, STAGE, ring(stages))

    def onwards(state: Array) -> Array:
        moved = around(state)
        return jnp.where(lax.axis_index(STAGE) == 0, jnp.zeros_like(moved), moved)

    def streamed_on(buffer: Array, taken: Array, state: Array, slot: Array) -> Array:
        nearer = lax.ppermute(taken, STAGE, [(b, a) for a, b in ring(stages)])
        kept = jnp.where(lax.axis_index(STAGE) == stages - 1, state, nearer)
        return lax.dynamic_update_slice_in_dim(buffer, kept[:, None], slot, axis=1)

    rotate, shift = on_stages(around, of_stages), on_stages(onwards, of_stages)
    stream = on_stages(streamed_on, of_stages, of_stages, of_stages, P())

    def whole(weights: Any, x: Array) -> Array:
        weights = weights.reshape(sizes.chunks, stages, sizes.each, WIDTH, WIDTH)
        buffer = x.reshape(stages, slots, sizes.samples, WIDTH)
        number = lax.broadcasted_iota(jnp.int32, (stages, sizes.samples, WIDTH), 0)

        def tick(carry: Any, t: Array) -> Any:
            buffer, state, storage, mover = carry
            taken = buffer[:, t % slots]
            back = storage[:, t % count] if waits else state
            state = jnp.where(number == 0, jnp.where(t < count, taken, back), state)
            chunks = jnp.maximum(t - jnp.arange(stages), 0) // count
            own = jax.vmap(
                lambda w, chunk: lax.dynamic_slice_in_dim(w, chunk, 1, 0)[0], in_axes=(1, 0)
            )(weights, chunks)
            done = jax.vmap(partial(scanned, dense))(own, state)
            buffer = stream(buffer, taken, done, t % slots)
            if waits:
                place = (t - stages) % count
                storage = lax.dynamic_update_slice_in_dim(storage, rotate(mover)[:, None], place, 1)
            return (buffer, (shift if waits else rotate)(done), storage, done), None

        first = jnp.zeros((stages, sizes.samples, WIDTH), x.dtype)
        storage = jnp.zeros((stages, count if waits else 1, sizes.samples, WIDTH), x.dtype)
        ticks = jnp.arange(count * sizes.chunks + stages - 1)
        (buffer, *_), _ = lax.scan(tick, (buffer, first, storage, first), ticks)
        order = (np.arange(slots) + count * (sizes.chunks - 1) + stages - 1) % slots
        return buffer[:, order].reshape(x.shape)

    case = exported(whole, on, (weights, x), (P(), P()))
    return Case(case, partial(scanned, dense), (weights, x))


def trained(build: Callable[..., Case], *args: Any, inputs: bool = False, **options: Any) -> Case:
    """The step of a pipeline, with the gradients of the weights, and of the samples if asked."""

    def differentiated(function: Callable[..., Any]) -> Callable[..., Any]:
        def loss(weights: Any, *rest: Any) -> Any:
            return (function(weights, *rest) ** 2).mean()

        return jax.value_and_grad(loss, argnums=(0, 1) if inputs else 0)

    export = exported

    def step(function: Callable[..., Any], *rest: Any) -> Any:
        return export(differentiated(function), *rest)

    own = sys.modules[__name__]
    with (
        mock.patch.object(gpipe_programs, "exported", step),
        mock.patch.object(own, "exported", step),
    ):
        case = build(*args, **options)
    return Case(case.exported, differentiated(case.plain), case.arguments)
