"""The child process that runs a module in the reference interpreter, which may end its process.

python -m stablehlo_tools.mpmd.running.interpreter_process DIRECTORY
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stablehlo_tools.mpmd.running.child import (
    inputs_of,
    outputs_of,
    read_arrays,
    serve,
    type_of,
    value_of,
    write_arrays,
)
from stablehlo_tools.mpmd.running.interpreter import MODULE, RANKS
from stablehlo_tools.verify.execution import InterpreterProgram
from stablehlo_tools.verify.job import SIDES, Run


def answer(directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Runs all ranks at once; inputs and outputs are those of rank 0, then those of rank 1."""
    inputs, outputs = (
        [[value_of(type_) for type_ in own] for own in request[side]]
        for side in ("inputs", "outputs")
    )
    every = [tuple(value for own in side for value in own) for side in (inputs, outputs)]
    forms = dict.fromkeys(SIDES, "interpreter")
    run = Run("interpreter", forms, every[0], every[1], 1, RANKS, 1)  # pyright: ignore[reportArgumentType]
    program = InterpreterProgram((directory / MODULE).read_bytes(), run)
    arrays = [array for rank in range(RANKS) for array in read_arrays(directory / inputs_of(rank))]
    shards_of = iter(shards[0].data for shards in program([arrays]))
    for rank, own in enumerate(outputs):
        results = [next(shards_of) for _ in own]
        write_arrays(directory / outputs_of(rank), results, [type_of(v) for v in own])
    return {}


if __name__ == "__main__":
    serve(answer)
