"""Three scientific programs on eight devices, exported: `python scientific.py FOLDER`.

A wave equation with fixed ends, a Poisson equation by FFT, and a linear system by CG. All are
written as for one device: the sharding of the arguments is all that speaks of several.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def wave(now: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A hundred steps of the wave equation; the ends of the grid stay as they are."""

    def advance(
        state: tuple[jax.Array, jax.Array], _: None
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        u, old = state
        bend = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]
        new = (2 * u - old).at[1:-1, 1:-1].add(0.25 * bend)
        return (new, u), None

    return lax.scan(advance, (now, before), length=100)[0]


def poisson(density: jax.Array) -> jax.Array:
    """The periodic potential of a density, by FFTs over all three dimensions."""
    waves = [jnp.fft.fftfreq(n) * 2 * jnp.pi for n in density.shape]
    square = sum(k**2 for k in jnp.meshgrid(*waves, indexing="ij", sparse=True))
    inverse = jnp.where(square == 0, 0.0, 1 / jnp.where(square == 0, 1.0, square))
    return jnp.fft.ifftn(jnp.fft.fftn(density) * inverse).real


def solve(right: jax.Array) -> jax.Array:
    """A linear system by conjugate gradients, which end when the residual is small."""

    def apply(u: jax.Array) -> jax.Array:
        rows = jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0)
        return 4.1 * u - rows - jnp.roll(u, 1, 1) - jnp.roll(u, -1, 1)

    return jax.scipy.sparse.linalg.cg(apply, right, tol=1e-6, maxiter=500)[0]


def exported(program: Callable[..., object], *shape: int, arguments: int = 1) -> export.Exported:
    """A program for eight devices, which divide the first dimension. No array is made."""
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("x"))
    array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
    stepped = jax.jit(program, out_shardings=rows)
    return export.export(stepped, platforms=["cuda"])(*[array] * arguments)


def main() -> None:
    """Writes the artifacts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", type=int, default=1, help="divide all sizes by this")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    programs = {
        "wave": exported(wave, *[8192 // given.part] * 2, arguments=2),
        "poisson": exported(poisson, *[512 // given.part] * 3),
        "solve": exported(solve, *[4096 // given.part] * 2),
    }
    for name, program in programs.items():
        (given.folder / f"{name}.jax_export").write_bytes(program.serialize())


if __name__ == "__main__":
    main()
