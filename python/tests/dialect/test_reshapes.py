"""Reshapes as merges and splits: all shapes have factors, and these say where elements go."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest

from stablehlo_tools.dialect.factors import Shape
from stablehlo_tools.dialect.reshapes import DimPart, ReshapeFactor, reshape_factors, runs


def shapes_of(size: int) -> list[Shape]:
    """All shapes of so many elements, of at most four dimensions longer than one."""
    divisors = [n for n in range(2, size + 1) if size % n == 0]
    return [
        shape
        for rank in range(1, 5)
        for shape in product(divisors, repeat=rank)
        if prod(shape) == size
    ]


def digit(part: DimPart, shape: Shape, size: int) -> np.ndarray:
    """Of every element, in row-major order, its position along a part of a dimension."""
    return (np.indices(shape)[part.dim].reshape(-1) // part.step) % size


def assert_covers(factors: list[ReshapeFactor], shape: Shape, parts: list[DimPart | None]) -> None:
    """That the factors of a shape are all of every dimension of it."""
    sizes = [1] * len(shape)
    for factor, part in zip(factors, parts, strict=True):
        if part is not None:
            sizes[part.dim] *= factor.size
    assert tuple(sizes) == shape


@pytest.mark.parametrize("size", [12, 24, 36, 60])
def test_all_reshapes_have_factors_and_common_ones_hold_the_same_elements(size: int):
    for before, after in product(shapes_of(size), repeat=2):
        factors = list(reshape_factors(before, after))
        assert_covers(factors, before, [factor.before for factor in factors])
        assert_covers(factors, after, [factor.after for factor in factors])
        for factor in factors:
            if factor.before is not None and factor.after is not None:
                one = digit(factor.before, before, factor.size)
                np.testing.assert_array_equal(one, digit(factor.after, after, factor.size))


def test_where_nothing_is_in_common_the_factors_come_to_an_end():
    assert all(f.before is None or f.after is None for f in reshape_factors((3, 4, 2), (4, 2, 3)))


def test_dimensions_of_one_element_have_no_factor():
    assert reshape_factors((1, 6, 1), (2, 1, 3)) == (
        ReshapeFactor(2, DimPart(1, 3), DimPart(0, 1)),
        ReshapeFactor(3, DimPart(1, 1), DimPart(2, 1)),
    )


def test_the_shortest_runs_of_as_many_elements():
    assert runs((2, 3, 4, 1), (6, 2, 2)) == ((range(2), range(1)), (range(2, 4), range(1, 3)))
