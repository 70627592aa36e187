"""What ops compute of integer scalars."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

from stablehlo_tools.analysis.trip_counts import comparison_direction
from stablehlo_tools.bindings import ir

_IDENTITIES = frozenset(
    {
        "sdy.sharding_constraint",
        "stablehlo.broadcast_in_dim",
        "stablehlo.convert",
        "stablehlo.reshape",
    }
)
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}


def _divide(a: int, b: int) -> int:
    """Towards zero, as StableHLO divides; by zero all bits are set."""
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_ARITHMETIC: dict[str, Callable[..., int]] = {
    "stablehlo.add": operator.add,
    "stablehlo.subtract": operator.sub,
    "stablehlo.multiply": operator.mul,
    "stablehlo.divide": _divide,
    "stablehlo.remainder": lambda a, b: a if b == 0 else a - b * _divide(a, b),
    "stablehlo.and": operator.and_,
    "stablehlo.or": operator.or_,
    "stablehlo.xor": operator.xor,
    "stablehlo.maximum": max,
    "stablehlo.minimum": min,
    "stablehlo.negate": lambda a: -a,
    "stablehlo.clamp": lambda low, x, high: min(max(low, x), high),
    "stablehlo.select": lambda p, a, b: a if p else b,
}


_OF_BOOLEANS: dict[str, Callable[..., int]] = {
    "stablehlo.add": operator.or_,
    "stablehlo.multiply": operator.and_,
}


def scalar_function(op: ir.Operation) -> Callable[..., int] | None:
    """What an op computes of integer scalars, before wrapping; None where that is not known."""
    name = op.name
    if name in _IDENTITIES:
        return _nonzero if _is_boolean(op.results[0].type) else int
    if name == "stablehlo.compare":
        return partial(_compare, _COMPARISONS[comparison_direction(op)])
    if _is_boolean(op.results[0].type) and name in _OF_BOOLEANS:
        return _OF_BOOLEANS[name]
    if name == "stablehlo.not":
        return _flip if _is_boolean(op.results[0].type) else _invert
    return _ARITHMETIC.get(name)


def _is_boolean(kind: ir.Type) -> bool:
    element = ir.RankedTensorType(kind).element_type
    return isinstance(element, ir.IntegerType) and element.width == 1


def _nonzero(value: int) -> int:
    return int(value != 0)


def _invert(value: int) -> int:
    return ~value


def _flip(value: int) -> int:
    return int(not value)


def _compare(holds: Callable[[int, int], bool], a: int, b: int) -> int:
    return int(holds(a, b))
