"""The protocol of a child process: a module of this package, run with `python -m`.

Native code of XLA and MLIR ends its process on input that it does not know, and the number of
virtual devices is fixed when jax starts (`virtual_devices`); so such code runs in a child. There
are two forms:

- **one request** (`ask`, `answer_request`): JSON files in a directory that both sides share, with
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

_REQUEST, _ANSWER, _ERRORS = "request.json", "answer.json", "errors.txt"
_ERROR, _REFUSED = "error", "refused"
_SEARCH_PATH = "PYTHONPATH"
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
    return subprocess.Popen(
        command(module, *words, traced=traced),
        env=with_package(os.environ if environment is None else environment),
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


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, with this package where Python looks first."""
    package_root = str(Path(__file__).parents[2])
    paths = filter(None, (package_root, environment.get(_SEARCH_PATH)))
    return {**environment, _SEARCH_PATH: os.pathsep.join(paths)}


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
    answer: dict[str, Any] | None  # None: it left none
    errors: str  # its standard error

    @property
    def error(self) -> str:
        """What was raised instead of an answer; empty where nothing was."""
        return "" if self.answer is None else self.answer.get(_ERROR, "")

    @property
    def refusal(self) -> ToolError | None:
        """The ToolError that was raised instead of an answer."""
        refused = None if self.answer is None else self.answer.get(_REFUSED)
        return None if refused is None else decoded_error(refused)

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


def ask(
    module: str,
    directory: Path,
    request: Mapping[str, Any],
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
    return Outcome(code, read_json(directory / _ANSWER), said)


def write_request(directory: Path, request: Mapping[str, Any]) -> None:
    """Leaves a request in a directory for a child of this process."""
    envelope = {"parent": os.getpid(), "request": request}
    (directory / _REQUEST).write_text(json.dumps(envelope), encoding="utf-8")


def read_request(directory: Path) -> dict[str, Any]:
    """The request that `write_request` left."""
    return json.loads((directory / _REQUEST).read_text(encoding="utf-8"))["request"]


def read_json(path: Path) -> Any:
    """What a child left in a file; None where that is missing, or cut short when it was ended."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def answer_request(answer: Callable[[Path, dict[str, Any]], Mapping[str, Any]]) -> None:
    """In the child: answers the request in the directory that the command line names.

    What goes wrong is an answer, too. The child ends with its parent.
    """
    directory = Path(sys.argv[1])
    envelope = json.loads((directory / _REQUEST).read_text(encoding="utf-8"))
    end_with_parent(envelope["parent"])
    answered: Mapping[str, Any]
    try:
        answered = answer(directory, envelope["request"])
    except Exception as error:  # errors of XLA and jax are of several private types
        answered = {_ERROR: str(error) or type(error).__name__}
        if isinstance(error, ToolError):
            answered[_REFUSED] = encoded_error(error)
    (directory / _ANSWER).write_text(json.dumps(answered), encoding="utf-8")


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


# Errors in messages of either form.


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
