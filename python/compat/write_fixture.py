"""Writes a small jax.export file with the jax that runs this, for the tests of older artifacts.

    pip install jax==0.10.2 && python write_fixture.py FOLDER

A matrix product whose columns two devices hold, summed over them: a sharding, a psum and a gather.
Needs nothing but jax, of any release since 0.6.
"""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH = Mesh(jax.devices(), ("x",))


def product(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """`rows` (4, 8) and `columns` (8, 4), both divided over what is summed."""
    partial = rows @ columns
    gathered = jax.lax.all_gather(rows, "x", axis=1, tiled=True)
    return jax.lax.psum(partial, "x") + gathered.sum()


def main() -> None:
    """One file, named by the release."""
    by_columns, by_rows = PartitionSpec(None, "x"), PartitionSpec("x")
    mapped = jax.shard_map(
        product,
        mesh=MESH,
        in_specs=(by_columns, by_rows),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    step = jax.jit(
        mapped, in_shardings=(NamedSharding(MESH, by_columns), NamedSharding(MESH, by_rows))
    )
    shapes = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    data = export.export(step)(*shapes).serialize()
    (Path(sys.argv[1]) / f"jax_{jax.__version__}.jax_export").write_bytes(data)


if __name__ == "__main__":
    main()
