"""Fourier transforms, triangular solves, factorizations and custom calls in exact arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from field_programs import (
    FIELD,
    MappedProgram,
    big,
    c64,
    centred,
    f32,
    mapped,
    parts,
    residues,
    same,
    written,
)
from jax import lax

from stablehlo_tools.verify.exact.constants import UnmappedError
from stablehlo_tools.verify.exact.field import Field, Hash, choose_field

# Fourier transforms.


def fourier_field(*sizes: int) -> Field:
    field = choose_field((), sizes)
    assert field is not None
    return field


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 12])
def test_a_fourier_transform_is_a_sum(size: int):
    field = fourier_field(size)
    a = field.random(np.random.default_rng(0), (3, size)) + 1j * field.random(
        np.random.default_rng(1), (3, size)
    )
    [found] = mapped(jnp.fft.fft, c64(3, size), field=field)(a)
    (ar, ai), (er, ei) = parts(a), (m.astype(object) for m in field.fourier_matrix(size))
    real, imaginary = ar @ er - ai @ ei, ar @ ei + ai @ er
    assert not ((parts(found)[0] - real) % field.prime).any()
    assert not ((parts(found)[1] - imaginary) % field.prime).any()


@pytest.mark.parametrize("shape", [(8,), (7,), (3, 6), (4, 5), (2, 3, 4), (3, 2, 5)], ids=str)
def test_identities_of_fourier_transforms(shape: tuple[int, ...]):
    field = fourier_field(*shape)
    axes = tuple(range(len(shape)))

    def pairs(x: jax.Array, y: jax.Array, a: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        transform = partial(jnp.fft.fftn, axes=axes)
        one_by_one = x
        for axis in axes:
            one_by_one = jnp.fft.fft(one_by_one, axis=axis)
        half = tuple(
            slice(0, size // 2 + 1 if axis == axes[-1] else None) for axis, size in enumerate(shape)
        )
        flipped = x
        for axis, size in enumerate(shape):
            flipped = jnp.take(flipped, -jnp.arange(size) % size, axis)
        return [
            (transform(x + 3 * y), transform(x) + 3 * transform(y)),
            (jnp.fft.ifftn(transform(x), axes=axes), x),
            (transform(jnp.fft.ifftn(x, axes=axes)), x),
            (transform(x), one_by_one),
            (jnp.fft.irfftn(jnp.fft.rfftn(a, axes=axes), shape, axes=axes), a),
            (jnp.fft.rfftn(a, axes=axes), transform(a.astype(jnp.complex64))[half]),
            (transform(transform(x)), flipped * x.size),
            (transform(x).conj(), jnp.fft.ifftn(x.conj(), axes=axes) * x.size),
            ((transform(x) * transform(y).conj()).sum(), (x * y.conj()).sum() * x.size),
        ]

    def sides(side: int) -> Any:
        return mapped(
            lambda *xs: [pair[side] for pair in pairs(*xs)],
            c64(*shape),
            c64(*shape),
            f32(*shape),
            field=field,
        )

    draw = [field.random(np.random.default_rng(i), shape) for i in range(5)]
    inputs = draw[0] + 1j * draw[1], draw[2] + 1j * draw[3], draw[4]
    for number, (one, other) in enumerate(zip(sides(0)(*inputs), sides(1)(*inputs), strict=True)):
        assert np.array_equal(one, other), number


def test_a_convolution_is_a_product_of_fourier_transforms():
    field = fourier_field(8)
    a, b = (field.random(np.random.default_rng(i), (8,)) for i in range(2))

    def both(a: jax.Array, b: jax.Array) -> Any:
        direct = jnp.stack([(a * jnp.take(b, (n - jnp.arange(8)) % 8)).sum() for n in range(8)])
        return direct, jnp.fft.irfft(jnp.fft.rfft(a) * jnp.fft.rfft(b), 8)

    direct, fourier = mapped(both, f32(8), f32(8), field=field)(a, b)
    assert np.array_equal(direct, fourier)


def test_a_large_fourier_transform():
    field = fourier_field(1024)
    a = field.random(np.random.default_rng(0), (2, 1024))
    program = mapped(
        lambda a: (jnp.fft.irfft(jnp.fft.rfft(a), 1024), jnp.fft.rfft(a)[:, 0].real),
        f32(2, 1024),
        field=field,
    )
    back, total = program(a)
    assert np.array_equal(back, a)
    assert np.array_equal(total, field.centre_residues(a.sum(1)))


# Functions of matrices.

SOLVES = list(itertools.product((True, False), (True, False), (True, False), (False, True)))


def test_triangular_solves():
    """A x = b, x A = b and so on, with each triangle, transposed and with a unit diagonal."""
    a, b = residues(FIELD, 2, 4, 4), residues(FIELD, 2, 4, 3, seed=1)
    c = residues(FIELD, 2, 3, 4, seed=2)

    def solve(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
        return [
            lax.linalg.triangular_solve(
                a,
                b if left else c,
                left_side=left,
                lower=lower,
                transpose_a=transposed,
                unit_diagonal=unit,
            )
            for left, lower, transposed, unit in SOLVES
        ]

    text = str(
        jax.export.export(jax.jit(solve))(f32(2, 4, 4), f32(2, 4, 3), f32(2, 3, 4)).mlir_module()
    )
    assert "triangular_solve" in text or "trsm" in text
    found = mapped(solve, f32(2, 4, 4), f32(2, 4, 3), f32(2, 3, 4))(a, b, c)
    for (left, lower, transposed, unit), x in zip(SOLVES, found, strict=True):
        matrix = np.tril(a) if lower else np.triu(a)
        if unit:
            matrix = matrix - matrix * np.eye(4, dtype=int) + np.eye(4, dtype=int)
        if transposed:
            matrix = np.swapaxes(matrix, -1, -2)
        matrix = big(matrix)
        product = matrix @ big(x) if left else big(x) @ matrix
        same(centred(product), b if left else c)


STABLEHLO_SOLVE = """%0 = "stablehlo.triangular_solve"(%a, %b) {{left_side = {left},
  lower = {lower}, unit_diagonal = {unit}, transpose_a = #stablehlo<transpose {transpose}>}}
  : (tensor<4x4x{type}>, tensor<4x4x{type}>) -> tensor<4x4x{type}>"""


@pytest.mark.parametrize("case", SOLVES, ids=str)
def test_triangular_solves_of_stablehlo(case: tuple[bool, bool, bool, bool]):
    left, lower, transposed, unit = case
    words = [str(flag).lower() for flag in (left, lower, unit)]
    text = STABLEHLO_SOLVE.format(
        left=words[0],
        lower=words[1],
        unit=words[2],
        transpose="TRANSPOSE" if transposed else "NO_TRANSPOSE",
        type="f32",
    )
    a, b = residues(FIELD, 4, 4), residues(FIELD, 4, 4, seed=1)
    [x] = written(text, "4x4xf32", "4x4xf32", outputs="4x4xf32")(a, b)
    matrix = np.tril(a) if lower else np.triu(a)
    if unit:
        matrix = matrix - matrix * np.eye(4, dtype=int) + np.eye(4, dtype=int)
    matrix = big(matrix.T if transposed else matrix)
    same(centred(matrix @ big(x) if left else big(x) @ matrix), b)


def test_complex_triangular_solves_have_no_form():
    text = STABLEHLO_SOLVE.format(
        left="true", lower="true", unit="false", transpose="ADJOINT", type="complex<f32>"
    )
    kind = "4x4xcomplex<f32>"
    with pytest.raises(UnmappedError, match="triangular_solve"):
        written(text, kind, kind, outputs=kind)


FACTORIZATIONS: dict[str, Callable[[jax.Array], Any]] = {
    "cholesky": jnp.linalg.cholesky,
    "eigh": jnp.linalg.eigh,
    "svd": jnp.linalg.svd,
    "qr": jnp.linalg.qr,
    "lu": jax.scipy.linalg.lu_factor,
    "inverse": jnp.linalg.inv,
    "determinant": jnp.linalg.det,
    "eigenvalues": jnp.linalg.eigvals,
    "schur": jax.scipy.linalg.schur,
}


@pytest.mark.parametrize("name", FACTORIZATIONS)
def test_factorizations_are_functions_of_each_matrix(name: str):
    function = FACTORIZATIONS[name]
    a = residues(FIELD, 4, 3, 3)
    a[2] = a[0]
    program = mapped(lambda a: jax.tree.leaves(function(a)), f32(4, 3, 3), field=None)
    single = mapped(lambda a: jax.tree.leaves(function(a)), f32(1, 3, 3), field=None)
    assert program.field == single.field
    whole, again = program(a), program(a)
    by_one = [single(a[i : i + 1]) for i in range(4)]
    for number, result in enumerate(whole):
        assert np.array_equal(result, again[number])
        assert np.array_equal(result, np.concatenate([one[number] for one in by_one]))
        assert np.array_equal(result[0], result[2])
    assert any(not np.array_equal(result[0], result[1]) for result in whole)


def test_the_cholesky_of_each_triangle_differs():
    a = residues(FIELD, 3, 3)
    text = '%0 = "stablehlo.cholesky"(%a) {{lower = {}}} : (tensor<3x3xf32>) -> tensor<3x3xf32>'
    programs = [
        written(text.format(lower), "3x3xf32", outputs="3x3xf32") for lower in ("true", "false")
    ]
    one, other = (program(a)[0] for program in programs)
    assert not np.array_equal(one, other)


# Custom calls that nobody knows.

CALL = """%0 = stablehlo.custom_call @{target}(%a, %b) {{{attributes}}}
  : (tensor<4xf32>, tensor<2xi32>) -> tensor<3x5xf32>"""
CALLS = {
    "same": ("kernel", 'backend_config = "one"'),
    "config": ("kernel", 'backend_config = "two"'),
    "typed": ("kernel", "api_version = 4 : i32, backend_config = {n = 1 : i32}"),
    "typed config": ("kernel", "api_version = 4 : i32, backend_config = {n = 2 : i32}"),
    "attributes": ("kernel", "mhlo.attributes = {n = 1 : i64}"),
    "other attributes": ("kernel", "mhlo.attributes = {n = 2 : i64}"),
    "target": ("other", 'backend_config = "one"'),
}


def called(target: str, attributes: str) -> MappedProgram:
    text = CALL.format(target=target, attributes=attributes)
    return written(text, "4xf32", "2xi32", outputs="3x5xf32")


def test_custom_calls_are_functions_of_operands_and_configuration():
    a, b = residues(FIELD, 4), np.array([3, 4], np.int32)
    found = {name: called(*case)(a, b)[0] for name, case in CALLS.items()}
    assert len({result.tobytes() for result in found.values()}) == len(CALLS)
    again = called(*CALLS["same"])
    assert np.array_equal(again(a, b)[0], found["same"])
    assert not np.array_equal(again(a + np.eye(4, dtype=int)[2], b)[0], found["same"])
    assert not np.array_equal(again(a, b + np.array([0, 1], np.int32))[0], found["same"])
    assert len(set(found["same"].reshape(-1).tolist())) == 15


def test_custom_calls_ignore_where_things_are():
    a, b = residues(FIELD, 4), np.array([3, 4], np.int32)
    attributes = 'backend_config = "one"'
    more = (
        'has_side_effect = true, mhlo.frontend_attributes = {_xla_compute_type = "host"}, '
        "operand_layouts = [dense<0> : tensor<1xindex>, dense<0> : tensor<1xindex>], "
        'result_layouts = [dense<[1, 0]> : tensor<2xindex>], mhlo.sharding = "{replicated}"'
    )
    one, other = (
        called("kernel", attributes)(a, b)[0],
        called("kernel", f"{attributes}, {more}")(a, b)[0],
    )
    assert np.array_equal(one, other)


def test_custom_calls_of_integers_alone():
    text = "%0 = stablehlo.custom_call @kernel(%a) : (tensor<4xi32>) -> tensor<4xi32>"
    program = written(text, "4xi32", outputs="4xi32")
    a = np.arange(4, dtype=np.int32)
    assert np.array_equal(program(a)[0], program(a)[0])


def test_custom_calls_with_several_results_of_all_types():
    types = ["2x3xf32", "4xi32", "complex<f64>", "5xi1", "i8", "3xui64"]
    joined = ", ".join(f"tensor<{each}>" for each in types)
    text = f"""%0:6 = stablehlo.custom_call @kernel(%a) : (tensor<4x6xf32>) -> ({joined})
    return %0#0, %0#1, %0#2, %0#3, %0#4, %0#5 : {joined}"""
    found = written(text, "4x6xf32", outputs=", ".join(types))(residues(FIELD, 4, 6))
    assert [x.shape for x in found] == [(2, 3), (4,), (), (5,), (), (3,)]
    assert found[0].any()
    assert ((found[1] >= 0) & (found[1] < 4)).all()
    assert found[4] == 0


def test_custom_calls_on_tokens_have_no_form():
    text = """%t = stablehlo.create_token : !stablehlo.token
    %0:2 = stablehlo.custom_call @kernel(%a, %t)
      : (tensor<4xf32>, !stablehlo.token) -> (tensor<4xf32>, !stablehlo.token)
    return %0#0 : tensor<4xf32>"""
    with pytest.raises(UnmappedError, match="token"):
        written(text, "4xf32", outputs="4xf32")


@pytest.mark.parametrize("target", ["mhlo.erf", "chlo.erf", "mhlo.tan", "mhlo.asin"])
def test_custom_calls_of_known_functions(target: str):
    a = residues(FIELD, 9)
    a[0] = 0
    text = f"%0 = stablehlo.custom_call @{target}(%a) : (tensor<9xf32>) -> tensor<9xf32>"
    [found] = written(text, "9xf32", outputs="9xf32")(a)
    name = target.partition(".")[2]
    shift = Hash(name).hash_numbers(FIELD, [0])
    same(found, [Hash(name).hash_numbers(FIELD, [int(x)]) - shift for x in a])
