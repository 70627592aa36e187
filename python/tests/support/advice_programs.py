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


def layers_of_microbatches(*, times: int) -> Artifact:
    """Layers in a scan, their weights divided over the axis of the batch, in a scan over
    microbatches."""

    def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x = lax.with_sharding_constraint(x, P("data", None, None))
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    def step(weights: tuple[jax.Array, jax.Array], batches: jax.Array) -> jax.Array:
        def micro(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + jnp.sum(lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2), None

        return lax.scan(micro, jnp.float32(0), batches)[0]

    up, down = (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)
    spec = P(None, "data", None)
    return exported(
        lambda a, b, x: step((a, b), x),
        (up, jnp.bfloat16, spec),
        (down, jnp.bfloat16, spec),
        ((times, 64, 512, WIDTH), jnp.bfloat16, P(None, "data", None, None)),
        data=8,
    )


def layer_scan(*, constrained: bool, scanned: bool = True) -> Artifact:
    """Layers in a scan, or the first alone, with weights and batch divided over one axis: FSDP as
    people begin with it.

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

        if scanned:
            y, _ = lax.scan(layer, x, (up, down))
        else:
            y, _ = layer(x, (up[0], down[0]))
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def step(weights: tuple[jax.Array, ...], tokens: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, tokens)
        return *(w - g * 1e-3 for w, g in zip(weights, gradients, strict=True)), value

    specs = P("data"), P(None, "data"), P(None, "data", None), P(None, None, "data")
    shapes = ((32000, WIDTH), (LENGTH, WIDTH), (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH))
    weights = [(shape, jnp.bfloat16, spec) for shape, spec in zip(shapes, specs, strict=True)]

    def flat(*arguments: jax.Array) -> Any:
        return step(arguments[:-1], arguments[-1])

    tokens = (BATCH, LENGTH), jnp.int32, P("data", None)
    return exported(flat, *weights, tokens, out=(*specs, P()), donate=(0, 1, 2, 3), data=8)


def checkpointed(*, layers: int) -> Artifact:
    """Layers in a scan that computes all of each again in the backward, or one alone."""

    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = lax.scan(layer, x, w)[0] if layers > 1 else layer(x, w[0])[0]
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return exported(
        jax.grad(loss),
        ((layers, WIDTH, WIDTH), jnp.bfloat16, P()),
        ((BATCH * LENGTH, WIDTH), jnp.bfloat16, P("data")),
        out=P(),
        donate=(0,),
        data=8,
    )


def microbatches(*, scaled: bool) -> Artifact:
    """Gradients reduced in every microbatch, and added up as they are or scaled before."""

    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        def one(total: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
            # Of a value that all devices have alike, jax reduces the gradient by itself.
            gradient = jax.grad(lambda w: jnp.sum((part @ w) ** 2))(w)
            return total + (gradient / 8 if scaled else gradient), None

        total, _ = lax.scan(one, jnp.zeros_like(w), x)
        return w - total

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


def scaled_weight(*, largest: bool) -> Artifact:
    """A gathered weight that becomes f8 after a division by its largest element, or by its sum."""

    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        whole = lax.all_gather(w, "data", tiled=True)
        scale = jnp.max(jnp.abs(whole)) if largest else jnp.sum(whole)
        narrow = jnp.clip(whole / scale, -1, 1).astype(jnp.float8_e4m3fn)
        return x @ narrow.astype(jnp.bfloat16)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.shard_map(local, in_specs=P("data"), out_specs=P("data"))(w, x)

    shapes = ((WIDTH, HIDDEN), jnp.bfloat16, P("data")), ((8 * 512, WIDTH), jnp.bfloat16, P("data"))
    return exported(step, *shapes, data=8)


def reduced(*, sent: str) -> Artifact:
    """A sum over devices of bf16 values, in f32 or as they are."""

    def local(x: jax.Array) -> jax.Array:
        y = jnp.tanh(x)
        return jnp.sin(lax.psum(y.astype(jnp.float32) if sent == "f32" else y, "data"))

    def step(x: jax.Array) -> jax.Array:
        return jax.shard_map(local, in_specs=P("data"), out_specs=P())(x)

    return exported(step, ((HIDDEN, HIDDEN), jnp.bfloat16, P("data")), data=8)


def optimizer(*, divided: bool = False, donated: bool = True) -> Artifact:
    """Momentum on replicated weights: its state replicated, too, or divided over the data axis."""
    rows = 32768

    def step(w: jax.Array, momentum: jax.Array, x: jax.Array) -> Any:
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        momentum = 0.9 * momentum + gradient
        return w - 1e-3 * momentum, momentum

    state = P("data") if divided else P()
    return exported(
        step,
        ((rows, WIDTH * 4), jnp.float32, P()),
        ((rows, WIDTH * 4), jnp.float32, state),
        ((256, rows), jnp.float32, P("data")),
        out=(P(), state),
        donate=(0, 1) if donated else (),
        data=8,
    )


def generated(*, donated: bool) -> Artifact:
    """A cache that a loop writes rows of, and that is not given back."""
    steps = 4

    def step(cache: jax.Array, x: jax.Array) -> jax.Array:
        def body(number: jax.Array, carried: tuple[jax.Array, jax.Array]) -> Any:
            cache, x = carried
            cache = lax.dynamic_update_slice(cache, x, (number, jnp.int32(0)))
            return cache, jnp.tanh(x @ cache[:WIDTH])

        return lax.fori_loop(jnp.int32(0), jnp.int32(steps), body, (cache, x))[1]

    return exported(
        step,
        ((32 * WIDTH, WIDTH), jnp.bfloat16, P()),
        ((1, WIDTH), jnp.bfloat16, P()),
        donate=(0,) if donated else (),
        data=8,
    )


def product(*, rows: int, spec: P, constrained: bool = False) -> Artifact:
    """A product of so many rows, divided over one axis of two, or over both."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        if constrained:
            x = lax.with_sharding_constraint(x, spec)
        return jnp.tanh(x) @ w

    shapes = (((rows, HIDDEN), jnp.bfloat16, spec), ((HIDDEN, HIDDEN), jnp.bfloat16, P()))
    return exported(step, *shapes, out=spec, data=4, model=2)


def weights_gathered(*, again: bool) -> Artifact:
    """Weights that are divided, gathered for a forward, and for its backward where there is one."""

    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        whole = lax.all_gather(w, "data", tiled=True)
        y = jnp.tanh(x @ whole)
        if again:
            whole = lax.all_gather(lax.optimization_barrier((w, y))[0], "data", tiled=True)
            y = y @ whole.T
        return y

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.shard_map(local, in_specs=P("data"), out_specs=P("data"))(w, x)

    shapes = (
        ((HIDDEN, HIDDEN), jnp.bfloat16, P("data")),
        ((8 * 512, HIDDEN), jnp.bfloat16, P("data")),
    )
    return exported(step, *shapes, data=8)


def tensor_parallel(*, axis: str) -> Artifact:
    """Layers whose partial sums are reduced, over an axis that divides the weights; or none is."""

    def local(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        for _ in range(3):
            x = x + lax.psum(jnp.tanh(x @ up) @ down, axis) if axis else jnp.tanh(x @ up) @ down
        return x

    def step(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        specs = P("data"), P(None, "model"), P("model", None)
        return jax.shard_map(local, in_specs=specs, out_specs=P("data"), check_vma=False)(
            x, up, down
        )

    shapes = (
        ((BATCH * LENGTH, WIDTH), jnp.bfloat16, P("data")),
        ((WIDTH, HIDDEN), jnp.bfloat16, P(None, "model")),
        ((HIDDEN, WIDTH), jnp.bfloat16, P("model", None)),
    )
    return exported(step, *shapes, data=2, model=4)


def two_networks(*, both: bool) -> Artifact:
    """Gathers along two axes, one of which leaves the domain of a fast network; or along one."""

    def local(x: jax.Array, y: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        gathered = (
            lax.all_gather(x, "model", tiled=True),
            lax.all_gather(y, "data" if both else "model", tiled=True),
        )
        return *gathered, jnp.tanh(w @ w)

    def step(x: jax.Array, y: jax.Array, w: jax.Array) -> Any:
        return jax.shard_map(
            local, in_specs=(P("model"), P("data" if both else "model"), P()), out_specs=P(),
            check_vma=False,
        )(x, y, w)  # fmt: skip

    shapes = (
        ((HIDDEN, HIDDEN), jnp.bfloat16, P("model")),
        ((HIDDEN, WIDTH), jnp.bfloat16, P("data" if both else "model")),
        ((HIDDEN, HIDDEN), jnp.bfloat16, P()),
    )
    return exported(step, *shapes, data=2, model=4)


def softmax_step(*, attention: bool) -> Artifact:
    """Gradients of layers of attention, or of a loss over a vocabulary of the same size."""
    heads, depth = 16, WIDTH // 16

    def attend(x: jax.Array, w: jax.Array) -> jax.Array:
        q, k, v = (
            (x @ w[i]).reshape(BATCH // 8, LENGTH * 4, heads, depth).swapaxes(1, 2)
            for i in range(3)
        )
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k) / depth**0.5
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(jnp.bfloat16)
        return x + jnp.einsum("bhst,bhtd->bhsd", weights, v).swapaxes(1, 2).reshape(x.shape)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        if attention:
            for layer in w:
                x = attend(x, layer)
            return jnp.sum(x.astype(jnp.float32) ** 2)
        logits = (x @ w[0, 0]).astype(jnp.float32)
        return jnp.sum(jax.nn.softmax(logits).astype(jnp.bfloat16) @ w[0, 1])

    shapes = (
        ((2, 3, WIDTH, WIDTH), jnp.bfloat16, P()),
        ((BATCH // 8, LENGTH * 4, WIDTH), jnp.bfloat16, P("data")),
    )
    return exported(jax.grad(loss), *shapes, data=8)
