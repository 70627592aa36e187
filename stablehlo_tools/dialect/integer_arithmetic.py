"""Computes elementwise ops on integers and booleans exactly, on NumPy arrays of their type.

Results wrap around as in StableHLO. StableHLO leaves these results to the implementation: a
division by zero, a division that overflows (the least integer by -1), and a shift by the width or
more. A result must hold for every compiler, so these are not computed. `Undefined.AS_XLA` computes
the divisions as XLA's compilers agree on them, for callers that have always relied on it.

Operands must have the shape of the result or be scalars that broadcast to it; this is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

type Integers = NDArray[Any]


class Undefined(Enum):
    """The policy for divisions whose result StableHLO leaves to the implementation."""

    UNKNOWN = auto()  # return None for the whole array
    AS_XLA = auto()  # x / 0 has all bits set, x % 0 is x, and an overflow wraps around


COMPARISONS: dict[str, Callable[[Integers, Integers], Integers]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}
HOLD_OF_EQUALS = frozenset({"EQ", "GE", "LE"})


@cache
def integer_dtype(width: int, *, signed: bool) -> np.dtype[Any] | None:
    """Returns the NumPy type of a boolean (width 1) or an integer of whole bytes, else None."""
    if width == 1:
        return np.dtype(np.bool_)
    return np.dtype(f"{'' if signed else 'u'}int{width}") if width in (8, 16, 32, 64) else None


def compute_op(
    name: str, operands: Sequence[Integers], undefined: Undefined = Undefined.UNKNOWN
) -> Integers | None:
    """Returns the result of an op of COMPUTED; None if it is undefined."""
    compute = _DIVISIONS.get(name)
    if compute is None:
        return _COMPUTED[name](*operands)
    dividend, divisor = operands
    with np.errstate(all="ignore"):
        if dividend.dtype.kind == "b":
            return None
        if undefined is Undefined.UNKNOWN:
            overflows = (
                dividend.dtype.kind == "i"
                and ((dividend == np.iinfo(dividend.dtype).min) & (divisor == -1)).any()
            )
            if not divisor.all() or overflows:
                return None
        return compute(dividend, divisor)


def bitcast(values: Integers, dtype: np.dtype[Any]) -> Integers | None:
    """Returns the bits as another type of the same width; None for booleans and other widths."""
    if dtype.itemsize != values.dtype.itemsize or "b" in (dtype.kind, values.dtype.kind):
        return None
    return np.ascontiguousarray(values).view(dtype)


def _quotient(a: Integers, b: Integers) -> Integers:
    """Returns the quotient rounded towards zero; NumPy rounds down."""
    floor = a // b
    inexact = (floor * b != a) & ((a < 0) != (b < 0))
    quotient = (floor + inexact).astype(a.dtype)
    return quotient if b.all() else np.where(b == 0, ~np.zeros_like(a), quotient)


def _guard_shift(
    compute: Callable[[Integers, Integers], Integers],
) -> Callable[..., Integers | None]:
    def shift(x: Integers, by: Integers) -> Integers | None:
        if x.dtype.kind == "b" or (by < 0).any() or (by >= 8 * x.dtype.itemsize).any():
            return None
        return compute(x, by)

    return shift


_DIVISIONS: dict[str, Callable[[Integers, Integers], Integers]] = {
    "stablehlo.divide": _quotient,
    "stablehlo.remainder": lambda a, b: (
        np.fmod(a, b) if b.all() else np.where(b == 0, a, np.fmod(a, b))
    ),
}
_COMPUTED: dict[str, Callable[..., Integers | None]] = {
    "stablehlo.abs": np.abs,
    "stablehlo.add": np.add,
    "stablehlo.and": np.bitwise_and,
    "stablehlo.clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "stablehlo.maximum": np.maximum,
    "stablehlo.minimum": np.minimum,
    "stablehlo.multiply": np.multiply,
    "stablehlo.negate": np.negative,
    "stablehlo.not": np.invert,
    "stablehlo.or": np.bitwise_or,
    "stablehlo.select": np.where,
    "stablehlo.shift_left": _guard_shift(np.left_shift),
    "stablehlo.shift_right_arithmetic": _guard_shift(
        lambda x, by: (x.view(f"i{x.itemsize}") >> by.view(f"i{x.itemsize}")).view(x.dtype)
    ),
    "stablehlo.shift_right_logical": _guard_shift(
        lambda x, by: (x.view(f"u{x.itemsize}") >> by.view(f"u{x.itemsize}")).view(x.dtype)
    ),
    "stablehlo.sign": np.sign,
    "stablehlo.subtract": np.subtract,
    "stablehlo.xor": np.bitwise_xor,
}

COMPUTED = frozenset(_COMPUTED) | frozenset(_DIVISIONS)
