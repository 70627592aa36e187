"""FileCheck patterns of a line that do not depend on the names of its values and symbols.

A pattern is a list of pieces. A name is captured at its definition, and later matched by its
variable. If no later check uses it, only its form is matched. A gap replaces text that does not
matter, and becomes the start of a `CHECK-SAME`. The middle of a long list (arguments, types and
shardings of whole models) becomes a gap:

    %0:40 = sdy.manual_computation(%arg0, %arg1, …, %arg38, %arg39)
    ==>
    %0:40 = sdy.manual_computation(%arg0, %arg1, <gap> %arg38, %arg39)

The numbers of a dense attribute, such as groups of devices, and attributes all stay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import accumulate

_NAME = "[^ ,)]+"  # of a value or a symbol
_WIDTH = 112
_SHORT = 24  # characters by which the end of a line may exceed `_WIDTH`
_ANY = "{{" + _NAME + "}}"
_PAIR = rf"%{re.escape(_ANY)}(?: = %{re.escape(_ANY)})?"
# Places where a long pattern may continue in a CHECK-SAME: never inside a sharding.
_BREAK = re.compile(
    r"(?<=,) (?=[A-Za-z_%<!]|\[-?\d)"
    r"|(?<!attributes) (?=\{[a-z])"
    r"| (?=<\{|-> |: \(|in_shardings=|out_shardings=|manual_axes=|attributes \{)"
)
_RUNS_ON = re.compile(r"\.\+\}\},?$")
_CAPTURE = re.compile(r"\[\[([A-Z]\w*):(.*?\+)\]\]")
_USE = re.compile(r"\[\[([A-Z]\w*)\]\]")
_LONG_LIST = re.compile(rf"{_PAIR}(?:, {_PAIR}){{3,}}")
# Text that FileCheck would read as the start of a variable or of a regular expression.
_SPECIAL = re.compile(r"\[\[(?=[$#@A-Za-z_])|\{\{")
_SPELLED = {"[[": r"{{\[\[}}", "{{": "{{[{][{]}}"}


@dataclass
class Variable:
    """A FileCheck variable. It gets its `name` when a second piece needs it."""

    base: str
    printed: str  # its value in this text
    uses: int = 0
    is_defined: bool = False
    name: str = ""


@dataclass(frozen=True)
class Text:
    """Text that is matched literally."""

    text: str


@dataclass(frozen=True)
class Pattern:
    """A regular expression."""

    regex: str


@dataclass(frozen=True)
class NamedReference:
    """A value or symbol with its sigil; `variable` is None if only its form is matched."""

    sigil: str
    variable: Variable | None
    defines: bool = False


@dataclass(frozen=True)
class Gap:
    """Text that does not matter."""


Piece = Text | Pattern | NamedReference | Gap


def pattern_lines(pieces: list[Piece], defined: set[str]) -> list[str]:
    """Renders the pieces as the patterns of a check and the CHECK-SAMEs after it, in order.

    `defined` holds the variables that earlier checks capture; those of this one are added.
    """
    lines: list[str] = []
    parts: list[list[Text | Pattern | NamedReference]] = [[]]
    for piece in pieces:
        if isinstance(piece, Gap):
            parts.append([])
        else:
            parts[-1].append(piece)
    for number, part in enumerate(parts):
        if number and all(isinstance(p, Text) and not re.search(r"\w", p.text) for p in part):
            continue  # punctuation after a gap
        text = "".join(_render_piece(piece, defined) for piece in part)
        text = re.sub(r"\s+", " ", _LONG_LIST.sub("{{.+}}", text)).strip()
        lines += _wrap_pattern(text, after_gap=number > 0)
    return lines


def _render_piece(piece: Text | Pattern | NamedReference, defined: set[str]) -> str:
    if isinstance(piece, Text):
        return escape_literal(piece.text)
    if isinstance(piece, Pattern):
        return "{{" + piece.regex + "}}"
    if piece.variable is None or not piece.variable.name:
        return piece.sigil + _ANY
    name = piece.variable.name
    if name in defined and not piece.defines:
        return f"{piece.sigil}[[{name}]]"
    defined.add(name)
    return f"{piece.sigil}[[{name}:{_NAME}]]"


def escape_literal(text: str) -> str:
    """Escapes text so that FileCheck matches it literally."""
    return _SPECIAL.sub(lambda match: _SPELLED[match[0]], text)


def _wrap_pattern(text: str, *, after_gap: bool) -> list[str]:
    """Breaks a long pattern where the part before the break can match in only one place.

    A break right after `.+` is excluded, because `.+` would extend to a later comma. So is a break
    between a gap and the end of its list, because one item may look like an item in the gap.
    """
    lines: list[str] = []
    line = ""
    left = len(text)
    for word in _BREAK.split(text):
        fixed = not (after_gap and not lines) or _closes_a_list(line)
        too_long = len(line) + len(word) >= _WIDTH and left > _SHORT
        if line and too_long and fixed and not _RUNS_ON.search(line):
            lines.append(line)
            line = word
        else:
            line += (" " if line else "") + word
        left -= len(word) + 1
    return [*lines, line] if line else lines


def _closes_a_list(line: str) -> bool:
    """Returns True if a list ends in the text that starts before the text."""
    plain = re.sub(r"\{\{.*?\}\}", "", _USE.sub("", anonymous(line)))
    return any(depth < 0 for depth in accumulate((c in "([") - (c in ")]") for c in plain))


def anonymous(pattern: str) -> str:
    """Returns a pattern line that matches the same text without captures."""
    return _CAPTURE.sub(lambda match: "{{" + match[2] + "}}", pattern)


def as_regex(pattern: str, pieces: list[Piece]) -> re.Pattern[str]:
    """Returns a pattern line as a regular expression, with the variables of `pieces` filled in."""
    named = (p.variable for p in pieces if isinstance(p, NamedReference) and p.variable is not None)
    values = {variable.name: variable.printed for variable in named}
    regex = ""
    for part in re.split(r"(\{\{.*?\}\}|\[\[[A-Z]\w*\]\])", anonymous(pattern)):
        if part.startswith("{{") and part.endswith("}}"):
            regex += part[2:-2]
        elif match := _USE.fullmatch(part):
            regex += re.escape(values[match[1]])
        else:
            regex += r"\s+".join(re.escape(word) for word in part.split(" "))
    return re.compile(regex)


_LONGEST = 8  # items; shorter lists are kept whole
_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
_NO_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|->')

_Position = tuple[int, int]  # a piece and a character in it


@dataclass
class _List:
    stays: bool
    items: list[_Position] = field(default_factory=list[_Position])  # starts, without the first

    @property
    def middle(self) -> tuple[_Position, _Position] | None:
        """From the third item to the last but one; None if the list is short or stays."""
        if self.stays or len(self.items) < _LONGEST:
            return None
        return self.items[1], self.items[-2]


def without_middles(pieces: list[Piece]) -> list[Piece]:
    """Replaces the middle of each long list by a gap."""
    result: list[Piece] = []
    here: _Position = (0, 0)
    open_lists = [_List(stays=False)]  # the first is that of the line itself
    middles = [
        middle
        for number, piece in enumerate(pieces)
        if isinstance(piece, Text)
        for middle in _close_lists(number, piece.text, open_lists)
    ]
    last = open_lists[0].middle
    ranges = [*middles, last] if last else middles
    for start, end in sorted(ranges, key=lambda r: (r[0], (-r[1][0], -r[1][1]))):
        if start >= here:  # not within a list whose middle is left out
            result += [*_slice_pieces(pieces, here, start), Gap()]
            here = end
    return result + _slice_pieces(pieces, here, (len(pieces), 0))


def _close_lists(
    number: int, text: str, open_lists: list[_List]
) -> list[tuple[_Position, _Position]]:
    """Returns the middles of the lists that a piece of text closes."""
    middles: list[tuple[_Position, _Position]] = []
    plain = _NO_BRACKETS.sub(lambda match: " " * len(match[0]), text)
    for offset, character in enumerate(plain):
        if character in _CLOSING:
            stays = character == "{" or plain[:offset].endswith("dense") or open_lists[-1].stays
            open_lists.append(_List(stays))
        elif character in _CLOSING.values() and len(open_lists) > 1:
            middle = open_lists.pop().middle
            middles += [middle] if middle else []
        elif character == ",":
            open_lists[-1].items.append((number, min(offset + 2, len(text))))
    return middles


def _slice_pieces(pieces: list[Piece], start: _Position, end: _Position) -> list[Piece]:
    result: list[Piece] = []
    for number, piece in enumerate(pieces[start[0] : end[0] + 1], start[0]):
        if isinstance(piece, Text):
            first = start[1] if number == start[0] else 0
            last = end[1] if number == end[0] else len(piece.text)
            result += [Text(piece.text[first:last])] if first < last else []
        elif number < end[0]:
            result.append(piece)
    return result
