"""Element types in exact arithmetic: conversions, bitcasts, complex numbers, constants."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from field_programs import (
    FIELD,
    MappedProgram,
    P,
    big,
    c64,
    centred,
    complex_residues,
    f32,
    inverses,
    mapped,
    module_text,
    ordered,
    parts,
    residues,
    same,
    same_complex,
    spec,
    written,
)
from jax import lax

from stablehlo_tools.verify.element_types import Array
from stablehlo_tools.verify.exact.constants import UnmappedError

# Types.

FLOATS = ("f64", "f32", "bf16", "f16", "f8E4M3FN", "f8E5M2")
INTEGERS = ("i1", "i4", "ui4", "i8", "ui8", "i16", "i32", "ui32", "i64", "ui64")
COMPLEX = ("complex<f32>", "complex<f64>")


def converted(types: Sequence[tuple[str, str]]) -> Callable[..., list[Array]]:
    """A program that converts an argument of each first type into the second one."""
    inputs = ", ".join(f"%a{i}: tensor<12x{one}>" for i, (one, _) in enumerate(types))
    outputs = ", ".join(f"tensor<12x{other}>" for _, other in types)
    lines = [
        f"%{i} = stablehlo.convert %a{i} : (tensor<12x{one}>) -> tensor<12x{other}>"
        for i, (one, other) in enumerate(types)
    ]
    lines.append(f"return {', '.join(f'%{i}' for i in range(len(types)))} : {outputs}")
    return MappedProgram(module_text("\n".join(lines), inputs, outputs))


def integer_bounds(name: str) -> tuple[int, int]:
    if name == "i1":
        return 0, 1
    bits = int(name.lstrip("ui"))
    return (0, 2**bits - 1) if name.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def integers_of(name: str) -> Array:
    """Twelve integers of a type, its ends among them."""
    import ml_dtypes

    low, high = integer_bounds(name)
    numbers = [low, high, 0, 1, high // 2, high - 1, low + 1, 1, 0, high // 3, high // 5, 1]
    dtype: Any = {"i1": np.bool_, "i4": ml_dtypes.int4, "ui4": ml_dtypes.uint4}.get(name)
    return np.array(
        numbers, dtype or name.replace("ui", "uint").replace("i", "int").replace("uintnt", "uint")
    )


def test_conversions_between_floats_change_nothing():
    types = list(itertools.product(FLOATS, FLOATS))
    inputs = [residues(FIELD, 12, seed=i) for i in range(len(types))]
    for value, found in zip(inputs, converted(types)(*inputs), strict=True):
        same(found, value)


def test_conversions_of_integers_to_floats():
    types = list(itertools.product(INTEGERS, FLOATS))
    inputs = [integers_of(one) for one, _ in types]
    for value, found in zip(inputs, converted(types)(*inputs), strict=True):
        same(found, [int(x) for x in value])


def test_conversions_of_floats_to_integers():
    """The low bits of the residue, so that small integers stay what they are."""
    types = list(itertools.product(FLOATS, INTEGERS))
    value = residues(FIELD, 12)
    value[:4] = 0, 1, 5, -3
    for (_, name), found in zip(types, converted(types)(*[value] * len(types)), strict=True):
        low, high = integer_bounds(name)
        for number, result in zip(value.tolist(), found.tolist(), strict=True):
            if name == "i1":
                assert int(result) == int(number != 0)
            else:
                assert (int(result) - number) % (high - low + 1) == 0
                assert low <= int(result) <= high


def test_conversions_of_complex_numbers():
    types = [
        *itertools.product(COMPLEX, (*COMPLEX, "f32", "bf16", "i32")),
        *itertools.product(("f32", "bf16", "i8"), COMPLEX),
    ]
    real, imaginary = residues(FIELD, 12), residues(FIELD, 12, seed=1)
    inputs = [
        real + 1j * imaginary if one in COMPLEX else integers_of("i8") if one == "i8" else real
        for one, _ in types
    ]
    for (one, other), value, found in zip(types, inputs, converted(types)(*inputs), strict=True):
        if other in COMPLEX:
            assert np.array_equal(found, value.astype(np.complex128)), (one, other)
        else:
            assert np.array_equal(found, real), (one, other)


def test_integers_survive_a_way_through_floats():
    a = np.array([0, 1, -1, 100, -(2**22), 2**22 - 1], np.int32)
    program = mapped(
        lambda a: (a.astype(jnp.float32).astype(jnp.int32), a.astype(jnp.bfloat16)),
        spec(jnp.int32, 6),
    )
    assert np.array_equal(program(a)[0], a)


def test_bitcasts_and_back():
    a = residues(FIELD, 6, 4)

    def cast(a: jax.Array) -> Any:
        cast = lax.bitcast_convert_type
        ways = (jnp.uint32, jnp.int32)
        same_width = [cast(cast(a, kind), jnp.float32) for kind in ways]
        return (
            *same_width,
            cast(cast(a, jnp.uint8), jnp.float32),
            cast(cast(a, jnp.uint16), jnp.float32),
            cast(a, jnp.int32),
        )

    *back, bits = mapped(cast, f32(6, 4))(a)
    for found in back:
        same(found, a)
    assert bits.dtype == np.int32
    assert len(set(bits.reshape(-1).tolist())) == 24


def test_random_floats_have_both_signs():
    """Bits with the exponent of 1.0, read as floats, less 1, as jax.random.uniform makes them."""
    bits = np.random.default_rng(0).integers(2**32, size=2_000, dtype=np.uint32)
    program = mapped(
        lambda bits: lax.bitcast_convert_type((bits >> 9) | 0x3F800000, jnp.float32) - 1.0 < 0.5,
        spec(jnp.uint32, 2_000),
        field=None,
    )
    assert 500 < program(bits)[0].sum() < 1_500


# Complex numbers.


def test_complex_arithmetic():
    a, b = complex_residues(20), complex_residues(20, seed=1)
    b[0] = 0

    def compute(a: jax.Array, b: jax.Array) -> Any:
        return (
            a + b,
            a - b,
            a * b,
            a / b,
            a.conj(),
            -a,
            a.real,
            a.imag,
            a == b,
            lax.complex(a.real, b.imag),
            a * (2 - 3j),
        )

    found = mapped(compute, c64(20), c64(20))(a, b)
    (ar, ai), (br, bi) = parts(a), parts(b)
    same_complex(found[0], ar + br, ai + bi)
    same_complex(found[1], ar - br, ai - bi)
    same_complex(found[2], ar * br - ai * bi, ar * bi + ai * br)
    scale = inverses(br * br + bi * bi)
    same_complex(found[3], (ar * br + ai * bi) * scale, (ai * br - ar * bi) * scale)
    same_complex(found[4], ar, -ai)
    same_complex(found[5], -ar, -ai)
    same(found[6], ar)
    same(found[7], ai)
    assert not found[8].any()
    same_complex(found[9], ar, bi)
    same_complex(found[10], 2 * ar + 3 * ai, 2 * ai - 3 * ar)


def test_functions_of_complex_numbers():
    a = complex_residues(20)
    a[0] = 0

    def compute(a: jax.Array) -> Any:
        turned = a.imag + 1j * a.real
        return (
            jnp.abs(a),
            jnp.abs(a.conj()),
            jnp.abs(turned),
            jnp.exp(a),
            jnp.exp(a.real),
            jnp.sign(a),
            jnp.sqrt(a),
        )

    size, of_conjugate, of_turned, exp, exp_real, sign, root = mapped(compute, c64(20))(a)
    assert size.dtype == np.int64
    assert size[0] == 0
    assert np.array_equal(size, of_conjugate)
    assert np.array_equal(size, of_turned)
    assert exp[0] == 1
    assert not np.array_equal(np.real(exp), exp_real)
    assert sign[0] == root[0] == 0
    assert len(set(exp.tolist())) == len(set(root.tolist())) == 20


@pytest.mark.parametrize(
    ("one", "other"), [((4, 6), (6, 5)), ((40, 90), (90, 30)), ((2, 9000), (9000, 1))]
)
def test_complex_dots_and_sums(one: tuple[int, int], other: tuple[int, int]):
    a, b = complex_residues(*one), complex_residues(*other, seed=1)
    a[0] = FIELD.half * (1 + 1j)
    b[:, 0] = FIELD.half * (1 - 1j)
    product, total = mapped(lambda a, b: (a @ b, a.sum(1)), c64(*one), c64(*other))(a, b)
    (ar, ai), (br, bi) = parts(a), parts(b)
    same_complex(product, ar @ br - ai @ bi, ar @ bi + ai @ br)
    same_complex(total, ar.sum(1), ai.sum(1))


def test_a_complex_convolution_has_no_form():
    """jax exports three of real numbers."""
    text = """%0 = stablehlo.convolution(%a, %b)
      dim_numbers = [b, f, 0]x[o, i, 0]->[b, f, 0], window = {}
      {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
      : (tensor<1x2x6xcomplex<f32>>, tensor<3x2x2xcomplex<f32>>) -> tensor<1x3x5xcomplex<f32>>"""
    with pytest.raises(UnmappedError, match="convolution"):
        written(text, "1x2x6xcomplex<f32>", "3x2x2xcomplex<f32>", outputs="1x3x5xcomplex<f32>")


def test_sorts_and_scatters_of_complex_numbers():
    a = complex_residues(9)
    a[1] = a[4].real + 1j * a[1].imag

    def compute(a: jax.Array) -> Any:
        return jnp.sort(a), jnp.zeros(4, jnp.complex64).at[jnp.arange(9) % 4].add(a), a.prod()

    ordered_numbers, scattered, product = mapped(compute, c64(9))(a)
    order = sorted(
        range(9),
        key=lambda i: (
            ordered(parts(a)[0].astype(np.int64))[i],
            ordered(parts(a)[1].astype(np.int64))[i],
        ),
    )
    assert np.array_equal(ordered_numbers, a[order])
    real, imaginary = ([sum(part[i::4]) for i in range(4)] for part in parts(a))
    same_complex(scattered, real, imaginary)
    real, imaginary = 1, 0
    for x, y in zip(*parts(a), strict=True):
        real, imaginary = (real * x - imaginary * y) % P, (real * y + imaginary * x) % P
    same_complex(product, real, imaginary)


# Constants.

CONSTANT_TYPES = (
    "f64",
    "f32",
    "f16",
    "bf16",
    "f8E4M3FN",
    "f8E5M2",
    "f8E4M3FNUZ",
    "f8E8M0FNU",
    "f4E2M1FN",
)


@pytest.mark.parametrize("kind", CONSTANT_TYPES)
def test_constants_are_the_fractions_that_they_are(kind: str):
    from stablehlo_tools.verify.element_types import element_type

    element = element_type(kind)
    assert element is not None
    bits = 4 if "f4" in kind else 8 * element.dtype.itemsize
    count = min(2**bits, 40)
    rng = np.random.default_rng(0)
    patterns = (
        np.arange(16) if bits == 4 else rng.integers(0, 2 ** min(bits, 63), count, dtype=np.uint64)
    )
    numbers = patterns.astype(f"u{element.dtype.itemsize}").view(element.dtype).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    words = ", ".join(f"{float(x):.17e}" for x in numbers)
    text = f"%0 = stablehlo.constant dense<[{words}]> : tensor<{len(numbers)}x{kind}>"
    [found] = written(text, outputs=f"{len(numbers)}x{kind}")()
    assert np.array_equal(found, FIELD.residues(numbers))


def test_constants_of_several_forms():
    large = np.random.default_rng(0).normal(size=(30, 40)).astype(np.float32)
    odd = np.array([np.inf, -np.inf, np.nan, -0.0, 1e-45], np.float32)

    def constants() -> Any:
        pair = np.array([1 + 2j, -3j], np.complex64)
        return (
            jnp.asarray(large),
            jnp.asarray(odd),
            jnp.asarray(pair),
            jnp.zeros((0, 3)),
            jnp.full((2, 2), 1 + 2j, jnp.complex64),
        )

    found = mapped(constants)()
    same(found[0], FIELD.residues(large))
    same(found[1], FIELD.residues(odd))
    same_complex(found[2], [1, 0], [2, -3])
    assert found[3].shape == (0, 3)
    same_complex(found[4], np.ones((2, 2), int), np.full((2, 2), 2))


# Quantized types.


def test_quantized_arithmetic_is_that_of_the_numbers():
    kind = "tensor<4x!quant.uniform<i8:f32, 5.000000e-01:3>>"
    text = f"""%q = stablehlo.uniform_quantize %a : (tensor<4xf32>) -> {kind}
    %c = stablehlo.constant() <{{value = dense<[1, 3, 5, -7]> : tensor<4xi8>}}> : () -> {kind}
    %s = stablehlo.add %q, %c : {kind}
    %0 = stablehlo.uniform_dequantize %s : ({kind}) -> tensor<4xf32>"""
    a = residues(FIELD, 4)
    [found] = written(text, "4xf32", outputs="4xf32")(a)
    same(centred(2 * big(found)), 2 * big(a) + np.array([-2, 0, 2, -10], object))


def test_quantized_dots():
    one, other = (
        "tensor<3x4x!quant.uniform<i8:f32, 0.5>>",
        "tensor<4x2x!quant.uniform<i8:f32, 0.25>>",
    )
    result = "tensor<3x2x!quant.uniform<i32:f32, 0.125>>"
    text = f"""%q = stablehlo.uniform_quantize %a : (tensor<3x4xf32>) -> {one}
    %r = stablehlo.uniform_quantize %b : (tensor<4x2xf32>) -> {other}
    %s = stablehlo.dot_general %q, %r, contracting_dims = [1] x [0] : ({one}, {other}) -> {result}
    %0 = stablehlo.uniform_dequantize %s : ({result}) -> tensor<3x2xf32>"""
    a, b = residues(FIELD, 3, 4), residues(FIELD, 4, 2, seed=1)
    program = written(text, "3x4xf32", "4x2xf32", outputs="3x2xf32")
    same(program(a, b)[0], big(a) @ big(b))
