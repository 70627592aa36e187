"""reassociate-collectives on programs of jax: fewer collectives, the values of before."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_comparison import assert_identical
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.artifacts import artifact

DEVICES = 4
type Step = Callable[[jax.Array, jax.Array], jax.Array]


def _exported(step: Step, out: P) -> export.Exported:
    mesh = jax.make_mesh((DEVICES,), ("data",), devices=jax.devices()[:DEVICES])
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=out)
    arguments = (
        jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(mesh, P())),
        jax.ShapeDtypeStruct((16, 8), np.float32, sharding=NamedSharding(mesh, P("data"))),
    )
    return export.export(jax.jit(mapped))(*arguments)


def _microbatches(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """Gradients of two microbatches, each reduced before they are added."""
    sums = [lax.psum(part.T @ jnp.tanh(part @ weights), "data") for part in jnp.split(rows, 2)]
    return sums[0] + sums[1]


def _means(weights: jax.Array, rows: jax.Array) -> jax.Array:
    means = [lax.pmean(part.T @ (part @ weights), "data") for part in jnp.split(rows, 4)]
    return means[0] + means[1] + means[2] + means[3]


def _scattered(weights: jax.Array, rows: jax.Array) -> jax.Array:
    parts = [part.T @ (part @ weights) for part in jnp.split(rows, 2)]
    one, other = (lax.psum_scatter(part, "data", tiled=True) for part in parts)
    return one + other


def _extremes(weights: jax.Array, rows: jax.Array) -> jax.Array:
    parts = [part.T @ (part @ weights) for part in jnp.split(rows, 2)]
    return jnp.maximum(lax.pmax(parts[0], "data"), lax.pmax(parts[1], "data"))


@pytest.mark.parametrize(
    ("step", "collectives", "out"),
    [
        pytest.param(_microbatches, 2, P(), marks=pytest.mark.soak),
        (_means, 4, P()),
        (_scattered, 2, P("data")),
        pytest.param(_extremes, 2, P(), marks=pytest.mark.soak),
    ],
)
def test_sums_of_reductions_are_reductions_of_sums(step: Step, collectives: int, out: P):
    before = _exported(step, out)
    after = stablehlo_tools.transform(before, "reassociate-collectives")
    given, made = artifact.from_exported(before), artifact.from_exported(after)
    assert len(find_collectives(given.module)) == collectives
    assert len(find_collectives(made.module)) == 1
    assert_identical(given, made)
