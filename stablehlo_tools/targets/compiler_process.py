"""The process that compiles one module: `python -m stablehlo_tools.targets.compiler_process DIR`.

A process of its own, because a compiler may end it, and because its environment has to be set
before jax is imported. DIR holds `request.json` and `module.mlirbc`; what is left there is
`answer.json` and, where the compiler took the module, `schedule.hlo`. `compilation` starts it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

REQUEST = "request.json"
MODULE = "module.mlirbc"
ANSWER = "answer.json"
SCHEDULE = "schedule.hlo"


def main(directory: Path) -> None:
    """Compiles what the directory holds and leaves the answer there."""
    request = json.loads((directory / REQUEST).read_text())
    threading.Thread(target=_end_with, args=(request["parent"],), daemon=True).start()
    try:
        answer = _compile(directory, request)
    except Exception as error:  # XLA's and jax's errors are of several private types
        answer = {"error": str(error) or type(error).__name__, "type": type(error).__name__}
    (directory / ANSWER).write_text(json.dumps(answer))


def _end_with(parent: int) -> None:
    """Ends this process when the one that waits for its answer is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _compile(directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    from stablehlo_tools import bindings
    from stablehlo_tools.targets.topologies import GPU_CONFIG, Target

    target = Target(request["target"])
    replicas, partitions = request["replicas"], request["partitions"]
    if target is Target.CPU:
        import jax

        devices: list[Any] = jax.devices()[: replicas * partitions]
    else:
        config = GPU_CONFIG.read_text() if target is Target.GPU else ""
        devices = bindings.described_devices(target.platform, request["topology"], config)
    context = bindings.new_context()
    module = bindings.parse_module((directory / MODULE).read_bytes(), context)
    started = time.perf_counter()
    text, memory = bindings.compile_ahead_of_time(
        module, replicas, partitions, devices, tuple_arguments=request["tuple_arguments"]
    )
    seconds = time.perf_counter() - started
    (directory / SCHEDULE).write_text(text)
    return {"memory": memory, "seconds": seconds}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
