"""Decoder steps whose layers are written as people write them, over stage 2 x data 2 x model 2.

`ATTENTION` and `MLP` are the styles; `export_step` exports the training step of one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from models.devices import DEVICES  # first: sets up the devices

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH, HEADS, LENGTH, SIZE, WIDTH, LAYERS, EXPERTS = 8, 2, 8, 4, 8, 4, 4
MESH = Mesh(np.array(jax.devices()[:DEVICES]).reshape(2, 2, 2), ("stage", "data", "model"))
Weights = dict[str, Any]
shard_map = functools.partial(jax.shard_map, mesh=MESH, check_vma=False)
unchecked = functools.partial(shard_map, in_specs=P("data", "model"), out_specs=P("data", "model"))


def softmax_attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of (batch, heads, length, size)."""
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("bhts,bhsk->bhtk", weights, v)


def checked(q: Any, k: Any, v: Any) -> Any:
    """A shard_map whose types are checked, with the axis of the stages left out."""
    axes = frozenset({"data", "model"})
    inside = jax.shard_map(
        softmax_attention,
        mesh=MESH,
        axis_names=axes,
        in_specs=P("data", "model"),
        out_specs=P("data", "model"),
    )
    return inside(q, k, v)


def two_axes(q: Any, k: Any, v: Any) -> Any:
    """Two shard_maps over different axes."""
    gate = functools.partial(shard_map, axis_names={"data"}, in_specs=P("data"))
    q = gate(lambda q: q * jax.nn.sigmoid(q), out_specs=P("data"))(q)
    return unchecked(softmax_attention)(q, k, v)


def ring(q: Any, k: Any, v: Any) -> Any:
    """Ring attention: sequences over `model`, keys passed on in a scan."""

    def local(q: Any, k: Any, v: Any) -> Any:
        def turn(carry: Any, _: None) -> tuple[Any, None]:
            k, v, out, most, total = carry
            scores = jnp.einsum("bhtk,bhsk->bhts", q, k)
            above = jnp.maximum(most, scores.max(-1))
            weights, scale = jnp.exp(scores - above[..., None]), jnp.exp(most - above)
            out = out * scale[..., None] + jnp.einsum("bhts,bhsk->bhtk", weights, v)
            k, v = (lax.ppermute(x, "model", [(0, 1), (1, 0)]) for x in (k, v))
            return (k, v, out, above, total * scale + weights.sum(-1)), None

        most = jnp.full(q.shape[:-1], -1e9, q.dtype)
        start = (k, v, jnp.zeros_like(q), most, jnp.zeros_like(most))
        (_, _, out, _, total), _ = lax.scan(turn, start, None, length=2)
        return out / total[..., None]

    spec = P("data", None, "model")
    return shard_map(local, in_specs=spec, out_specs=spec)(q, k, v)


def positions(q: Any, k: Any, v: Any) -> Any:
    """Sequences over `model`; the mask depends on the position of the device."""

    def local(q: Any, k: Any, v: Any) -> Any:
        k, v = (lax.all_gather(x, "model", axis=2, tiled=True) for x in (k, v))
        rows = lax.axis_index("model") * q.shape[2] + jnp.arange(q.shape[2])
        scores = jnp.einsum("bhtk,bhsk->bhts", q, k)
        seen = rows[:, None] >= jnp.arange(k.shape[2])
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        return jnp.einsum("bhts,bhsk->bhtk", weights, v)

    spec = P("data", None, "model")
    return shard_map(local, in_specs=spec, out_specs=spec)(q, k, v)


def gate_kernel(semantics: Any = "parallel", *, scratch: bool = False) -> Callable[[Any], Any]:
    """Returns a Pallas kernel for TPU on each sample, `(batch, rows, 128)`. With `scratch`, it adds
    up what it has seen."""

    def kernel(x: Any, y: Any, *seen: Any) -> None:
        value = x[...] * jax.nn.sigmoid(x[...])
        for total in seen:
            total[...] += value
            value = total[...]
        y[...] = value

    def call(x: Any) -> Any:
        block = pl.BlockSpec((None, *x.shape[1:]), lambda i: (i, 0, 0))
        return pl.pallas_call(
            kernel,
            grid=x.shape[:1],
            in_specs=[block],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM(x.shape[1:], x.dtype)] * scratch,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)),
        )(x)

    return call


@jax.custom_vjp
def _gated(x: Any) -> Any:
    return _per_sample(gate_kernel(), x)


def _per_sample(kernel: Callable[[Any], Any], x: Any) -> Any:
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    return kernel(jnp.pad(flat, ((0, 0), (0, 0), (0, 128 - x.shape[-1]))))[..., : x.shape[-1]]


_gated.defvjp(
    lambda x: (_gated(x), x), lambda x, g: (_per_sample(gate_kernel(), g) * jax.nn.sigmoid(x),)
)


def kernel_mlp(x: Any, w: Weights) -> Any:
    """A Pallas kernel in a shard_map."""
    inside = shard_map(_gated, in_specs=P("data"), out_specs=P("data"))
    return inside(x @ w["up"]) @ w["down"]


def scratch_mlp(x: Any, w: Weights) -> Any:
    """A kernel that carries scratch memory from sample to sample."""
    carried = gate_kernel("arbitrary", scratch=True)
    passed = jax.custom_vjp(lambda h: _per_sample(carried, h))
    passed.defvjp(lambda h: (passed(h), None), lambda _, g: (g,))
    inside = shard_map(passed, in_specs=P("data"), out_specs=P("data"))
    return inside(x @ w["up"]) @ w["down"]


def megatron(x: Any, w: Weights) -> Any:
    """Columns and rows over `model`, joined by a psum."""

    def local(x: Any, up: Any, down: Any) -> Any:
        return lax.psum(jax.nn.silu(x @ up) @ down, "model")

    specs = (P("data"), P(None, "model"), P("model"))
    return shard_map(local, in_specs=specs, out_specs=P("data"))(x, w["up"], w["down"])


def state_space(x: Any, w: Weights) -> Any:
    """A gated recurrence along the sequence by an associative scan, which has empty slices."""

    def join(one: Any, other: Any) -> Any:
        return one[0] * other[0], one[1] * other[0] + other[1]

    def local(x: Any, up: Any, down: Any) -> Any:
        hidden = x @ up
        _, state = lax.associative_scan(join, (jax.nn.sigmoid(hidden), hidden), axis=1)
        return lax.psum(state @ down, "model")

    specs = (P("data"), P(None, "model"), P("model"))
    return shard_map(local, in_specs=specs, out_specs=P("data"))(x, w["up"], w["down"])


def batch_mean(x: Any, w: Weights) -> Any:
    """Subtracts the mean over the samples of all devices."""

    def local(x: Any, up: Any, down: Any) -> Any:
        centred = x - lax.pmean(x.mean(0), "data")
        return lax.psum(jax.nn.silu(centred @ up) @ down, "model")

    specs = (P("data"), P(None, "model"), P("model"))
    return shard_map(local, in_specs=specs, out_specs=P("data"))(x, w["up"], w["down"])


def dropout(x: Any, w: Weights) -> Any:
    """Random bits inside, for the samples of a device."""

    def local(x: Any, up: Any, down: Any) -> Any:
        hidden = jax.nn.silu(x @ up)
        key = jax.random.fold_in(jax.random.PRNGKey(0), lax.axis_index("model"))
        kept = jax.random.bernoulli(key, 0.5, hidden.shape)
        return lax.psum(jnp.where(kept, hidden, 0) @ down, "model")

    specs = (P("data"), P(None, "model"), P("model"))
    return shard_map(local, in_specs=specs, out_specs=P("data"))(x, w["up"], w["down"])


def experts(x: Any, w: Weights, group: int = 1, top: int = 1) -> Any:
    """Experts over `model`; the tokens of a group of samples compete for their room."""

    def local(x: Any, router: Any, up: Any, down: Any) -> Any:
        shape = x.shape
        x = x.reshape(shape[0] // group, group * shape[1], shape[2])
        gates, chosen = lax.top_k(jax.nn.softmax(x @ router), top)
        hot = jax.nn.one_hot(chosen, EXPERTS)
        flat = hot.reshape(x.shape[0], -1, EXPERTS)
        place = (jnp.cumsum(flat, 1).reshape(hot.shape) * hot).astype(jnp.int32) - 1
        room = hot[..., None] * jax.nn.one_hot(place, shape[1] // 2)
        sent = jnp.einsum("btkec,btd->becd", room, x)
        sent = lax.all_to_all(sent, "model", 1, 0, tiled=True)
        hidden = jax.nn.silu(jnp.einsum("becd,edf->becf", sent, up))
        back = lax.all_to_all(jnp.einsum("becf,efd->becd", hidden, down), "model", 0, 1, tiled=True)
        return jnp.einsum("btkec,becd,btk->btd", room, back, gates).reshape(shape)

    specs = (P("data"), P(), P("model"), P("model"))
    inside = shard_map(local, in_specs=specs, out_specs=P("data"))
    return inside(x, w["router"], w["expert_up"], w["expert_down"])


def dropless(x: Any, w: Weights, top: int = 1, shift: Any = None) -> Any:
    """Experts without a limit: tokens are sorted by expert, and brought back. `shift` depends on
    the place in the sorted order."""
    tokens = x.reshape(-1, WIDTH)
    gates, chosen = lax.top_k(jax.nn.softmax(tokens @ w["router"]), top)
    expert = chosen.reshape(-1)
    order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=EXPERTS).astype(jnp.int32)
    hidden = jax.nn.silu(lax.ragged_dot(tokens[order // top], w["expert_up"], sizes))
    if shift is not None:
        hidden = hidden + shift(jnp.arange(hidden.shape[0]))[:, None]
    rows = lax.ragged_dot(hidden, w["expert_down"], sizes)
    back = jnp.take(rows, jnp.argsort(order), axis=0).reshape(-1, top, WIDTH)
    return (back * gates[..., None]).sum(1).reshape(x.shape)


def sorted_and_set(x: Any, w: Weights) -> Any:
    """Dropless experts that are brought back by an update."""
    tokens = x.reshape(-1, WIDTH)
    expert = (tokens @ w["router"]).argmax(-1)
    order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=EXPERTS).astype(jnp.int32)
    hidden = jax.nn.silu(lax.ragged_dot(tokens[order], w["expert_up"], sizes))
    rows = lax.ragged_dot(hidden, w["expert_down"], sizes)
    return jnp.zeros_like(tokens).at[order].set(rows).reshape(x.shape)


def inside(mlp: Callable[[Any, Weights], Any]) -> Callable[[Any, Weights], Any]:
    """Runs experts in a shard_map over samples, with all experts on each device."""

    def local(x: Any, router: Any, up: Any, down: Any) -> Any:
        return mlp(x, {"router": router, "expert_up": up, "expert_down": down})

    def call(x: Any, w: Weights) -> Any:
        mapped = shard_map(local, in_specs=(P("data"), P(), P(), P()), out_specs=P("data"))
        return mapped(x, w["router"], w["expert_up"], w["expert_down"])

    return call


@jax.custom_vjp
def permuted(x: Any, order: Any) -> Any:
    """Rows in another order; the backward sorts the order, instead of a scatter."""
    return x[order]


permuted.defvjp(
    lambda x, order: (x[order], order), lambda order, g: (permuted(g, jnp.argsort(order)), None)
)


def gated_experts(x: Any, w: Weights) -> Any:
    """Dropless experts as MaxText writes them: two for each token, with a gate."""
    tokens = x.reshape(-1, WIDTH)
    gates, chosen = lax.top_k(tokens @ w["router"], 2)
    expert = jnp.ravel(chosen)
    order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=EXPERTS)
    rows = permuted(jnp.repeat(tokens, 2, axis=0), order)
    up, down = w["expert_up"], w["expert_down"]
    hidden = jax.nn.silu(lax.ragged_dot(rows, up, sizes)) * lax.ragged_dot(rows, up, sizes)
    back = permuted(lax.ragged_dot(hidden, down, sizes), jnp.argsort(order))
    weights = jax.nn.softmax(gates)
    return jnp.einsum("btd,bt->bd", back.reshape(-1, 2, WIDTH), weights).reshape(x.shape)


ATTENTION: dict[str, Callable[..., Any]] = {
    "unchecked": unchecked(softmax_attention),
    "checked": checked,
    "two axes": two_axes,
    "ring": ring,
    "positions": positions,
}
MLP: dict[str, Callable[..., Any]] = {
    "megatron": megatron,
    "dropout": dropout,
    "state space": state_space,
    "kernel": kernel_mlp,
    "scratch": scratch_mlp,
    "batch mean": batch_mean,
    "experts": experts,
    "two experts": functools.partial(experts, top=2),
    "groups": functools.partial(experts, group=2),
    "dropless": sorted_and_set,
    "two dropless": functools.partial(dropless, top=2),
    "dropless inside": inside(sorted_and_set),
    "ragged": sorted_and_set,
    "two ragged": functools.partial(dropless, top=2),
    "ragged inside": inside(gated_experts),
    "shifted dropless": functools.partial(dropless, shift=jnp.cos),
    "shifted ragged": functools.partial(dropless, shift=jnp.cos),
}
# Exported for TPU: kernels, and `ragged_dot` as one op.
FOR_TPU = ("kernel", "scratch", "ragged", "two ragged", "ragged inside", "shifted ragged")


def export_step(style: str, *, balance: int = 0, stacked: bool = False) -> export.Exported:
    """Exports a training step of one style.

    With `balance`, it has an auxiliary loss of router probabilities, computed for each of so many
    microbatches and averaged; with 1, over the whole batch. If `stacked`, the losses of all layers
    are added after the loop.
    """
    attention, mlp = ATTENTION.get(style, softmax_attention), MLP.get(style)

    def layer(x: Any, w: Weights) -> Any:
        q, k, v = (jnp.einsum("btd,dhk->bhtk", x, w[name]) for name in "qkv")
        x = x + jnp.einsum("bhtk,hkd->btd", attention(q, k, v), w["o"])
        return x + (jax.nn.silu(x @ w["up"]) @ w["down"] if mlp is None else mlp(x, w))

    def balance_loss(x: Any, w: Weights) -> Any:
        gates = jax.nn.softmax(x @ w["router"])
        parts = gates.reshape(BATCH // balance, balance, LENGTH, EXPERTS)
        return (parts.mean((0, 2)) ** 2).sum(-1).mean()

    def step(weights: Weights, x: Any, labels: Any) -> tuple[Any, Weights]:
        def loss(weights: Weights) -> Any:
            def body(carry: tuple[Any, Any], w: Weights) -> tuple[tuple[Any, Any], Any]:
                x, extra = carry
                x = layer(x, w)
                mine = balance_loss(x, w) if balance else None
                return (x, extra if stacked or mine is None else extra + mine), mine

            (y, extra), each = lax.scan(body, (x, jnp.zeros(())), weights)
            return ((y - labels) ** 2).mean() + (each.sum() if stacked else extra)

        value, gradients = jax.value_and_grad(loss)(weights)
        return value, jax.tree.map(lambda w, g: w - g, weights, gradients)

    def shaped(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(MESH, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    hidden = 2 * WIDTH
    weights = {
        **{name: shaped((LAYERS, WIDTH, HEADS, SIZE), None, None, "model") for name in "qkv"},
        "o": shaped((LAYERS, HEADS, SIZE, WIDTH), None, "model"),
        "up": shaped((LAYERS, WIDTH, hidden), None, None, "model"),
        "down": shaped((LAYERS, hidden, WIDTH), None, "model"),
        "router": shaped((LAYERS, WIDTH, EXPERTS)),
        "expert_up": shaped((LAYERS, EXPERTS, WIDTH, hidden), None, "model"),
        "expert_down": shaped((LAYERS, EXPERTS, hidden, WIDTH), None, "model"),
    }
    batch = shaped((BATCH, LENGTH, WIDTH), "data")
    return export.export(
        jax.jit(step),
        platforms=["tpu" if style in FOR_TPU else "cpu"],
        disabled_checks=[
            export.DisabledSafetyCheck.platform(),
            export.DisabledSafetyCheck.custom_call("tpu_custom_call"),
        ],
    )(weights, batch, batch)
