"""Training loops over microbatches, as jax exports them: one collective for each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.export import Exported
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from kept_values import assert_kept, compared
from sink_programs import Sinking, sinkings, sunk, surveyed

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.ir.inline import inline_all_calls

MICROBATCHES, BATCH, WIDTH = 4, 8, 16


def loss(weights: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ weights["in"])
    return jnp.mean((hidden @ weights["out"]) ** 2)


def accumulate_with_scan(reduce: Callable[[Any], Any], start: Callable[[Any], Any]) -> Any:
    """Gradients of microbatches, reduced one by one, added up by a scan."""

    def gradients(weights: Any, batches: Any) -> Any:
        def step(total: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(weights, x)
            return jax.tree.map(lambda a, g: a + reduce(g), total, grads), value

        return lax.scan(step, jax.tree.map(start, weights), batches)[0]

    return gradients


def accumulate_with_fori_loop(reduce: Callable[[Any], Any], start: Callable[[Any], Any]) -> Any:
    """The same by a fori_loop."""

    def gradients(weights: Any, batches: Any) -> Any:
        def step(i: Any, total: Any) -> Any:
            x = lax.dynamic_index_in_dim(batches, i, keepdims=False)
            grads = jax.grad(loss)(weights, x)
            return jax.tree.map(lambda a, g: a + reduce(g), total, grads)

        return lax.fori_loop(0, batches.shape[0], step, jax.tree.map(start, weights))

    return gradients


def whole(g: Any) -> Any:
    return lax.psum(g, "x")


def mean(g: Any) -> Any:
    return lax.pmean(g.astype(jnp.bfloat16), "x").astype(jnp.float32)


def shard(g: Any) -> Any:
    return lax.psum_scatter(g, "x", scatter_dimension=0, tiled=True)


def shard_and_back(g: Any) -> Any:
    return lax.all_gather(shard(g), "x", axis=0, tiled=True)


def zeros(w: Any) -> Any:
    return jnp.zeros_like(w)


def zero_shard(w: Any) -> Any:
    return jnp.zeros((w.shape[0] // 8, *w.shape[1:]), w.dtype)


REDUCTIONS = {
    "psum": (whole, zeros, P()),
    "pmean-of-bf16": (mean, zeros, P()),
    "psum_scatter": (shard, zero_shard, P("x")),
    "psum_scatter-all_gather": (shard_and_back, zeros, P()),
}
ONE_EACH_WAY = ("psum", "psum_scatter-all_gather")


def exported(function: Any, out: Any, arguments: Any, taken: Any) -> Exported:
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=taken, out_specs=out, check_vma=False)
    return export.export(jax.jit(mapped))(*arguments)


def training_arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    weights = {
        "in": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32),
        "out": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32),
    }
    batches = rng.normal(size=(MICROBATCHES, 8 * BATCH, WIDTH)).astype(np.float32)
    return weights, batches


def in_loops(program: Artifact) -> Counter[str]:
    """The collectives of a program's loops."""
    copy = program.copy()
    inline_all_calls(copy.module)
    found = [c.kind for loop in surveyed(copy) for c in loop.collectives]
    return Counter(found)


@pytest.mark.parametrize(
    "loop", [accumulate_with_scan, pytest.param(accumulate_with_fori_loop, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ONE_EACH_WAY else pytest.mark.soak) for n in REDUCTIONS],
)
def test_gradients_are_reduced_once(name: str, loop: Any):
    reduce, start, out = REDUCTIONS[name]
    arguments = training_arguments()
    before = exported(loop(reduce, start), out, arguments, (P(), P(None, "x")))
    given = artifact.from_exported(before)
    after = sunk(given, merge=True)
    kinds = {c.kind for c in find_collectives(given.module)}
    assert set(in_loops(given)) == kinds
    assert not in_loops(after)
    assert Counter(c.kind for c in find_collectives(after.module)) == dict.fromkeys(kinds, 1)
    assert_kept(compared(before, after.to_exported(), arguments))


def layers_of_losses(weights: Any, batches: Any) -> Any:
    """A mean loss and a reduced norm of each microbatch, stacked; the last norm is carried too."""

    def step(last: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        sizes = jnp.stack([jnp.sum(g * g) for g in jax.tree.leaves(grads)])
        return lax.pmax(sizes, "x"), (lax.pmean(value, "x"), lax.all_gather(sizes, "x"))

    return lax.scan(step, jnp.zeros(2), batches)


def test_rows_and_last_values_of_a_scan():
    arguments = training_arguments()
    before = exported(layers_of_losses, P(), arguments, (P(), P(None, "x")))
    given = artifact.from_exported(before)
    copy = given.copy()
    inline_all_calls(copy.module)
    (found,) = surveyed(copy)
    plans = sinkings(found).values()
    hows = Counter(plan.way if isinstance(plan, Sinking) else plan for plan in plans)
    assert hows == {"last": 1, "batch": 2}
    after = sunk(given)
    assert not in_loops(after)
    assert_kept(compared(before, after.to_exported(), arguments), bitwise=True)
