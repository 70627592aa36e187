"""Explains the end of a process that ran native code, from its signal and standard error.

Native code of XLA and MLIR writes its reason to standard error, among stack frames, and ends the
process. Here the signal, the last message and the activity become one line for a user. If the
process continues, the output of native code is captured for a message instead of shown.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Generator
from dataclasses import dataclass

from stablehlo_tools.diagnostics import Diagnostic, ToolError, first_line, note
from stablehlo_tools.processes.activity import READER, Activity

_STDERR = 2
_CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}
_LONGEST_MESSAGE = 500  # characters
_KEPT_OUTPUT = 1 << 16  # bytes from the end of standard error that are searched for a reason


# Lines of a dying process that are not its reason: stack frames, addresses, crash reporting.
_NOISE = re.compile(
    r"^\s*(@ |\*\*\*|https?://|File \"|Thread 0x|Current thread|Extension modules|Traceback|"
    r"Fatal Python error|WARNING|PLEASE submit|Stack dump|#\d+ 0x|\d+\.\s|[IW]\d{4} )|RAW: |^\s*$"
)
_LOG_PREFIX = re.compile(r"^[EF]\d{4} [\d:.]+\s+\d+ ([\w./+-]+:\d+)\] ")


def how_it_ended(code: int, doing: str) -> str:
    """Describes in words how a process with this exit code ended; `doing` is its activity."""
    if code >= 0:
        return f"ended with exit code {code}, without an answer"
    name = signal.Signals(-code).name
    hint = ", which is usual if the machine runs out of memory" if -code == 9 else ""
    return f"was ended by {name} while {doing}{hint}"


def death(who: str, code: int, doing: str, errors: str) -> ToolError:
    """Returns the error of a process that ended without an answer; `errors` is its stderr."""
    error = ToolError(f"{who} {how_it_ended(code, doing)}", notes=last_words(errors, code))
    error.by_chance = -code == signal.SIGKILL
    return error


def last_words(errors: str, code: int = 0) -> tuple[Diagnostic, ...]:
    """Returns the last line of stderr with a reason as a note, preferably a fatal one; else ().

    A process that was killed did not know it: its last line is about something else."""
    if -code == signal.SIGKILL:
        return ()
    lines = [line for line in errors.splitlines() if not _NOISE.search(line)]
    # XLA's log marks the message that aborts with F.
    fatal = [line for line in lines if line.startswith("F") and _LOG_PREFIX.match(line)]
    if not lines:
        return ()
    reason = (fatal or lines)[-1]
    return (note(f"it said: {shorten_message(_LOG_PREFIX.sub(r'\1: ', reason))}"),)


def shorten_message(message: str) -> str:
    """Returns the first line of a message, cut to `_LONGEST_MESSAGE` characters."""
    line = first_line(message)
    return line if len(line) <= _LONGEST_MESSAGE else line[: _LONGEST_MESSAGE - 1] + "…"


def process_error(present: Activity, code: int, overdue: bool, errors: int | None) -> ToolError:
    """Returns the error for a watched process that a signal ended during this activity.

    `errors` is the descriptor of its standard error; `overdue`: it was ended after its limit.
    """
    how = how_it_ended(code, present.doing)
    if overdue or -code == signal.SIGPROF:
        how = f"was stopped while {present.doing}, which did not end in time"
    how = f"{present.actor} {how}"
    said = ""
    if errors is not None:
        with contextlib.suppress(OSError):
            start = max(0, os.lseek(errors, 0, os.SEEK_END) - _KEPT_OUTPUT)
            said = os.pread(errors, _KEPT_OUTPUT, start).decode(errors="replace")
    hint = ""
    if present.reason:
        message = f"{present.reason} ({how})"
    elif present.actor == READER:
        crashed = code in _CRASHES and not overdue
        why = f"MLIR's parser crashed on it ({how})" if crashed else how
        message = f"damaged, or nested too deeply: {why}"
        hint = "copy the file again, or write it again"
    else:
        message = f"{how}; no file was written"
    error = ToolError(message, notes=last_words(said, code), hint=hint)
    error.input_name = present.input_name or None
    return error


@dataclass
class Captured:
    """The text that was written until the end of the block."""

    text: str = ""


@contextlib.contextmanager
def native_stderr() -> Generator[Captured]:
    """Captures standard error until the end of the block.

    This affects the whole process, so keep the block short."""
    captured = Captured()
    try:
        own = os.dup(_STDERR)
    except OSError:  # it is closed
        yield captured
        return
    kept = os.memfd_create("stderr")
    os.dup2(kept, _STDERR)
    try:
        yield captured
    finally:
        os.dup2(own, _STDERR)
        size = os.lseek(kept, 0, os.SEEK_END)
        captured.text = os.pread(kept, size, 0).decode(errors="replace").strip()
        os.close(own)
        os.close(kept)
