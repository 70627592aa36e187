"""The ops that reducers are made of, and the elements that they leave alone or give way to.

A reducer is associative and commutative, so that a compiler may combine elements in any order. Its
identity is where a reduction starts from; an absorbing element decides the result by itself.
"""

from __future__ import annotations

from math import isinf

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import SHARDING_CONSTRAINT
from stablehlo_tools.dialect.traits import Trait, ops_with, short_names

REDUCERS = short_names(ops_with(Trait.COMMUTATIVE | Trait.ASSOCIATIVE))
IDEMPOTENT = short_names(ops_with(Trait.IDEMPOTENT))

# Of a sum -0.0, which unlike 0.0 keeps -0.0.
_OF_FLOATS = {
    "add": -0.0,
    "multiply": 1.0,
    "maximum": float("-inf"),
    "minimum": float("inf"),
}
_OF_COMPLEX = {"add": 0j, "multiply": 1 + 0j}


def combining_ops(block: ir.Block) -> list[ir.Operation]:
    """The ops of a reducer but for sharding constraints, which jax puts on its scalars, too, where
    some axes of a mesh are manual."""
    ops = [op.operation for op in block.operations]
    return [op for op in ops if op.name != SHARDING_CONSTRAINT]


def _unconstrained(value: ir.Value) -> ir.Value:
    """A value of a reducer as it is before sharding constraints."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != SHARDING_CONSTRAINT:
        return value
    return _unconstrained(owner.operation.operands[0])


def reducer_kind(block: ir.Block) -> str | None:
    """The one op of REDUCERS that combines a block's two arguments; None for any other region."""
    kinds = reducer_kinds(block)
    return kinds[0] if kinds is not None and len(kinds) == 1 else None


def reducer_kinds(block: ir.Block) -> list[str] | None:
    """The op of REDUCERS that combines each argument of the first half with its counterpart.

    Returns None for any other region.
    """
    *combines, end = combining_ops(block)
    arguments, count = list(block.arguments), len(combines)
    if len(arguments) != 2 * count:
        return None
    results: list[ir.Value] = [result for combine in combines for result in combine.results]
    returned = [_unconstrained(value) for value in end.operands]
    if set(returned) != set(results) or len(returned) != count:
        return None
    kinds: list[str] = []
    for number, value in enumerate(returned):
        combine = combines[results.index(value)]
        kinds.append(combine.name.removeprefix("stablehlo."))
        if set(map(_unconstrained, combine.operands)) != {*arguments[number::count]}:
            return None
    return kinds if REDUCERS.issuperset(kinds) else None


def identity_of(reducer: str, element_type: ir.Type) -> float | int | None:
    """The element that leaves every other as it is under a reducer of REDUCERS.

    For a sum of floats -0.0, which unlike 0.0 keeps -0.0. None where there is none to write.
    """
    if isinstance(element_type, ir.FloatType):
        identity = float_identity(reducer)
        # FN: finite values and NaN only, as of f8E4M3FN.
        return None if identity and isinf(identity) and "FN" in str(element_type) else identity
    if not isinstance(element_type, ir.IntegerType):
        return None
    return integer_identity(reducer, element_type.width, signed=not element_type.is_unsigned)


def float_identity(reducer: str) -> float | None:
    """The float that leaves every other as it is; None for a reducer of bits."""
    return _OF_FLOATS.get(reducer)


def complex_identity(reducer: str) -> complex | None:
    """The complex number that leaves every other as it is, but for the signs of zeros."""
    return _OF_COMPLEX.get(reducer)


def integer_identity(reducer: str, width: int, *, signed: bool) -> int:
    """The integer that leaves every other as it is; booleans are integers of width 1."""
    low, high = integer_bounds(width, signed=signed)
    if reducer in ("maximum", "minimum"):
        return low if reducer == "maximum" else high
    if reducer == "and":
        return all_ones(width, signed=signed)
    return int(reducer == "multiply")


def absorbing_integer(name: str, width: int, *, signed: bool) -> tuple[int, int] | None:
    """The operand that decides an op by itself, and what the result then is.

    `x * 0` is 0; of `power` and `remainder` only the operand on the right decides: `x ** 0` is 1,
    and `x % 1` is 0. None for an op without one.
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
    """The least and the greatest integer of a type; one bit is a boolean, 0 or 1."""
    if width == 1 or not signed:
        return 0, (1 << width) - 1
    return -(1 << width - 1), (1 << width - 1) - 1


def all_ones(width: int, *, signed: bool) -> int:
    """The integer of which all bits are set."""
    return -1 if signed and width > 1 else (1 << width) - 1
