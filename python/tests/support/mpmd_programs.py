"""Training steps that accumulate gradients in the ways of many programs, of a few layers, over four
microbatches of two samples: what expand-mpmd takes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact

WIDTH, MICROBATCHES, ROWS = 8, 4, 2
Tree = Any
Loss = Callable[[Tree, Tree], Any]
Step = Callable[[Tree, Tree], Any]


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """An array of f32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


UNROLLED = {"in": floats(8, 8), "layers": [floats(8, 8)] * 4, "out": floats(8, 4)}
STACKED = {"layers": floats(8, 8, 8), "out": floats(8, 4)}
SHARED = {"layer": floats(8, 8), "out": floats(8, 4)}
BATCH = {"x": floats(8, 8), "y": floats(8, 4)}


def unrolled(weights: Tree, batch: Tree) -> Any:
    """The loss of layers written one after the other."""
    x = batch["x"] @ weights["in"]
    for layer in weights["layers"]:
        x = jnp.tanh(x @ layer)
    return jnp.mean((x @ weights["out"] - batch["y"]) ** 2)


def with_skips(weights: Tree, batch: Tree) -> Any:
    """The loss of layers of which the last ones add what the first ones gave."""
    x, skips = batch["x"] @ weights["in"], list[Any]()
    for number, layer in enumerate(weights["layers"]):
        x = x + skips.pop() if number >= 2 else x
        x = jnp.tanh(x @ layer)
        skips.append(x)
    return jnp.mean((x @ weights["out"] - batch["y"]) ** 2)


def sharing(weights: Tree, batch: Tree) -> Any:
    """The loss of six times the same layer."""
    x = batch["x"]
    for _ in range(6):
        x = jnp.tanh(x @ weights["layer"]) + x
    return jnp.mean((x @ weights["out"] - batch["y"]) ** 2)


def sharing_in_a_loop(weights: Tree, batch: Tree) -> Any:
    """The same, in a scan."""
    x, _ = lax.scan(
        lambda x, _: (jnp.tanh(x @ weights["layer"]) + x, None), batch["x"], None, length=6
    )
    return jnp.mean((x @ weights["out"] - batch["y"]) ** 2)


def scoped(weights: Tree, batch: Tree) -> Any:
    """A loss that names its stages, the first one in a scan."""

    def layer(x: Any, weight: Any) -> tuple[Any, None]:
        with jax.named_scope("stage_0"):
            return jnp.tanh(x @ weight), None

    x, _ = lax.scan(layer, batch["x"], weights["layers"])
    with jax.named_scope("stage_1"):
        return jnp.mean((x @ weights["out"] - batch["y"]) ** 2)


def counting(weights: Tree, batch: Tree) -> tuple[Any, Any]:
    """The sum of the losses of the samples that count, and their number."""
    x = batch["x"] @ weights["in"]
    for layer in weights["layers"]:
        x = jnp.tanh(x @ layer)
    counts = batch["y"][:, 0] > 0
    return jnp.sum(jnp.sum((x @ weights["out"] - batch["y"]) ** 2, -1) * counts), counts.sum()


def penalised(weights: Tree, batch: Tree) -> Any:
    """A loss with the gradient of the outputs by the samples in it."""

    def outputs(x: Any) -> Any:
        x = x @ weights["in"]
        for layer in weights["layers"]:
            x = jnp.tanh(x @ layer)
        return jnp.sum(x @ weights["out"])

    slope = jax.grad(outputs)(batch["x"])
    return unrolled(weights, batch) + jnp.mean(slope * slope)


def step_of(
    loss: Loss, add: Callable[..., Any] | None = None, start: Any = 0.0, unroll: int = 1
) -> Step:
    """A step over microbatches. `add(carry, value, gradients, number)` goes on with a carry beside
    the gradients; the losses are added up without it. `unroll` microbatches go at a time."""

    def step(weights: Tree, batch: Tree) -> Any:
        parts = jax.tree.map(lambda a: a.reshape(MICROBATCHES, ROWS, *a.shape[1:]), batch)

        def body(carry: Any, numbered: Any) -> tuple[Any, None]:
            sums, beside = carry
            number, part = numbered
            value, gradients = jax.value_and_grad(loss)(weights, part)
            sums = jax.tree.map(jnp.add, sums, gradients)
            beside = beside + value if add is None else add(beside, value, gradients, number)
            return (sums, beside), None

        zeros = jax.tree.map(jnp.zeros_like, weights)
        begin = start() if callable(start) else start
        numbered = (jnp.arange(MICROBATCHES), parts)
        (sums, beside), _ = lax.scan(body, (zeros, begin), numbered, unroll=unroll)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, sums), beside

    return step


def divided_behind(weights: Tree, batch: Tree) -> Any:
    """A step whose gradients are divided by the number of samples that count, behind the loop."""
    parts = jax.tree.map(lambda a: a.reshape(MICROBATCHES, ROWS, *a.shape[1:]), batch)

    def body(carry: Any, part: Any) -> tuple[Any, None]:
        (value, count), gradients = jax.value_and_grad(counting, has_aux=True)(weights, part)
        sums = jax.tree.map(jnp.add, carry[0], gradients)
        return (sums, carry[1] + value, carry[2] + count), None

    zeros = jax.tree.map(jnp.zeros_like, weights)
    (sums, value, count), _ = lax.scan(body, (zeros, 0.0, 0), parts)
    return jax.tree.map(lambda w, g: w - g / count, weights, sums), value / count, count


def rows_added_up(weights: Tree, batch: Tree) -> Any:
    """A step whose scan gives the gradients of each microbatch, which sums after it add up: those
    of the first weights in bf16, as their sums are."""
    parts = jax.tree.map(lambda a: a.reshape(MICROBATCHES, ROWS, *a.shape[1:]), batch)

    def body(carry: Any, part: Any) -> tuple[Any, Any]:
        value, gradients = jax.value_and_grad(unrolled)(weights, part)
        return carry, (value, {**gradients, "in": gradients["in"].astype(jnp.bfloat16)})

    _, (values, rows) = lax.scan(body, None, parts)
    sums = jax.tree.map(lambda each: jnp.sum(each, 0).astype(jnp.float32), rows)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, sums), jnp.mean(values)


def finite_only(weights: Tree, batch: Tree) -> Any:
    """A step that leaves out microbatches whose loss is not finite."""
    parts = jax.tree.map(lambda a: a.reshape(MICROBATCHES, ROWS, *a.shape[1:]), batch)

    def body(carry: Any, part: Any) -> tuple[Any, None]:
        value, gradients = jax.value_and_grad(unrolled)(weights, part)
        is_finite = jnp.isfinite(value)
        return jax.tree.map(lambda s, g: jnp.where(is_finite, s + g, s), carry, gradients), None

    sums, _ = lax.scan(body, jax.tree.map(jnp.zeros_like, weights), parts)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, sums)


def without_a_loss(weights: Tree, batch: Tree) -> Any:
    """A step that gives gradients of stacked layers, and nothing else."""

    def loss(layers: Any, part: Tree) -> Any:
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), part["x"], layers)
        return jnp.mean((x[:, :4] - part["y"]) ** 2)

    parts = jax.tree.map(lambda a: a.reshape(MICROBATCHES, ROWS, *a.shape[1:]), batch)
    layers = weights["layers"]
    sums, _ = lax.scan(
        lambda s, part: (s + jax.grad(loss)(layers, part), None), jnp.zeros_like(layers), parts
    )
    return layers - 0.1 * sums


def _beside(add: Callable[..., Any], start: Callable[[], Any]) -> tuple[Step, Tree]:
    """A step that goes on with a carry beside its gradients, and its weights."""
    return step_of(unrolled, add, start), UNROLLED


PROGRAMS: dict[str, tuple[Step, Tree]] = {
    "losses-set": _beside(
        lambda c, v, g, i: c.at[i].set(v), lambda: jnp.full(MICROBATCHES, jnp.nan)
    ),
    "rows-of-two-stages": _beside(
        lambda c, v, g, i: c.at[i].set(v).at[i + MICROBATCHES].set(jnp.sum(g["in"])),
        lambda: jnp.ones(2 * MICROBATCHES),
    ),
    "histogram": _beside(lambda c, v, g, i: c.at[jnp.arange(3) % 2].add(v), lambda: jnp.zeros(4)),
    "complex-sum": _beside(
        lambda c, v, g, i: c + lax.complex(jnp.sum(g["in"]), v), lambda: jnp.complex64(1)
    ),
    "divided-behind": (divided_behind, UNROLLED),
    "rows-added-up": (rows_added_up, UNROLLED),
    "finite-only": (finite_only, UNROLLED),
    "without-a-loss": (without_a_loss, STACKED),
    "unrolled-by-two": (step_of(unrolled, unroll=2), UNROLLED),
    "with-skips": (step_of(with_skips), UNROLLED),
    "sharing": (step_of(sharing), SHARED),
    "sharing-in-a-loop": (step_of(sharing_in_a_loop), SHARED),
    "scoped": (step_of(scoped), STACKED),
    "penalised": (step_of(penalised), UNROLLED),
    # refused
    "rows-twice": _beside(
        lambda c, v, g, i: c.at[i].set(v).at[i + 1].set(2 * v), lambda: jnp.zeros(MICROBATCHES + 1)
    ),
    "rows-that-overlap": _beside(
        lambda c, v, g, i: lax.dynamic_update_slice(c, jnp.full(2, v), (i,)),
        lambda: jnp.zeros(MICROBATCHES + 1),
    ),
    "cut-off-to-integers": _beside(
        lambda c, v, g, i: (c.astype(jnp.float32) + 10 * v).astype(jnp.int32), lambda: jnp.int32(0)
    ),
    "rows-beside-others": _beside(
        lambda c, v, g, i: c.at[i].set(v), lambda: jnp.ones(MICROBATCHES + 1)
    ),
    "moving-average": _beside(lambda c, v, g, i: 0.9 * c + 0.1 * v, lambda: jnp.float32(0)),
}


@cache
def program(name: str) -> Artifact:
    """A step, exported."""
    step, weights = PROGRAMS[name]
    return artifact.from_exported(jax.export.export(jax.jit(step))(weights, BATCH))
