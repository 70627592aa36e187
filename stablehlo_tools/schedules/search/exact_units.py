"""Whole numbers for a solver that knows no others: multiples of a unit that fits all figures.

Where the figures are fractions of few digits, the unit divides every one of them and nothing is
lost. Else it is a small part of the largest, and figures are rounded down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

_DENOMINATOR = 10_000  # the finest fraction that counts as one of few digits
_MOST = 2**20  # units in the largest figure, at most
_ROUNDED = 1e-12  # relative: what floats that stand for the same fraction may differ by


@dataclass(frozen=True)
class Unit:
    """The size of one unit, and whether every figure is a whole number of it."""

    size: float
    divides: bool

    def whole(self, figure: float) -> int:
        """The figure in units: a whole number already, else rounded down."""
        return round(figure / self.size) if self.divides else math.floor(figure / self.size)


def unit_of(figures: Iterable[float]) -> Unit:
    """The unit of figures that are not negative."""
    positive = {figure for figure in figures if figure > 0}
    if not positive:
        return Unit(1.0, True)
    largest = max(positive)
    fractions = {figure: Fraction(figure).limit_denominator(_DENOMINATOR) for figure in positive}
    common = math.lcm(*(fraction.denominator for fraction in fractions.values()))
    shared = math.gcd(*(int(fraction * common) for fraction in fractions.values()))
    size = Fraction(shared, common)
    close = all(abs(float(fraction) - x) <= _ROUNDED * x for x, fraction in fractions.items())
    if shared and close and largest / float(size) <= _MOST:
        return Unit(float(size), True)
    return Unit(largest / _MOST, False)
