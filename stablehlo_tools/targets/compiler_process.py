"""The process that compiles one module: `python -m stablehlo_tools.targets.compiler_process DIR`.

It is a separate process, because a compiler may abort it, and because its environment has to be set
before jax is imported. DIR holds a request (`processes.child`) and `module.mlirbc`. The process
writes an answer there and, if the compiler accepts the module, `schedule.hlo`. `compilation` starts
it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from stablehlo_tools.processes.child import answer_request

MODULE = "module.mlirbc"
SCHEDULE = "schedule.hlo"


def compile_module(directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Compiles the module in the directory, writes its schedule there, returns its memory."""
    from stablehlo_tools import bindings
    from stablehlo_tools.targets.topologies import Target

    target = Target(request["target"])
    replicas, partitions = request["replicas"], request["partitions"]
    if target is Target.CPU:
        import jax

        # XLA:CPU has no described devices; flags in the environment make virtual ones.
        devices: list[Any] = jax.devices()[: replicas * partitions]
    else:
        devices = bindings.described_devices(
            target.platform, request["topology"], request["config"]
        )
    context = bindings.new_context()
    module = bindings.parse_module((directory / MODULE).read_bytes(), context)
    started = time.perf_counter()
    text, memory = bindings.compile_ahead_of_time(
        module,
        replicas,
        partitions,
        devices,
        tuple_arguments=request["tuple_arguments"],
        options=request["options"],
    )
    seconds = time.perf_counter() - started
    (directory / SCHEDULE).write_text(text)
    return {"memory": memory, "seconds": seconds}


if __name__ == "__main__":
    answer_request(compile_module)
