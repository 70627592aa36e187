"""Runs a command in a child of this process, and explains what ended the child.

Native code can end its process on a damaged file, or never return. The child is forked before
anything is loaded, which costs a few milliseconds, and does all of the work; this process waits,
passes on signals and the exit code, and turns the child's death into one message.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from stablehlo_tools.cli.progress import ProgressLine
from stablehlo_tools.cli.streams import text_output
from stablehlo_tools.processes import activity
from stablehlo_tools.processes.activity import IDLE

BAD_INPUT = 2
INTERRUPTED = 130
_GRACE = 10  # seconds that an interrupted command has to clean up
_STACK = 100 << 20  # bytes; the addresses below the stack are free that far, for any initial limit
_STDERR = 2
_FORWARDED = (signal.SIGINT, signal.SIGTERM)


def run_supervised(command: Callable[[], int], title: str = "") -> int:
    """Runs a command in a child process and returns its exit code.

    `title` is the progress on a terminal, if the command runs long and shows no other text."""
    sys.stdout.flush()
    sys.stderr.flush()
    activities, watcher = os.pipe()
    errors = os.memfd_create("stderr") if hasattr(os, "memfd_create") else None
    parent = os.getpid()
    # Before the fork, so that no signal arrives while a side has no handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        os.close(activities)
        _become_child(command, parent, watcher, errors)
    # With this end open here, the activities would not end with the child.
    os.close(watcher)
    with ProgressLine(title) as line:
        return _Supervisor(child, activities, errors, line).wait()


class _Supervisor:
    """The parent of one child, with the child's current activity."""

    def __init__(self, child: int, activities: int, errors: int | None, line: ProgressLine) -> None:
        self.child = child
        self.activities = activities
        self.errors = errors
        self.line = line
        self.interrupted = False
        self.overdue = False
        self.present = IDLE

    def wait(self) -> int:
        for number in _FORWARDED:
            # nohup and background jobs ignore signals; that stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._forward)
        signal.signal(signal.SIGALRM, self._end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        with os.fdopen(self.activities, "rb") as lines:
            for line in lines:
                self.present = present = activity.told(line)
                shown = present.shown
                if not shown and present.actor != IDLE.actor:
                    shown = f"{present.input_name}: {present.doing}".removeprefix(": ")
                self.line.show(shown)
                if not self.interrupted:
                    signal.setitimer(signal.ITIMER_REAL, present.seconds)
        _, status = os.waitpid(self.child, 0)
        self.line.end()
        # Signals from now on are ignored: the child that would get them has ended.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        signal.setitimer(signal.ITIMER_REAL, 0)
        # The output of native code goes to standard error if the child ended by itself.
        if self.errors is not None and os.WIFEXITED(status):
            with contextlib.suppress(OSError):
                os.lseek(self.errors, 0, os.SEEK_SET)
                while data := os.read(self.errors, 1 << 16):
                    os.write(_STDERR, data)
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return code
        if self.interrupted:
            return _print("stablehlo-tools: interrupted", INTERRUPTED)
        from stablehlo_tools.processes.ending import process_error

        error = process_error(self.present, code, self.overdue, self.errors)
        return _print(error.diagnostic.render(error.input_name or "stablehlo-tools"), BAD_INPUT)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        """Asks the child to end at the first signal; kills it at the second, or after the grace."""
        os.kill(self.child, signal.SIGKILL if self.interrupted else signal.SIGTERM)
        self.interrupted = True
        signal.setitimer(signal.ITIMER_REAL, self.present.grace or _GRACE)

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self.overdue = not self.interrupted
        os.kill(self.child, signal.SIGKILL)


def _print(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)
    return code


def _become_child(
    command: Callable[[], int], parent: int, watcher: int, errors: int | None
) -> NoReturn:
    """Runs the command and ends with its exit code; never returns into the parent's code."""
    activity.end_with_parent(parent)
    # MLIR reads, checks and prints nested regions by recursion.
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK if most == resource.RLIM_INFINITY else min(_STACK, most)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, most))
    activity.tell(watcher)
    if errors is not None:
        # Python still writes to standard error; output of native code goes to `errors`.
        with contextlib.suppress(OSError, AttributeError):  # it is closed
            sys.stderr.flush()
            own = os.dup(_STDERR)
            os.dup2(errors, _STDERR)
            sys.stderr = text_output(own)
    # A terminal also interrupts the parent, which passes the signal on: once is enough.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    code = 1
    try:
        code = command()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = BAD_INPUT
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGALRM})  # it is ending
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        # Not sys.exit: unloading all modules takes longer than the fork did.
        os._exit(code)
