"""Colours on a terminal: of errors, warnings, suggestions, figures, and the word that answers.

Colour says nothing that the words do not. It is off if a stream is not a terminal, if NO_COLOR is
set to anything (no-color.org), or if TERM is `dumb`.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import TextIO

_RESET = "\x1b[0m"
_RED, _GREEN, _YELLOW, _CYAN = (f"\x1b[1;{number}m" for number in (31, 32, 33, 36))
_LABELS = {"error": _RED, "warning": _YELLOW, "note": _CYAN, "try": _GREEN}
# A label is before its message, at the start of a line or after a place.
_LABEL = re.compile(r"(?m)(^|(?<=: ))(error|warning|note|try)(?=: )")
_EMPHASIS = (
    (re.compile(r"(?m)^\S.*$"), "\x1b[1m"),
    (re.compile(r"(?m)(?<=^  exposed )[ ]*\S+ \S+"), _YELLOW),
    (re.compile(r"(?m)(?<=^    \d\. )[^:\n]+(?=: )"), _GREEN),
)
_ANSWER = re.compile(r"[\w-]+(?: proven)?")


def in_colour(stream: TextIO) -> bool:
    """Returns True if colours may be written to the stream."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def colour_labels(text: str) -> str:
    """Colours the labels of messages, such as `error`."""
    return _LABEL.sub(lambda label: f"{_LABELS[label[0]]}{label[0]}{_RESET}", text)


def with_answer(text: str, *, holds: bool) -> str:
    """Colours the first word of an answer: green if it holds, else red."""
    colour = _GREEN if holds else _RED
    return _ANSWER.sub(lambda word: f"{colour}{word[0]}{_RESET}", text, count=1)


def with_emphasis(text: str) -> str:
    """Colours a report on cost: programs, labels, the exposed time, and the gain of each advice."""
    for pattern, colour in _EMPHASIS:
        text = pattern.sub(lambda found, colour=colour: f"{colour}{found[0]}{_RESET}", text)
    return colour_labels(text)


def terminal_width(stream: TextIO) -> int | None:
    """Returns the columns of a terminal; None for a file or a pipe, whose lines have any length."""
    return shutil.get_terminal_size().columns if stream.isatty() else None
