"""Integer ops evaluate to what the reference interpreter computes."""

from __future__ import annotations

import numpy as np
import pytest

from stablehlo_tools import bindings
from stablehlo_tools.dialect.integer_arithmetic import (
    COMPARISONS,
    COMPUTED,
    MIRRORED,
    Undefined,
    bitcast,
    compute_op,
    integer_dtype,
)
from stablehlo_tools.dialect.traits import ELEMENTWISE, Trait, ops_with, traits_of

_TYPES = {"i8": np.int8, "ui8": np.uint8, "i32": np.int32, "ui64": np.uint64, "i1": np.bool_}
_TERNARY = {"stablehlo.clamp", "stablehlo.select"}
_OF_NUMBERS = ops_with(Trait.SHIFT) | {
    f"stablehlo.{name}" for name in ("abs", "divide", "negate", "remainder", "sign", "subtract")
}
_OF_SIGNED = {"stablehlo.abs", "stablehlo.sign"}


def test_what_is_computed_is_elementwise() -> None:
    assert COMPUTED < ELEMENTWISE


@pytest.mark.parametrize("element", _TYPES)
@pytest.mark.parametrize("name", sorted(COMPUTED))
def test_results_are_those_of_the_interpreter(name: str, element: str) -> None:
    if element == "i1" and name in _OF_NUMBERS:
        pytest.skip("not of booleans")
    if element.startswith("u") and name in _OF_SIGNED:
        pytest.skip("of signed integers")
    operands = _operands(name, _numbers(element))
    result = compute_op(name, operands)
    assert result is not None
    assert result.dtype == operands[-1].dtype
    np.testing.assert_array_equal(result, _run(name, operands))


@pytest.mark.parametrize("element", _TYPES)
@pytest.mark.parametrize("direction", COMPARISONS)
def test_comparisons_are_those_of_the_interpreter(direction: str, element: str) -> None:
    one, other = _operands("stablehlo.add", _numbers(element))
    result = COMPARISONS[direction](one, other)
    np.testing.assert_array_equal(result, _run("stablehlo.compare", [one, other], direction))
    np.testing.assert_array_equal(result, COMPARISONS[MIRRORED[direction]](other, one))


@pytest.mark.parametrize("name", ["stablehlo.divide", "stablehlo.remainder"])
@pytest.mark.parametrize(("a", "b"), [(5, 0), (-128, -1)])
def test_what_is_left_to_the_implementation_is_unknown_unless_asked_for(
    name: str, a: int, b: int
) -> None:
    operands = [np.array([7, a], np.int8), np.array([2, b], np.int8)]
    assert compute_op(name, operands) is None
    asked = compute_op(name, operands, Undefined.AS_XLA)
    assert asked is not None
    quotient, rest = (-1, a) if b == 0 else (a, 0)
    assert asked.tolist() == ([3, quotient] if name.endswith("divide") else [1, rest])


def test_a_division_of_unsigned_by_zero_has_all_bits_set_as_xla_computes_it() -> None:
    operands = [np.array([5], np.uint8), np.array([0], np.uint8)]
    asked = compute_op("stablehlo.divide", operands, Undefined.AS_XLA)
    assert asked is not None
    assert asked.tolist() == [255]


@pytest.mark.parametrize("name", sorted(ops_with(Trait.SHIFT)))
@pytest.mark.parametrize("by", [8, -1])
def test_shifts_by_the_width_or_more_are_unknown(name: str, by: int) -> None:
    assert compute_op(name, [np.array([1], np.int8), np.array([by], np.int8)]) is None


def test_types() -> None:
    assert integer_dtype(1, signed=False) == np.bool_
    assert integer_dtype(16, signed=False) == np.uint16
    assert integer_dtype(4, signed=True) is None
    values = np.array([-1, 256, 0], np.int32)
    cast = bitcast(values, np.dtype(np.uint32))
    assert cast is not None
    assert cast.tolist() == [2**32 - 1, 256, 0]
    assert bitcast(values, np.dtype(np.int8)) is None


def _numbers(element: str) -> np.ndarray:
    dtype = np.dtype(_TYPES[element])
    if dtype.kind == "b":
        return np.array([False, True])
    limits = np.iinfo(str(dtype))
    return np.array([limits.min, limits.max, 0, 1, 2, 5, limits.max // 3], dtype)


def _operands(name: str, numbers: np.ndarray) -> list[np.ndarray]:
    a, b = (part.ravel() for part in np.meshgrid(numbers, numbers))
    if name == "stablehlo.select":
        return [a < b, a, b]
    if name == "stablehlo.clamp":
        return [np.minimum(a, b), a[::-1].copy(), np.maximum(a, b)]
    if name in ("stablehlo.divide", "stablehlo.remainder"):
        kept = (b != 0) & ~((a == a.min()) & (b.astype(np.int64) == -1))
        return [a[kept], b[kept]]
    if Trait.SHIFT in traits_of(name):
        return [a, (b.astype(np.int64) % (8 * a.itemsize)).astype(a.dtype)]
    return [a] if Trait.UNARY in traits_of(name) else [a, b]


def _run(name: str, operands: list[np.ndarray], direction: str = "") -> np.ndarray:
    spelled = {np.dtype(dtype): element for element, dtype in _TYPES.items()}
    types = [f"tensor<{len(x)}x{spelled[x.dtype]}>" for x in operands]
    result = types[-1] if not direction else f"tensor<{len(operands[0])}xi1>"
    attribute = f"{{comparison_direction = #stablehlo<comparison_direction {direction}>}}"
    arguments = ", ".join(f"%{i}: {type_}" for i, type_ in enumerate(types))
    used = ", ".join(f"%{i}" for i in range(len(types)))
    text = (
        f"func.func @main({arguments}) -> {result} {{\n"
        f'  %r = "{name}"({used}) {attribute if direction else ""}'
        f" : ({', '.join(types)}) -> {result}\n"
        f"  return %r : {result}\n}}"
    )
    context = bindings.new_context()
    module = bindings.parse_module(text, context)
    with context:
        constants = [_constant(x, type_) for x, type_ in zip(operands, types, strict=True)]
        return np.asarray(bindings.eval_module(module, constants)[0])


def _constant(values: np.ndarray, type_: str) -> bindings.ir.Attribute:
    numbers = ", ".join(str(number).lower() for number in values.tolist())
    return bindings.ir.Attribute.parse(f"dense<[{numbers}]> : {type_}")
