"""Runs work in a fork of this process; the death of the fork is also an answer.

A fork has all modules of its parent, so it starts at once. A new process would load MLIR for a
second. Only processes of one thread (children of this package) may fork.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.processes.activity import end_with_parent
from stablehlo_tools.processes.child import encoded_error, receive, send
from stablehlo_tools.processes.ending import death

Answer = tuple[Any, bytes]
REFUSED = "refused"  # the key of an answer that holds a ToolError


def in_fork(
    work: Callable[[], Answer],
    doing: str,
    seconds: float,
    cpu_seconds: float = 0,
    explain: Callable[[int, int], ToolError] | None = None,
) -> Answer:
    """Returns the result of `work` in a fork; `{"refused": …}` for a ToolError or a dead fork.

    The fork is ended after `seconds`, or after `cpu_seconds` of CPU time. `explain` makes an error
    of its exit code and the descriptor of its stderr. Without it, the error names `doing`.
    """
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as errors:
        server = os.getpid()
        child = os.fork()
        if child == 0:
            end_with_parent(server)
            os.dup2(errors.fileno(), 1)  # the server's standard output carries a conversation
            os.dup2(errors.fileno(), 2)
            # If memory runs out, the kernel ends this process and not its parent.
            with contextlib.suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("500")
            # Its default action ends the fork even in native code; 0 sets no limit.
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            _answer(work, answer.fileno())
        overdue = threading.Event()

        def end() -> None:
            overdue.set()
            os.kill(child, signal.SIGKILL)

        timer = threading.Timer(seconds, end)
        timer.start()
        _, status = os.waitpid(child, 0)
        timer.cancel()
        # A late timer could kill a new process that got the same id.
        timer.join()
        if status == 0:
            answer.seek(0)
            return receive(answer)
        code = os.waitstatus_to_exitcode(status)
        if explain is not None:
            return _refusal(explain(code, errors.fileno()))
        if overdue.is_set():
            late = ToolError(f"{doing} took more than {seconds:.0f} s and was stopped")
            late.by_chance = True
            return _refusal(late)
        errors.seek(0)
        said = errors.read().decode(errors="replace")
        return _refusal(death("the process", code, doing, said))


def _refusal(error: ToolError) -> Answer:
    return {REFUSED: encoded_error(error)}, b""


def _answer(work: Callable[[], Answer], output: int) -> NoReturn:
    """Writes the answer, in the fork, and ends it."""
    # A crash of native code is expected here, and its core file would be large.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        try:
            head, data = work()
        except ToolError as error:
            head, data = _refusal(error)
        with os.fdopen(output, "wb", closefd=False) as stream:
            send(stream, head, data)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    # Not sys.exit: the exit handlers are those of the server.
    os._exit(0)
