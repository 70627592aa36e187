"""Factors a reshape into merges and splits of dimensions.

    tensor<4x6x5> -> tensor<2x12x5>      factors 2, 2, 6, 5

Dimension 0 is split into 2 and 2; the second of these is merged with dimension 1. If neither
shape divides the other's elements (2x3 -> 3x2), elements of one dimension are spread over all of
another. These dimensions have no common factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from stablehlo_tools.dialect.factors import Shape


@dataclass(frozen=True, slots=True)
class DimPart:
    """A part of a dimension: its neighbouring positions are `step` elements apart."""

    dim: int
    step: int


@dataclass(frozen=True, slots=True)
class ReshapeFactor:
    """`size` positions that are a part of a dimension of one shape, or of both."""

    size: int
    before: DimPart | None
    after: DimPart | None


class _Digits:
    """A reader of a shape's dimensions in parts, outermost first."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._dim = -1
        self.left = 1  # size of the rest of this dimension
        self.read = 1  # product of the parts read

    def next_dim(self) -> bool:
        """Moves to the next dimension if this one is used up; returns False at the end."""
        while self.left == 1 and self._dim < len(self._shape) - 1:
            self._dim += 1
            self.left = self._shape[self._dim]
        return self.left > 1

    def take(self, size: int) -> DimPart:
        """Returns the outermost unread part of the dimension, of this size."""
        self.left //= size
        self.read *= size
        return DimPart(self._dim, self.left)


def without_empty(before: Shape, after: Shape) -> tuple[Shape, Shape] | None:
    """Returns the shapes of a reshape with size 1 for empty dimensions; None if they do not fit.

    jax has empty slices in `lax.associative_scan`. Their other dimensions correspond, too.
    """
    filled = tuple(tuple(size or 1 for size in shape) for shape in (before, after))
    return (filled[0], filled[1]) if prod(filled[0]) == prod(filled[1]) else None


@lru_cache(maxsize=4096)
def reshape_factors(before: Shape, after: Shape) -> tuple[ReshapeFactor, ...]:
    """Returns the factors of a reshape, outermost first; dimensions of size 1 have none.

    Both shapes must have the same number of elements, at least one.
    """
    one, other = _Digits(before), _Digits(after)
    factors: list[ReshapeFactor] = []
    while one.next_dim() | other.next_dim():
        common = gcd(one.left, other.left)
        if one.read == other.read and common > 1:
            factors.append(ReshapeFactor(common, one.take(common), other.take(common)))
            continue
        # Without a common next factor, read on until both have read equally many elements.
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
    """Returns the smallest factor of `behind` that catches up with `ahead`.

    Without one, returns the rest of the dimension divided by `common`, or all of it if equal.
    """
    missing, rest = divmod(ahead.read, behind.read)
    if not rest and behind.left % missing == 0:
        return missing
    return behind.left // common if behind.left > common else behind.left


@lru_cache(maxsize=4096)
def runs(before: Shape, after: Shape) -> tuple[tuple[range, range], ...]:
    """Returns the shortest runs of dimensions with equal numbers of elements, in order.

    A dimension of size 1 belongs to the run before it, unless a run needs it.
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
