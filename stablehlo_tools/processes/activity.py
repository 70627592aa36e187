"""A process that its parent watches: it reports its activity, and ends with the parent.

Native code can end a process, or never return, on bytes that it does not expect. So a command does
its work in a child. The reports tell the parent how to explain a crash, and how long to wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace

READER = "the reader"
_BYTES_A_SECOND = 100_000  # a tenth of the speed of MLIR's slowest reader
_LEAST_SECONDS = 10
WAIT_PER_CPU_SECOND = 6  # wall seconds that a busy machine may need for a second of CPU time
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


@dataclass(frozen=True)
class Activity:
    """An actor, its work and its input, with a limit in wall seconds (0: no limit).

    `reason` says why it may fail, if that is known. `grace`: the seconds to end after an interrupt
    (0: the default of the parent).
    """

    actor: str
    doing: str
    input_name: str = ""
    seconds: float = 0
    reason: str = ""
    grace: float = 0
    # The progress shown to the user; "": derived from `doing`, None: no progress.
    shown: str | None = ""


IDLE = Activity("the command", "running")
_dispensable = False
_watcher: int | None = None  # the pipe to the process that watches this one
_present = IDLE


def tell(pipe: int) -> None:
    """Reports the activities of this process on a pipe from now on."""
    global _watcher  # noqa: PLW0603
    _watcher = pipe


def trust_input() -> None:
    """Lets this process read all input itself from now on, even if native code may end it."""
    global _dispensable  # noqa: PLW0603
    _dispensable = True


def may_end() -> bool:
    """Returns True if native code may end this process: a parent explains it, or it may die."""
    return _watcher is not None or _dispensable


def told(line: bytes) -> Activity:
    """Decodes a line of the pipe."""
    return Activity(**json.loads(line))


@contextlib.contextmanager
def busy(
    actor: str, doing: str, input_name: str = "", size: int | None = None, reason: str = ""
) -> Generator[None]:
    """Reports this activity to the watching process until the end of the block.

    With a size in bytes, the time of native code is limited to `seconds_for(size)`. Without a
    watcher there is no limit, because the process is the user's own.
    """
    global _present  # noqa: PLW0603
    if _watcher is None:
        yield
        return
    seconds = 0 if size is None else seconds_for(size)
    before = _present
    wall = seconds * WAIT_PER_CPU_SECOND
    _present = Activity(actor, doing, input_name, wall, reason, before.grace)
    _say(_watcher, seconds)
    try:
        yield
    finally:
        _present = before
        _say(_watcher, 0)


def show(text: str | None) -> None:
    """Sets the progress shown to the user until the next call or the end of the `busy` block.

    None shows none, because other processes write to the terminal."""
    global _present  # noqa: PLW0603
    if _watcher is not None:
        _present = replace(_present, shown=text)
        _tell(_watcher)


def ends_slowly(seconds: float) -> None:
    """Sets the seconds that this process has from now on to end after an interrupt."""
    global _present  # noqa: PLW0603
    _present = replace(_present, grace=seconds)
    if _watcher is not None:
        _say(_watcher, 0)


def seconds_for(size: int) -> float:
    """Returns the limit in CPU seconds for reading `size` bytes."""
    return _LEAST_SECONDS + size / _BYTES_A_SECOND


def _say(pipe: int, cpu_seconds: float) -> None:
    # CPU time does not depend on other work of the machine. The signal's default action ends the
    # process; a Python handler would only run after the native code returns.
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    _tell(pipe)


def _tell(pipe: int) -> None:
    with contextlib.suppress(OSError):  # the watcher has ended
        os.write(pipe, json.dumps(asdict(_present)).encode() + b"\n")


def end_with_parent(parent: int) -> None:
    """Ends this process, a child of `parent`, when `parent` ends for any reason.

    On Linux it also ends with the thread that started it. So use it only if that thread waits for
    this process.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before `prctl` ran
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        # Not sys.exit, which would end only this thread.
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
