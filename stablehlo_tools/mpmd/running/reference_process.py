"""The child process that runs the original program, in floats.

python -m stablehlo_tools.mpmd.running.reference_process DIRECTORY
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.mpmd.running.child import (
    element_of,
    inputs_of,
    outputs_of,
    read_arrays,
    serve,
    type_of,
    write_arrays,
)
from stablehlo_tools.verify.element_types import Array
from stablehlo_tools.verify.execution import load_program
from stablehlo_tools.verify.job import run_of


def answer(directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Runs the program in `directory` on the inputs beside it."""
    run = run_of(request)
    skipped = bindings.REROUNDING_PASSES
    try:  # compiled as `verify` compiles it
        program = load_program(directory, run, "before", skipped=skipped)
    except Exception:  # XLA's own types; what it says counts when the second attempt fails
        kept = [name for name in skipped if name not in bindings.INDISPENSABLE_PASSES]
        program = load_program(directory, run, "before", skipped=kept)
    outputs: list[Array] = []
    results = program([read_arrays(directory / inputs_of(0))])
    for value, shards in zip(run.outputs, results, strict=True):
        outputs.append(np.zeros(value.shape, element_of(value).dtype))
        for shard in reversed(shards):
            outputs[-1][shard.index] = shard.data
    write_arrays(directory / outputs_of(0), outputs, [type_of(value) for value in run.outputs])
    return {}


if __name__ == "__main__":
    serve(answer)
