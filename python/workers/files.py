"""What a worker and its parent tell each other: files in a directory of the worker's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

REQUEST = "request.json"
INPUTS = "inputs.npz"
COMPILED = "compiled"  # an empty file: the worker waits for the others
OUTPUTS = "outputs.npz"
FAILED = "failed"  # an empty file: what went wrong is among the errors
ERRORS = "errors.txt"


@dataclass(frozen=True)
class Request:
    """Which program a worker runs, and among how many."""

    program: str
    rank: int
    workers: int


def write_request(directory: Path, request: Request) -> None:
    """Leaves the request in the worker's directory."""
    (directory / REQUEST).write_text(json.dumps(asdict(request)))


def read_request(directory: Path) -> Request:
    """The request that lies in the worker's directory."""
    return Request(**json.loads((directory / REQUEST).read_text()))


def write_arrays(path: Path, arrays: Sequence[NDArray[Any]]) -> None:
    """Writes arrays of NumPy's own element types, in their order; the file appears when whole."""
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.savez(file, *arrays)
    unfinished.rename(path)


def read_arrays(path: Path) -> tuple[NDArray[Any], ...]:
    """The arrays in their order."""
    with np.load(path) as arrays:
        return tuple(arrays[f"arr_{i}"] for i in range(len(arrays.files)))
