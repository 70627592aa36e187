"""What native code writes to standard error, kept for a message instead of shown."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

_STDERR = 2


class Captured:
    """What was written so far."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._text = ""

    def text(self) -> str:
        """All of it, stripped."""
        return self._text

    def keep(self) -> None:
        """Reads it, before its place is closed."""
        if self._descriptor is not None:
            size = os.lseek(self._descriptor, 0, os.SEEK_END)
            self._text = os.pread(self._descriptor, size, 0).decode(errors="replace").strip()


@contextlib.contextmanager
def native_stderr() -> Generator[Captured]:
    """Keeps what is written to standard error until the end of the block: of the whole process, so
    the block must be short."""
    try:
        own = os.dup(_STDERR)
    except OSError:  # it is closed
        yield Captured(None)
        return
    kept = os.memfd_create("stderr")
    captured = Captured(kept)
    os.dup2(kept, _STDERR)
    try:
        yield captured
    finally:
        os.dup2(own, _STDERR)
        captured.keep()
        os.close(own)
        os.close(kept)
