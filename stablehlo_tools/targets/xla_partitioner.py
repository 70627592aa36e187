"""XLA's own partitioner: the program of one device, read back from XLA:CPU's dump.

It is slow, because XLA compiles the whole program. The result loses its locations and contains
XLA's simplifications. It is a reference for `partition`, and a fallback for programs that
`partition` rejects. `python -m stablehlo_tools.targets.xla_partitioner DIR` is the child process.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.walk import ops_where
from stablehlo_tools.processes import child
from stablehlo_tools.processes.ending import shorten_message

_MODULE = "stablehlo_tools.targets.xla_partitioner"
_INPUT, _OUTPUT = "module.mlirbc", "partitioned.mlirbc"
_DUMP = "dump"
_PASS = "spmd-partitioning"
DEFAULT_TIMEOUT = 600.0  # seconds


def partition_with_xla(
    module: ir.Module, partitions: int, timeout: float = DEFAULT_TIMEOUT
) -> ir.Module:
    """Returns the module that XLA:CPU makes for each of `partitions` devices, in the same context.

    Raises ToolError if XLA rejects the program, crashes or runs longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="stablehlo-tools-") as name:
        directory = Path(name)
        (directory / _INPUT).write_bytes(bindings.write_bytecode(module))
        flags = (
            f"--xla_force_host_platform_device_count={partitions} "
            f"--xla_dump_to={directory / _DUMP} --xla_dump_hlo_pass_re={_PASS}"
        )
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        outcome = child.ask(_MODULE, directory, {}, timeout, environment)
        outcome.in_time(f"XLA's partitioner took more than {timeout:g} s and was stopped")
        if outcome.error:
            raise ToolError(
                f"XLA's partitioner refused the program: {shorten_message(outcome.error)}"
            )
        if outcome.answer is None:
            raise outcome.death("XLA's partitioner", "partitioning")
        local = bindings.parse_module((directory / _OUTPUT).read_bytes(), module.context)
    # Removes XLA's copies, the only op of its dialect that does not change values.
    for op in ops_where(local.operation, lambda op: op.name.startswith("mhlo.")):
        if op.name != "mhlo.copy":
            raise ToolError(f"XLA's partitioner left {op.name}, which no artifact can hold")
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()
    return local


def partition(directory: Path, _request: dict[str, Any]) -> dict[str, Any]:
    """Compiles the module in the directory and writes the partitioned one; runs in the child."""
    import jax

    devices = jax.devices()
    code = (directory / _INPUT).read_bytes()
    bindings.compile_for_devices(code, 1, len(devices), devices, partitioned=True)
    dumped = list((directory / _DUMP).glob(f"*after_{_PASS}*.txt"))
    if len(dumped) != 1:
        raise RuntimeError(f"it left {len(dumped)} dumps of its result")
    module = bindings.hlo_text_to_proto(dumped[0].read_text())
    (directory / _OUTPUT).write_bytes(bindings.hlo_proto_to_stablehlo(module))
    return {}


if __name__ == "__main__":
    child.answer_request(partition)
