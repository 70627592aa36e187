"""Describes the dimensions of an op's tensors as factors, and the role of each factor.

A factor is a range of positions, 0 to `size`, that an op iterates over, like a letter of an einsum.
It occurs in dimensions of operands and of results. At position p of the factor, the op reads
element `start + step * p` of an operand's dimension. It writes that element of a result's.

    %c = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
           : (tensor<4x6xf32>, tensor<6x8xf32>) -> tensor<4x8xf32>

    size 4  KEPT        operand 0 dim 0                    result 0 dim 0
    size 6  CONTRACTED  operand 0 dim 1, operand 1 dim 0
    size 8  KEPT        operand 1 dim 1                    result 0 dim 1

The same table works in both directions. Shardy's sharding rules have such factors too, with fewer
roles; `python/tests/support/shardy_rules.py` describes the differences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]


class FactorRole(Enum):
    """The role of a factor in an op.

    KEPT        positions are independent, and the factor fills each dimension that it is in:
                the op on a part of the operands computes that part of the results
    MERGED      as KEPT, but one of several factors of a dimension of a result (reshape)
    SPLIT       as KEPT, but one of several factors of a dimension of an operand (reshape)
    REGROUPED   as KEPT, but one of several factors on both sides (reshape, grouped convolutions)
    CONTRACTED  the results are sums of products along it
    REDUCED     the op's region combines elements along it
    MOVED       elements move to a static position: slices, pads, concatenations, reverses
    INDEXED     operands give the position of elements at run time (`start` is None), or the
                elements stay unless such elements overwrite them
    WINDOWED    positions of a window, or positions within it: windows may share elements
    REPEATED    the results are equal along it; an operand that has it has `step` 0
    EXCHANGED   devices exchange `size` pieces along it: they gather if the operand is shorter than
                the result, scatter if it is longer, do both if the sizes are equal (all_to_all)
    WHOLE       each element of a result depends on all elements along it, or on their order; each
                tensor has its own size
    """

    KEPT = auto()
    MERGED = auto()
    SPLIT = auto()
    REGROUPED = auto()
    CONTRACTED = auto()
    REDUCED = auto()
    MOVED = auto()
    INDEXED = auto()
    WINDOWED = auto()
    REPEATED = auto()
    EXCHANGED = auto()
    WHOLE = auto()


# Roles whose positions are computed independently.
PASSED_THROUGH = frozenset(
    {FactorRole.KEPT, FactorRole.MERGED, FactorRole.SPLIT, FactorRole.REGROUPED}
)


@dataclass(frozen=True, slots=True)
class Along:
    """The occurrence of a factor in dimension `dim` of operand or result number `tensor`.

    Position p of the factor is element `start + step * p` of a dimension that has no other factor.
    If several factors share the dimension, their offsets add up, like digits of a number. A
    `start` of None is known only at run time.
    """

    tensor: int
    dim: int
    start: int | None = 0
    step: int = 1

    def positions(self, size: int) -> range | None:
        """Returns the elements that a factor of this size covers here; None if not static."""
        if self.start is None or not self.step:
            return None
        return range(self.start, self.start + size * self.step, self.step)


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor: corresponding dimensions of operands and results."""

    size: int
    role: FactorRole
    operands: tuple[Along, ...]
    results: tuple[Along, ...]

    def in_operand(self, operand: int) -> Along | None:
        """Returns its occurrence in an operand, or None."""
        return next((along for along in self.operands if along.tensor == operand), None)

    def in_result(self, result: int = 0) -> Along | None:
        """Returns its occurrence in a result, or None."""
        return next((along for along in self.results if along.tensor == result), None)


@dataclass(frozen=True, slots=True)
class DimensionLink:
    """A dimension of an operand and one of a result with a common factor."""

    factor: Factor
    operand: Along
    result: Along

    @property
    def role(self) -> FactorRole:
        """The role of the common factor."""
        return self.factor.role


@dataclass(frozen=True, slots=True)
class OpDimensions:
    """All factors of an op with tensors of these shapes.

    A dimension may have several factors: those that a reshape merges (major first), the operands of
    a concatenate, and the positions of windows and within them.
    """

    operands: Shapes
    results: Shapes
    factors: tuple[Factor, ...]

    def of_operand(self, operand: int, dim: int) -> tuple[DimensionLink, ...]:
        """Returns a link from an operand's dimension to each related dimension of a result."""
        return tuple(
            DimensionLink(factor, one, other)
            for factor in self.factors
            for one in factor.operands
            if (one.tensor, one.dim) == (operand, dim)
            for other in factor.results
        )

    def of_result(self, result: int, dim: int) -> tuple[DimensionLink, ...]:
        """Returns a link to a result's dimension from each related dimension of an operand."""
        return tuple(
            DimensionLink(factor, other, one)
            for factor in self.factors
            for one in factor.results
            if (one.tensor, one.dim) == (result, dim)
            for other in factor.operands
        )

    def along_operand(self, operand: int, dim: int) -> tuple[Factor, ...]:
        """Returns the factors of an operand's dimension."""
        return tuple(
            factor
            for factor in self.factors
            if any((a.tensor, a.dim) == (operand, dim) for a in factor.operands)
        )

    def along_result(self, result: int, dim: int) -> tuple[Factor, ...]:
        """Returns the factors of a result's dimension."""
        return tuple(
            factor
            for factor in self.factors
            if any((a.tensor, a.dim) == (result, dim) for a in factor.results)
        )


def with_whole(factors: list[Factor], operands: Shapes, results: Shapes) -> list[Factor]:
    """Adds a WHOLE factor for each dimension that no factor has."""
    taken = {(along.tensor, along.dim) for factor in factors for along in factor.operands}
    given = {(along.tensor, along.dim) for factor in factors for along in factor.results}
    return [
        *factors,
        *(Factor(size, FactorRole.WHOLE, (a,), ()) for a, size in _others(operands, taken)),
        *(Factor(size, FactorRole.WHOLE, (), (a,)) for a, size in _others(results, given)),
    ]


def _others(shapes: Shapes, known: Collection[tuple[int, int]]) -> Iterator[tuple[Along, int]]:
    """Yields the dimensions that are not among the known ones, with their sizes."""
    for tensor, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            if (tensor, dim) not in known:
                yield Along(tensor, dim), size
