"""Colours on a terminal: of errors, warnings, suggestions, and the word that answers.

Colour says nothing that the words do not. It is off if a stream is not a terminal, if NO_COLOR is
set to anything (no-color.org), or if TERM is `dumb`.
"""

from __future__ import annotations

import os
import re
from typing import TextIO

_RESET = "\x1b[0m"
_RED, _GREEN, _YELLOW, _CYAN = (f"\x1b[1;{number}m" for number in (31, 32, 33, 36))
_LABELS = {"error": _RED, "warning": _YELLOW, "note": _CYAN, "try": _GREEN}
# A label is before its message, at the start of a line or after a place.
_LABEL = re.compile(r"(?m)(^|(?<=: ))(error|warning|note|try)(?=: )")
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
