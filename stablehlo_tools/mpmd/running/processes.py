"""Runs a set as on a cluster: a process for each rank, connected by gloo on this machine.

Each process compiles its own rank's program, in the form `permutes`, for its own devices.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from stablehlo_tools import bindings
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.dialect.names import COLLECTIVE_PERMUTE
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.running.localisation import LocalProgram, localise_rank
from stablehlo_tools.mpmd.running.rank_child import (
    PACKAGE,
    environment,
    inputs_of,
    outputs_of,
    read_arrays,
    write_arrays,
)
from stablehlo_tools.mpmd.running.sequential import SetRun
from stablehlo_tools.mpmd.transfers import PERMUTES, with_permutes
from stablehlo_tools.processes.child import end_group, free_port, start, write_request
from stablehlo_tools.processes.ending import how_it_ended, last_words
from stablehlo_tools.verify.element_types import Array

ATTEMPTS = 3  # because another program may take the port
_MODULE, _COMPILED, _FAILED = "module.mlirbc", "compiled", "failed"
_ERRORS = "errors.txt"
_PORT_TAKEN = "already in use"
_POLL = 0.02


def run_processes(
    ranks: RankSet, inputs: Sequence[Sequence[Array]], directory: Path, timeout: float
) -> SetRun:
    """Runs a set on the arguments of each rank's `main`. No process outlives the call.

    A set in the form `pairs` is rewritten. Raises ToolError if a rank fails or dies, or if they are
    not done within `timeout` seconds.
    """
    with naming(ranks.name):
        written = ranks if ranks.manifest.form == PERMUTES else with_permutes(ranks)
        programs = [localise_rank(written, rank) for rank in range(ranks.ranks)]
        rooms = [directory / f"rank_{rank}" for rank in range(ranks.ranks)]
        for rank, (program, room) in enumerate(zip(programs, rooms, strict=True)):
            room.mkdir()
            _prepare(written, rank, program, inputs[rank], room)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                _attempt(rooms, ranks.manifest.devices, timeout)
                break
            except _PortTakenError:
                if attempt == ATTEMPTS:
                    raise ToolError("no free port was found for the processes") from None
    results: list[tuple[Array, ...]] = []
    for program, room in zip(programs, rooms, strict=True):
        by_device = [read_arrays(room / outputs_of(d)) for d in range(ranks.manifest.devices)]
        results.append(tuple(program.assemble_results(list(zip(*by_device, strict=True)))))
    return SetRun(tuple(results))


class _PortTakenError(Exception):
    """Another program took the port between its choice and its use."""


def _prepare(
    ranks: RankSet, rank: int, program: LocalProgram, inputs: Sequence[Array], room: Path
) -> None:
    """Writes the files that a rank's process needs."""
    block = program.block
    devices = ranks.manifest.devices
    request: dict[str, Any] = {
        "rank": rank,
        "ranks": ranks.ranks,
        "devices": devices,
        "types": [str(value.type) for value in terminator(block).operands],
        "permutes": sum(view.operation.name == COLLECTIVE_PERMUTE for view in block.operations),
    }
    write_request(room, request)
    (room / _MODULE).write_bytes(bindings.write_bytecode(program.module))
    types = [str(argument.type) for argument in block.arguments]
    divided = program.split_arguments(inputs)
    for device in range(devices):
        parts = [of_devices[device] for of_devices in divided]
        write_arrays(room / inputs_of(device), parts, types)


def _attempt(rooms: Sequence[Path], devices: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    port = free_port()
    with ExitStack() as running:
        processes = [
            running.enter_context(_RankProcess(rank, room, port, devices, timeout))
            for rank, room in enumerate(rooms)
        ]
        _wait(processes, _COMPILED, deadline, f"not compiled within {timeout:g} s (--timeout)")
        for process in processes:
            process.go()
        last = f"not done within {timeout:g} s (--timeout): a deadlock, or too much work"
        _wait(processes, outputs_of(0), deadline, last)


def _wait(processes: Sequence[_RankProcess], file: str, deadline: float, late: str) -> None:
    """Waits until each process has written a file. Raises ToolError if one fails or is too late."""
    while not all((process.room / file).exists() for process in processes):
        failed = next((process for process in processes if process.failed), None)
        if failed is not None:
            raise failed.error()
        if time.monotonic() > deadline:
            without = [p.rank for p in processes if not (p.room / file).exists()]
            names = ", ".join(map(str, without))
            raise ToolError(f"rank{'s' * (len(without) > 1)} {names}: {late}")
        time.sleep(_POLL)


class _RankProcess:
    """The process of a rank, which leads its own process group. Leaving the context ends it."""

    def __init__(self, rank: int, room: Path, port: int, devices: int, timeout: float) -> None:
        self.rank, self.room = rank, room
        (room / _FAILED).unlink(missing_ok=True)
        (room / _COMPILED).unlink(missing_ok=True)
        with (room / _ERRORS).open("wb") as errors:
            self.process = start(
                f"{PACKAGE}.worker_process",
                str(room),
                str(port),
                environment=environment(devices, timeout),
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                traced=True,
            )

    def __enter__(self) -> _RankProcess:
        return self

    def __exit__(self, *_: object) -> None:
        end_group(self.process)
        assert self.process.stdin is not None
        self.process.stdin.close()

    @property
    def failed(self) -> bool:
        return (self.room / _FAILED).exists() or self.process.poll() is not None

    def go(self) -> None:
        """Tells the rank that all have compiled."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # if the process has just ended
            self.process.stdin.write(b"go\n")

    def error(self) -> Exception:
        """Returns the error of a rank that failed."""
        errors = (self.room / _ERRORS).read_text(encoding="utf-8", errors="replace")
        if _PORT_TAKEN in errors:
            return _PortTakenError()
        code = self.process.poll()
        how = "failed" if code is None else how_it_ended(code, "running it")
        return ToolError(f"the process of rank {self.rank} {how}", notes=last_words(errors))
