"""One line on a terminal that says what a long command does; nothing where there is no terminal."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from types import TracebackType
from typing import Self

_EVERY = 0.5  # seconds
_CLEAR = "\r\x1b[K"


class ProgressLine:
    """Shows a text and the seconds since the beginning, on standard error, until the block ends."""

    def __init__(self) -> None:
        self._text = ""
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._drawing = threading.Thread(target=self._draw, daemon=True)

    def show(self, text: str) -> None:
        """What is being done from now on."""
        self._text = text

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._drawing.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._drawing.is_alive():
            self._drawing.join()
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()

    def _draw(self) -> None:
        while not self._ended.wait(_EVERY):
            width = shutil.get_terminal_size().columns - 1
            line = f"{time.monotonic() - self._began:5.0f} s  {self._text}"
            sys.stderr.write(_CLEAR + line[:width])
            sys.stderr.flush()
