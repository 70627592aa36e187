"""The process that reads untrusted bytes: `python -m stablehlo_tools.artifacts.outside_reader`.

It loads MLIR once and reads each module in a new fork, so that damaged bytes end only the fork. The
answer is the module as bytecode, written again by MLIR, or the error.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from typing import Any

from stablehlo_tools import bindings
from stablehlo_tools.artifacts.parsing import ArtifactForm, parse_module, too_new
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.processes import activity
from stablehlo_tools.processes.child import Conversation, decoded_error, serve
from stablehlo_tools.processes.ending import process_error
from stablehlo_tools.processes.forks import REFUSED, Answer, in_fork

_MODULE = "stablehlo_tools.artifacts.outside_reader"


class _ReaderProcess:
    """The process, started at its first use, and again if it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Conversation | None = None
        self._owner = 0

    def ask(self, data: bytes, form: ArtifactForm) -> tuple[dict[str, Any], bytes]:
        with self._lock:
            return self._ensure_started().ask(form.value, data)

    def start(self) -> None:
        """Starts the process, which is ready after half a second."""
        with self._lock:
            self._ensure_started()

    def end(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.end()
        self._process = None

    def _ensure_started(self) -> Conversation:
        # A fork of the process that started it must not use the same conversation.
        if self._owner != os.getpid() or self._process is None or self._process.ended:
            # Forks lack the threads of OpenBLAS and would wait for them, so it must have none.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            self._process, self._owner = Conversation(_MODULE, environment), os.getpid()
        return self._process


reader = _ReaderProcess()
atexit.register(reader.end)


def read_outside(data: bytes, form: ArtifactForm) -> bytes:
    """Reads a module from untrusted bytes; returns it as MLIR bytecode. Raises ToolError."""
    try:
        answer, written = reader.ask(data, form)
    except (OSError, EOFError):
        reader.end()
        raise ToolError("another process ended the process that reads artifacts") from None
    if REFUSED in answer:
        raise decoded_error(answer[REFUSED])
    return written


def _read(form: str, data: bytes) -> Answer:
    """Returns the answer of a fork, or the error that explains its end."""

    def work() -> Answer:
        return {}, bindings.write_bytecode(parse_module(data, ArtifactForm(form)))

    def explain(code: int, errors: int) -> ToolError:
        present = activity.Activity(activity.READER, "reading it", reason=too_new(data))
        return process_error(present, code, code == -signal.SIGKILL, errors)

    seconds = activity.seconds_for(len(data))
    wall = seconds * activity.WAIT_PER_CPU_SECOND
    return in_fork(work, "reading", wall, seconds, explain)


if __name__ == "__main__":
    serve(_read)  # until the other side closes
