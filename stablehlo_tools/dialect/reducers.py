"""Describes the ops of reducers, and their identities and absorbing elements.

A reducer is associative and commutative, so that a compiler may combine elements in any order. A
reduction starts from the identity. An absorbing element determines the result by itself.
"""

from __future__ import annotations

from math import isinf

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import SHARDING_CONSTRAINT
from stablehlo_tools.dialect.traits import Trait, ops_with, short_names

REDUCERS = short_names(ops_with(Trait.COMMUTATIVE | Trait.ASSOCIATIVE))
IDEMPOTENT = short_names(ops_with(Trait.IDEMPOTENT))

# The identity of a sum is -0.0: starting from 0.0 would change a result of -0.0.
_OF_FLOATS = {"add": -0.0, "multiply": 1.0, "maximum": float("-inf"), "minimum": float("inf")}
_OF_COMPLEX = {"add": 0j, "multiply": 1 + 0j}


def combining_ops(block: ir.Block) -> list[ir.Operation]:
    """Returns the ops of a reducer without sharding constraints.

    jax also constrains the scalars of reducers if some axes of a mesh are manual.
    """
    ops = [op.operation for op in block.operations]
    return [op for op in ops if op.name != SHARDING_CONSTRAINT]


def _skip_constraints(value: ir.Value) -> ir.Value:
    """Returns a value of a reducer before its sharding constraints."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != SHARDING_CONSTRAINT:
        return value
    return _skip_constraints(owner.operation.operands[0])


def reducer_kind(block: ir.Block) -> str | None:
    """Returns the op of REDUCERS that combines a block's two arguments; None for other regions."""
    kinds = reducer_kinds(block)
    return kinds[0] if kinds is not None and len(kinds) == 1 else None


def reducer_kinds(block: ir.Block) -> list[str] | None:
    """Returns the op of REDUCERS that combines each argument of the first half with its pair.

    Returns None for any other region.
    """
    *combines, end = combining_ops(block)
    arguments, count = list(block.arguments), len(combines)
    if len(arguments) != 2 * count:
        return None
    results: list[ir.Value] = [result for combine in combines for result in combine.results]
    returned = [_skip_constraints(value) for value in end.operands]
    if set(returned) != set(results) or len(returned) != count:
        return None
    kinds: list[str] = []
    for number, value in enumerate(returned):
        combine = combines[results.index(value)]
        kinds.append(combine.name.removeprefix("stablehlo."))
        if set(map(_skip_constraints, combine.operands)) != {*arguments[number::count]}:
            return None
    return kinds if REDUCERS.issuperset(kinds) else None


def identity_of(reducer: str, element_type: ir.Type) -> float | int | None:
    """Returns the identity of a reducer of REDUCERS; None if the type cannot express it.

    For a sum of floats it is -0.0: 0.0 would change -0.0 to 0.0.
    """
    if isinstance(element_type, ir.FloatType):
        identity = float_identity(reducer)
        # FN types such as f8E4M3FN have finite values and NaN only.
        return None if identity and isinf(identity) and "FN" in str(element_type) else identity
    if not isinstance(element_type, ir.IntegerType):
        return None
    return integer_identity(reducer, element_type.width, signed=not element_type.is_unsigned)


def float_identity(reducer: str) -> float | None:
    """Returns the identity of a reducer of floats; None for bitwise reducers."""
    return _OF_FLOATS.get(reducer)


def complex_identity(reducer: str) -> complex | None:
    """Returns the identity of a reducer of complex numbers, except for the signs of zeros."""
    return _OF_COMPLEX.get(reducer)


def integer_identity(reducer: str, width: int, *, signed: bool) -> int:
    """Returns the identity of a reducer of integers; booleans are integers of width 1."""
    low, high = integer_bounds(width, signed=signed)
    if reducer in ("maximum", "minimum"):
        return low if reducer == "maximum" else high
    if reducer == "and":
        return all_ones(width, signed=signed)
    return int(reducer == "multiply")


def absorbing_integer(name: str, width: int, *, signed: bool) -> tuple[int, int] | None:
    """Returns the absorbing operand of an op, and the result with it; None without one.

    `x * 0` is 0. For `power` and `remainder` it is the right operand: `x ** 0` is 1, and `x % 1`
    is 0.
    """
    low, high = integer_bounds(width, signed=signed)
    ones = all_ones(width, signed=signed)
    if name in ("power", "remainder"):
        return (0, 1) if name == "power" else (1, 0)
    if name in ("and", "multiply"):
        return 0, 0
    if name in ("maximum", "minimum"):
        return (high, high) if name == "maximum" else (low, low)
    return (ones, ones) if name == "or" else None


def integer_bounds(width: int, *, signed: bool) -> tuple[int, int]:
    """Returns the least and the greatest integer of a type; a boolean (width 1) is 0 or 1."""
    if width == 1 or not signed:
        return 0, (1 << width) - 1
    return -(1 << width - 1), (1 << width - 1) - 1


def all_ones(width: int, *, signed: bool) -> int:
    """Returns the integer with all bits set."""
    return -1 if signed and width > 1 else (1 << width) - 1
