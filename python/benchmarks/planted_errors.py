"""Errors planted in training steps: which of them `verify` finds, exactly and within tolerances.

    python python/benchmarks/planted_errors.py [ERROR ...]

A step has attention with a causal mask in a scan over layers, and a scan over 64 microbatches. Each
error is planted in two of its four variants (SGD and Adam, float32 and bfloat16): 40 pairs of
exports. A pair is compared in exact arithmetic, and in floats with the tolerances that `optimize`
had (1e-4 for float32, 5e-2 for bfloat16) on two inputs. A column shows how many elements differ.
Exit code 1 if an error is not found exactly. All of it runs for about six minutes on two cores.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.verify import Options, Rule, Verification, verify_artifacts

LAYERS, MICROBATCHES, SAMPLES, LENGTH, WIDTH = 3, 64, 2, 5, 8
RATE, DECAY, EPSILON = 1e-3, 1e-2, 1e-8
FACTOR = np.float32(1 + 2.0**-20)
CHANGED = 37  # the microbatch that some errors change
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}

Tree = dict[str, jax.Array]


@dataclass(frozen=True)
class Variant:
    """How a step updates its weights, and their element type."""

    optimizer: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.optimizer} {self.dtype}"


SGD, SGD_16 = Variant("sgd", "float32"), Variant("sgd", "bfloat16")
ADAM, ADAM_16 = Variant("adam", "float32"), Variant("adam", "bfloat16")

# An error, and the two variants that it is planted in.
ERRORS: dict[str, tuple[Variant, Variant]] = {
    "a gradient times 1 + 2**-20": (SGD, ADAM_16),
    "an activation times 1 + 2**-20": (SGD_16, ADAM),
    "one of 64 microbatches dropped": (SGD, ADAM_16),
    "one microbatch doubled, one halved": (SGD_16, ADAM),
    "weights of two layers exchanged": (SGD, ADAM_16),
    "two layers exchanged": (SGD_16, ADAM),
    "the gradient of the last microbatch": (SGD, ADAM_16),
    "the labels of the next microbatch": (SGD_16, ADAM),
    "the mask off by one": (SGD, ADAM_16),
    "the mask off by one in one position": (SGD_16, ADAM),
    "a mean over 63": (SGD, ADAM_16),
    "the loss of one token twice": (SGD_16, ADAM),
    "no gradient of a tensor": (SGD, ADAM_16),
    "no gradient through the keys": (SGD_16, ADAM),
    "no update of a tensor": (SGD, ADAM_16),
    "no update": (SGD_16, ADAM),
    "the sign of a gradient": (SGD, ADAM_16),
    "no residual in the last layer": (SGD_16, ADAM),
    "the rate of the next step": (SGD, ADAM_16),
    "the decay of another tensor": (SGD_16, ADAM),
}


def attention(x: jax.Array, layer: Tree, error: str) -> jax.Array:
    """Causal attention with one head."""
    queries, keys, values = (x @ layer[name] for name in ("queries", "keys", "values"))
    if error == "no gradient through the keys":
        keys = lax.stop_gradient(keys)
    rows = jnp.arange(LENGTH)
    seen = rows <= rows[:, None]
    if error == "the mask off by one":
        seen = rows <= rows[:, None] + 1
    if error == "the mask off by one in one position":
        seen = seen.at[LENGTH - 2, LENGTH - 1].set(True)
    scores = jnp.where(seen, queries @ keys.mT / math.sqrt(WIDTH), -1e9)
    return jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype) @ values


def network(weights: Tree, x: jax.Array, error: str) -> jax.Array:
    """Layers of attention and a feed-forward part, in a scan."""
    if error == "weights of two layers exchanged":
        weights = {**weights, "keys": weights["keys"][jnp.array([1, 0, 2])]}
    if error == "two layers exchanged":
        weights = {name: each[jnp.array([0, 2, 1])] for name, each in weights.items()}

    def layer(x: jax.Array, given: tuple[Tree, jax.Array]) -> tuple[jax.Array, None]:
        tensors, number = given
        x = x + attention(x, tensors, error)
        hidden = jax.nn.relu(x @ tensors["up"])
        if error == "an activation times 1 + 2**-20":
            hidden = (hidden.astype(jnp.float32) * FACTOR).astype(x.dtype)
        kept = x
        if error == "no residual in the last layer":
            kept = jnp.where(number == LAYERS - 1, 0, x)
        return kept + hidden @ tensors["down"], None

    return lax.scan(layer, x, (weights, jnp.arange(LAYERS)))[0]


def loss(weights: Tree, x: jax.Array, y: jax.Array, error: str) -> jax.Array:
    """The mean square of what a microbatch's outputs miss."""
    missed = jnp.square((network(weights, x, error) - y).astype(jnp.float32))
    if error == "the loss of one token twice":
        missed = missed.at[0, 0].multiply(2)
    return missed.mean()


def gradients(weights: Tree, x: jax.Array, y: jax.Array, error: str) -> tuple[jax.Array, Tree]:
    """The mean loss and gradient of all microbatches."""
    count = 63 if error == "a mean over 63" else MICROBATCHES
    if error == "the labels of the next microbatch":
        y = y.at[CHANGED].set(y[CHANGED + 1])

    def accumulate(carry: Any, given: Any) -> tuple[Any, None]:
        total, sums, last = carry
        value, gradient = jax.value_and_grad(loss)(weights, *given[:2], error)
        used, weight = gradient, jnp.float32(1)
        if error == "the gradient of the last microbatch":
            used = jax.tree.map(lambda a, b: jnp.where(given[2] == CHANGED, a, b), last, gradient)
        if error == "one of 64 microbatches dropped":
            weight = jnp.where(given[2] == CHANGED, 0, weight)
        if error == "one microbatch doubled, one halved":
            weight = jnp.select([given[2] == CHANGED, given[2] == CHANGED + 1], [2.0, 0.5], 1.0)
        sums = jax.tree.map(lambda a, b: a + weight * b.astype(jnp.float32), sums, used)
        return (total + value, sums, gradient), None

    empty = jax.tree.map(lambda each: jnp.zeros(each.shape, jnp.float32), weights)
    start = jnp.float32(0), empty, jax.tree.map(jnp.zeros_like, weights)
    (total, sums, _), _ = lax.scan(accumulate, start, (x, y, jnp.arange(MICROBATCHES)))
    return total / MICROBATCHES, jax.tree.map(lambda each: each / count, sums)


def step_of(variant: Variant, error: str = "") -> Callable[..., Any]:
    """A training step, with an error or without."""

    def step(weights: Tree, state: Any, number: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        value, gradient = gradients(weights, x, y, error)
        if error == "a gradient times 1 + 2**-20":
            gradient["up"] = gradient["up"] * FACTOR
        if error == "no gradient of a tensor":
            gradient["values"] = jnp.zeros_like(gradient["values"])
        if error == "the sign of a gradient":
            gradient["down"] = -gradient["down"]
        counted = (number + 1).astype(jnp.float32)
        rate = RATE / (counted + 1 if error == "the rate of the next step" else counted)
        updates = {name: rate * each for name, each in gradient.items()}
        if variant.optimizer == "adam":
            first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradient)
            second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["second"], gradient)
            updates = jax.tree.map(lambda m, v: rate * m / (jnp.sqrt(v) + EPSILON), first, second)
            state = {"first": first, "second": second}
        decayed = "values" if error == "the decay of another tensor" else "queries"
        updates[decayed] += RATE * DECAY * weights[decayed].astype(jnp.float32)
        if error == "no update of a tensor":
            updates["keys"] = jnp.zeros_like(updates["keys"])
        if error == "no update":
            updates = jax.tree.map(jnp.zeros_like, updates)
        updated = jax.tree.map(
            lambda w, u: (w.astype(jnp.float32) - u).astype(w.dtype), weights, updates
        )
        return updated, state, value

    return step


@functools.cache
def exported(variant: Variant, error: str = "") -> Artifact:
    """The export of a step."""
    dtype = jnp.dtype(variant.dtype)
    shapes = dict.fromkeys(("queries", "keys", "values"), (LAYERS, WIDTH, WIDTH))
    shapes |= {"up": (LAYERS, WIDTH, 2 * WIDTH), "down": (LAYERS, 2 * WIDTH, WIDTH)}
    weights = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    moments = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = {"first": moments, "second": moments} if variant.optimizer == "adam" else {}
    batch = jax.ShapeDtypeStruct((MICROBATCHES, SAMPLES, LENGTH, WIDTH), dtype)
    step = jax.jit(step_of(variant, error), keep_unused=True)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return artifact.from_exported(export.export(step)(weights, state, number, batch, batch))


def compare_exactly(variant: Variant, error: str) -> Verification:
    """Compares a step with an error in it, in exact arithmetic."""
    before, after = exported(variant), exported(variant, error)
    return verify_artifacts(before, after, Options(arithmetic="exact"))


def compare_floats(variant: Variant, error: str) -> Verification:
    """Compares it in floats, as `optimize` did."""
    tolerance = TOLERANCES[variant.dtype]
    rule = Rule(tolerance, tolerance)
    before, after = exported(variant), exported(variant, error)
    return verify_artifacts(before, after, Options(rule=rule, trials=2))


def share(verification: Verification) -> str:
    """How many elements differ."""
    if verification.same:
        return "-"
    return f"{sum(each.differing for each in verification.outputs):,} of {verification.elements:,}"


def main(words: Sequence[str]) -> int:
    """Prints a row for each planted error; exit code 1 if one is not found exactly."""
    parser = argparse.ArgumentParser(description="Which planted errors verify finds.")
    parser.add_argument("errors", nargs="*", metavar="ERROR", help="words in names (all)")
    chosen = parser.parse_args(words).errors
    print(f"{'error':36} {'step':14} {'exact':>16} {'floats':>16} {'seconds':>8}")
    count = exactly = in_floats = 0
    for error, variants in ERRORS.items():
        if chosen and not any(word in error for word in chosen):
            continue
        for variant in variants:
            started = time.monotonic()
            exact, floats = compare_exactly(variant, error), compare_floats(variant, error)
            count += 1
            exactly += not exact.same
            in_floats += not floats.same
            print(
                f"{error:36} {variant!s:14} {share(exact):>16} {share(floats):>16} "
                f"{time.monotonic() - started:8.1f}",
                flush=True,
            )
    same = [
        variant for variant in (SGD, SGD_16, ADAM, ADAM_16) if compare_exactly(variant, "").same
    ]
    print(f"found exactly: {exactly} of {count}; in floats: {in_floats} of {count}")
    print(f"steps without an error that are identical to themselves: {len(same)} of 4")
    return 0 if exactly == count and len(same) == 4 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
