"""Training steps of which every device's part is written by hand in a `jax.shard_map`, around a
scan over stacked layers: data, tensor, sequence and fully sharded parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpipe_programs import (  # first: sets up the devices
    Array,
    Case,
    descended,
    descending,
    placed,
    ring,
)

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HIDDEN, HEADS, BATCH, LENGTH = 4, 8, 16, 2, 8, 4
SAMPLES = P("data")
ROWS, COLUMNS = P(None, "model"), P(None, None, "model")
MEGATRON: dict[str, P] = {
    "q": COLUMNS,
    "k": COLUMNS,
    "v": COLUMNS,
    "o": ROWS,
    "up": COLUMNS,
    "down": ROWS,
}
BOTH = frozenset({"data", "model"})
MICROBATCHES, STAGES = 4, 2
Weights = dict[str, Array]


@dataclass(frozen=True)
class Form:
    """How a step is divided: the specs of weights and of the batch, what a layer exchanges, and
    whether gradients are taken inside of the shard_map, where `joined` reduces loss and gradients,
    over how many microbatches of a device's samples in turn.
    """

    batch: P = SAMPLES
    axes: frozenset[str] = frozenset({"data"})
    tensor: str = ""
    gathers: str = ""
    scatters: bool = False
    ulysses: bool = False
    checks: bool = True
    joined: Callable[[Array, Weights], tuple[Array, Weights]] | None = None
    microbatches: int = 1
    specs: Mapping[str, P] = field(default_factory=dict[str, P])

    def spec(self, name: str) -> P:
        """That of a stack of weights."""
        return self.specs.get(name, P())


def _normalised(x: Array) -> Array:
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def _attention(x: Array, w: Weights, form: Form) -> Array:
    q, k, v = (jnp.einsum("bsd,dhc->bshc", x, w[name]) for name in "qkv")
    if form.ulysses:  # of the sequence each device has a part, and then of the heads
        q, k, v = (lax.all_to_all(a, "data", 2, 1, tiled=True) for a in (q, k, v))
    scores = jnp.einsum("bshc,bthc->bhst", q, k)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    mixed = jnp.einsum("bhst,bthc->bshc", jax.nn.softmax(jnp.where(causal, scores, -1e9)), v)
    if form.ulysses:
        mixed = lax.all_to_all(mixed, "data", 1, 2, tiled=True)
    return jnp.einsum("bshc,hcd->bsd", mixed, w["o"])


def layer(x: Array, w: Weights, form: Form) -> Array:
    """One layer, of which a device computes its part."""
    if form.gathers:
        w = {name: lax.all_gather(own, form.gathers, axis=0, tiled=True) for name, own in w.items()}
    for part in (_attention, lambda h, w, _: jnp.tanh(h @ w["up"]) @ w["down"]):
        h = _normalised(x)
        if form.scatters:
            h = lax.all_gather(h, form.tensor, axis=1, tiled=True)
        y = part(h, w, form)
        if form.scatters:
            y = lax.psum_scatter(y, form.tensor, scatter_dimension=1, tiled=True)
        elif form.tensor:
            y = lax.psum(y, form.tensor)
        x = x + y
    return x


def _layers(w: Weights, x: Array, form: Form) -> Array:
    return lax.scan(lambda h, own: (layer(h, own, form), None), x, w)[0]


def _loss(w: Weights, x: Array, form: Form) -> Array:
    return jnp.square(_layers(w, x, form)).mean()


def shard_map_step(form: Form) -> Case:
    """The loss, and the weights after a step of gradient descent, on eight devices of which two
    are left for the stages of a pipeline."""

    def inside(w: Weights, x: Array) -> Any:
        assert form.joined is not None
        parts = x.reshape(form.microbatches, -1, *x.shape[1:])

        def one(total: Any, own: Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(_loss)(w, own, form)), None

        if len(parts) > 1:
            total, _ = lax.scan(one, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, w)), parts)
        else:
            total = jax.value_and_grad(_loss)(w, x, form)
        mean = jax.tree.map(lambda each: each / len(parts), total)
        value, gradients = form.joined(*mean)
        return value, descended(w, gradients)

    outputs = partial(_layers, form=form)
    return _case(form, outputs if form.joined is None else inside, set(form.axes), (BATCH,))


def gpipe_step(form: Form, *, inside: bool) -> Case:
    """The same for a GPipe pipeline in which all of three axes are manual; `inside`: so that
    gradients are taken in the shard_map, which does not check what is replicated."""

    def pipeline(w: Weights, x: Array) -> Array:
        first = lax.axis_index("stage") == 0

        def tick(arriving: Array, t: Array) -> tuple[Array, Array]:
            y = jnp.where(first, x[jnp.minimum(t, MICROBATCHES - 1)], arriving)
            y = _layers(w, y, form)
            return lax.ppermute(y, "stage", ring(STAGES)), y

        ticks = jnp.arange(MICROBATCHES + STAGES - 1)
        return lax.scan(tick, jnp.zeros_like(x[0]), ticks)[1][STAGES - 1 :]

    def last(value: Array) -> Array:
        return jnp.where(lax.axis_index("stage") == STAGES - 1, value, 0.0)

    def outputs(w: Weights, x: Array) -> Array:
        return lax.psum(last(pipeline(w, x)), "stage")

    def local_step(w: Weights, x: Array) -> Any:
        def loss(w: Weights) -> Array:
            return last(jnp.square(pipeline(w, x)).mean())

        value, gradients = jax.value_and_grad(loss)(w)
        # A sum of what all have is what unchecked sums of activations are differentiated to.
        copies = lax.axis_size("model") if form.tensor else 1
        gradients = jax.tree.map(lambda g: g / copies, gradients)
        value, gradients = (form.joined or mean_over("data"))(lax.psum(value, "stage"), gradients)
        return value, descended(w, gradients)

    sizes = (MICROBATCHES, BATCH // MICROBATCHES)
    return _case(form, local_step if inside else outputs, set(_AXES), sizes, returns_step=inside)


_AXES = ("data", "model", "stage")


def mean_over(axes: str | tuple[str, ...]) -> Callable[[Array, Weights], tuple[Array, Weights]]:
    """Loss and gradients are means over the devices of some axes."""
    return lambda value, gradients: lax.pmean((value, gradients), axes)


def _case(
    form: Form,
    local: Callable[..., Any],
    axes: set[str],
    sizes: tuple[int, ...],
    *,
    returns_step: bool | None = None,
) -> Case:
    """A step of what each device runs on its part of weights and of a batch of some sizes."""
    steps = form.joined is not None if returns_step is None else returns_step
    mesh = jax.make_mesh((2, 2, 2), _AXES, axis_types=(AxisType.Auto,) * len(_AXES))
    key = np.random.default_rng(0)
    shapes = dict.fromkeys("qkv", (WIDTH, HEADS, WIDTH // HEADS))
    shapes |= {"o": (HEADS, WIDTH // HEADS, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    w = {
        name: jnp.asarray(key.standard_normal((LAYERS, *shape), dtype=np.float32) / 4)
        for name, shape in shapes.items()
    }
    x = jnp.asarray(key.standard_normal((*sizes, LENGTH, WIDTH), dtype=np.float32))
    specs = {name: form.spec(name) for name in w}
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, form.batch),
        out_specs=(P(), specs) if steps else form.batch,
        axis_names=axes,
        check_vma=form.checks,
    )

    step = descending(lambda w, x: jnp.square(mapped(w, x)).mean())
    plain = descending(lambda w, x: _loss(w, x.reshape(-1, LENGTH, WIDTH), Form()))
    kinds = placed((w, x), mesh, (specs, form.batch))
    made = export.export(jax.jit(mapped if steps else step))(*kinds)
    return Case(made, plain, (w, x))
