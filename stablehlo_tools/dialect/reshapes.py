"""A reshape as merges and splits of dimensions: which parts of them hold the same elements.

    tensor<4x6x5> -> tensor<2x12x5>      factors 2, 2, 6, 5

Dimension 0 is split into 2 and 2; the second of them is merged with dimension 1. Where the two
shapes divide their elements so that neither divides the other (2x3 -> 3x2), elements of one
dimension are spread over all of another, and there is no common factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from stablehlo_tools.dialect.factors import Shape


@dataclass(frozen=True, slots=True)
class DimPart:
    """A part of a dimension: positions that are `step` elements of it apart."""

    dim: int
    step: int


@dataclass(frozen=True, slots=True)
class ReshapeFactor:
    """`size` positions that a dimension of either shape, or both, has as a part."""

    size: int
    before: DimPart | None
    after: DimPart | None


class _Digits:
    """Reads a shape's dimensions from the outermost on, in parts."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._dim = -1
        self.left = 1  # elements along the dimension that are still to be read, as one part
        self.read = 1  # product of the parts that were

    def next_dim(self) -> bool:
        """Goes on where a dimension is used up; False at the end."""
        while self.left == 1 and self._dim < len(self._shape) - 1:
            self._dim += 1
            self.left = self._shape[self._dim]
        return self.left > 1

    def take(self, size: int) -> DimPart:
        """A part of the dimension, the outermost that is left."""
        self.left //= size
        self.read *= size
        return DimPart(self._dim, self.left)


@lru_cache(maxsize=4096)
def reshape_factors(before: Shape, after: Shape) -> tuple[ReshapeFactor, ...]:
    """The factors of a reshape, outermost first; none of dimensions of one element.

    Shapes have as many elements as each other, and some.
    """
    one, other = _Digits(before), _Digits(after)
    factors: list[ReshapeFactor] = []
    while one.next_dim() | other.next_dim():
        common = gcd(one.left, other.left)
        if one.read == other.read and common > 1:
            factors.append(ReshapeFactor(common, one.take(common), other.take(common)))
            continue
        # Neither shape's next part is one of the other's: read on until both have come as far.
        if one.read == other.read:
            factors.append(ReshapeFactor(one.left, one.take(one.left), None))
            factors.append(ReshapeFactor(other.left, None, other.take(other.left)))
        elif one.read < other.read:
            size = _catching_up(one, other, common)
            factors.append(ReshapeFactor(size, one.take(size), None))
        else:
            size = _catching_up(other, one, common)
            factors.append(ReshapeFactor(size, None, other.take(size)))
    return tuple(factors)


def _catching_up(behind: _Digits, ahead: _Digits, common: int) -> int:
    """As small a part as comes as far as the other shape, or else leaves what both have; all that
    is left where that would be nothing."""
    missing, rest = divmod(ahead.read, behind.read)
    if not rest and behind.left % missing == 0:
        return missing
    return behind.left // common if behind.left > common else behind.left


@lru_cache(maxsize=4096)
def runs(before: Shape, after: Shape) -> tuple[tuple[range, range], ...]:
    """The shortest runs of dimensions that hold equally many elements, in order.

    A dimension of one element that no run needs is with the run before it.
    """
    pairs: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        first, second = i, j
        one = other = 1
        while True:
            if one == other and (i > first or j > second):
                while i < len(before) and before[i] == 1:
                    i += 1
                while j < len(after) and after[j] == 1:
                    j += 1
                break
            if one <= other and i < len(before):
                one *= before[i]
                i += 1
            else:
                other *= after[j]
                j += 1
        pairs.append((range(first, i), range(second, j)))
    return tuple(pairs)
