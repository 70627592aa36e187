"""The dimensions of an op's tensors as factors: what stands where, and what the op does along it.

A factor is a range of positions, 0 to `size`, that an op runs over, as the letters of an einsum
are. It stands along dimensions of operands and of results: at position p of the factor, the op
takes element `start + step * p` along such a dimension of an operand, and gives that one of a
result.

    %c = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
           : (tensor<4x6xf32>, tensor<6x8xf32>) -> tensor<4x8xf32>

    size 4  KEPT        operand 0 dim 0                    result 0 dim 0
    size 6  CONTRACTED  operand 0 dim 1, operand 1 dim 0
    size 8  KEPT        operand 1 dim 1                    result 0 dim 1

The same table answers in both directions. Shardy's sharding rules have such factors, too, with
fewer roles; how the two differ is written down in `python/tests/support/shardy_rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

Shape = tuple[int, ...]


class FactorRole(Enum):
    """What an op does along a factor.

    KEPT        each position by itself, and the factor is all of every dimension that it is along:
                the op on a part of the operands gives that part of the results
    MERGED      as KEPT, but in a result it is one of several factors of a dimension (reshape)
    SPLIT       as KEPT, but in an operand it is one of several factors of a dimension (reshape)
    REGROUPED   as KEPT, but one of several factors on both sides (reshape, grouped convolutions)
    CONTRACTED  the results are sums along it, of products
    REDUCED     the results are combined along it, by the op's region
    MOVED       elements go to another place, which is known: slices, pads, concatenations, reverses
    INDEXED     elements go to a place that operands of the op say when it runs (`start` is None),
                or stay where they are unless such elements overwrite them
    WINDOWED    places of a window, or positions within it: elements count for several places
    REPEATED    the results are alike along it; an operand that has it has `step` 0
    EXCHANGED   devices exchange pieces along it, `size` many; a shorter operand is gathered to the
                result, a longer one scattered, one of the same size both (all_to_all)
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


# Roles of which each position is computed by itself.
PASSED_THROUGH = frozenset(
    {FactorRole.KEPT, FactorRole.MERGED, FactorRole.SPLIT, FactorRole.REGROUPED}
)


@dataclass(frozen=True, slots=True)
class Along:
    """Where a factor stands: dimension `dim` of operand or result number `tensor`.

    Position p of the factor is element `start + step * p` there, if nothing else stands along that
    dimension; of several factors that share it the steps add up, as the digits of a number do. A
    `start` of None is known only when the program runs.
    """

    tensor: int
    dim: int
    start: int | None = 0
    step: int = 1

    def positions(self, size: int) -> range | None:
        """The elements that a factor of this size takes here; None where that is not known."""
        if self.start is None or not self.step:
            return None
        return range(self.start, self.start + size * self.step, self.step)


@dataclass(frozen=True, slots=True)
class Factor:
    """Dimensions of operands and results that belong together."""

    size: int
    role: FactorRole
    operands: tuple[Along, ...]
    results: tuple[Along, ...]

    def in_operand(self, operand: int) -> Along | None:
        """Where it stands in an operand; None where it does not."""
        return next((along for along in self.operands if along.tensor == operand), None)

    def in_result(self, result: int = 0) -> Along | None:
        """Where it stands in a result; None where it does not."""
        return next((along for along in self.results if along.tensor == result), None)


@dataclass(frozen=True, slots=True)
class Link:
    """One dimension of an operand beside one of a result, by the factor that both have."""

    factor: Factor
    operand: Along
    result: Along

    @property
    def role(self) -> FactorRole:
        """What the op does along it."""
        return self.factor.role


@dataclass(frozen=True, slots=True)
class OpDimensions:
    """All factors of an op whose tensors have these shapes.

    A dimension may have several factors: those that a reshape merges (major first), the operands
    side by side of a concatenate, the places of windows and the positions within them.
    """

    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    factors: tuple[Factor, ...]

    def of_operand(self, operand: int, dim: int) -> tuple[Link, ...]:
        """What becomes of an operand's dimension: a link for each dimension of a result."""
        return tuple(
            Link(factor, one, other)
            for factor in self.factors
            for one in factor.operands
            if (one.tensor, one.dim) == (operand, dim)
            for other in factor.results
        )

    def of_result(self, result: int, dim: int) -> tuple[Link, ...]:
        """What a result's dimension is made of: a link for each dimension of an operand."""
        return tuple(
            Link(factor, other, one)
            for factor in self.factors
            for one in factor.results
            if (one.tensor, one.dim) == (result, dim)
            for other in factor.operands
        )

    def along_operand(self, operand: int, dim: int) -> tuple[Factor, ...]:
        """The factors along an operand's dimension."""
        return tuple(
            factor
            for factor in self.factors
            if any((a.tensor, a.dim) == (operand, dim) for a in factor.operands)
        )

    def along_result(self, result: int, dim: int) -> tuple[Factor, ...]:
        """The factors along a result's dimension."""
        return tuple(
            factor
            for factor in self.factors
            if any((a.tensor, a.dim) == (result, dim) for a in factor.results)
        )
