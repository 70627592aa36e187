"""Steps of workers of one job, exported for 8 devices, that differ in what a test asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from models.devices import DEVICES, mesh  # first: sets up the devices

import jax  # isort: skip
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "x"
ROWS = jax.ShapeDtypeStruct((DEVICES, 16), jnp.float32)
Local = Callable[[jax.Array], Any]


def exported(local: Local, out_specs: Any = P(AXIS)) -> export.Exported:  # noqa: B008 (a constant)
    """A function of one device's row, on all devices."""
    on = mesh(x=DEVICES)
    mapped = jax.shard_map(
        local, mesh=on, in_specs=(P(AXIS),), out_specs=out_specs, check_vma=False
    )
    step = jax.jit(mapped, in_shardings=(NamedSharding(on, P(AXIS)),))
    return export.export(step, platforms=("cpu",))(ROWS)


def data_parallel() -> export.Exported:
    """Two gradients, summed one by one with nothing between them."""

    def local(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.psum(jnp.sin(x), AXIS), lax.pmean(x.T @ x, AXIS)

    return exported(local, (P(), P()))


def chained(*, extra: bool = False, turned: bool = False) -> export.Exported:
    """A gather, a sum of what it gave, a shift of that; another sum at the end, or turned round."""

    def local(x: jax.Array) -> jax.Array:
        y = lax.psum(x, AXIS) if turned else lax.all_gather(x, AXIS, tiled=True)
        if turned:
            y = lax.all_gather(jnp.tanh(y), AXIS, tiled=True).sum(0, keepdims=True)
        else:
            y = lax.psum(jnp.tanh(y.sum(0, keepdims=True)), AXIS)
        y = lax.ppermute(y, AXIS, [(i, (i + 1) % DEVICES) for i in range(DEVICES)])
        return lax.pmax(y, AXIS) if extra else y

    return exported(local)


def both_orders(*, turned: bool) -> export.Exported:
    """Two independent collectives, in the text one way or the other."""

    def local(x: jax.Array) -> jax.Array:
        if turned:
            scattered = lax.psum_scatter(jnp.tile(x, (DEVICES, 1)), AXIS, tiled=True)
            summed = lax.pmax(x, AXIS)
        else:
            summed = lax.pmax(x, AXIS)
            scattered = lax.psum_scatter(jnp.tile(x, (DEVICES, 1)), AXIS, tiled=True)
        return summed - scattered

    return exported(local)


def nested_scans() -> export.Exported:
    """A scan of a scan, with a chained collective in each."""

    def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(lax.psum(x, AXIS)), None

    def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        x, _ = lax.scan(inner, x, None, length=3)
        return 0.5 * lax.ppermute(x, AXIS, [(i, (i + 1) % DEVICES) for i in range(DEVICES)]), None

    return exported(lambda x: lax.scan(outer, x, None, length=4)[0])


def branch_on_index(*, groups_fit: bool) -> export.Exported:
    """The first half of the devices sums among itself, or with all."""
    half = DEVICES // 2
    halves = [list(range(half)), list(range(half, DEVICES))]

    def local(x: jax.Array) -> jax.Array:
        groups = halves if groups_fit else None
        return lax.cond(
            lax.axis_index(AXIS) < half,
            lambda v: lax.psum(v, AXIS, axis_index_groups=groups),
            lambda v: 2 * v,
            x,
        )

    return exported(local)


def until_small(*, of_all: bool) -> export.Exported:
    """A loop that ends when a norm is small: of all devices' values, or of one's own."""

    def far(x: jax.Array) -> jax.Array:
        norm = jnp.square(x).sum()
        return (lax.psum(norm, AXIS) if of_all else norm) > 1e-2

    def local(x: jax.Array) -> jax.Array:
        return lax.while_loop(far, lambda v: 0.4 * lax.pmean(v, AXIS), jnp.tanh(x))

    return exported(local)
