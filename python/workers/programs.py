"""The two forms of program that a worker can run, compiled for all workers' devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from stablehlo_tools import bindings
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.program_mesh import program_mesh

Array = NDArray[Any]
Run = Callable[[], list[Array]]


def load_program(path: Path, inputs: Sequence[Array]) -> Run:
    """Compiles a program; calling the result runs it on what this worker's device holds.

    Raises whatever JAX or XLA raises.
    """
    program = artifact.load(path)
    if program.exported is None:
        return _load_module(bindings.write_bytecode(program.module), inputs)
    return _load_exported(program.exported, inputs)


def _load_exported(exported: export.Exported, inputs: Sequence[Array]) -> Run:
    """A jax.export artifact, called as its users call it, on global arrays."""
    mesh = program_mesh(exported, jax.devices())
    arguments = [
        _global_array(array, aval.shape, sharding or NamedSharding(mesh, PartitionSpec()))
        for array, aval, sharding in zip(
            inputs, exported.in_avals, exported.in_shardings_jax(mesh), strict=True
        )
    ]
    call: Any = jax.jit(exported.call)
    compiled = call.lower(*arguments).compile()
    return lambda: [_local(output) for output in jax.tree.leaves(compiled(*arguments))]


def _load_module(code: bytes, inputs: Sequence[Array]) -> Run:
    """A bare module, a replica on each worker's device, compiled and run below JAX."""
    devices = jax.devices()
    # "Replicated" with other contents on each device: the only form that holds any values.
    whole = NamedSharding(Mesh(np.array(devices), ("replica",)), PartitionSpec())
    arguments = [_global_array(array, array.shape, whole) for array in inputs]
    executable = bindings.compile_for_devices(code, len(devices), 1, devices, partitioned=True)

    def run() -> list[Array]:
        results = executable.execute_sharded(arguments)
        outputs = results.disassemble_into_single_device_arrays()
        return [np.asarray(parts[0]) for parts in outputs]

    return run


def _global_array(local: Array, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """The array of which this worker's device holds `local`."""
    part = jax.device_put(local, jax.local_devices()[0])
    return jax.make_array_from_single_device_arrays(shape, sharding, [part])


def _local(array: Any) -> Array:
    """What this worker's device holds."""
    return np.asarray(array.addressable_data(0))
