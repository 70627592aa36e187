"""Splits pipeline text into passes and options, without interpreting them.

text    = pass ("," pass)*
pass    = name [ "{" option* "}" ]
option  = name [ "=" value ]            values may nest braces and quote spaces
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stablehlo_tools.diagnostics import ToolError

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_PASSES = "stablehlo-tools opt --list-passes"
_OPENING = {"{": "}", "(": ")", "[": "]"}


@dataclass(frozen=True)
class PassText:
    """A pass as written: its name, and its options in order; the value of a flag is None."""

    name: str
    options: tuple[tuple[str, str | None], ...] = ()

    @property
    def options_text(self) -> str:
        """The options, separated by single spaces."""
        return " ".join(n if v is None else f"{n}={v}" for n, v in self.options)


def parse_pipeline_text(text: str) -> list[PassText]:
    """Splits a pipeline into passes. Raises ToolError that quotes the invalid part."""
    parts = _split(text, ",")
    if not text.strip():
        raise ToolError("the pipeline is empty", hint=_PASSES)
    return [_parse_pass(part.strip(), text) for part in parts]


def _parse_pass(part: str, pipeline: str) -> PassText:
    name = _NAME.match(part)
    if name is None:
        raise ToolError(
            f"pipeline {pipeline!r}: expected a pass name, found {part!r}", hint=_PASSES
        )
    rest = part[name.end() :].strip()
    if not rest:
        return PassText(name.group())
    if not (rest.startswith("{") and rest.endswith("}")):
        raise ToolError(
            f"pipeline {pipeline!r}: expected {{…}} after {name.group()}, not {rest!r}",
            hint=f"stablehlo-tools opt --help {name.group()}",
        )
    return PassText(name.group(), tuple(_parse_options(rest[1:-1], name.group(), pipeline)))


def _parse_options(text: str, name_of_pass: str, pipeline: str) -> list[tuple[str, str | None]]:
    options: list[tuple[str, str | None]] = []
    for part in _split(text, " "):
        if not part.strip():
            continue
        name, equals, value = part.strip().partition("=")
        if not _NAME.fullmatch(name) or (equals and not value):
            raise ToolError(
                f"pipeline {pipeline!r}: {part.strip()!r} is not an option, NAME=VALUE",
                hint=f"stablehlo-tools opt --help {name_of_pass}",
            )
        options.append((name, value if equals else None))
    return options


def _split(text: str, separator: str) -> list[str]:
    """Splits at separators outside of brackets and quotes. Raises ToolError if unbalanced."""
    parts, start, closing, quote = list[str](), 0, list[str](), ""
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _OPENING:
            closing.append(_OPENING[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif character in "})]":
            raise ToolError(
                f"pipeline {text!r}: {character!r} at {position + 1} matches no opening bracket"
            )
        elif character == separator and not closing:
            parts.append(text[start:position])
            start = position + 1
    if closing or quote:
        missing = (closing or [quote])[-1]
        raise ToolError(f"pipeline {text!r}: {missing!r} is missing at the end")
    return [*parts, text[start:]]
