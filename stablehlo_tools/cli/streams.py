"""Standard streams that hold whatever becomes of them: closed, without a reader, or a terminal.

Set up once, before anything is opened or forked. A stream that is closed is neither taken by the
next file nor a crash: reading and writing it fail as for any file that cannot be had.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import time
from typing import TYPE_CHECKING

from stablehlo_tools.cli.terminal import colour_labels, in_colour, with_answer
from stablehlo_tools.diagnostics import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDIN, _STDOUT, _STDERR = 0, 1, 2
PATIENCE = 3.0  # seconds after which a terminal shows the progress of a command
_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
_CLEAR = b"\r\x1b[2K"


def prepare() -> None:
    """Replaces the standard streams of this process by the streams of this module."""
    _fill(_STDIN, os.O_WRONLY)  # so that reading a closed stream is an error
    _fill(_STDOUT, os.O_RDONLY)
    _fill(_STDERR, os.O_WRONLY)  # nowhere to complain
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdin = io.TextIOWrapper(io.BufferedReader(_ClosedInput()))
    sys.stdout = text_output(_STDOUT)
    sys.stderr = text_output(_STDERR)


def text_output(descriptor: int) -> io.TextIOWrapper:
    """Returns a text stream to a descriptor; line-buffered, except standard output to a file."""
    output = _TextOutput(descriptor)
    return _Printed(
        io.BufferedWriter(output),
        encoding="utf-8",
        # File names may hold bytes that are not UTF-8.
        errors="backslashreplace",
        line_buffering=descriptor != _STDOUT or output.isatty(),
    )


def put_in_colour(text: str) -> None:
    """Writes to standard output with its colours, and without any other escapes."""
    stream = sys.stdout
    if isinstance(stream, _Printed):
        stream.write_in_colour(text)
    else:
        stream.write(text)


def print_answer(text: str, *, holds: bool) -> None:
    """Prints an answer; on a terminal, its first word is green if it holds, else red."""
    painted = with_answer(text, holds=holds) if in_colour(sys.stdout) else text
    put_in_colour(painted + "\n")


def _fill(descriptor: int, mode: int) -> None:
    """Opens the null device at a closed descriptor; else the next file would get its number."""
    try:
        os.fstat(descriptor)
    except OSError:
        null = os.open(os.devnull, mode)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)


class _ClosedInput(io.RawIOBase):
    """Standard input that was closed."""

    def readable(self) -> bool:
        return True

    def readinto(self, _buffer: object) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


class _TextOutput(io.RawIOBase):
    """A descriptor to write to.

    After its reader has closed it, output is dropped, so that the command keeps its exit code."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._began = time.monotonic()
        self._at_line_start = True

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data)
        try:
            # The terminal may show the progress of the command on the line to be written.
            waited = time.monotonic() - self._began > PATIENCE - 1
            if waited and self._at_line_start and self.isatty() and sys.stderr.isatty():
                os.write(self._descriptor, _CLEAR)
            written = os.write(self._descriptor, data)
        except BrokenPipeError:
            return view.nbytes
        self._at_line_start = not written or view.cast("B")[written - 1] == ord("\n")
        return written


class _Printed(io.TextIOWrapper):
    """Text without control characters of a terminal, because names come from untrusted files."""

    def write(self, text: str, /) -> int:
        shown = printable(text)
        is_messages = self.fileno() != _STDOUT
        super().write(colour_labels(shown) if is_messages and in_colour(self) else shown)
        return len(text)

    def write_in_colour(self, text: str) -> None:
        """Writes text and keeps the escapes of colours."""
        parts = _COLOUR.split(text)
        super().write("".join(part if at % 2 else printable(part) for at, part in enumerate(parts)))
