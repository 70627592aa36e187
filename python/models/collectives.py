"""Tiny programs, each with one thing about collectives that a pass must get right.

Every builder returns a `jax.export.Exported` on a mesh of virtual CPU devices with one axis, `x`,
unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from models.devices import DEVICES, mesh  # first: sets up the devices

import jax  # isort: skip
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "x"
ROWS = jax.ShapeDtypeStruct((DEVICES, 16), jnp.float32)
MATRIX = jax.ShapeDtypeStruct((DEVICES, DEVICES), jnp.float32)


def independent() -> export.Exported:
    """Three collectives with no data between them, which every XLA backend reorders."""

    def local(a: jax.Array, b: jax.Array) -> jax.Array:
        gathered = lax.all_gather(a, AXIS, tiled=True)
        scattered = lax.psum_scatter(b, AXIS, tiled=True)
        shifted = lax.ppermute(a, AXIS, _ring(DEVICES))
        return gathered.sum(0, keepdims=True) + scattered + shifted

    return _exported(local, (ROWS, ROWS), in_specs=(P(AXIS), P()), check_vma=False)


def control_flow() -> export.Exported:
    """A `while` that holds an `if` that holds a `case`, each with collectives of its own.

    Predicates and indices come out of a psum, so that all devices take the same way.
    """

    def switched(which: jax.Array, x: jax.Array) -> jax.Array:
        branches: list[Callable[[jax.Array], jax.Array]] = [
            lambda v: lax.ppermute(v, AXIS, _ring(DEVICES)),
            lambda v: v * 0.5,  # a branch with no collective
            lambda v: v + lax.all_gather(v, AXIS).sum(0),
        ]
        return lax.switch(which, branches, x)

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        step, x = carry
        mean = lax.pmean(x.sum(), AXIS)
        chosen = lax.cond(
            mean > 0,
            lambda v: switched(step % 3, v) / (1 + jnp.abs(mean)),
            lambda v: lax.psum_scatter(
                jnp.broadcast_to(v, (DEVICES, v.shape[1])), AXIS, tiled=True
            ),
            x,
        )
        return step + 1, jnp.tanh(chosen) + 0.1

    def local(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda carry: carry[0] < 6, body, (jnp.int32(0), x))[1]

    return _exported(local, (ROWS,), in_specs=(P(AXIS),), check_vma=False)


def condition_collective() -> export.Exported:
    """A `while` whose condition communicates: it stops when the global norm is small."""

    def far(x: jax.Array) -> jax.Array:
        return lax.psum(jnp.square(x).sum(), AXIS) > 1e-2

    def local(x: jax.Array) -> jax.Array:
        return lax.while_loop(far, lambda v: 0.4 * lax.ppermute(v, AXIS, _ring(DEVICES)), x)

    return _exported(lambda x: local(jnp.tanh(x)), (ROWS,), in_specs=(P(AXIS),), check_vma=False)


def inner_functions() -> export.Exported:
    """Jitted functions called several times and within each other: `func.call`."""

    @jax.jit
    def shifted(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, AXIS, _ring(DEVICES))

    @jax.jit
    def mixed(x: jax.Array) -> jax.Array:
        return shifted(x) + lax.pmean(x, AXIS)

    def local(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return mixed(mixed(x)) + shifted(y), mixed(y)

    return _exported(local, (ROWS, ROWS), in_specs=(P(AXIS), P(AXIS)), out_specs=(P(AXIS), P(AXIS)))


def two_platforms() -> export.Exported:
    """Exported for CPU and CUDA, with other collectives on each: they sit in a `stablehlo.case`."""

    def on_cpu(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, AXIS, _ring(DEVICES)) + lax.psum(x, AXIS)

    def on_cuda(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, AXIS, tiled=True).sum(0, keepdims=True)

    def local(x: jax.Array) -> jax.Array:
        chosen = lax.platform_dependent(x, cpu=on_cpu, cuda=on_cuda)
        return chosen + lax.psum_scatter(jnp.tile(x, (DEVICES, 1)), AXIS, tiled=True)

    return _exported(
        local, (ROWS,), in_specs=(P(AXIS),), check_vma=False, platforms=("cpu", "cuda")
    )


def silent() -> export.Exported:
    """Shard_mapped, and no collective at all."""
    return _exported(jnp.tanh, (ROWS,), in_specs=(P(AXIS),))


def single_device() -> export.Exported:
    """Collectives on a mesh of one device: every group has one member."""

    def local(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, AXIS, tiled=True) * 2 + lax.psum(x, AXIS)

    return _exported(local, (ROWS,), in_specs=(P(AXIS),), devices=1, check_vma=False)


def unsharded() -> export.Exported:
    """A plain function of one device: no mesh, no sharding, no collective."""
    return export.export(jax.jit(lambda x: jnp.tanh(x) @ x.T), platforms=("cpu",))(ROWS)


def unpartitioned() -> export.Exported:
    """A plain `jit` over sharded arguments: its collectives appear when it is partitioned."""
    devices = mesh(x=DEVICES)
    rows, columns = NamedSharding(devices, P(AXIS)), NamedSharding(devices, P(None, AXIS))
    step = jax.jit(lambda x, w: jnp.tanh(x @ w) @ w.T, in_shardings=(rows, columns))
    return export.export(step, platforms=("cpu",))(MATRIX, MATRIX)


def unused_result() -> export.Exported:
    """A composite of two collectives, one of whose results nobody uses: compilers delete it.

    JAX drops an equation with unused results when it lowers, so that an artifact has none in the
    plain; it keeps those in the decomposition of a composite, and those before a barrier.
    """

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.psum(x, AXIS), lax.ppermute(x, AXIS, _ring(DEVICES))

    def local(x: jax.Array) -> jax.Array:
        summed, _ = lax.composite(both, name="models.both")(x)
        return x - summed

    return _exported(local, (ROWS,), in_specs=(P(AXIS),), check_vma=False)


def barrier_result() -> export.Exported:
    """A collective whose result reaches an optimization_barrier and no further.

    XLA drops the barrier's unused element, and the collective with it.
    """

    def local(x: jax.Array) -> jax.Array:
        kept, _ = lax.optimization_barrier((x * 2, lax.ppermute(x, AXIS, _ring(DEVICES))))
        return kept - lax.psum(kept, AXIS)

    return _exported(local, (ROWS,), in_specs=(P(AXIS),), check_vma=False)


def permute_loop(microbatches: int = 12) -> export.Exported:
    """One pipeline stage a device: in each step of a scan, activations go to the next stage."""
    last = DEVICES - 1

    def local(weights: jax.Array, inputs: jax.Array) -> jax.Array:
        stage = lax.axis_index(AXIS)

        def step(arriving: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
            fed = inputs[jnp.minimum(number, microbatches - 1)]
            computed = jnp.tanh(jnp.where(stage == 0, fed, arriving) @ weights[0])
            onward = lax.ppermute(computed, AXIS, [(i, i + 1) for i in range(last)])
            return onward, computed

        first = lax.pcast(jnp.zeros_like(inputs[0]), (AXIS,), to="varying")
        _, computed = lax.scan(step, first, jnp.arange(microbatches + last))
        return lax.psum(jnp.where(stage == last, computed[last:], 0.0), AXIS)

    weights = jax.ShapeDtypeStruct((DEVICES, 16, 16), jnp.float32)
    inputs = jax.ShapeDtypeStruct((microbatches, 4, 16), jnp.float32)
    return _exported(local, (weights, inputs), in_specs=(P(AXIS), P()), out_specs=P())


def expert_exchange() -> export.Exported:
    """Mixture of experts, one expert a device: all_to_all out, a matmul, all_to_all home."""

    def local(tokens: jax.Array, router: jax.Array, expert: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(tokens @ router)  # [tokens, experts]
        sent = jnp.einsum("te,td->etd", gates, tokens)
        arrived = lax.all_to_all(sent, AXIS, split_axis=0, concat_axis=0, tiled=True)
        computed = jax.nn.relu(arrived @ expert[0])
        return lax.all_to_all(computed, AXIS, split_axis=0, concat_axis=0, tiled=True).sum(0)

    shapes = ((DEVICES * 4, 16), (16, DEVICES), (DEVICES, 16, 16))
    return _exported(
        local,
        tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
        in_specs=(P(AXIS), P(), P(AXIS)),
    )


def disjoint_groups() -> export.Exported:
    """Permutes among the first and among the last devices, which never meet, and sums in halves."""
    half = DEVICES // 2

    def local(x: jax.Array) -> jax.Array:
        low = lax.ppermute(x, AXIS, _ring(half))
        high = lax.ppermute(x, AXIS, [(half + a, half + b) for a, b in _ring(half)])
        halves = [list(range(half)), list(range(half, DEVICES))]
        gathered = lax.all_gather(x, AXIS, axis_index_groups=halves).sum(0)
        return low - high + gathered

    return _exported(local, (ROWS,), in_specs=(P(AXIS),), check_vma=False)


def element_types() -> export.Exported:
    """Collectives on bf16, integers, booleans, complex numbers and an empty array."""

    def local(x: jax.Array) -> tuple[jax.Array, ...]:
        narrow = lax.psum(x.astype(jnp.bfloat16), AXIS)
        whole = lax.pmax(x.astype(jnp.int32), AXIS)
        flags = lax.all_gather(x > 0, AXIS, tiled=True)
        turning = lax.ppermute(lax.complex(x, -x), AXIS, _ring(DEVICES))
        empty = lax.all_gather(x[:, :0], AXIS, tiled=True)
        return narrow, whole, flags, turning, empty

    return _exported(
        local,
        (ROWS,),
        in_specs=(P(AXIS),),
        out_specs=(P(), P(), P(), P(AXIS), P()),
        check_vma=False,
    )


def _ring(size: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % size) for i in range(size)]


def _exported(
    local: Callable[..., Any],
    arguments: Sequence[jax.ShapeDtypeStruct],
    *,
    in_specs: tuple[P, ...],
    out_specs: Any = P(AXIS),  # noqa: B008 (a constant)
    devices: int = DEVICES,
    check_vma: bool = True,
    platforms: tuple[str, ...] = ("cpu",),
) -> export.Exported:
    on = mesh(x=devices)
    mapped = jax.shard_map(
        local, mesh=on, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    step = jax.jit(mapped, in_shardings=tuple(NamedSharding(on, spec) for spec in in_specs))
    return export.export(step, platforms=platforms)(*arguments)
