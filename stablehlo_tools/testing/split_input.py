"""Splits a test file into parts that are read on their own, at lines of `// -----`."""

from __future__ import annotations

import re

SEPARATOR = "// -----"
_SEPARATOR_LINE = re.compile(r"^[ \t]*// -----[ \t]*\n?", re.MULTILINE)


def split_input(text: str) -> list[str]:
    """The parts of a text, each led by as many empty lines as keep its line numbers.

    Parts that are empty, as behind a separator at the end, are left out.
    """
    parts: list[str] = []
    start = 0
    for match in [*_SEPARATOR_LINE.finditer(text), None]:
        end = len(text) if match is None else match.start()
        parts.append("\n" * text.count("\n", 0, start) + text[start:end])
        start = end if match is None else match.end()
    return [part for part in parts if part.strip()] or parts[:1]


def join_parts(parts: list[str]) -> str:
    """Puts transformed parts back into one text."""
    return f"{SEPARATOR}\n".join(parts)
