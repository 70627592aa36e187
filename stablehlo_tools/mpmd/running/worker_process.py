"""One rank in a separate process: compiles its program, waits for the others, and runs it.

    python -m stablehlo_tools.mpmd.running.worker_process DIRECTORY PORT

A line on standard input means that all have compiled.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.mpmd.running.functions import any_values, permutes_left
from stablehlo_tools.mpmd.running.rank_child import inputs_of, outputs_of, read_arrays, write_arrays
from stablehlo_tools.processes.child import read_request

MODULE, COMPILED, FAILED = "module.mlirbc", "compiled", "failed"
_STANDARD_INPUT = 0


def main(directory: Path, port: int) -> None:
    """Writes the results of each device to `directory`. Raises the errors of JAX and XLA."""
    go = threading.Event()
    _watch_parent(go)
    request = read_request(directory)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address, request["ranks"], request["rank"], coordinator_bind_address=address
    )
    executable = _compile_program((directory / MODULE).read_bytes(), request["permutes"])
    parts = [read_arrays(directory / inputs_of(d)) for d in range(request["devices"])]
    # the parts of each argument on this rank's devices, as an array over the devices of all ranks
    whole, own = any_values(jax.devices()), jax.local_devices()
    arguments: list[jax.Array] = []
    for shares in zip(*parts, strict=True):
        placed = [jax.device_put(part, device) for part, device in zip(shares, own, strict=True)]
        arguments.append(jax.make_array_from_single_device_arrays(placed[0].shape, whole, placed))
    (directory / COMPILED).touch()
    go.wait()
    results = executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
    for device in range(request["devices"])[::-1]:  # the parent waits for the first
        outputs = [np.asarray(of_devices[device]) for of_devices in results]
        write_arrays(directory / outputs_of(device), outputs, request["types"])


def _watch_parent(go: threading.Event) -> None:
    """Sets `go` when the parent writes a line, and ends this process when the parent is gone."""

    def follow() -> None:
        while os.read(_STANDARD_INPUT, 1):  # not sys.stdin, whose lock breaks Python's shutdown
            go.set()
        os._exit(1)  # also if the main thread hangs

    threading.Thread(target=follow, daemon=True).start()


def _compile_program(code: bytes, permutes: int) -> Any:
    """Returns the executable. Raises RuntimeError if the compiler deleted permutes."""
    devices = jax.devices()
    executable = bindings.compile_for_devices(
        code, 1, len(devices), devices, partitioned=False, skipped_passes=bindings.REROUNDING_PASSES
    )
    left = permutes_left(executable)
    if left != permutes:
        raise RuntimeError(f"XLA:CPU left {left} of {permutes} permutes in the program")
    return executable


if __name__ == "__main__":
    place = Path(sys.argv[1])
    try:
        main(place, int(sys.argv[2]))
    except Exception:  # any error of JAX or XLA
        traceback.print_exc()
        (place / FAILED).touch()
    # Wait for the parent to end this process: if one rank exits, JAX also ends the others.
    threading.Event().wait()
