"""Runs N programs in N processes and says of each whether it finished, hung or failed.

    workers = run_workers([program0, program1], [[x0, y0], [x1, y1]])

Each process has one CPU device and reads a program of its own, as the workers of a real cluster do;
`jax.distributed` connects them on this machine, and gloo carries their collectives. Compilers
order the collectives of each program without looking at the others, so this is where two programs
wait for each other for ever, if they do.
"""

from __future__ import annotations

import enum
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from workers.files import (
    COMPILED,
    ERRORS,
    FAILED,
    INPUTS,
    OUTPUTS,
    Request,
    read_arrays,
    write_arrays,
    write_request,
)

Array = NDArray[Any]

# Seconds after which a running worker counts as hung. Where a worker is 30 s late for the first
# collective of a group, gloo gives up and those who wait fail; once connected, they wait on and on.
TIMEOUT = 10.0
START_TIMEOUT = 600.0  # seconds to start JAX, find the others and compile
ATTEMPTS = 3  # at a port that nobody else takes

_ROOMS = Path(__file__).parents[1]
_POLL = 0.02
_PORT_TAKEN = "already in use"
_LAST_LINES = 20


class State(enum.Enum):
    """How a worker ended."""

    FINISHED = "finished"
    HUNG = "hung"  # still running when the time was up
    FAILED = "failed"  # raised an exception, or died
    STOPPED = "stopped"  # ended before its time was up, because another one failed


@dataclass(frozen=True)
class Worker:
    """What became of one worker: the outputs that its device holds, or the end of its stderr."""

    state: State
    outputs: tuple[Array, ...]
    seconds: float  # from the start of the run, with all programs compiled, to the end
    errors: str


def run_workers(
    programs: Sequence[Path], inputs: Sequence[Sequence[Array]], timeout: float = TIMEOUT
) -> list[Worker]:
    """Runs program r on worker r's own device, all at once; `inputs[r]` is what that device holds.

    A program is a `.jax_export` file for as many devices as there are programs, or a StableHLO
    module in text or bytecode for as many replicas. The `timeout`, in seconds, counts from the
    moment when all are compiled. No process outlives the call. Raises TimeoutError when they are
    not compiled within START_TIMEOUT, and ValueError for lists of unequal length.
    """
    requests = [
        Request(str(program.resolve()), rank, len(programs))
        for rank, program in enumerate(programs)
    ]
    for _ in range(ATTEMPTS - 1):
        workers = _attempt(requests, inputs, timeout)
        if not any(w.state is State.FAILED and _PORT_TAKEN in w.errors for w in workers):
            return workers
    return _attempt(requests, inputs, timeout)


def _attempt(
    requests: Sequence[Request], inputs: Sequence[Sequence[Array]], timeout: float
) -> list[Worker]:
    port = free_port()
    with tempfile.TemporaryDirectory() as root, ExitStack() as running:
        processes: list[_Process] = []
        for request, arrays in zip(requests, inputs, strict=True):
            directory = Path(root) / str(request.rank)
            directory.mkdir()
            write_request(directory, request)
            write_arrays(directory / INPUTS, arrays)
            processes.append(running.enter_context(_Process(directory, port)))
        _wait_until_compiled(processes)
        return _run(processes, timeout)


def _wait_until_compiled(processes: Sequence[_Process]) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while not all(process.compiled for process in processes):
        if any(process.failed for process in processes):
            return
        if time.monotonic() > deadline:
            late = next(process for process in processes if not process.compiled)
            raise TimeoutError(f"not compiled within {START_TIMEOUT:g} s:\n{late.errors()}")
        time.sleep(_POLL)


def _run(processes: Sequence[_Process], timeout: float) -> list[Worker]:
    """Lets go of all that wait, and watches until all finished, one failed, or the time is up."""
    if not any(process.failed for process in processes):
        for process in processes:
            process.go()
    started = time.monotonic()
    finished: dict[int, float] = {}
    while (now := time.monotonic() - started) < timeout:
        done = [rank for rank, process in enumerate(processes) if process.finished]
        finished |= {rank: now for rank in done if rank not in finished}
        if any(process.failed for process in processes) or len(finished) == len(processes):
            break
        time.sleep(_POLL)
    seconds = time.monotonic() - started
    # All of them before any is killed: the others notice, and fail by that.
    return [
        process.outcome(finished.get(rank, seconds), hung=seconds >= timeout)
        for rank, process in enumerate(processes)
    ]


class _Process:
    """One worker's process, which leads a process group of its own; leaving the context ends it."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        command = [sys.executable, "-P", "-m", "workers.process", str(directory), str(port)]
        with (directory / ERRORS).open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                env=_environment(),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    @property
    def compiled(self) -> bool:
        return (self.directory / COMPILED).exists()

    @property
    def finished(self) -> bool:
        return (self.directory / OUTPUTS).exists()

    @property
    def failed(self) -> bool:
        return (self.directory / FAILED).exists() or self._ended

    @property
    def _ended(self) -> bool:
        return self.process.poll() is not None

    def go(self) -> None:
        """Tells the worker that all have compiled."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # where it ended just now
            self.process.stdin.write(b"go\n")

    def outcome(self, seconds: float, *, hung: bool) -> Worker:
        """What became of the worker, `seconds` after the start of the run."""
        if self.finished:
            return Worker(State.FINISHED, read_arrays(self.directory / OUTPUTS), seconds, "")
        state = State.FAILED if self.failed else State.HUNG if hung else State.STOPPED
        return Worker(state, (), seconds, self.errors())

    def errors(self) -> str:
        """The last lines of what the worker said."""
        text = (self.directory / ERRORS).read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])


def free_port() -> int:
    """A port that nobody listened at a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment() -> dict[str, str]:
    """The caller's, without settings of JAX and XLA or proxies: one device, default flags."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("JAX_", "XLA_")) and not name.lower().endswith("_proxy")
    }
    search = [str(_ROOMS), str(_ROOMS.parent), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": os.pathsep.join(search),
    }
