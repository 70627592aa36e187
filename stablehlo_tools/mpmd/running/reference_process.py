"""The child process that runs the original program, on several sets of inputs.

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
from stablehlo_tools.verify.comparison import Shard
from stablehlo_tools.verify.element_types import Array
from stablehlo_tools.verify.execution import Program, load_program
from stablehlo_tools.verify.job import Request, Run
from stablehlo_tools.verify.signatures import Value


def answer(directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Runs the program that lies in `directory` on the inputs of these numbers.

    Where `loose`, as XLA would compile it if it were asked for nothing.
    """
    run = Request.read(directory / request["job"]).runs[0]
    program = _loaded(directory / request["job"], run, loose=request["loose"])
    for number in request["numbers"]:
        inputs = read_arrays(directory / inputs_of(number))
        shards = program([inputs])
        outputs = [_whole(v, s) for v, s in zip(run.outputs, shards, strict=True)]
        types = [type_of(value) for value in run.outputs]
        write_arrays(directory / outputs_of(number), outputs, types)
    return {}


def _loaded(directory: Path, run: Run, *, loose: bool) -> Program:
    """The program, compiled as `verify` compiles it unless `loose`."""
    if loose:
        return load_program(directory, run, "before", skipped=())
    skipped = bindings.REROUNDING_PASSES
    try:
        return load_program(directory, run, "before", skipped=skipped)
    except Exception:  # XLA's own types; what it says counts when the second attempt fails
        kept = [name for name in skipped if name not in bindings.INDISPENSABLE_PASSES]
        return load_program(directory, run, "before", skipped=kept)


def _whole(value: Value, shards: list[Shard]) -> Array:
    whole = np.zeros(value.shape, element_of(value).dtype)
    for shard in reversed(shards):
        whole[shard.index] = shard.data
    return whole


if __name__ == "__main__":
    serve(answer)
