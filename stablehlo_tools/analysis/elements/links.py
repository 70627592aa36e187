"""How elements of one operand become elements of the result.

`push` answers which elements of the result surely depend on the operand's, `pull` which elements of
the operand those of the result surely need: all elements of the box that is returned do.
"""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.analysis.elements.boxes import (
    Box,
    Shape,
    meet,
    moved_range,
    reshaped,
    whole_box,
)


@dataclass(frozen=True)
class Piece:
    """Elements `source` of the operand become `target` of the result.

    `along` pairs dimensions of the two, which have equally many elements in the piece: the n-th
    becomes the n-th. What is in the piece along any other dimension of the source goes into all of
    the target along its other dimensions.
    """

    source: Box
    target: Box
    along: tuple[tuple[int, int], ...]

    def push(self, box: Box) -> Box | None:
        """Elements of the result that depend on all that a box of the operand depends on."""
        return _carried(box, self.source, self.target, self.along)

    def pull(self, box: Box) -> Box | None:
        """Elements of the operand that a box of the result needs."""
        along = tuple((r, o) for o, r in self.along)
        return _carried(box, self.target, self.source, along)


@dataclass(frozen=True)
class Reshape:
    """The same elements in the same order."""

    before: Shape
    after: Shape

    def push(self, box: Box) -> Box | None:
        """Elements of the result that depend on all that a box of the operand depends on."""
        return reshaped(box, self.before, self.after)

    def pull(self, box: Box) -> Box | None:
        """Elements of the operand that a box of the result needs."""
        return reshaped(box, self.after, self.before)


Link = Piece | Reshape


def identity(shape: Shape) -> Piece:
    """Each element becomes the one at its place."""
    box = whole_box(shape)
    return Piece(box, box, tuple((d, d) for d in range(len(shape))))


def _carried(box: Box, source: Box, target: Box, along: tuple[tuple[int, int], ...]) -> Box | None:
    part = meet(box, tuple(_ascending(numbers) for numbers in source))
    if part is None:
        return None
    carried = [_ascending(numbers) for numbers in target]
    for one, other in along:
        carried[other] = moved_range(part[one], source[one], target[other])
    return tuple(carried)


def _ascending(numbers: range) -> range:
    return numbers if numbers.step > 0 else numbers[::-1]
