"""The process that reads what nobody has vouched for.

`python -m stablehlo_tools.artifacts.outside_reader` is it.

It loads MLIR once and reads each module in a fork of its own, so that only the fork ends on bytes
that end a process. What comes back is the module as MLIR's writer wrote it anew, or the error.
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import tempfile
import threading
from typing import IO, Any, NoReturn

from stablehlo_tools.artifacts.parsing import Form
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.processes import activity
from stablehlo_tools.processes.child import (
    Conversation,
    decoded_error,
    encoded_error,
    receive,
    send,
    serve,
)

_MODULE = "stablehlo_tools.artifacts.outside_reader"


class _Reader:
    """The process, started when it is first needed and again where it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Conversation | None = None
        self._owner = 0

    def ask(self, data: bytes, form: Form) -> tuple[dict[str, Any], bytes]:
        with self._lock:
            return self._started().ask(form.value, data)

    def start(self) -> None:
        with self._lock:
            self._started()

    def end(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.end()
        self._process = None

    def _started(self) -> Conversation:
        # A fork of the process that started it would talk into its conversation.
        if self._owner != os.getpid() or self._process is None or self._process.ended:
            # A thread of OpenBLAS would not be in the forks, which would wait for it.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            self._process, self._owner = Conversation(_MODULE, environment), os.getpid()
        return self._process


_reader = _Reader()
atexit.register(_reader.end)


def start() -> None:
    """Starts the process, which is ready after half a second."""
    _reader.start()


def read_outside(data: bytes, form: Form) -> bytes:
    """The module that the bytes hold, as MLIR bytecode. Raises ToolError."""
    try:
        answer, written = _reader.ask(data, form)
    except (OSError, EOFError):
        _reader.end()
        raise ToolError("the process that reads artifacts was ended from outside") from None
    if "error" in answer:
        raise decoded_error(answer["error"])
    return written


def main() -> None:
    """Reads modules until the other side closes."""
    from stablehlo_tools import bindings
    from stablehlo_tools.artifacts import parsing

    assert bindings  # loaded once, before the forks
    assert parsing
    serve(_read)


def _read(form: str, data: bytes) -> tuple[dict[str, Any], bytes]:
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as errors:
        return _read_in_fork(Form(form), data, answer, errors)


def _read_in_fork(
    form: Form, data: bytes, answer: IO[bytes], errors: IO[bytes]
) -> tuple[dict[str, Any], bytes]:
    """The answer of a fork, or why it ended without one."""
    from stablehlo_tools.artifacts import parsing
    from stablehlo_tools.processes.ending import explained

    seconds = activity.seconds_for(len(data))
    server = os.getpid()
    child = os.fork()
    if child == 0:
        _answer(form, data, answer, errors, server, seconds)
    wall = threading.Timer(seconds * activity.WAIT_PER_CPU_SECOND, os.kill, (child, signal.SIGKILL))
    wall.start()
    _, status = os.waitpid(child, 0)
    wall.cancel()
    wall.join()
    if status == 0:
        answer.seek(0)
        return receive(answer)
    code = os.waitstatus_to_exitcode(status)
    present = activity.Activity(activity.READER, "reading it", reason=parsing.too_new(data))
    error = explained(present, code, code == -signal.SIGKILL, errors.fileno())
    return {"error": encoded_error(error)}, b""


def _answer(
    form: Form, data: bytes, answer: IO[bytes], errors: IO[bytes], server: int, seconds: float
) -> NoReturn:
    """In a fork: reads, writes the answer, and ends."""
    from stablehlo_tools import bindings
    from stablehlo_tools.artifacts import parsing

    activity.end_with_parent(server)
    os.dup2(errors.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        try:
            written = bindings.write_bytecode(parsing.parse_module(data, form))
            send(answer, {}, written)
        except ToolError as error:
            send(answer, {"error": encoded_error(error)}, b"")
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
