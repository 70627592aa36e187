"""Runs a set in one process on XLA:CPU: the ranks in turn, each function compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stablehlo_tools.diagnostics import naming
from stablehlo_tools.ir.views import Function
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.running.rank_child import (
    ask,
    inputs_of,
    outputs_of,
    read_arrays,
    write_arrays,
)
from stablehlo_tools.verify.element_types import Array


@dataclass(frozen=True)
class SetRun:
    """The result of a run: the results of each rank's `main`, and the activity of each rank."""

    results: tuple[tuple[Array, ...], ...]
    played: tuple[Played, ...] = ()
    functions: int = 0  # number of compiled functions, equal ones counted once


def run_sequentially(
    ranks: RankSet, inputs: Sequence[Sequence[Array]], directory: Path, timeout: float
) -> SetRun:
    """Runs a set on the arguments of each rank's `main`; `directory` is for temporary files.

    Raises ToolError for messages that do not fit the manifest, ranks that deadlock, and errors of
    XLA:CPU.
    """
    write_inputs(ranks, inputs, directory)
    request, devices = {"set": ranks.name}, ranks.manifest.devices
    with naming(ranks.name):
        answer = ask(
            "sequential_process", directory, request, devices, timeout, "running the ranks"
        )
    played = tuple(
        Played(tuple(rank["actions"]), rank["peak_bytes"], rank["peak_at"])
        for rank in answer["ranks"]
    )
    return SetRun(read_results(ranks, directory), played, answer["functions"])


def write_inputs(ranks: RankSet, inputs: Sequence[Sequence[Array]], directory: Path) -> None:
    """Writes the arguments of each rank's `main` for a child."""
    for rank, arrays in enumerate(inputs):
        block = Function(ranks.main(rank)).body
        types = [str(argument.type) for argument in block.arguments]
        write_arrays(directory / inputs_of(rank), arrays, types)


def read_results(ranks: RankSet, directory: Path) -> tuple[tuple[Array, ...], ...]:
    """Returns the results of each rank's `main` that a child wrote."""
    files = (directory / outputs_of(rank) for rank in range(ranks.ranks))
    return tuple(tuple(read_arrays(file)) for file in files)


@dataclass(frozen=True)
class Played:
    """The actions of a rank in order, and its peak memory in bytes of one device.

    Arguments count all the time, other values from their op to their last use, each once.
    Temporaries within a function do not count. `peak_at` is the action at which the peak occurs.
    """

    actions: tuple[str, ...]
    peak_bytes: int
    peak_at: str
