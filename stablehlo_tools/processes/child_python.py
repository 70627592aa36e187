"""Child processes that run this package with `python -m`: their environment, and their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

_SEARCH_PATH = "PYTHONPATH"
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def with_package(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables, with this package where Python looks first, installed or not."""
    package_root = str(Path(__file__).parents[2])
    paths = filter(None, (package_root, environment.get(_SEARCH_PATH)))
    return {**environment, _SEARCH_PATH: os.pathsep.join(paths)}


def wait_or_end(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    """The exit code of a process that leads a group of its own; None where it took more than so
    many seconds. Whatever happens, the group has ended then."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group of its own, with the group, if it runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_with_parent(parent: int) -> None:
    """Ends this process, a child of `parent`, when that ends in whatever way."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before that
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def send(stream: IO[bytes], head: Any, data: bytes) -> None:
    """Writes one message of a conversation over a pipe: what JSON can hold, and bytes."""
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
