"""Damage to the bytes of artifacts: what disks, transfers and editors do to them."""

from __future__ import annotations

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.artifact import ArtifactForm

Mutation = Callable[[bytearray, random.Random], None]


def sources() -> list[export.Exported]:
    """Programs with what artifacts are made of: loops, functions, collectives, shardings, names."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))

    def local(a: jax.Array) -> jax.Array:
        return jax.lax.psum(a, "x") + jax.lax.ppermute(a, "x", [(0, 1), (1, 0)])

    def mapped(a: jax.Array, unused: jax.Array) -> dict[str, jax.Array]:
        del unused
        spec = PartitionSpec("x")
        return {"sum": jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(a)}

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w), None

        h, _ = jax.lax.scan(layer, x, weights["layers"])
        return jnp.mean((h - weights["bias"]) ** 2)

    def step(weights: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    weights = {
        "layers": jax.ShapeDtypeStruct((3, 16, 16), jnp.float32),
        "bias": jax.ShapeDtypeStruct((16,), jnp.float32),
    }
    return [
        export.export(jax.jit(mapped))(
            jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding),
            jax.ShapeDtypeStruct((3,), jnp.int32),
        ),
        export.export(jax.jit(step))(
            weights, jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)
        ),
    ]


FORMS = (ArtifactForm.TEXT, ArtifactForm.BYTECODE, ArtifactForm.PORTABLE, ArtifactForm.JAX_EXPORT)


def encoded() -> dict[ArtifactForm, list[bytes]]:
    """Each program in each form that is written."""
    programs = [artifacts.from_exported(exported) for exported in sources()]
    return {form: [artifacts.encode(program, form) for program in programs] for form in FORMS}


def mutated(data: bytes, seed: int) -> bytes:
    """The data with one to three places of damage, always the same for a seed."""
    rng = random.Random(seed)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if changed:
            rng.choice(_MUTATIONS)(changed, rng)
    return bytes(changed)


def _flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)))


def _early(data: bytearray, rng: random.Random) -> None:
    """Where lengths, versions and offsets are."""
    data[rng.randrange(min(len(data), 200))] = rng.randrange(256)


def _step(data: bytearray, rng: random.Random) -> None:
    """A length or an index that is off by a little."""
    at = rng.randrange(len(data))
    data[at] = (data[at] + rng.choice((-4, -2, -1, 1, 2, 4))) % 256


def _word(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at : at + 4] = rng.choice(
        (b"\xff" * 4, b"\x00" * 4, b"\xff\xff\xff\x7f", rng.randbytes(4))
    )


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _without(data: bytearray, rng: random.Random) -> None:
    start, size = _piece(data, rng)
    del data[start : start + size]


def _insert(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.randrange(1, 9))


def _repeat(data: bytearray, rng: random.Random) -> None:
    start, size = _piece(data, rng)
    data[start:start] = data[start : start + size]


def _swap(data: bytearray, rng: random.Random) -> None:
    """One piece where another is, as blocks of a file that were written out of order."""
    (start, size), (other, _) = _piece(data, rng), _piece(data, rng)
    data[start : start + size] = data[other : other + size]


_MUTATIONS: tuple[Mutation, ...] = (
    *(_flip, _flip, _set, _early, _step, _step, _word),
    *(_cut, _without, _insert, _repeat, _swap),
)


def _piece(data: bytearray, rng: random.Random) -> tuple[int, int]:
    return rng.randrange(len(data)), rng.randrange(1, 65)
