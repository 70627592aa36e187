"""What a value depends on: collectives as bits, of all its elements, of some, or somewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from stablehlo_tools.analysis.elements.boxes import Box, contains, size_of

VARIES = 1  # the lowest bit: no collective's
_MOST_PARTS = 8  # told apart of one value; the largest are kept

Parts = tuple[tuple[Box, int], ...]


class Dependence(NamedTuple):
    """Sets of collectives as bits, and `VARIES`: the value depends on what the run alone knows.

    `each` holds of every element, the bits of a part of every element in its box, and `whole` of
    some element, wherever it is; it includes the others.
    """

    each: int = 0
    whole: int = 0
    parts: Parts = ()

    def common(self, other: Dependence) -> Dependence:
        """What holds of a value that is the one or the other. Of parts, only this one's are kept,
        so that this ends where it is repeated.
        """
        parts = () if not self.parts else [(box, bits & other.at(box)) for box, bits in self.parts]
        return Dependence(
            self.each & other.each, self.whole & other.whole, joined(parts, self.each & other.each)
        )

    def both(self, other: Dependence) -> Dependence:
        """What holds of a value each element of which is computed from those of the two."""
        each = self.each | other.each
        return Dependence(each, self.whole | other.whole, joined(self.parts + other.parts, each))

    def mapped(self, change: Callable[[int], int]) -> Dependence:
        """With other bits in place of each set."""
        each = change(self.each)
        parts = joined([(box, change(bits | self.each)) for box, bits in self.parts], each)
        return Dependence(each, change(self.whole), parts)

    def without(self, bits: int) -> Dependence:
        """All but some."""
        return self.mapped(lambda held: held & ~bits)

    def only(self, bits: int) -> Dependence:
        """Some, and no others."""
        return self.mapped(lambda held: held & bits)

    def with_all(self, bits: int) -> Dependence:
        """With collectives that every element depends on besides."""
        return self.mapped(lambda held: held | bits)

    def at(self, box: Box) -> int:
        """What every element of a box depends on."""
        bits = self.each
        for outer, inner in self.parts:
            if contains(outer, box):
                bits |= inner
        return bits


NOTHING = Dependence()
GIVEN = Dependence(VARIES, VARIES)  # a value that comes from outside of the program


def joined(parts: Iterable[tuple[Box, int]], each: int) -> Parts:
    """Parts in the one order in which equal ones are equal, without what holds of each element."""
    if not parts:
        return ()
    by_box: dict[Box, int] = {}
    for box, bits in parts:
        if bits & ~each:
            by_box[box] = by_box.get(box, 0) | bits & ~each
    if len(by_box) < 2:
        return tuple(by_box.items())
    ordered = sorted(
        by_box.items(),
        key=lambda part: (-size_of(part[0]), [(n.start, n.stop, n.step) for n in part[0]]),
    )
    return tuple(ordered[:_MOST_PARTS])
