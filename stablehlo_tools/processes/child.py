"""The protocol of a child process: a module of this package, run with `python -m`.

Native code of XLA and MLIR ends its process on input that it does not know, and the number of
virtual devices is fixed when jax starts (`virtual_devices`); so such code runs in a child. There
are two forms:

- **one request** (`ask`, `answer_request`): pickles in a directory that both sides share, with
  programs and arrays beside them. The child does one thing and ends.
- **a conversation** (`Conversation`, `serve`): messages over the child's standard input and output,
  each what JSON can hold, and bytes. The child loads MLIR once for many requests.

Whatever becomes of the child, its parent goes on: it gets an answer, an `Outcome` that says what
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from stablehlo_tools.diagnostics import Diagnostic, Place, ToolError, note
from stablehlo_tools.processes.activity import end_with_parent
from stablehlo_tools.processes.ending import death

_REQUEST, _ANSWER, _ERRORS = "request.pickle", "answer.pickle", "errors.txt"
_LEAST_SECONDS_TO_MEET = 40.0


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
    """Runs a module of this package, whatever the working directory is, installed or not.

    `traced`: with its stack on standard error where it crashes. `own_session`: it leads a group of
    its own, so that Ctrl-C reaches this process alone, which then ends the whole group.
    """
    variables = os.environ if environment is None else environment
    package_root = str(Path(__file__).parents[2])  # where Python is to look first
    paths = filter(None, (package_root, variables.get("PYTHONPATH")))
    return subprocess.Popen(
        command(module, *words, traced=traced),
        env={**variables, "PYTHONPATH": os.pathsep.join(paths)},
        # A word on a pipe that carries no conversation is there at once.
        bufsize=-1 if stdout == subprocess.PIPE else 0,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=own_session,
    )


def command(module: str, *words: str, traced: bool) -> list[str]:
    """The command line that runs a module, with none of the working directory's in its way."""
    options = ("-X", "faulthandler") if traced else ()
    return [sys.executable, "-P", *options, "-m", module, *words]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group of its own, with the group, if it runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A port that nobody listened at a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def virtual_devices(
    devices: int, timeout: float, flags: Sequence[str], inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables for so many CPU devices, with `flags` for XLA.

    What the caller has in `XLA_FLAGS` overrules all but the number of devices. Variables of jax are
    not inherited: the child is to run any artifact, and none of them on an accelerator.
    """
    stuck = math.ceil(seconds_to_meet(timeout))
    all_flags = [  # of a flag that is given twice XLA takes the last
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
    """How long the devices of a collective wait for each other where a run has `timeout` seconds.

    Less than the run, so that XLA says which collective waits for whom before the child is ended.
    """
    return min(timeout, max(_LEAST_SECONDS_TO_MEET, timeout / 4))


# One request: files in a directory.


@dataclass(frozen=True)
class Outcome:
    """How a child ended that had one request to answer."""

    code: int | None  # its exit code; None: it took too long, and was ended
    answer: Any  # None: it left none
    errors: str  # its standard error

    @property
    def error(self) -> str:
        """The text of what was raised instead of an answer; empty if nothing was."""
        return self.answer.text if isinstance(self.answer, _Raised) else ""

    @property
    def refusal(self) -> ToolError | None:
        """The ToolError that was raised instead of an answer."""
        return self.answer.refusal if isinstance(self.answer, _Raised) else None

    def in_time(self, overdue: str) -> int:
        """The exit code. Raises ToolError, with this message, where the child took too long."""
        if self.code is None:
            error = ToolError(overdue)
            error.by_chance = True
            raise error
        return self.code

    def death(self, who: str, doing: str) -> ToolError:
        """The error of a child that ended by itself without an answer."""
        assert self.code is not None
        return death(who, self.code, doing, self.errors)


@dataclass(frozen=True)
class _Raised:
    """An exception in the place of an answer; those of XLA and jax cannot be pickled."""

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
) -> Outcome:
    """Has a child answer a request in a directory; it has ended then, with all that it started.

    `runs_programs`: what it prints is kept with what it says on standard error, and so is its stack
    where it crashes, which tells where in XLA or the reference interpreter a user's program ended
    it. A compiler's own words are fewer, and say more.
    """
    write_request(directory, request)
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
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    said = (directory / _ERRORS).read_text(encoding="utf-8", errors="replace")
    return Outcome(code, read_message(directory / _ANSWER), said)


def write_request(directory: Path, request: Any) -> None:
    """Leaves a request in a directory for a child of this process."""
    write_message(directory / _REQUEST, (os.getpid(), request))


def read_request(directory: Path) -> Any:
    """The request that `write_request` left."""
    return read_message(directory / _REQUEST)[1]


def write_message(path: Path, content: Any) -> None:
    """Leaves something for the other side in a file."""
    path.write_bytes(pickle.dumps(content))


def read_message(path: Path) -> Any:
    """The content of a file that the other side left; None if it is missing or was cut short."""
    try:
        return pickle.loads(path.read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        return None


def answer_request(answer: Callable[[Path, Any], Any]) -> None:
    """In the child: answers the request in the directory that the command line names.

    What goes wrong is an answer, too. The child ends with its parent.
    """
    directory = Path(sys.argv[1])
    parent, request = read_message(directory / _REQUEST)
    end_with_parent(parent)
    try:
        answered = answer(directory, request)
    except Exception as error:  # errors of XLA and jax are of several private types
        refusal = error if isinstance(error, ToolError) else None
        answered = _Raised(str(error) or type(error).__name__, refusal)
    write_message(directory / _ANSWER, answered)


# A conversation: messages over pipes.


class Conversation:
    """A child that answers one message after another.

    It ends when its standard input does, so with its parent, whichever thread of that began it.
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
        """The answer to a message. Raises OSError or EOFError where the child has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        send(self._process.stdin, head, data)
        return receive(self._process.stdout)

    @property
    def ended(self) -> bool:
        """Whether the child has ended."""
        return self._process.poll() is not None

    def exit_code(self) -> int:
        """The exit code of a child that has ended, or is about to."""
        return self._process.wait()

    def end(self) -> None:
        """Ends the child."""
        self._process.kill()
        self._process.communicate()


def serve(answer: Callable[[Any, bytes], tuple[Any, bytes]]) -> None:
    """In the child: answers each message until the other side closes."""
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
    """The next message. Raises EOFError where the other side ended before it had said all."""
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
    """A ToolError as JSON can hold it."""
    return {**_encoded(error.diagnostic), "input": error.input_name, "chance": error.by_chance}


def decoded_error(fields: Mapping[str, Any]) -> ToolError:
    """The ToolError that was encoded."""
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


def _encoded(diagnostic: Diagnostic) -> dict[str, Any]:
    return {
        "message": diagnostic.message,
        "place": asdict(diagnostic.place),
        "notes": [_encoded(part) for part in diagnostic.notes],
        "hint": diagnostic.hint,
        "instead": diagnostic.instead,
        "added": diagnostic.added,
    }
