"""Loops as JAX writes them, for the tests of pipeline-collectives: scans, steps, remat, calls.

Weights are permutations with signs and inputs small whole numbers, so that sums are exact in any
order and the same program gives the same bits however XLA fuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.export import Exported
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, ROWS = 4, 16, 32
type Forward = Callable[[Any, Any], Any]


def gathered(weight: Any) -> Any:
    """All rows of a layer's weights."""
    return lax.all_gather(weight, "data", tiled=True)


def layer(x: Any, weight: Any) -> tuple[Any, None]:
    """One layer of an FSDP stack."""
    return jnp.abs(x @ gathered(weight)), None


def _scan(weights: Any, x: Any) -> Any:
    return lax.scan(layer, x, weights)[0]


def _unrolled(weights: Any, x: Any) -> Any:
    return lax.scan(layer, x, weights, unroll=2)[0]


def _reversed(weights: Any, x: Any) -> Any:
    return lax.scan(layer, x, weights, reverse=True)[0]


def _remat(weights: Any, x: Any) -> Any:
    return lax.scan(jax.checkpoint(layer), x, weights)[0]


def _counted(weights: Any, x: Any) -> Any:
    def body(i: Any, x: Any) -> Any:
        return jnp.abs(x @ gathered(weights[i]))

    return lax.fori_loop(1, LAYERS, body, x)


def _backwards(weights: Any, x: Any) -> Any:
    def body(i: Any, x: Any) -> Any:
        return jnp.abs(x @ gathered(weights[-1 - i]))

    return lax.fori_loop(0, LAYERS, body, x)


def _while(weights: Any, x: Any) -> Any:
    def body(state: Any) -> Any:
        x, i = state
        return jnp.abs(x @ gathered(lax.dynamic_index_in_dim(weights, i, keepdims=False))), i - 1

    return lax.while_loop(lambda state: state[1] >= 0, body, (x, LAYERS - 1))[0]


def _nested(weights: Any, x: Any) -> Any:
    pairs = weights.reshape(2, LAYERS // 2, *weights.shape[1:])
    return lax.scan(lambda x, two: (lax.scan(layer, x, two)[0] + 1, None), x, pairs)[0]


def _summed(weights: Any, x: Any) -> Any:
    """Sums over devices that only leave the loop, as rows and in an accumulator."""

    def body(total: Any, weight: Any) -> tuple[Any, Any]:
        y = jnp.tile(x, (2, 1)) @ jnp.tile(weight, (8, 1))
        return total + lax.psum_scatter(y, "data", tiled=True), lax.psum(y, "data")

    total, rows = lax.scan(body, jnp.zeros((1, WIDTH)), weights)
    return total + rows.sum(axis=0)


def _branched(weights: Any, x: Any) -> Any:
    return lax.cond(lax.psum(1, "data") > 4, _scan, _reversed, weights, x)


def _ring(weights: Any, x: Any) -> Any:
    """What is sent on as it is, as ring attention sends keys."""
    pairs = [(i, (i + 1) % 8) for i in range(8)]

    def body(state: Any, weight: Any) -> tuple[Any, None]:
        total, sent = state
        return (total + sent @ jnp.tile(weight, (8, 1)), lax.ppermute(sent, "data", pairs)), None

    return lax.scan(body, (jnp.zeros_like(x), x), weights)[0][0]


def _step(forward: Forward) -> Forward:
    def step(weights: Any, x: Any) -> Any:
        return jax.grad(lambda w: forward(w, x).sum())(weights)

    return step


def _mapped(function: Forward, results: Any) -> Forward:
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("data",))
    specs = (P(None, "data"), P("data"))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)


PROGRAMS: dict[str, Forward] = {
    **{
        name: _mapped(function, P("data"))
        for name, function in {
            "scan": _scan,
            "unroll": _unrolled,
            "reverse": _reversed,
            "fori": _counted,
            "negative-index": _backwards,
            "while-down": _while,
            "nested": _nested,
            "sums": _summed,
            "cond": _branched,
            "ring": _ring,
        }.items()
    },
    **{
        f"{name}-step": _mapped(_step(function), P(None, "data"))
        for name, function in {
            "scan": _scan,
            "remat": _remat,
            "unroll": _unrolled,
            "nested": _nested,
        }.items()
    },
}


def exported(name: str, **options: Any) -> Exported:
    """A program as an artifact; `donate_argnums` goes to jit, the rest to export."""
    donated = options.pop("donate_argnums", ())
    shapes = (
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    )
    jitted = jax.jit(PROGRAMS[name], donate_argnums=donated)
    return export.export(jitted, **options)(*shapes)


def whole_numbers() -> list[Any]:
    """Arguments that keep every sum exact."""
    random = np.random.default_rng(0)
    weights = np.zeros((LAYERS, WIDTH, WIDTH), np.float32)
    for weight in weights:
        weight[np.arange(WIDTH), random.permutation(WIDTH)] = random.choice([-1, 1], WIDTH)
    return [weights, random.integers(-3, 4, (ROWS, WIDTH)).astype(np.float32)]
