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
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from typing import IO, Any, NoReturn

from stablehlo_tools.artifacts.parsing import Form
from stablehlo_tools.diagnostics import Diagnostic, Place, ToolError, note
from stablehlo_tools.processes import activity
from stablehlo_tools.processes.child import end_with_parent, receive, send, with_package


class _Reader:
    """The process, started when it is first needed and again where it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, data: bytes, form: Form) -> tuple[dict[str, Any], bytes]:
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            send(process.stdin, form.value, data)
            return receive(process.stdout)

    def start(self) -> None:
        with self._lock:
            self._started()

    def end(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        # A fork of the process that started it would talk into its conversation.
        if self._owner != os.getpid() or self._process is None or self._process.poll() is not None:
            self._process, self._owner = _start(), os.getpid()
        return self._process


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "stablehlo_tools.artifacts.outside_reader"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**with_package(), "OPENBLAS_NUM_THREADS": "1"},  # a thread would not be in the forks
        start_new_session=True,  # Ctrl-C is for the user's program
    )


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
        raise _error(answer["error"])
    return written


def _error(said: dict[str, Any]) -> ToolError:
    notes = tuple(note(part["message"], Place(**part["place"])) for part in said["notes"])
    return ToolError(said["message"], Place(**said["place"]), notes)


def _plain(diagnostic: Diagnostic) -> dict[str, Any]:
    return {
        "message": diagnostic.message,
        "place": asdict(diagnostic.place),
        "notes": [_plain(part) for part in diagnostic.notes],
    }


def main() -> None:
    """Serves requests until the other side closes."""
    from stablehlo_tools import bindings
    from stablehlo_tools.artifacts import parsing

    assert bindings
    assert parsing
    while True:
        try:
            form, data = receive(sys.stdin.buffer)
        except EOFError:
            return
        with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as said:
            head, written = _read_in_fork(Form(form), data, answer, said)
        send(sys.stdout.buffer, head, written)


def _read_in_fork(
    form: Form, data: bytes, answer: IO[bytes], said: IO[bytes]
) -> tuple[dict[str, Any], bytes]:
    """The answer of a fork, or why it ended without one."""
    from stablehlo_tools.artifacts import parsing
    from stablehlo_tools.processes.ending import explained

    seconds = activity.seconds_for(len(data))
    server = os.getpid()
    child = os.fork()
    if child == 0:
        _answer(form, data, answer, said, server, seconds)
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
    error = explained(present, code, code == -signal.SIGKILL, said.fileno())
    return {"error": _plain(error.diagnostic)}, b""


def _answer(
    form: Form, data: bytes, answer: IO[bytes], said: IO[bytes], server: int, seconds: float
) -> NoReturn:
    """In a fork: reads, writes the answer, and ends."""
    from stablehlo_tools import bindings
    from stablehlo_tools.artifacts import parsing

    end_with_parent(server)
    os.dup2(said.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        try:
            written = bindings.write_bytecode(parsing.parse_module(data, form))
            send(answer, {}, written)
        except ToolError as error:
            send(answer, {"error": _plain(error.diagnostic)}, b"")
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
