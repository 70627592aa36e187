"""Says in one line what ended a process that ran native code: its signal and its last words."""

from __future__ import annotations

import re
import signal

from stablehlo_tools.diagnostics import Diagnostic, first_line, note

_LONGEST_MESSAGE = 500  # characters

# Lines of a dying process that are not its reason: stack frames, addresses, crash reporting.
_NOISE = re.compile(
    r"^\s*(@ |\*\*\*|https?://|File \"|Thread 0x|Current thread|Extension modules|Traceback|"
    r"Fatal Python error|WARNING|PLEASE submit|Stack dump|#\d+ 0x|\d+\.\s|[IW]\d{4} )|RAW: |^\s*$"
)
_LOG_PREFIX = re.compile(r"^[EF]\d{4} [\d:.]+\s+\d+ ([\w./+-]+:\d+)\] ")


def how_it_ended(code: int, doing: str) -> str:
    """How a process with this exit code ended, in words, while `doing` something."""
    if code >= 0:
        return f"ended with exit code {code} and no answer"
    name = signal.Signals(-code).name
    hint = ", which is what happens when the machine runs out of memory" if -code == 9 else ""
    return f"was ended by {name} while {doing}{hint}"


def last_words(said: str) -> tuple[Diagnostic, ...]:
    """The last line of standard error that says something, a fatal one first, as a note."""
    lines = [line for line in said.splitlines() if not _NOISE.search(line)]
    fatal = [line for line in lines if line.startswith("F") and _LOG_PREFIX.match(line)]
    if not lines:
        return ()
    said_last = (fatal or lines)[-1]
    return (note(f"it said: {shortened(_LOG_PREFIX.sub(r'\1: ', said_last))}"),)


def shortened(message: str) -> str:
    """The first line of a message, cut where it would fill a screen."""
    line = first_line(message)
    return line if len(line) <= _LONGEST_MESSAGE else line[: _LONGEST_MESSAGE - 1] + "…"
