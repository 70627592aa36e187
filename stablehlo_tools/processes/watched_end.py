"""Explains the end of a watched process: what it was busy with, and what a user can do."""

from __future__ import annotations

import contextlib
import os
import signal

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.processes.activity import READER, Activity
from stablehlo_tools.processes.last_words import how_it_ended, last_words


def explained(present: Activity, code: int, overdue: bool, said: int | None) -> ToolError:
    """The error to report where a process ended by a signal while it did this."""
    how = f"{present.actor} {_how(present, code, overdue)}"
    if present.reason:
        message = f"{present.reason} ({how})"
    elif present.actor == READER:
        message = f"damaged, or nested too deeply: {how}; write or export it again"
    else:
        message = f"{how}; no file was written"
    error = ToolError(message, notes=last_words(_text(said)))
    error.input_name = present.input_name or None
    return error


def _how(present: Activity, code: int, overdue: bool) -> str:
    if overdue or -code == signal.SIGPROF:
        return f"was stopped while {present.doing}, which did not come to an end"
    return how_it_ended(code, present.doing)


def _text(said: int | None) -> str:
    if said is None:
        return ""
    with contextlib.suppress(OSError):
        size = os.lseek(said, 0, os.SEEK_END)
        return os.pread(said, 1 << 16, max(0, size - (1 << 16))).decode(errors="replace")
    return ""
