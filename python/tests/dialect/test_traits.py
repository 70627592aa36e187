"""Every op has a row in the table of traits, and what rows claim holds where it is evaluated."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from jaxlib.mlir.dialects import chlo, sdy, stablehlo

from stablehlo_tools import bindings
from stablehlo_tools.dialect import names
from stablehlo_tools.dialect.traits import (
    ELEMENTWISE,
    KNOWN,
    Trait,
    full_names,
    ops_with,
    ops_with_any,
    short_names,
    traits_of,
)

_REAL = np.array([-0.0, 0.0, 1.5, -2.25, np.inf, 3.0], np.float32)
_WHOLE = np.array([0, 1, -1, 7, -128, 127], np.int8)
_BINARY = sorted(
    ops_with(Trait.COMMUTATIVE) | {"stablehlo.divide", "stablehlo.remainder", "stablehlo.subtract"}
)


def _registered(dialect: Any) -> dict[str, Any]:
    classes = (getattr(dialect, name) for name in dir(dialect))
    named = ((getattr(each, "OPERATION_NAME", None), each) for each in classes)
    return {
        name: each
        for name, each in named
        if isinstance(name, str) and hasattr(each, "build_generic")
    }


@pytest.mark.parametrize("dialect", [stablehlo, chlo, sdy])
def test_every_op_of_the_dialect_has_a_row(dialect: Any) -> None:
    prefix = dialect.__name__.rpartition(".")[2] + "."
    assert {name for name in KNOWN if name.startswith(prefix)} == set(_registered(dialect))


def test_ops_with_regions_are_those_that_the_dialects_build_with_them() -> None:
    built = {
        name
        for dialect in (stablehlo, chlo, sdy)
        for name, each in _registered(dialect).items()
        if each._ODS_REGIONS != (0, True)
    }
    # A composite may have the body of its function beside it; it runs the function.
    assert built - {"stablehlo.composite"} == ops_with(Trait.REGIONS)


def test_names_are_of_known_ops() -> None:
    named = {value for key, value in vars(names).items() if key.isupper()}
    assert named <= KNOWN


def test_an_op_without_a_row_has_no_traits() -> None:
    assert traits_of("stablehlo.never_heard_of") == Trait(0)


def test_sets_ask_for_all_traits_or_for_any() -> None:
    both = ops_with(Trait.SOURCE | Trait.TOKEN)
    assert both == full_names("create_token")
    assert ops_with_any(Trait.SOURCE | Trait.TOKEN) == ops_with(Trait.SOURCE) | ops_with(
        Trait.TOKEN
    )
    assert short_names(both) == {"create_token"}


def test_traits_that_imply_others() -> None:
    for narrow, wide in (
        (Trait.UNARY, Trait.ELEMENTWISE),
        (Trait.BIJECTIVE, Trait.LAYOUT),
        (Trait.LAYOUT, Trait.EXACT),
        (Trait.PIECE, Trait.EXACT),
        (Trait.JOIN, Trait.EXACT),
        (Trait.COMMUTATIVE, Trait.ELEMENTWISE),
        (Trait.ASSOCIATIVE, Trait.COMMUTATIVE),
        (Trait.IDEMPOTENT, Trait.ASSOCIATIVE),
        (Trait.CONSTANT, Trait.SOURCE),
        (Trait.DEVICE_ID, Trait.SOURCE),
        (Trait.GROUPED, Trait.COLLECTIVE),
        (Trait.EXCHANGE, Trait.COLLECTIVE),
        (Trait.ACROSS_DEVICES, Trait.COLLECTIVE),
        (Trait.SAME_ON_GROUP, Trait.GROUPED),
        (Trait.BRANCH, Trait.REGIONS),
        (Trait.LOOP, Trait.REGIONS),
        (Trait.TRANSFER, Trait.EFFECT),
    ):
        assert ops_with(narrow) <= ops_with(wide), (narrow, wide)
    apart = (
        Trait.ELEMENTWISE,
        Trait.LAYOUT,
        Trait.PIECE,
        Trait.JOIN,
        Trait.COLLECTIVE,
        Trait.TRANSFER,
    )
    for one, other in itertools.combinations(apart, 2):
        assert not ops_with(one | other), (one, other)


@pytest.mark.parametrize("name", _BINARY)
@pytest.mark.parametrize("values", [_REAL, _WHOLE], ids=["floats", "integers"])
def test_algebra_is_what_the_interpreter_computes(name: str, values: np.ndarray) -> None:
    traits = traits_of(name)
    if Trait.BITWISE in traits and values is _REAL:
        pytest.skip("of bits")
    if values is _WHOLE and name in full_names("divide remainder"):
        values = np.array([1, 7, 3, 5], np.int8)
    a, b = (part.ravel() for part in np.meshgrid(values, values))
    one, other = _run(name, a, b), _run(name, b, a)
    assert _equal(one, other) == (Trait.COMMUTATIVE in traits)
    if Trait.IDEMPOTENT in traits:
        assert _equal(_run(name, values, values), values)
    if Trait.ASSOCIATIVE in traits:
        three = [part.ravel() for part in np.meshgrid(values, values, values)]
        left = _run(name, _run(name, three[0], three[1]), three[2])
        right = _run(name, three[0], _run(name, three[1], three[2]))
        assert _equal(left, right)


@pytest.mark.parametrize("name", sorted(ops_with(Trait.ZERO_OF_ZEROS) & ELEMENTWISE))
def test_zeros_of_all_operands_are_zeros(name: str) -> None:
    dtype = np.int8 if Trait.BITWISE in traits_of(name) else np.float32
    zeros = np.zeros(3, dtype)
    assert _equal(_run(name, zeros, zeros), zeros)


@pytest.mark.parametrize("name", sorted(ops_with(Trait.ZERO_OF_ZERO | Trait.UNARY)))
def test_zeros_of_the_operand_are_zeros(name: str) -> None:
    zeros = np.zeros(3, np.float32)
    assert _equal(_run(name, zeros), zeros)


@pytest.mark.parametrize(
    "name",
    sorted(
        {op for op in ops_with(Trait.UNARY) if op.startswith("stablehlo.")}
        - ops_with(Trait.COMPLEX_PART)
        - full_names("convert reduce_precision")
    ),
)
def test_an_elementwise_result_does_not_see_its_neighbours(name: str) -> None:
    dtype = np.int32 if name in full_names("count_leading_zeros not popcnt") else np.float32
    values = np.array([1, 4, 2, 9], dtype)
    each = [_run(name, values[i : i + 1]) for i in range(len(values))]
    assert _equal(_run(name, values), np.concatenate(each))


def _run(name: str, *operands: np.ndarray) -> np.ndarray:
    """What the reference interpreter makes of vectors."""
    element = {"float32": "f32", "int8": "i8", "int32": "i32"}[str(operands[0].dtype)]
    type_ = f"tensor<{len(operands[0])}x{element}>"
    result = type_.replace(element, "i1") if Trait.PREDICATE in traits_of(name) else type_
    arguments = ", ".join(f"%{i}: {type_}" for i in range(len(operands)))
    used = ", ".join(f"%{i}" for i in range(len(operands)))
    types = ", ".join([type_] * len(operands))
    text = (
        f"func.func @main({arguments}) -> {result} {{\n"
        f'  %r = "{name}"({used}) : ({types}) -> {result}\n'
        f"  return %r : {result}\n}}"
    )
    context = bindings.new_context()
    module = bindings.parse_module(text, context)
    with context:
        attributes = [bindings.ir.DenseElementsAttr.get(np.ascontiguousarray(x)) for x in operands]
        return np.asarray(bindings.eval_module(module, attributes)[0])


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    """The same values and signs; NaN is NaN."""
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f") and bool(
        (np.signbit(one) == np.signbit(other))[one == one].all() if one.dtype.kind == "f" else True
    )
