"""Splits pipeline text into passes and options; knows nothing of what they mean.

text    = pass ("," pass)*
pass    = name [ "{" option* "}" ]
option  = name [ "=" value ]            values may nest braces and quote spaces
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stablehlo_tools.diagnostics import ToolError

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_SEPARATED = re.compile(r"\s*[:=]\s*")  # a name and its value, in other languages
_ARROW = re.compile(r"\s*(?:;|\||-?>|\+|&+)\s*")  # between passes, elsewhere
_OPENING = {"{": "}", "(": ")", "[": "]"}


@dataclass(frozen=True)
class PassText:
    """A pass as written: its name, and its options in order; a flag has the value None."""

    name: str
    options: tuple[tuple[str, str | None], ...] = ()

    @property
    def options_text(self) -> str:
        """The options, normalised to single spaces."""
        return " ".join(n if v is None else f"{n}={v}" for n, v in self.options)


def parse_pipeline_text(text: str) -> list[PassText]:
    """The passes of a pipeline. Raises ToolError that quotes what it could not read."""
    parts = _split(text, ",")
    if not text.strip():
        raise ToolError("the pipeline is empty", hint="stablehlo-tools opt --list-passes")
    return [_parse_pass(part.strip(), text) for part in parts]


def _parse_pass(part: str, pipeline: str) -> PassText:
    name = _NAME.match(part)
    if name is None:
        raise _no_name(part, pipeline)
    rest = part[name.end() :].strip()
    if not rest:
        return PassText(name.group())
    if "}{" in rest:
        raise ToolError(
            f"pipeline {pipeline!r}: the options of {name.group()} stand in one pair of braces",
            instead=(pipeline, pipeline.replace("}{", " ")),
        )
    if not (rest.startswith("{") and rest.endswith("}")):
        meant = _with_braces(name.group(), rest)
        raise ToolError(
            f"pipeline {pipeline!r}: expected {{…}} after {name.group()}, not {rest!r}",
            instead=(pipeline, pipeline.replace(part, meant)),
        )
    return PassText(name.group(), tuple(_parse_options(rest[1:-1], name.group(), pipeline)))


def _no_name(part: str, pipeline: str) -> ToolError:
    """Where a comma is too much, the pipeline without it."""
    said = f"pipeline {pipeline!r}: expected the name of a pass, found {part!r}"
    named = [each.strip() for each in _split(pipeline, ",") if each.strip()]
    if part or not named:
        return ToolError(said, hint="stablehlo-tools opt --list-passes")
    return ToolError(said, instead=(pipeline, ",".join(named)))


def _with_braces(name: str, rest: str) -> str:
    """What was probably meant by what stands behind a name: its options, passes that MLIR would
    nest in it, or the next pass."""
    if _ARROW.match(rest):
        return _ARROW.sub(",", name + rest)
    inside = rest[1:-1] if rest[0] in _OPENING else rest
    if "=" in inside:
        return f"{name}{{{inside}}}"
    return inside if rest[0] in _OPENING else f"{name},{rest}"


def _parse_options(text: str, name_of_pass: str, pipeline: str) -> list[tuple[str, str | None]]:
    options: list[tuple[str, str | None]] = []
    for part in _split(text, " "):
        if not part.strip():
            continue
        name, equals, value = part.strip().partition("=")
        if not _NAME.fullmatch(name) or (equals and not value):
            meant = _SEPARATED.sub("=", text)
            raise ToolError(
                f"pipeline {pipeline!r}: {part.strip()!r} is no option, NAME=VALUE",
                hint=f"stablehlo-tools opt --help {name_of_pass}",
                instead=(pipeline, pipeline.replace(text, meant)) if meant != text else None,
            )
        options.append((name, value if equals else None))
    return options


def _split(text: str, separator: str) -> list[str]:
    """Splits at separators that stand outside of brackets and quotes."""
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
                f"pipeline {text!r}: {character!r} at {position + 1} closes nothing",
                instead=(text, text[:position] + text[position + 1 :]),
            )
        elif character == separator and not closing:
            parts.append(text[start:position])
            start = position + 1
    if closing or quote:
        raise ToolError(
            f"pipeline {text!r}: {(closing or [quote])[-1]!r} is missing at the end",
            instead=(text, "".join([text, quote, *reversed(closing)])),
        )
    return [*parts, text[start:]]
