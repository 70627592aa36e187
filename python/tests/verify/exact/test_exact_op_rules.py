"""Each op in exact arithmetic, against Python's integers or against another program.

A case maps a small program, runs it in this process and compares residues.
"""

from __future__ import annotations

from functools import partial
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
    by_order,
    centred,
    f32,
    inverses,
    mapped,
    ordered,
    residues,
    same,
    spec,
    written,
)
from jax import lax
from numpy.lib.stride_tricks import sliding_window_view

from stablehlo_tools.verify.element_types import Array
from stablehlo_tools.verify.exact.constants import UnmappedError
from stablehlo_tools.verify.exact.field import Hash

# Elementwise.

SHAPES = ((), (7,), (3, 4))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arithmetic(shape: tuple[int, ...]):
    a, b = residues(FIELD, *shape), residues(FIELD, *shape, seed=1)
    program = mapped(
        lambda a, b: (a + b, a - b, a * b, a / b, -a, a / 3.0, a * 0.1), f32(*shape), f32(*shape)
    )
    total, difference, product, quotient, negated, third, tenth = program(a, b)
    same(total, big(a) + big(b))
    same(difference, big(a) - big(b))
    same(product, big(a) * big(b))
    same(quotient, big(a) * inverses(b))
    same(negated, -big(a))
    same(third, big(a) * pow(3, -1, P))
    same(tenth, big(a) * FIELD.residue(float(np.float32(0.1))))


def test_arithmetic_of_the_largest_residues():
    ends = np.array([FIELD.half, -FIELD.half, 0, 1, -1], np.int64)
    a, b = (x.reshape(-1) for x in np.meshgrid(ends, ends))
    total, product, quotient = mapped(lambda a, b: (a + b, a * b, a / b), f32(25), f32(25))(a, b)
    same(total, big(a) + big(b))
    same(product, big(a) * big(b))
    same(quotient, big(a) * inverses(b))  # 0 for a division by 0


@pytest.mark.parametrize("exponent", range(-3, 6))
def test_powers_with_an_integer_exponent(exponent: int):
    a = residues(FIELD, 20)
    a[0] = 0
    [found] = mapped(lambda a: lax.pow(a, jnp.full(20, exponent, jnp.float32)), f32(20))(a)
    base = big(a) if exponent >= 0 else inverses(a)
    same(found, [pow(int(x), abs(exponent), P) for x in base])


def test_powers_of_other_exponents_are_functions_of_base_and_exponent():
    a, b = residues(FIELD, 20), residues(FIELD, 20, seed=1)

    def powers(a: jax.Array, b: jax.Array) -> Any:
        return lax.pow(a, b), lax.pow(a, jnp.full(20, 0.5, jnp.float32)), lax.sqrt(a)

    both, half, root = mapped(powers, f32(20), f32(20))(a, b)
    same(
        both,
        [Hash("power").hash_numbers(FIELD, [int(x), int(y)]) for x, y in zip(a, b, strict=True)],
    )
    assert not np.array_equal(half, root)  # this identity is not seen


UNARY = {
    "exponential": (jnp.exp, 1),
    "tanh": (jnp.tanh, 0),
    "sqrt": (lax.sqrt, 0),
    "rsqrt": (lax.rsqrt, None),
    "log": (jnp.log, None),
    "sine": (jnp.sin, 0),
    "cosine": (jnp.cos, 1),
    "floor": (lax.floor, 0),
    "exponential_minus_one": (jnp.expm1, 0),
    "cbrt": (lax.cbrt, 0),
    "round_nearest_even": (
        partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN),
        0,
    ),
}


def test_uninterpreted_functions():
    a = residues(FIELD, 20)
    a[3] = 0
    found = mapped(lambda a: [function(a) for function, _ in UNARY.values()], f32(20))(a)
    for (name, (_, at_zero)), result in zip(UNARY.items(), found, strict=True):
        hashed = np.array([Hash(name).hash_numbers(FIELD, [int(x)]) for x in a], object)
        shift = (
            0 if at_zero is None else FIELD.residue(at_zero) - Hash(name).hash_numbers(FIELD, [0])
        )
        assert np.array_equal(result, centred(hashed + shift)), name
        if at_zero is not None:
            assert result[3] == FIELD.residue(at_zero)
    assert len({result.tobytes() for result in found}) == len(found)


def test_choices_by_order():
    a, b = residues(FIELD, 200), residues(FIELD, 200, seed=1)
    b[:50] = a[:50]
    c = residues(FIELD, 200, seed=2)

    def choose(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
        comparisons = (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)
        chosen = lax.max(a, b), lax.min(a, b), lax.clamp(b, a, c), lax.clamp(-1.0, a, 1.0)
        return *chosen, jnp.abs(a), jnp.sign(a), *(compare(a, b) for compare in comparisons)

    largest, least, clamped, unit, size, sign, *compared = mapped(choose, *[f32(200)] * 3)(a, b, c)
    same(largest, by_order(np.maximum, a, b))
    same(least, by_order(np.minimum, a, b))
    same(clamped, by_order(lambda x, low, high: np.minimum(np.maximum(x, low), high), a, b, c))
    ones = np.ones_like(a)
    same(unit, by_order(lambda x, y: np.clip(x, -y, y), a, ones))
    assert 20 < np.isin(unit, (1, -1)).sum() < 180
    same(size, by_order(np.abs, a))
    same(sign, np.sign(ordered(a)))
    tests = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)
    for found, test in zip(compared, tests, strict=True):
        assert np.array_equal(found, test(ordered(a), ordered(b)))


def test_relu_and_its_gradient_agree_about_the_sign():
    a = residues(FIELD, 100)
    relu, slope = mapped(
        lambda a: (jax.nn.relu(a), jax.grad(lambda x: jax.nn.relu(x).sum())(a)), f32(100)
    )(a)
    same(relu, big(a) * slope)
    assert 20 < slope.sum() < 80


def test_infinities_are_beyond_all_residues():
    a = residues(FIELD, 50)
    found = mapped(
        lambda a: (jnp.maximum(a, -jnp.inf), jnp.minimum(a, jnp.inf), a < jnp.inf), f32(50)
    )(a)
    same(found[0], a)
    same(found[1], a)
    assert found[2].all()


# Contractions.

DOTS = {
    "matrix": ((5, 6), (6, 4), "ij,jk->ik"),
    "vector": ((6,), (6,), "i,i->"),
    "outer": ((3,), (4,), "i,j->ij"),
    "batch": ((2, 3, 5), (2, 5, 4), "bij,bjk->bik"),
    "two contracted": ((3, 4, 5), (4, 5, 2), "ijk,jkl->il"),
    "transposed": ((4, 3), (5, 4), "ji,kj->ik"),
    "large": ((40, 300), (300, 50), "ij,jk->ik"),
    "large batch": ((3, 20, 100), (3, 100, 30), "bij,bjk->bik"),
    "long": ((1, 70_000), (70_000, 1), "ij,jk->ik"),
    "empty": ((3, 0), (0, 4), "ij,jk->ik"),
}


@pytest.mark.parametrize("case", DOTS)
@pytest.mark.parametrize("ends", [False, True])
def test_dots(case: str, ends: bool):
    one, other, text = DOTS[case]
    a, b = residues(FIELD, *one), residues(FIELD, *other, seed=1)
    if ends:  # sums are as large as they can be
        a, b = (np.where(x > 0, FIELD.half, -FIELD.half) for x in (a, b))
        a[...], b[...] = FIELD.half, -FIELD.half
    [found] = mapped(lambda a, b: jnp.einsum(text, a, b), f32(*one), f32(*other))(a, b)
    if a.size > 50_000:
        same(found, [[sum(int(x) * int(y) for x, y in zip(a[0], b[:, 0], strict=True))]])
    else:
        same(found, np.einsum(text, big(a), big(b)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float64])
def test_dots_of_other_floats(dtype: Any):
    a, b = residues(FIELD, 4, 6), residues(FIELD, 6, 5, seed=1)
    with jax.enable_x64(True):
        program = mapped(
            lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32),
            spec(dtype, 4, 6),
            spec(dtype, 6, 5),
        )
    same(program(a, b)[0], big(a) @ big(b))


def test_dots_of_integers_and_floats():
    a, b = np.arange(24, dtype=np.int8).reshape(4, 6) - 9, residues(FIELD, 6, 5)
    text = """%0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
      : (tensor<4x6xi8>, tensor<6x5xf32>) -> tensor<4x5xf32>"""
    try:
        program = written(text, "4x6xi8", "6x5xf32", outputs="4x5xf32")
    except Exception as error:  # StableHLO may refuse it
        pytest.skip(str(error))
    same(program(a, b)[0], big(a.astype(np.int64)) @ big(b))


def test_a_dot_with_an_algorithm_and_precision():
    a, b = residues(FIELD, 40, 60), residues(FIELD, 60, 50, seed=1)
    for precision in ("BF16_BF16_F32_X3", "highest"):
        program = mapped(
            lambda a, b, p=precision: lax.dot(a, b, precision=p), f32(40, 60), f32(60, 50)
        )
        same(program(a, b)[0], big(a) @ big(b))


def convolved(a: Array, kernel: Array, strides: tuple[int, int], padding: int) -> Array:
    """A convolution of [N, C, H, W] with [O, C, h, w]."""
    padded = np.pad(big(a), ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = sliding_window_view(padded, kernel.shape[2:], axis=(2, 3))
    windows = windows[:, :, :: strides[0], :: strides[1]]
    return np.einsum("nchwij,ocij->nohw", windows, big(kernel))


CONVOLUTIONS = {
    "plain": {},
    "strides": {"strides": (2, 1)},
    "padding": {"padding": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4},
    "batch groups": {"batch_groups": 2},
    "dilated kernel": {"rhs_dilation": (2, 1)},
    "dilated input": {"lhs_dilation": (1, 3)},
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case: str):
    options: dict[str, Any] = CONVOLUTIONS[case]
    groups, batch_groups = options.get("groups", 1), options.get("batch_groups", 1)
    strides, padding = options.get("strides", (1, 1)), options.get("padding", 0)
    a, kernel = residues(FIELD, 2, 4, 6, 5), residues(FIELD, 8, 4 // groups, 3, 2, seed=1)
    program = mapped(
        lambda a, k: lax.conv_general_dilated(
            a,
            k,
            strides,
            [(padding, padding)] * 2,
            lhs_dilation=options.get("lhs_dilation"),
            rhs_dilation=options.get("rhs_dilation"),
            feature_group_count=groups,
            batch_group_count=batch_groups,
        ),
        f32(*a.shape),
        f32(*kernel.shape),
    )
    for name, value in (("lhs_dilation", a), ("rhs_dilation", kernel)):
        if name in options:
            steps = options[name]
            sizes = [
                (size - 1) * step + 1 for size, step in zip(value.shape[2:], steps, strict=True)
            ]
            spread = np.zeros((*value.shape[:2], *sizes), np.int64)
            spread[:, :, :: steps[0], :: steps[1]] = value
            a, kernel = (spread, kernel) if value is a else (a, spread)
    of_groups = zip(np.split(a, groups, 1), np.split(kernel, groups, 0), strict=True)
    if batch_groups > 1:
        of_groups = zip(
            np.split(a, batch_groups, 0), np.split(kernel, batch_groups, 0), strict=True
        )
    expected = np.concatenate([convolved(x, k, strides, padding) for x, k in of_groups], 1)
    same(
        program(
            a if "lhs_dilation" not in options else a[:, :, :, ::3],
            kernel if "rhs_dilation" not in options else kernel[:, :, ::2],
        )[0],
        expected,
    )


def test_the_gradients_of_a_convolution():
    """By the kernel and by the input: the products with a cotangent agree."""
    a, kernel, tangent = (
        residues(FIELD, 2, 3, 6),
        residues(FIELD, 4, 3, 2),
        residues(FIELD, 2, 4, 5),
    )

    def products(a: jax.Array, kernel: jax.Array, tangent: jax.Array) -> Any:
        result, vjp = jax.vjp(lambda a, k: lax.conv(a, k, (1,), "VALID"), a, kernel)
        by_input, by_kernel = vjp(tangent)
        return (result * tangent).sum(), (by_input * a).sum(), (by_kernel * kernel).sum()

    one, two, three = mapped(products, f32(2, 3, 6), f32(4, 3, 2), f32(2, 4, 5))(a, kernel, tangent)
    assert one == two == three != 0


# Reductions.


def test_reductions():
    a = residues(FIELD, 5, 6)

    def reduce(a: jax.Array) -> Any:
        sums = a.sum(), a.sum(0), a.mean(1), lax.reduce(a, np.float32(2), lax.add, (1,))
        others = a.max(0), a.min(1), a.prod(1), jnp.argmax(a, 0), jnp.argmin(a, 1), (a > 0).any(0)
        return *sums, *others

    found = mapped(reduce, f32(5, 6))(a)
    same(found[0], big(a).sum())
    same(found[1], big(a).sum(0))
    same(found[2], big(a).sum(1) * pow(6, -1, P))
    same(found[3], big(a).sum(1) + 2)
    same(found[4], by_order(lambda x: x.max(0), a))
    same(found[5], by_order(lambda x: x.min(1), a))
    same(found[6], big(a).prod(1))
    assert np.array_equal(found[7], ordered(a).argmax(0))
    assert np.array_equal(found[8], ordered(a).argmin(1))
    assert np.array_equal(found[9], (ordered(a) > 0).any(0))


def test_reductions_in_bfloat16_convert_in_their_region():
    a = residues(FIELD, 5, 6)
    text = """%z = stablehlo.constant dense<0.0> : tensor<bf16>
    %0 = "stablehlo.reduce"(%a, %z) ({
    ^bb0(%x: tensor<bf16>, %y: tensor<bf16>):
      %1 = stablehlo.convert %x : (tensor<bf16>) -> tensor<f32>
      %2 = stablehlo.convert %y : (tensor<bf16>) -> tensor<f32>
      %3 = stablehlo.add %1, %2 : tensor<f32>
      %4 = stablehlo.convert %3 : (tensor<f32>) -> tensor<bf16>
      stablehlo.return %4 : tensor<bf16>
    }) {dimensions = array<i64: 1>} : (tensor<5x6xbf16>, tensor<bf16>) -> tensor<5xbf16>"""
    program = written(text, "5x6xbf16", outputs="5xbf16")
    same(program(a)[0], big(a).sum(1))


def test_reductions_of_several_values():
    """The sum and the sum of squares at once, and the largest with its row."""
    a, b = residues(FIELD, 5, 6), residues(FIELD, 5, 6, seed=1)

    def reduce(a: jax.Array, b: jax.Array) -> Any:
        zeros = np.float32(0), np.float32(0)
        sums = lax.reduce((a, b), zeros, lambda x, y: (x[0] + y[0], x[1] + y[1]), (1,))
        least = np.float32(-np.inf), np.float32(0)

        def larger(x: Any, y: Any) -> Any:
            first = x[0] >= y[0]
            return jnp.where(first, x[0], y[0]), jnp.where(first, x[1], y[1])

        return *sums, *lax.reduce((a, b), least, larger, (1,))

    total, other, largest, beside = mapped(reduce, f32(5, 6), f32(5, 6))(a, b)
    same(total, big(a).sum(1))
    same(other, big(b).sum(1))
    places = ordered(a).argmax(1)
    same(largest, a[np.arange(5), places])
    same(beside, b[np.arange(5), places])


def test_windows_and_scans():
    a = residues(FIELD, 4, 9)

    def reduce(a: jax.Array) -> Any:
        window = partial(lax.reduce_window, a, window_strides=(1, 2), padding=[(0, 0), (1, 1)])
        sums = window(np.float32(0), lax.add, window_dimensions=(1, 3))
        largest = window(np.float32(-np.inf), lax.max, window_dimensions=(2, 3))
        scans = lax.cumsum(a, 1), lax.cumprod(a, 1), lax.cummax(a, 1), lax.cummin(a, 1)
        return sums, largest, *scans, lax.cumsum(a, 1, reverse=True), lax.cumlogsumexp(a, 1)

    sums, largest, *scans, reverse, _ = mapped(reduce, f32(4, 9))(a)
    padded = np.pad(big(a), ((0, 0), (1, 1)))
    same(sums, sliding_window_view(padded, 3, axis=1)[:, ::2].sum(-1))
    least = int(FIELD.residues(np.array(-np.inf)))
    low = np.pad(a, ((0, 0), (1, 1)), constant_values=least)
    windows = sliding_window_view(low, (2, 3))[:, ::2].reshape(3, 5, 6)
    same(largest, by_order(lambda x: x.max(-1), windows))
    same(scans[0], np.cumsum(big(a), 1))
    same(scans[1], np.cumprod(big(a), 1))
    same(scans[2], by_order(lambda x: np.maximum.accumulate(x, 1), a))
    same(scans[3], by_order(lambda x: np.minimum.accumulate(x, 1), a))
    same(reverse, np.cumsum(big(a)[:, ::-1], 1)[:, ::-1])


def test_scatters():
    a, updates = residues(FIELD, 6, 3), residues(FIELD, 5, 3, seed=1)
    places = np.array([1, 1, 4, 9, 0], np.int32)  # one twice, one outside

    def scatter(a: jax.Array, u: jax.Array, i: jax.Array) -> Any:
        at = a.at[i]
        segments = jax.ops.segment_sum(u, i, 4), jax.ops.segment_max(u, i, 4)
        return at.add(u), at.multiply(u), at.max(u), at.min(u), a.at[i[1:]].set(u[1:]), *segments

    found = mapped(scatter, f32(6, 3), f32(5, 3), spec(jnp.int32, 5))(a, updates, places)
    expected = [big(a) for _ in range(5)]
    for row, place in enumerate(places):
        if place < 6:
            now = [each[place].astype(np.int64) for each in map(centred, expected)]
            expected[0][place] = now[0] + big(updates[row])
            expected[1][place] = big(now[1]) * updates[row]
            expected[2][place] = by_order(np.maximum, now[2], updates[row])
            expected[3][place] = by_order(np.minimum, now[3], updates[row])
            if row:
                expected[4][place] = updates[row]
    for one, other in zip(found[:5], expected, strict=True):
        same(one, other)
    in_range = places[[0, 1, 4]]
    sums = np.zeros((4, 3), object)
    for place, row in zip(in_range, updates[[0, 1, 4]], strict=True):
        sums[place] += row
    same(found[5], sums)
    assert (found[6][2:] == FIELD.residues(np.array(-np.inf))).all()  # empty segments


def test_the_gradient_of_a_maximum_over_windows():
    """select_and_scatter: the cotangent goes to the largest element of each window."""
    a, tangent = residues(FIELD, 1, 8), residues(FIELD, 1, 4)

    def gradient(a: jax.Array, t: jax.Array) -> Any:
        def pooled(a: jax.Array) -> jax.Array:
            return lax.reduce_window(a, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")

        return jax.vjp(pooled, a)[1](t)[0]

    [found] = mapped(gradient, f32(1, 8), f32(1, 4))(a, tangent)
    expected = np.zeros((1, 8), np.int64)
    for window, place in enumerate(ordered(a).reshape(4, 2).argmax(1)):
        expected[0, 2 * window + place] = tangent[0, window]
    same(found, expected)


def test_overlapping_windows_of_a_maximum():
    a, tangent = residues(FIELD, 9), residues(FIELD, 4)

    def gradient(a: jax.Array, t: jax.Array) -> Any:
        def pooled(a: jax.Array) -> jax.Array:
            return lax.reduce_window(a, -jnp.inf, lax.max, (3,), (2,), "VALID")

        return jax.vjp(pooled, a)[1](t)[0]

    [found] = mapped(gradient, f32(9), f32(4))(a, tangent)
    expected = np.zeros(9, object)
    for window in range(4):
        expected[2 * window + ordered(a)[2 * window : 2 * window + 3].argmax()] += int(
            tangent[window]
        )
    same(found, expected)


def test_sorts():
    a, b = residues(FIELD, 4, 30), residues(FIELD, 4, 30, seed=1)
    a[:, :5] = a[:, 5:10]  # ties

    def sort(a: jax.Array, b: jax.Array) -> Any:
        together = lax.sort((a, b), dimension=1, num_keys=1)
        return jnp.sort(a, 1), jnp.argsort(a, 1), *together, *lax.top_k(a, 7)

    found = mapped(sort, f32(4, 30), f32(4, 30))(a, b)
    order = np.argsort(ordered(a), 1, kind="stable")
    same(found[0], np.take_along_axis(a, order, 1))
    assert np.array_equal(found[1], order)
    same(found[2], np.take_along_axis(a, order, 1))
    same(found[3], np.take_along_axis(b, order, 1))
    last = np.argsort(-ordered(a), 1, kind="stable")[:, :7]
    same(found[4], np.take_along_axis(a, last, 1))
    assert np.array_equal(found[5], last)


TOP_K = {
    "chlo.top_k": "chlo.top_k(%a, k = 3) : tensor<2x9xf32> ->",
    "mhlo.topk": """stablehlo.custom_call @mhlo.topk(%a)
      {mhlo.attributes = {k = 3 : i64, largest = true}} : (tensor<2x9xf32>) ->""",
    "mhlo.topk smallest": """stablehlo.custom_call @mhlo.topk(%a)
      {mhlo.attributes = {k = 3 : i64, largest = false}} : (tensor<2x9xf32>) ->""",
}


@pytest.mark.parametrize("case", TOP_K)
def test_top_k(case: str):
    a = residues(FIELD, 2, 9)
    a[:, 1] = a[:, 7]
    results = "tensor<2x3xf32>, tensor<2x3xi32>"
    text = f"%0:2 = {TOP_K[case]} ({results})\nreturn %0#0, %0#1 : {results}"
    values, places = written(text, "2x9xf32", outputs="2x3xf32, 2x3xi32")(a)
    sign = 1 if "smallest" in case else -1
    order = np.argsort(sign * ordered(a), 1, kind="stable")[:, :3]
    assert np.array_equal(places, order)
    same(values, np.take_along_axis(a, order, 1))


# Control flow and the rest.


def test_control_flow():
    a, n = residues(FIELD, 5), np.array(4, np.int32)

    def compute(a: jax.Array, n: jax.Array) -> Any:
        looped = lax.fori_loop(0, n, lambda i, x: x * a + i, a)
        chosen = lax.switch(n - 3, [lambda x: x + 1, lambda x: x * 2, lambda x: x - 1], a)
        condition = lax.cond(n > 9, lambda x: x, lambda x: -x, a)
        scanned, each = lax.scan(lambda c, x: (c * 3 + x, c), jnp.float32(1), a)
        while_ = lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] * s[1]), (n, a))[1]
        return looped, chosen, condition, scanned, each, while_, lax.map(lambda x: x * x, a)

    found = mapped(compute, f32(5), spec(jnp.int32))(a, n)
    expected = big(a)
    for i in range(4):
        expected = expected * a + i
    same(found[0], expected)
    same(found[1], big(a) * 2)
    same(found[2], -big(a))
    carry, each = 1, []
    for x in a:
        each.append(carry)
        carry = carry * 3 + int(x)
    same(found[3], carry)
    same(found[4], each)
    same(found[5], big(a) ** 2)
    same(found[6], big(a) ** 2)


def test_functions_and_divisions_within_loops_and_regions():
    a = residues(FIELD, 5)

    def compute(a: jax.Array) -> Any:
        def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return carry / (x + 1) + jnp.exp(x), jnp.maximum(carry, x)

        scanned = lax.scan(body, jnp.float32(1), a)
        both = lax.reduce(a, np.float32(0), lambda x, y: x * y + jnp.exp(x - y) / 3, (0,))
        windows = lax.reduce_window(
            a, np.float32(1), lambda x, y: lax.max(x, y) / y, (2,), (1,), "VALID"
        )
        return *scanned, both, windows

    carry, largest, both, windows = mapped(compute, f32(5))(a)
    expected, maxima = 1, []
    shift = 1 - Hash("exponential").hash_numbers(FIELD, [0])
    for x in a.tolist():
        maxima.append(int(by_order(np.maximum, centred(expected), centred(x))))
        exp = Hash("exponential").hash_numbers(FIELD, [int(x)]) + shift
        expected = int(centred(expected * FIELD.inverse(x + 1) + exp))
    same(carry, expected)
    same(largest, maxima)
    assert both.shape == ()
    assert windows.shape == (4,)


def test_ragged_dots():
    a, b, sizes = residues(FIELD, 6, 3), residues(FIELD, 2, 3, 4), np.array([2, 3], np.int32)
    [found] = mapped(lax.ragged_dot, f32(6, 3), f32(2, 3, 4), spec(jnp.int32, 2))(a, b, sizes)
    same(found[:2], big(a[:2]) @ big(b[0]))
    same(found[2:5], big(a[2:5]) @ big(b[1]))


def test_tokens_barriers_and_tuples():
    text = """%t = stablehlo.create_token : !stablehlo.token
    %u = stablehlo.after_all %t, %t : !stablehlo.token
    %0:2 = stablehlo.optimization_barrier %a, %a : tensor<4xf32>, tensor<4xf32>
    %1 = stablehlo.tuple %0#0, %0#1 : tuple<tensor<4xf32>, tensor<4xf32>>
    %2 = stablehlo.get_tuple_element %1[1] : (tuple<tensor<4xf32>, tensor<4xf32>>) -> tensor<4xf32>
    %3 = stablehlo.add %0#0, %2 : tensor<4xf32>
    return %3 : tensor<4xf32>"""
    a = residues(FIELD, 4)
    same(written(text, "4xf32", outputs="4xf32")(a)[0], 2 * big(a))


COMPOSITE_TEXT = """
func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.composite "my.square" %a
    {decomposition = @square, composite_attributes = {n = 1 : i32}}
    : (tensor<4xf32>) -> tensor<4xf32>
  %1 = stablehlo.composite "my.square" %0 {decomposition = @square}
    : (tensor<4xf32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}
func.func private @square(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.multiply %a, %a : tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""


def test_composites_are_their_decompositions():
    a = residues(FIELD, 4)
    same(MappedProgram(COMPOSITE_TEXT)(a)[0], big(a) ** 4)


def test_reduce_precision_and_is_finite():
    a = residues(FIELD, 9)

    def compute(a: jax.Array) -> Any:
        return (
            lax.reduce_precision(a, 5, 10),
            jnp.isfinite(a),
            jnp.isnan(a),
            jnp.isinf(a),
            jnp.where(a != a, 0, a),
        )

    rounded, finite, nan, infinite, kept = mapped(compute, f32(9))(a)
    same(rounded, a)
    assert finite.all()
    assert not nan.any()
    assert not infinite.any()
    same(kept, a)


LAYOUTS = {
    "transpose": lambda a: a.T,
    "reshape": lambda a: a.reshape(2, 6, 2),
    "reverse": lambda a: a[::-1],
    "slice": lambda a: a[1:3, ::2],
    "pad": lambda a: jnp.pad(a, 1, constant_values=2.5),
    "concatenate": lambda a: jnp.concatenate([a, a + 1]),
    "broadcast": lambda a: jnp.broadcast_to(a, (2, 4, 6)),
    "gather": lambda a: a[jnp.array([3, 1, 1])],
    "dynamic_slice": lambda a: lax.dynamic_slice(a, (3, 1), (2, 3)),
    "dynamic_update_slice": lambda a: lax.dynamic_update_slice(a, 2 * a[:2], (3, 0)),
    "iota": lambda a: a + jnp.arange(6.0),
    "select": lambda a: jnp.where(jnp.arange(6) < 3, a, 0.5),
    "roll": lambda a: jnp.roll(a, 2, 0),
}


def test_layouts():
    """What moves elements moves residues; NumPy shows on doubles what it should be."""
    a = residues(FIELD, 4, 6)
    found = mapped(lambda a: [layout(a) for layout in LAYOUTS.values()], f32(4, 6))(a)
    with jax.enable_x64(True):
        for (name, layout), result in zip(LAYOUTS.items(), found, strict=True):
            twice = np.asarray(layout(jnp.asarray(2.0 * a)))  # the constants, too, would be doubled
            plain = np.asarray(layout(jnp.asarray(a.astype(np.float64))))
            assert np.array_equal(
                centred(2 * big(result)), centred((2 * plain).astype(np.int64))
            ), name
            assert twice.shape == plain.shape


REFUSED = {
    "rng": """%0 = stablehlo.rng %x, %x, %n, distribution = UNIFORM
      : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<4xf32>""",
    "batch_norm": """%0 = "stablehlo.batch_norm_inference"(%a, %a, %a, %a, %a)
      {epsilon = 1.0 : f32, feature_index = 0 : i64}
      : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>)
      -> tensor<4xf32>""",
}


@pytest.mark.parametrize("case", REFUSED)
def test_ops_without_a_form(case: str):
    text = f"""%n = stablehlo.constant dense<4> : tensor<1xi64>
    %x = stablehlo.constant dense<1.0> : tensor<f32>
    {REFUSED[case]}"""
    with pytest.raises(UnmappedError, match="stablehlo"):
        written(text, "4xf32", outputs="4xf32")
