"""Cuts the middle out of long lists: arguments, types and shardings of whole models.

%0:40 = sdy.manual_computation(%arg0, %arg1, …, %arg38, %arg39)
==>
%0:40 = sdy.manual_computation(%arg0, %arg1, <gap> %arg38, %arg39)

The numbers of a dense attribute, such as groups of devices, and attributes all stay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from stablehlo_tools.testing.check_patterns import Gap, Piece, Text

LONGEST = 8  # items that are all kept
_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
_NO_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|->')

_Position = tuple[int, int]  # a piece and a character in it


@dataclass
class _List:
    stays: bool
    items: list[_Position] = field(default_factory=list[_Position])  # starts, but for the first

    @property
    def middle(self) -> tuple[_Position, _Position] | None:
        """From the third item to the last but one, of a long list."""
        if self.stays or len(self.items) < LONGEST:
            return None
        return self.items[1], self.items[-2]


def without_middles(pieces: list[Piece]) -> list[Piece]:
    """The pieces with a gap in each long list."""
    result: list[Piece] = []
    here: _Position = (0, 0)
    for start, end in _outermost(_middles(pieces)):
        result += [*_between(pieces, here, start), Gap()]
        here = end
    return result + _between(pieces, here, (len(pieces), 0))


def _middles(pieces: list[Piece]) -> list[tuple[_Position, _Position]]:
    open_lists = [_List(stays=False)]  # the first is that of the line itself
    middles = [
        middle
        for number, piece in enumerate(pieces)
        if isinstance(piece, Text)
        for middle in _closed(number, piece.text, open_lists)
    ]
    last = open_lists[0].middle
    return [*middles, last] if last else middles


def _closed(number: int, text: str, open_lists: list[_List]) -> list[tuple[_Position, _Position]]:
    """The middles of the lists that a piece of text closes."""
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


def _outermost(ranges: list[tuple[_Position, _Position]]) -> list[tuple[_Position, _Position]]:
    kept: list[tuple[_Position, _Position]] = []
    for start, end in sorted(ranges, key=lambda r: (r[0], (-r[1][0], -r[1][1]))):
        if not kept or start >= kept[-1][1]:
            kept.append((start, end))
    return kept


def _between(pieces: list[Piece], start: _Position, end: _Position) -> list[Piece]:
    result: list[Piece] = []
    for number, piece in enumerate(pieces[start[0] : end[0] + 1], start[0]):
        if isinstance(piece, Text):
            first = start[1] if number == start[0] else 0
            last = end[1] if number == end[0] else len(piece.text)
            result += [Text(piece.text[first:last])] if first < last else []
        elif number < end[0]:
            result.append(piece)
    return result
