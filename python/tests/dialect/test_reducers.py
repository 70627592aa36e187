"""Identities leave every element as it is, absorbing elements decide by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from stablehlo_tools.dialect.integer_arithmetic import compute_op, integer_dtype
from stablehlo_tools.dialect.reducers import (
    REDUCERS,
    absorbing_integer,
    complex_identity,
    float_identity,
    integer_identity,
)

_TYPES = [(1, True), (1, False), (8, True), (8, False), (32, True)]


def test_reducers() -> None:
    assert sorted(REDUCERS) == ["add", "and", "maximum", "minimum", "multiply", "or", "xor"]


@pytest.mark.parametrize(("width", "signed"), _TYPES)
@pytest.mark.parametrize("reducer", sorted(REDUCERS))
def test_an_identity_leaves_every_integer_as_it_is(reducer: str, width: int, signed: bool) -> None:
    numbers = _numbers(width, signed)
    identity = np.full_like(numbers, integer_identity(reducer, width, signed=signed))
    result = compute_op(f"stablehlo.{reducer}", [numbers, identity])
    np.testing.assert_array_equal(result, numbers)


@pytest.mark.parametrize(("width", "signed"), _TYPES)
@pytest.mark.parametrize("name", ["and", "maximum", "minimum", "multiply", "or", "remainder"])
def test_an_absorbing_element_decides_by_itself(name: str, width: int, signed: bool) -> None:
    if width == 1 and name == "remainder":
        pytest.skip("not of booleans")
    absorbing = absorbing_integer(name, width, signed=signed)
    assert absorbing is not None
    numbers = _numbers(width, signed)
    result = compute_op(f"stablehlo.{name}", [numbers, np.full_like(numbers, absorbing[0])])
    np.testing.assert_array_equal(result, np.full_like(numbers, absorbing[1]))


def test_a_power_of_zero_is_one_and_a_sum_absorbs_nothing() -> None:
    assert absorbing_integer("power", 32, signed=True) == (0, 1)
    assert absorbing_integer("add", 32, signed=True) is None


def test_floats() -> None:
    functions = {
        "add": np.add,
        "multiply": np.multiply,
        "maximum": np.maximum,
        "minimum": np.minimum,
    }
    values = np.array([-0.0, 0.0, np.inf, -np.inf, 1.5])
    for reducer in REDUCERS:
        identity = float_identity(reducer)
        assert (identity is None) == (reducer not in functions)
        if identity is not None:
            result = functions[reducer](values, identity)
            np.testing.assert_array_equal(result, values)
            np.testing.assert_array_equal(np.signbit(result), np.signbit(values))
    assert (complex_identity("add"), complex_identity("multiply")) == (0, 1)
    assert complex_identity("maximum") is None


def _numbers(width: int, signed: bool) -> np.ndarray:
    dtype = integer_dtype(width, signed=signed)
    assert dtype is not None
    if dtype.kind == "b":
        return np.array([False, True])
    limits = np.iinfo(dtype)
    return np.array([limits.min, limits.max, 0, 1, 3], dtype)
