"""The protocol of a child process: a module of this package, run with `python -m`.

Native code of XLA and MLIR ends its process on unknown input, and jax fixes the number of virtual
devices when it starts (`virtual_devices`). So such code runs in a child. There are two forms:

- **one request** (`ask`, `answer_request`): pickles in a directory that both sides share, with
  programs and arrays in further files. The child answers and ends.
- **a conversation** (`Conversation`, `serve`): messages over the child's standard input and output,
  each of JSON and bytes. The child loads MLIR once for many requests.

The parent continues even if the child dies. It gets an answer, a `ChildOutcome` that says what
ended the child, or EOFError in the middle of a conversation.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from stablehlo_tools.diagnostics import Diagnostic, Place, ToolError, note
from stablehlo_tools.processes.activity import end_with_parent
from stablehlo_tools.processes.ending import death

_REQUEST, _ANSWER, _ERRORS = "request.pickle", "answer.pickle", "errors.txt"
_LEAST_SECONDS_TO_MEET = 40.0
_POLL = 0.2  # seconds


def start(
    module: str,
    *words: str,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
    traced: bool = False,
    own_session: bool = True,
) -> subprocess.Popen[bytes]:
    """Runs a module of this package in any working directory, even if it is not installed.

    `traced`: a crash prints the stack on standard error. `own_session`: the child leads its own
    process group, so that Ctrl-C reaches only this process, which then ends the group.
    """
    variables = os.environ if environment is None else environment
    package_root = str(Path(__file__).parents[2])  # first in PYTHONPATH
    paths = filter(None, (package_root, variables.get("PYTHONPATH")))
    return subprocess.Popen(
        command(module, *words, traced=traced),
        env={**variables, "PYTHONPATH": os.pathsep.join(paths)},
        # Without buffering, writes to a pipe that carries no conversation arrive at once.
        bufsize=-1 if stdout == subprocess.PIPE else 0,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=own_session,
    )


def command(module: str, *words: str, traced: bool) -> list[str]:
    """Returns the command line of a module; `-P` ignores modules in the working directory."""
    options = ("-X", "faulthandler") if traced else ()
    return [sys.executable, "-P", *options, "-m", module, *words]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a running process that leads its own group, with the group."""
    if process.poll() is None:
        # The group also has the processes that the child started.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """Returns a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def virtual_devices(
    devices: int, timeout: float, flags: Sequence[str], inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns environment variables for `devices` CPU devices, with `flags` for XLA.

    The caller's `XLA_FLAGS` override all but the number of devices. Variables of jax are not
    inherited, because the child must run any artifact on CPU devices.
    """
    stuck = math.ceil(seconds_to_meet(timeout))
    all_flags = [  # XLA uses the last value of a repeated flag
        f"--xla_cpu_collective_call_terminate_timeout_seconds={stuck}",
        f"--xla_cpu_collective_timeout_seconds={stuck}",
        *flags,
        inherited.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={devices}",
    ]
    kept = {name: text for name, text in inherited.items() if not name.startswith("JAX_")}
    return {
        **kept,
        "XLA_FLAGS": " ".join(all_flags),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def seconds_to_meet(timeout: float) -> float:
    """Returns how many seconds the devices of a collective wait for each other.

    This is less than the `timeout` of the run if that is long. Then XLA reports which collective
    waits for which device before the child is ended.
    """
    return min(timeout, max(_LEAST_SECONDS_TO_MEET, timeout / 4))


# One request: files in a directory.


@dataclass(frozen=True)
class ChildOutcome:
    """The end of a child that had one request to answer."""

    code: int | None  # its exit code; None: it was ended after the timeout
    answer: Any  # None: it wrote none
    errors: str  # its standard error

    @property
    def error(self) -> str:
        """The text of the exception raised instead of an answer; empty if there was none."""
        return self.answer.text if isinstance(self.answer, _Raised) else ""

    @property
    def refusal(self) -> ToolError | None:
        """The ToolError that was raised instead of an answer, or None."""
        return self.answer.refusal if isinstance(self.answer, _Raised) else None

    def in_time(self, overdue: str) -> int:
        """Returns the exit code. Raises ToolError, with this message, after a timeout."""
        if self.code is None:
            error = ToolError(overdue)
            error.by_chance = True
            raise error
        return self.code

    def death(self, who: str, doing: str) -> ToolError:
        """Returns the error of a child that ended by itself without an answer."""
        assert self.code is not None
        return death(who, self.code, doing, self.errors)


@dataclass(frozen=True)
class _Raised:
    """An exception instead of an answer, as text: those of XLA and jax cannot be pickled."""

    text: str
    refusal: ToolError | None


def ask(
    module: str,
    directory: Path,
    request: Any,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    *,
    runs_programs: bool = False,
    enough: Callable[[], bool] | None = None,
) -> ChildOutcome:
    """Runs a child that answers a request in a directory, then ends its whole process group.

    `enough` is called several times a second. If it returns True, the child is ended, as after the
    timeout.

    `runs_programs`: the outcome also has its standard output, and its stack if it crashes. The
    stack shows where in XLA or the reference interpreter a user's program crashed. For a compiler,
    standard error alone is shorter and more helpful.
    """
    write_request(directory, request)
    # An answer of an earlier request would hide that this child died.
    (directory / _ANSWER).unlink(missing_ok=True)
    with (directory / _ERRORS).open("wb") as errors:
        process = start(
            module,
            str(directory),
            environment=environment,
            stdout=errors if runs_programs else subprocess.DEVNULL,
            stderr=errors,
            traced=runs_programs,
        )
        try:
            code = _wait(process, timeout, enough)
        finally:
            end_group(process)
    said = (directory / _ERRORS).read_text(encoding="utf-8", errors="replace")
    return ChildOutcome(code, read_message(directory / _ANSWER), said)


def _wait(
    process: subprocess.Popen[bytes], timeout: float, enough: Callable[[], bool] | None
) -> int | None:
    """Returns the exit code; None after the timeout, or if `enough` returned True before."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0 and not (enough and enough()):
        with suppress(subprocess.TimeoutExpired):
            return process.wait(left if enough is None else min(left, _POLL))
    return process.poll()


def write_request(directory: Path, request: Any) -> None:
    """Writes a request for a child of this process into a directory."""
    write_message(directory / _REQUEST, (os.getpid(), request))


def read_request(directory: Path) -> Any:
    """Reads the request that `write_request` wrote."""
    return read_message(directory / _REQUEST)[1]


def write_message(path: Path, content: Any) -> None:
    """Pickles a message for the other side into a file."""
    path.write_bytes(pickle.dumps(content))


def read_message(path: Path) -> Any:
    """Reads a message of the other side; None if the file is missing or truncated."""
    try:
        return pickle.loads(path.read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        return None


def answer_request(answer: Callable[[Path, Any], Any]) -> None:
    """Answers, in the child, the request in the directory that the command line names.

    An exception is also sent as an answer. The child ends with its parent.
    """
    directory = Path(sys.argv[1])
    # Not os.getppid(): the parent may have ended before this line.
    parent, request = read_message(directory / _REQUEST)
    end_with_parent(parent)
    try:
        answered = answer(directory, request)
    except Exception as error:  # errors of XLA and jax have several private types
        refusal = error if isinstance(error, ToolError) else None
        answered = _Raised(str(error) or type(error).__name__, refusal)
    write_message(directory / _ANSWER, answered)


# A conversation: messages over pipes.


class Conversation:
    """A child that answers one message after another.

    It ends when its standard input is closed. So it ends with its parent, but not with the thread
    that started it.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str] | None = None,
        *,
        stderr: int | IO[bytes] = subprocess.DEVNULL,
        own_session: bool = True,
    ) -> None:
        self._process = start(
            module,
            environment=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            own_session=own_session,
        )

    def ask(self, head: Any, data: bytes) -> tuple[Any, bytes]:
        """Sends a message and returns the answer. Raises OSError or EOFError if the child ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        send(self._process.stdin, head, data)
        return receive(self._process.stdout)

    @property
    def ended(self) -> bool:
        """True if the child has ended."""
        return self._process.poll() is not None

    def exit_code(self) -> int:
        """The exit code of a child that has ended, or is about to."""
        return self._process.wait()

    def end(self) -> None:
        """Ends the child."""
        self._process.kill()
        self._process.communicate()


def serve(answer: Callable[[Any, bytes], tuple[Any, bytes]]) -> None:
    """Answers each message, in the child, until the other side closes."""
    while True:
        try:
            head, data = receive(sys.stdin.buffer)
        except EOFError:
            return
        send(sys.stdout.buffer, *answer(head, data))


def send(stream: IO[bytes], head: Any, data: bytes) -> None:
    """Writes one message."""
    stream.write(json.dumps([head, len(data)]).encode() + b"\n")
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[Any, bytes]:
    """Reads the next message. Raises EOFError if the other side ended before the end of it."""
    line = stream.readline()
    if not line:
        raise EOFError
    head, size = json.loads(line)
    data = stream.read(size)
    if len(data) != size:
        raise EOFError
    return head, data


# Errors in the heads of messages.


def encoded_error(error: ToolError) -> dict[str, Any]:
    """Encodes a ToolError as plain data."""
    return {
        **_encode_diagnostic(error.diagnostic),
        "input": error.input_name,
        "chance": error.by_chance,
    }


def decoded_error(fields: Mapping[str, Any]) -> ToolError:
    """Returns the ToolError from the data of `encoded_error`."""
    notes = tuple(note(part["message"], Place(**part["place"])) for part in fields["notes"])
    instead = fields["instead"] and tuple(fields["instead"])
    error = ToolError(
        fields["message"],
        Place(**fields["place"]),
        notes,
        fields["hint"],
        instead,
        tuple(fields["added"]),
    )
    error.input_name, error.by_chance = fields["input"], fields["chance"]
    return error


def _encode_diagnostic(diagnostic: Diagnostic) -> dict[str, Any]:
    return {
        "message": diagnostic.message,
        "place": asdict(diagnostic.place),
        "notes": [_encode_diagnostic(part) for part in diagnostic.notes],
        "hint": diagnostic.hint,
        "instead": diagnostic.instead,
        "added": diagnostic.added,
    }
