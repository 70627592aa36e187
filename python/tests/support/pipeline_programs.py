"""Pipelines over the microbatches of a loop, one stage a device, as shard_map programs.

Every builder returns a `jax.export.Exported` on a mesh with the axis `stage`; the iteration
numbers of its loop are 0 to N - 1. What is not needed of them is said beside each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpipe_programs import STAGE, Array, of_last, ring, varying  # first: sets up the devices
from models.devices import mesh

import jax  # isort: skip
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import PartitionSpec as P

WIDTH = 4


def forward(
    stages: int,
    microbatches: int,
    iterations: int | None = None,
    output: str = "psum",
    data: int = 1,
) -> export.Exported:
    """GPipe: stage s works on microbatch i - s in iteration i; edge s>s+1 is needed from s on.

    `output`: `psum` of what the last stage computed; `product` of that with zeros and ones, so that
    garbage is needed, if it is NaN; `shards`, of which that of the last stage alone holds it and
    the others zeros; `buffers`: everything any stage computed, garbage too. `data`: the size of
    another axis of the mesh, left to the partitioner.
    """
    steps = microbatches + stages - 1 if iterations is None else iterations

    def local(weights: Array, inputs: Array) -> Array:
        computed = _scan(weights[0], inputs, stages, steps)
        wanted = computed[max(steps - microbatches, 0) :]
        if output == "psum":
            return of_last(wanted)
        last = lax.axis_index(STAGE) == stages - 1
        if output == "product":
            return lax.psum(last.astype(wanted.dtype) * wanted, STAGE)
        return jnp.where(last, wanted, 0) if output == "shards" else computed

    out = P() if output in ("psum", "product") else P(STAGE)
    return _exported(local, stages, microbatches, out, data)


def _scan(weights: Array, inputs: Array, stages: int, steps: int) -> Array:
    stage = lax.axis_index(STAGE)

    def step(arriving: Array, number: Array) -> tuple[Array, Array]:
        fed = inputs[jnp.minimum(number, len(inputs) - 1)]
        computed = jnp.tanh(jnp.where(stage == 0, fed, arriving) @ weights)
        return lax.ppermute(computed, STAGE, ring(stages, closed=False)), computed

    return lax.scan(step, garbage(inputs), jnp.arange(steps))[1]


def garbage(inputs: Array) -> Array:
    """What nobody may use, of which a program would show any trace: NaN."""
    return varying(jnp.full_like(inputs[0], jnp.nan))


def chosen_by_data(stages: int, microbatches: int) -> export.Exported:
    """Which stage takes an input is said by the data."""

    def local(weights: Array, inputs: Array) -> Array:
        def step(arriving: Array, number: Array) -> tuple[Array, Array]:
            taken = jnp.where(inputs[0, 0, 0] > 0, inputs[number % microbatches], arriving)
            computed = jnp.tanh(taken @ weights[0])
            return lax.ppermute(computed, STAGE, ring(stages, closed=False)), computed

        steps = jnp.arange(microbatches + stages - 1)
        computed = lax.scan(step, garbage(inputs), steps)[1]
        return lax.psum(computed.sum(0), STAGE)

    return _exported(local, stages, microbatches, P())


def ring_attention(stages: int) -> export.Exported:
    """Keys go round: the permute of the last iteration is not needed, all others are."""

    def local(queries: Array, keys: Array) -> Array:
        def step(carry: tuple[Array, Array], _: Array) -> tuple[tuple[Array, Array], None]:
            block, total = carry
            return (
                lax.ppermute(block, STAGE, ring(stages)),
                total + queries[0] @ block.T @ block,
            ), None

        first = varying(jnp.zeros((WIDTH, WIDTH)))
        block = varying(keys[0])
        return lax.scan(step, (block, first), jnp.arange(stages))[0][1]

    return _exported(local, stages, 2, P(STAGE))


def until_small(stages: int) -> export.Exported:
    """A loop of which nobody knows how often it runs."""

    def local(weights: Array, inputs: Array) -> Array:
        def far(block: Array) -> Array:
            return lax.psum(jnp.square(block).sum(), STAGE) > 1.0

        block = varying(inputs[0])
        return lax.while_loop(far, lambda b: 0.5 * lax.ppermute(b, STAGE, ring(stages)), block)

    return _exported(local, stages, 2, P(STAGE))


def circular(
    stages: int, microbatches: int, repeats: int, *, early: bool = False
) -> export.Exported:
    """Every microbatch goes round the ring `repeats` times, as in XLA's naive pipelines.

    The first stage keeps what comes round until its turn. `early` stores what came in the
    iteration before. Only what the last stage computed in the last round is put out.
    """
    steps = microbatches * repeats + stages - 1
    wait = microbatches - stages + 1

    def local(weights: Array, inputs: Array) -> Array:
        stage = lax.axis_index(STAGE)
        last = stage == stages - 1

        def step(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            outputs, waiting, before = carry
            row = number % microbatches
            stored = lax.dynamic_index_in_dim(
                waiting, (number + microbatches - wait) % microbatches, keepdims=False
            )
            leaving = jnp.where(last, stored, before) if wait > 1 else before
            arriving = lax.ppermute(leaving, STAGE, ring(stages))
            fed = lax.dynamic_index_in_dim(inputs, row, keepdims=False)
            first = (stage == 0) & (number < microbatches)
            computed = jnp.tanh(jnp.where(first, fed, arriving) @ weights[0])
            at = (number + (1 - stages) % microbatches) % microbatches
            outputs = lax.dynamic_update_index_in_dim(outputs, computed, at, 0)
            kept = (before, (number + microbatches - 1) % microbatches)
            value, place = kept if early else (computed, row)
            waiting = lax.dynamic_update_index_in_dim(waiting, value, place, 0)
            return outputs, waiting, computed

        buffer = varying(jnp.full_like(inputs, jnp.nan))
        outputs = lax.fori_loop(0, steps, step, (buffer, buffer, garbage(inputs)))[0]
        return of_last(outputs)

    return _exported(local, stages, microbatches, P())


def training(stages: int, microbatches: int, form: str = "plain") -> export.Exported:
    """The gradient of a GPipe forward pass by jax.grad.

    `plain`: stages work on garbage too, and their gradients are products of it with zeros;
    `masked`: what a stage takes is zeros outside of its iterations; `guarded`: a stage does
    nothing there.
    """
    steps = microbatches + stages - 1

    def local(weights: Array, inputs: Array) -> Array:
        stage = lax.axis_index(STAGE)

        def work(block: Array, matrix: Array) -> Array:
            return jnp.tanh(block @ matrix)

        def step(arriving: Array, number: Array) -> tuple[Array, Array]:
            valid = (number >= stage) & (number < stage + microbatches)
            block = jnp.where(stage == 0, inputs[jnp.minimum(number, microbatches - 1)], arriving)
            if form == "guarded":
                idle = jnp.zeros_like(block)
                computed = lax.cond(valid, work, lambda *_: idle, block, weights[0])
            else:
                block = jnp.where(valid, block, 0) if form == "masked" else block
                computed = work(block, weights[0])
            return lax.ppermute(computed, STAGE, ring(stages, closed=False)), computed

        first = varying(jnp.zeros_like(inputs[0]))
        computed = lax.scan(step, first, jnp.arange(steps))[1][stages - 1 :]
        return of_last(computed)

    mapped = jax.shard_map(local, mesh=mesh(stage=stages), in_specs=(P(STAGE), P()), out_specs=P())

    def loss(weights: Array, inputs: Array) -> Array:
        return jnp.square(mapped(weights, inputs)).sum()

    return _export(jax.value_and_grad(loss), stages, microbatches)


def _exported(
    local: Callable[..., Any], stages: int, microbatches: int, out: P, data: int = 1
) -> export.Exported:
    mapped = jax.shard_map(
        local,
        mesh=mesh(stage=stages, **({"data": data} if data > 1 else {})),
        in_specs=(P(STAGE), P()),
        out_specs=out,
        axis_names={STAGE},
        check_vma=False,
    )
    return _export(mapped, stages, microbatches)


def _export(function: Callable[..., Any], stages: int, microbatches: int) -> export.Exported:
    weights = jax.ShapeDtypeStruct((stages, WIDTH, WIDTH), jnp.float32)
    inputs = jax.ShapeDtypeStruct((microbatches, 2, WIDTH), jnp.float32)
    return export.export(jax.jit(function), platforms=("cpu",))(weights, inputs)
