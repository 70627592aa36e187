"""Jobs on the workers of an executor, such as those of a cluster.

A task has all bytes that its job reads, and its result is bytes, too. Each worker runs the job as
local workers do, in a fork of a process of its own. Workers with other versions refuse.
"""

from __future__ import annotations

import io
import os
import platform
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from pathlib import Path
from typing import Any

from stablehlo_tools.cost.hardware import is_file
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.optimization.store import tool_digest
from stablehlo_tools.processes.child import Conversation, encoded_error, receive, send
from stablehlo_tools.processes.forks import REFUSED
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.topologies import check_installed, compiler_version

WORKER = "stablehlo_tools.optimization.worker"
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables that compilers read
_TRIES = 2  # a lost worker costs its task one retry
_ON_THE_WAY = 10.0  # seconds to send a task and its result
_of_thread = threading.local()  # the process of each thread of a worker


class RemoteWorkers:
    """The workers of an executor, for one target."""

    def __init__(self, executor: Executor, target: str) -> None:
        self._executor, self._target = executor, target
        self._pending = set[Future[bytes]]()

    def ask(self, message: Mapping[str, Any], files: Mapping[str, bytes]) -> tuple[Any, bytes]:
        """Returns the answer of a worker to a message within its `seconds`. `files` are added to
        the message as paths, and so is the file of its hardware.

        Raises ToolError if two workers in turn are lost, TimeoutError, and BrokenExecutor if the
        executor takes no more tasks.
        """
        if is_file(message.get("hardware", "")):
            files = {**files, "hardware": Path(message["hardware"]).read_bytes()}
        head = {
            "message": message,
            "files": [[name, len(data)] for name, data in files.items()],
            "target": self._target,
            "versions": _versions(self._target),
        }
        task = _to_bytes(head, b"".join(files.values()))
        why = ""
        for _ in range(_TRIES):
            try:
                future = self._executor.submit(run_task, task)
            except RuntimeError as error:  # it is broken or shut down
                raise BrokenExecutor(str(error)) from None
            self._pending.add(future)
            try:
                answer = future.result(timeout=message["seconds"] + _ON_THE_WAY)
                return receive(io.BytesIO(answer))
            except (TimeoutError, CancelledError):
                raise TimeoutError from None
            except Exception as error:  # each executor has its own
                why = f"{type(error).__name__}: {error}".splitlines()[0]
            finally:
                future.cancel()
                self._pending.discard(future)
        lost = ToolError(f"a worker was lost two times: {why}")
        lost.by_chance = True
        raise lost

    def end(self) -> None:
        """Cancels all tasks; those that have begun run on."""
        for future in list(self._pending):
            future.cancel()


def run_task(task: bytes) -> bytes:
    """Runs a task on a worker. Returns its encoded answer."""
    head, data = receive(io.BytesIO(task))
    try:
        check_installed(Target(head["target"]))
        mine = _versions(head["target"])
        for name, version in head["versions"].items():
            if mine[name] != version:
                raise ToolError(
                    f"{name} is {mine[name]!r} on the worker {platform.node()}, and {version!r} in "
                    "the process that asks",
                    hint="install the same versions, and set the same flags",
                )
        with tempfile.TemporaryDirectory() as directory:
            message: dict[str, Any] = head["message"]
            start = 0
            for name, size in head["files"]:
                path = Path(directory) / f"{name}.toml"  # the suffix of profiles
                path.write_bytes(data[start : start + size])
                start, message[name] = start + size, str(path)
            return _to_bytes(*_process().ask(message, b""))
    except ToolError as error:
        error.by_chance = True  # another worker may do it
        return _to_bytes({REFUSED: encoded_error(error)}, b"")


def _process() -> Conversation:
    """Returns the process that runs the jobs of this thread."""
    process: Conversation | None = getattr(_of_thread, "process", None)
    if process is None or process.ended:
        process = _of_thread.process = Conversation(WORKER)
    return process


def _versions(target: str) -> dict[str, str]:
    """Returns the versions and the flags on which answers depend."""
    return {
        "stablehlo-tools": tool_digest()[:12],
        "compiler": compiler_version(Target(target)),
        **{flag: os.environ.get(flag, "") for flag in FLAGS},
    }


def _to_bytes(head: Any, data: bytes) -> bytes:
    stream = io.BytesIO()
    send(stream, head, data)
    return stream.getvalue()
