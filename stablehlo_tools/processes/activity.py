"""A process that its parent watches: it tells what it is busy with, and ends with the parent.

Native code can end a process, or never return, on bytes that it was not made for. So what a command
does happens in a child; this is how its parent knows what to say of it, and how long to wait.
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
_BYTES_A_SECOND = 100_000  # a tenth of what the slowest of MLIR's readers does
_LEAST_SECONDS = 10
WAIT_PER_CPU_SECOND = 6  # seconds that a machine with other work may take for one of its own
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


@dataclass(frozen=True)
class Activity:
    """Who does what to which input, within how many seconds (0: any number).

    `reason` is why it may fail, where that is known. `grace`: seconds that it may take to end where
    it is interrupted, 0 for what others have.
    """

    actor: str
    doing: str
    input_name: str = ""
    seconds: float = 0
    reason: str = ""
    grace: float = 0
    # What a person who waits is told: without it what is being done, None: nothing.
    shown: str | None = ""


IDLE = Activity("the command", "running")
_dispensable = False
_watcher: int | None = None  # the pipe to the process that watches this one
_present = IDLE


def tell(pipe: int) -> None:
    """From now on, says on this pipe what this process does."""
    global _watcher  # noqa: PLW0603
    _watcher = pipe


def trust_input() -> None:
    """From now on this process itself reads whatever it is given, and ends where that ends it."""
    global _dispensable  # noqa: PLW0603
    _dispensable = True


def may_end() -> bool:
    """Whether native code may end this process: a parent explains it, or nobody minds."""
    return _watcher is not None or _dispensable


def told(line: bytes) -> Activity:
    """What a line on the pipe says."""
    return Activity(**json.loads(line))


@contextlib.contextmanager
def busy(
    actor: str, doing: str, input_name: str = "", size: int | None = None, reason: str = ""
) -> Generator[None]:
    """Tells who watches that this is done until the end of the block.

    With a size in bytes, native code gets as much time as that may take. Without a watcher
    nothing is limited: the process is not ours to end.
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
    """From now on, until the next time or the end of a `busy` block around it, a person who waits
    is told this; None: nothing more, for others write to the terminal."""
    global _present  # noqa: PLW0603
    if _watcher is not None:
        _present = replace(_present, shown=text)
        _tell(_watcher)


def ends_slowly(seconds: float) -> None:
    """From now on, where it is interrupted this process has so many seconds to end."""
    global _present  # noqa: PLW0603
    _present = replace(_present, grace=seconds)
    if _watcher is not None:
        _say(_watcher, 0)


def seconds_for(size: int) -> float:
    """How many seconds of a processor reading so many bytes may take."""
    return _LEAST_SECONDS + size / _BYTES_A_SECOND


def _say(pipe: int, cpu_seconds: float) -> None:
    # Processor time, so that a busy machine changes nothing, and by a signal whose default is the
    # end of the process, as a handler in Python would wait for the native code to return.
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    _tell(pipe)


def _tell(pipe: int) -> None:
    with contextlib.suppress(OSError):  # it has gone
        os.write(pipe, json.dumps(asdict(_present)).encode() + b"\n")


def end_with_parent(parent: int) -> None:
    """Ends this process, a child of `parent`, when that ends in whatever way.

    On Linux also when the thread ends that started it: for a child that its thread waits for.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before that
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
