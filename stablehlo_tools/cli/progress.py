"""A line on a terminal that shows the progress of a long command; off without a terminal.

The process that waits for the command draws it, after the first seconds: native code that keeps
the command's own process from running Python does not stop the line.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import Self

from stablehlo_tools.cli.streams import PATIENCE
from stablehlo_tools.diagnostics import printable

SECONDS = "{seconds}"  # in a text: the seconds since the start, which otherwise come before it
_EVERY = 0.2  # seconds
_STDERR = 2


class ProgressLine:
    """Shows a text and the seconds since the start, on standard error, until the block ends."""

    def __init__(self, title: str) -> None:
        self._title = self._text = title
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._drawn = threading.Event()
        self._drawing = threading.Thread(target=self._draw, daemon=True)

    def show(self, text: str | None) -> None:
        """Sets the text from now on; "" shows the title, and None ends the line."""
        if text is None:
            self.end()
        else:
            self._text = text or self._title

    @property
    def is_drawn(self) -> bool:
        """Returns True if the line has been drawn."""
        return self._drawn.is_set()

    def end(self) -> None:
        """Removes the line, before anything else is written."""
        self._ended.set()
        if self._drawing.is_alive():
            self._drawing.join()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._drawing.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.end()

    def _draw(self) -> None:
        if self._ended.wait(PATIENCE):
            return
        # Loaded here, because most commands end before it is needed, and --help stays instant.
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn
        from rich.table import Column

        with os.fdopen(os.dup(_STDERR), "w") as terminal:
            said = TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis"),
            )
            shown = Progress(
                SpinnerColumn(),
                said,
                console=Console(file=terminal),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            with shown:
                task = shown.add_task("")
                while not self._ended.wait(_EVERY):
                    seconds = f"{time.monotonic() - self._began:.0f}"
                    text = self._text if SECONDS in self._text else f"{SECONDS} s  {self._text}"
                    text = printable(text.replace(SECONDS, seconds))
                    shown.update(task, description=text, refresh=True)
                    self._drawn.set()
