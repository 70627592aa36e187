"""The child process that runs the original program, in floats.

python -m stablehlo_tools.mpmd.running.reference_process DIRECTORY
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stablehlo_tools.mpmd.running.rank_child import (
    element_of,
    inputs_of,
    outputs_of,
    read_arrays,
    serve,
    type_of,
    write_arrays,
)
from stablehlo_tools.verify.element_types import Array
from stablehlo_tools.verify.execution import load_program, load_without_rerounding
from stablehlo_tools.verify.verification_job import BackendRun


def answer(directory: Path, run: BackendRun) -> dict[str, Any]:
    """Runs the program on the inputs in `directory`."""
    program, _ = load_without_rerounding(
        lambda skipped: load_program(run, "before", skipped=skipped)
    )
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
