"""A test file of diagnostics: its parts, split at `// -----`, and the expectations in comments.

// expected-error@+1 {{part of the message}}
// expected-warning {{...}}              on the line of the comment
// expected-error-re@-2 {{text {{regex}} text}}
// expected-note@above {{...}}           @below is @+1
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from stablehlo_tools.diagnostics import Diagnostic, Severity

SEPARATOR = "// -----"
_SEPARATOR_LINE = re.compile(r"^[ \t]*// -----[ \t]*\n?", re.MULTILINE)


def split_input(text: str) -> list[str]:
    """Returns the parts of a text, each after enough empty lines to keep its line numbers.

    Empty parts, such as after a separator at the end, are left out.
    """
    parts: list[str] = []
    start = 0
    for match in [*_SEPARATOR_LINE.finditer(text), None]:
        end = len(text) if match is None else match.start()
        parts.append("\n" * text.count("\n", 0, start) + text[start:end])
        start = end if match is None else match.end()
    return [part for part in parts if part.strip()] or parts[:1]


def join_parts(parts: list[str]) -> str:
    """Joins transformed parts into one text."""
    return f"{SEPARATOR}\n".join(parts)


_EXPECTATION = re.compile(
    r"expected-(?P<severity>error|warning|note|remark)(?P<regex>-re)?"
    r"(?:@(?P<place>[+-]\d+|above|below|unknown))?\s*\{\{(?P<text>.*?)\}\}(?=\s*(?:$|//|expected-))"
)


@dataclass(frozen=True)
class Expectation:
    """One expected diagnostic. `line` None accepts a diagnostic without a line in the input."""

    severity: Severity
    line: int | None
    pattern: str
    text: str  # the text in the comment, unescaped
    written_at: int

    def accepts(self, diagnostic: Diagnostic) -> bool:
        """Returns True if the diagnostic is the expected one."""
        place = diagnostic.place
        line = place.line if place.file is None and place.line else None
        if diagnostic.severity is not self.severity or line != self.line:
            return False
        return re.search(self.pattern, diagnostic.message) is not None


def parse_expectations(text: str) -> list[Expectation]:
    """Returns the expectations in a text, in order."""
    expectations: list[Expectation] = []
    for number, line in enumerate(text.splitlines(), start=1):
        for match in _EXPECTATION.finditer(line):
            severity = Severity("note" if match["severity"] == "remark" else match["severity"])
            pattern = re.escape(match["text"])
            if match["regex"]:  # `plain {{regex}} plain`
                parts = re.split(r"\{\{(.*?)\}\}", match["text"])
                pattern = "".join(p if i % 2 else re.escape(p) for i, p in enumerate(parts))
            offset = {"above": "-1", "below": "+1"}.get(match["place"], match["place"] or "+0")
            place = None if offset == "unknown" else number + int(offset)
            expectations.append(Expectation(severity, place, pattern, match["text"], number))
    return expectations


def mismatches(text: str, reported: Iterable[Diagnostic]) -> list[str]:
    """Returns expected diagnostics that were not reported, and reported ones not expected.

    The notes of a diagnostic also match expectations, but need not be expected.
    """
    waiting = parse_expectations(text)
    problems: list[str] = []
    for diagnostic in reported:
        for part in (diagnostic, *diagnostic.notes):
            expected = next((e for e in waiting if e.accepts(part)), None)
            if expected is not None:
                waiting.remove(expected)
            elif part.severity is not Severity.NOTE:
                problems.append(f"unexpected {part.severity.value}: {part.render('input')}")
    problems += [
        f"line {e.written_at}: expected {e.severity.value} was not reported: {e.text}"
        for e in waiting
    ]
    return problems
