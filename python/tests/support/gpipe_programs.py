"""Programs that are SPMD pipelines already, written the way people write them, and the plain layer
scan that each computes.

Each case has the exported pipeline, the plain function, and random arguments for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.devices import mesh  # first: sets up the devices

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

STAGE = "stage"
WIDTH = 8
LENGTH = 4
RATE = 0.1

Array = jax.Array
Layer = Callable[[Array, Any], Array]


@dataclass(frozen=True)
class Sizes:
    """Stages, layers on each, microbatches, samples in each, chunks of layers on a stage."""

    stages: int = 4
    each: int = 2
    microbatches: int = 6
    samples: int = 2
    chunks: int = 1

    @property
    def layers(self) -> int:
        """All of them."""
        return self.stages * self.each * self.chunks

    @property
    def batch(self) -> int:
        """Samples of all microbatches."""
        return self.microbatches * self.samples


@dataclass(frozen=True)
class Case:
    """A pipeline, what it computes, and arguments."""

    exported: export.Exported
    plain: Callable[..., Any]
    arguments: tuple[Any, ...]


def dense(h: Array, w: Array) -> Array:
    """A layer: one matrix and a residual connection."""
    return h + jnp.tanh(h @ w)


def attention(h: Array, w: dict[str, Array]) -> Array:
    """A layer of a small transformer: causal attention with rotary positions, and a gated MLP."""
    length, width = h.shape[-2:]
    x = _normed(h, w["norm1"])
    q, k, v = (x @ w[name] for name in ("q", "k", "v"))
    q, k = _rotated(q), _rotated(k)
    scores = jnp.einsum("...qd,...kd->...qk", q, k) / width**0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    h = h + (weights @ v) @ w["o"]
    x = _normed(h, w["norm2"])
    return h + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"]) + w["bias"]) @ w["down"]


def _normed(x: Array, scale: Array) -> Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def _rotated(x: Array) -> Array:
    length, width = x.shape[-2:]
    angles = jnp.arange(length)[:, None] / 100 ** (jnp.arange(width // 2) * 2 / width)
    a, b = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def packed(h: Array, w: dict[str, Array]) -> Array:
    """A layer of two matrices that one array holds, as another one holds their biases."""
    return h + jnp.tanh(h @ w["w"][0] + w["b"][0]) @ w["w"][1] + w["b"][1]


def normalised(h: Array, w: Array) -> Array:
    """A layer that scales its matrix: what it does with its weights alone, jax does in front of a
    pipeline that it differentiates."""
    return dense(h, w * lax.rsqrt((w * w).sum(0, keepdims=True) + 1e-6))


LAYERS: dict[str, Layer] = {
    "dense": dense,
    "attention": attention,
    "packed": packed,
    "normalised": normalised,
    "checkpointed": jax.checkpoint(dense),
    "packed-checkpointed": jax.checkpoint(packed),
}


def dense_weights(layers: int) -> Any:
    """Random weights of `dense`, stacked."""
    random = np.random.default_rng(0)
    return random.normal(size=(layers, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5


def attention_weights(layers: int) -> Any:
    """Random weights of `attention`, stacked."""
    random = np.random.default_rng(1)
    square = ("q", "k", "v", "o", "gate", "up", "down")
    shapes = dict.fromkeys(square, (layers, WIDTH, WIDTH))
    shapes |= dict.fromkeys(("norm1", "norm2", "bias"), (layers, WIDTH))
    return {name: random.normal(size=s).astype(np.float32) / 3 for name, s in shapes.items()}


def packed_weights(layers: int) -> Any:
    """Random weights of `packed`, stacked."""
    random = np.random.default_rng(6)
    shapes = {"w": (layers, 2, WIDTH, WIDTH), "b": (layers, 2, WIDTH)}
    return {name: random.normal(size=s).astype(np.float32) / 3 for name, s in shapes.items()}


def weights_of(layer: str, layers: int) -> Any:
    """Random weights of a layer of `LAYERS`, stacked."""
    if layer.startswith("packed"):
        return packed_weights(layers)
    return (attention_weights if layer == "attention" else dense_weights)(layers)


def batch(sizes: Sizes, *, sequences: bool = False) -> Any:
    """Random samples: vectors, or sequences of them."""
    shape = (sizes.batch, LENGTH, WIDTH) if sequences else (sizes.batch, WIDTH)
    return np.random.default_rng(2).normal(size=shape).astype(np.float32)


def scanned(layer: Layer, weights: Any, h: Array) -> Array:
    """The layers one after the other."""
    return lax.scan(lambda h, w: (layer(h, w), None), h, weights)[0]


def unrolled(layer: Layer, weights: Any, h: Array) -> Array:
    """The same without a loop."""
    for number in range(len(jax.tree.leaves(weights)[0])):
        h = layer(h, jax.tree.map(lambda w, n=number: w[n], weights))
    return h


def apart(layer: Layer, weights: Any, h: Array) -> Array:
    """The same with an array of its own for each layer, as where layers are parameters of their
    own."""
    for own in weights:
        h = layer(h, own)
    return h


def _parted(weights: Any, stage: Any, dim: int) -> Any:
    """Stacked weights, in arrays of their own for a stage that takes such."""
    if stage.__name__ != apart.__name__:
        return weights
    count = jax.tree.leaves(weights)[0].shape[dim]
    return [
        jax.tree.map(lambda w, n=n: lax.index_in_dim(w, n, dim, False), weights)
        for n in range(count)
    ]


def single(layer: Layer, weights: Any, h: Array) -> Array:
    """The only layer."""
    return layer(h, jax.tree.map(lambda w: w[0], weights))


USUAL = Sizes()
Stage = Callable[[Layer, Any, Array], Array]


def exported(function: Callable[..., Any], on: Mesh, arguments: Any, specs: Any) -> export.Exported:
    """A function for a mesh, its arguments divided as the specs say."""
    shardings = jax.tree.map(
        lambda spec: NamedSharding(on, spec), specs, is_leaf=lambda s: isinstance(s, P)
    )
    kinds = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
    return export.export(jax.jit(function, in_shardings=shardings))(*kinds)


def staged(
    local: Callable[..., Any], stages: int, *specs: P, out: P | None = None, check: bool = True
) -> Callable[..., Any]:
    """What each stage runs on its part, as a function of whole arrays; `out` is whole if None."""
    on, out = mesh(stage=stages), P() if out is None else out
    return jax.shard_map(local, mesh=on, in_specs=specs, out_specs=out, check_vma=check)


def varying(value: Array) -> Array:
    """A value that stages may have different ones of."""
    return lax.pcast(value, (STAGE,), to="varying")


def of_last(value: Array) -> Array:
    """The last stage's value, on all stages."""
    return lax.psum(jnp.where(lax.axis_index(STAGE) == lax.axis_size(STAGE) - 1, value, 0), STAGE)


def descending(loss: Callable[..., Array]) -> Callable[..., Any]:
    """A step of gradient descent by the first argument: the loss, and the new parameters."""

    def step(parameters: Any, *rest: Any) -> tuple[Array, Any]:
        value, gradients = jax.value_and_grad(loss)(parameters, *rest)
        return value, descended(parameters, gradients)

    return step


def descended(parameters: Any, gradients: Any) -> Any:
    """The parameters after a step of gradient descent."""
    return jax.tree.map(lambda own, gradient: own - RATE * gradient, parameters, gradients)


def placed(values: Any, on: Mesh, specs: Any) -> Any:
    """Arrays as shapes with shardings; a spec stands for all that is below it."""
    return jax.tree.map(
        lambda spec, below: jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(on, spec)),
            below,
        ),
        specs,
        values,
        is_leaf=lambda node: isinstance(node, P),
    )


def ring(stages: int, *, closed: bool = True) -> list[tuple[int, int]]:
    """Every stage hands on to the next; the last to the first where it is closed."""
    pairs = [(stage, (stage + 1) % stages) for stage in range(stages)]
    return pairs if closed else pairs[:-1]


def shifted(
    sizes: Sizes = USUAL,
    *,
    collect: str = "updates",
    leave: str = "psum",
    stage: Stage = scanned,
    layer: str = "dense",
    closed: bool = True,
    strided: bool = False,
    loop: str = "scan",
    axes: str = "stage",
    sent: Any = None,
    run: Layer | None = None,
    start: float = np.nan,
) -> Case:
    """A shift register of collective_permutes in a shard_map.

    `collect`: outputs are written into a buffer (`updates`), or stacked by the scan and sliced
    (`stacked`). `leave`: by a masked `psum`, by one of a `product` with the mask, or as
    `shards` of which the last is taken. `axes`: the mesh has the `stage` axis alone, or `partial`
    and `full`: a data axis too, which is automatic or manual. `sent`: the type that activations
    have on their way. `run`: a layer with the weights of `dense`. `start`: what ramp-up computes
    with.
    """
    run = run or LAYERS[layer]
    weights: Any = weights_of(layer, sizes.layers)
    x = batch(sizes, sequences=layer == "attention")
    on = mesh(stage=sizes.stages) if axes == "stage" else mesh(data=2, stage=sizes.stages)
    last, ticks = sizes.stages - 1, sizes.microbatches + sizes.stages - 1

    def local(weights: Any, x: Array) -> Array:
        weights = _parted(weights, stage, 0)
        rank = lax.axis_index(STAGE)

        def tick(carry: Any, t: Array) -> Any:
            arriving, outputs = carry
            fed = x[jnp.minimum(t, sizes.microbatches - 1)]
            y = stage(run, weights, jnp.where(rank == 0, fed, arriving.astype(x.dtype)))
            place = jnp.maximum(t - last, 0)
            if collect == "updates":
                updated = lax.dynamic_update_index_in_dim(outputs, y, place, 0)
                outputs = jnp.where((rank == last) & (t >= last), updated, outputs)
            passed = y if sent is None else y.astype(sent)
            passed = lax.ppermute(passed, STAGE, ring(sizes.stages, closed=closed))
            return (passed, outputs), y

        first = jnp.full_like(x[0], start, dtype=sent)
        outputs = jnp.zeros_like(x)
        first, outputs = varying(first), varying(outputs)
        if loop == "scan":
            (_, outputs), ys = lax.scan(tick, (first, outputs), jnp.arange(ticks))
        else:
            outputs = lax.fori_loop(
                0, ticks, lambda t, carry: tick(carry, jnp.int32(t))[0], (first, outputs)
            )[1]
            ys = outputs
        if collect == "stacked":
            outputs = ys[last:]
        if leave == "psum":
            return of_last(outputs)
        if leave == "product":
            return lax.psum((rank == last).astype(x.dtype) * outputs, STAGE)
        return outputs[None]

    def whole(weights: Any, x: Array) -> Array:
        inner = P() if axes != "full" else P(None, "data")
        outer = P(STAGE, *inner) if leave == "shards" else inner
        names = {STAGE} if axes == "partial" else set(on.axis_names)
        mapped = jax.shard_map(
            local, mesh=on, in_specs=(P(STAGE), inner), out_specs=outer, axis_names=names
        )
        y = mapped(weights, _microbatches(x, sizes, strided=strided))
        return _together(y[-1] if leave == "shards" else y, strided=strided)

    specs = (P(STAGE), P("data") if axes != "stage" else P())
    case = exported(whole, on, (weights, x), specs)
    return Case(case, _plain(run, sent, sizes.each), (weights, x))


def _plain(layer: Layer, sent: Any = None, each: int = 1) -> Callable[[Any, Array], Array]:
    def plain(weights: Any, h: Array) -> Array:
        if sent is None:
            return scanned(layer, weights, h)
        count = len(jax.tree.leaves(weights)[0])
        for number in range(count):
            if number and number % each == 0:
                h = h.astype(sent).astype(np.float32)
            h = layer(h, jax.tree.map(lambda w, n=number: w[n], weights))
        return h

    return plain


def _microbatches(x: Array, sizes: Sizes, *, strided: bool = False) -> Array:
    if strided:
        apart = x.reshape(sizes.samples, sizes.microbatches, *x.shape[1:])
        return apart.swapaxes(0, 1)
    return x.reshape(sizes.microbatches, sizes.samples, *x.shape[1:])


def _together(y: Array, *, strided: bool = False) -> Array:
    if strided:
        y = y.swapaxes(0, 1)
    return y.reshape(-1, *y.shape[2:])


def rolled(
    sizes: Sizes = USUAL,
    *,
    shift: str = "roll",
    collect: str = "updates",
    stage: Stage = scanned,
    layer: str = "dense",
    constrained: bool = True,
    fed: str = "index",
    start: float = np.nan,
) -> Case:
    """One program for all stages: a state of one microbatch a stage, the stages side by side.

    `shift`: the state moves on by a `roll`, by slices put together (`slices`), by a `select` with
    the index of the stage, by a `pad`, or by a `permute` in a shard_map. `fed`: microbatches are
    taken by `index`, or handed to the scan, with padding, as what it goes over (`xs`). `start`:
    what ramp-up computes with.
    """
    run = LAYERS[layer]
    weights: Any = weights_of(layer, sizes.layers)
    x = batch(sizes, sequences=layer == "attention")
    on = mesh(stage=sizes.stages)
    last, ticks = sizes.stages - 1, sizes.microbatches + sizes.stages - 1
    staged = NamedSharding(on, P(STAGE))

    def entered(state: Array, taken: Array) -> Array:
        if shift == "roll":
            return jnp.roll(state, 1, axis=0).at[0].set(taken)
        if shift == "slices":
            return jnp.concatenate([taken[None], state[:-1]])
        if shift == "pad":
            moved = jnp.pad(state[:-1], [(1, 0)] + [(0, 0)] * (state.ndim - 1))
            return moved.at[0].set(taken)
        number = lax.broadcasted_iota(jnp.int32, state.shape, 0)
        moved = permuted(state) if shift == "permute" else jnp.roll(state, 1, axis=0)
        return jnp.where(number == 0, taken, moved)

    def permuted(state: Array) -> Array:
        hand_on = partial(lax.ppermute, axis_name=STAGE, perm=ring(sizes.stages))
        return jax.shard_map(hand_on, mesh=on, in_specs=P(STAGE), out_specs=P(STAGE))(state)

    def whole(weights: Any, x: Array) -> Array:
        weights = jax.tree.map(lambda w: w.reshape(sizes.stages, sizes.each, *w.shape[1:]), weights)
        weights = _parted(weights, stage, 1)
        x = _microbatches(x, sizes)

        def tick(carry: Any, given: Any) -> Any:
            state, outputs = carry
            t, taken = given
            if fed == "index":
                taken = x[jnp.minimum(t, sizes.microbatches - 1)]
            state = entered(state, taken)
            if constrained:
                state = lax.with_sharding_constraint(state, staged)
            state = jax.vmap(partial(stage, run))(weights, state)
            if collect == "updates":
                place = jnp.maximum(t - last, 0)
                outputs = lax.dynamic_update_index_in_dim(outputs, state[-1], place, 0)
            return (state, outputs), state[-1]

        first = jnp.full((sizes.stages, *x.shape[1:]), start, x.dtype)
        padded = jnp.concatenate([x, jnp.zeros((last, *x.shape[1:]), x.dtype)])
        given = (jnp.arange(ticks), padded)
        (_, outputs), ys = lax.scan(tick, (first, jnp.zeros_like(x)), given)
        return _together(outputs if collect == "updates" else ys[last:])

    case = exported(whole, on, (weights, x), (P(STAGE), P()))
    return Case(case, _plain(run), (weights, x))
