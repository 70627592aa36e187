"""Residues of floats, roots of unity and the choice of a prime, against Python's integers."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablehlo_tools.verify.exact.field import Field, Hash, choose_field

PRIMES = (16777213, 8388617, 65537, 257)
DTYPES = (
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e8m0fnu,
    ml_dtypes.float4_e2m1fn,
)
F64_CORNERS = [0.0, -0.0, 5e-324, -5e-324, 2.0**-1022, 1.7976931348623157e308, 1 / 3, -1e9, 0.1]


def centred(number: int, prime: int) -> int:
    residue = number % prime
    return residue - prime if residue > (prime - 1) // 2 else residue


def residue_of(number: float, prime: int) -> int:
    """The fraction that a float is, modulo a prime, by Python's integers."""
    fraction = Fraction(number)
    return centred(fraction.numerator * pow(fraction.denominator, -1, prime), prime)


def patterns(dtype: type) -> np.ndarray:
    """All numbers of a type of 8 or 16 bits, random ones of a larger type."""
    size = np.dtype(dtype).itemsize
    rng = np.random.default_rng(0)
    if size == 1:
        return np.arange(256, dtype=np.uint8).view(dtype)
    if size == 2:
        return np.arange(0, 2**16, 7, dtype=np.uint16).view(dtype)
    return np.frombuffer(rng.bytes(2_000 * size), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_residues_are_those_of_the_fractions(dtype: type):
    floats = patterns(dtype)
    wide = floats.astype(np.float64)
    for prime in PRIMES:
        found = Field(prime).residues(floats)
        expected = [residue_of(x, prime) for x in wide if math.isfinite(x)]
        assert found.dtype == np.int64
        assert found[np.isfinite(wide)].tolist() == expected


@given(number=st.floats(allow_nan=False, allow_infinity=False), prime=st.sampled_from(PRIMES))
def test_the_residue_of_any_double(number: float, prime: int):
    assert Field(prime).residue(number) == residue_of(number, prime)


@pytest.mark.parametrize("number", F64_CORNERS)
def test_the_residues_of_corners(number: float):
    for prime in PRIMES:
        assert Field(prime).residue(number) == residue_of(number, prime)


@pytest.mark.parametrize("scale", [2**9, 2**21, 64_000])
@pytest.mark.parametrize("prime", PRIMES[:2])
def test_infinities_are_the_ends_of_the_order(prime: int, scale: int):
    field = Field(prime, scale)
    ends = field.residues(np.array([np.inf, -np.inf]))
    others = field.random(np.random.default_rng(0), (10_000,))
    assert (np.abs(others) <= field.half).all()
    high, low = field.to_ordered(ends).tolist()
    keys = field.to_ordered(np.concatenate([others, np.arange(-(2**21), 2**21, 1001)]))
    assert low <= keys.min()
    assert keys.max() <= high
    nan = field.residues(np.array([np.nan, -np.nan]))
    assert (np.abs(nan) <= field.half).all()
    assert nan[0] == nan[1]


@given(a=st.floats(-1e30, 1e30), b=st.floats(-1e30, 1e30), prime=st.sampled_from(PRIMES))
def test_residues_of_exact_sums_and_products(a: float, b: float, prime: int):
    a, b = float(np.float32(a)), float(np.float32(b))
    field = Field(prime)
    product = a * b  # of 24 bits each: exact, if it is no denormal
    if product == 0 or abs(product) > 1e-200:
        assert field.residue(product) == centred(field.residue(a) * field.residue(b), prime)
    if Fraction(a) + Fraction(b) == Fraction(a + b):
        assert field.residue(a + b) == centred(field.residue(a) + field.residue(b), prime)


@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_centred(numbers: list[int]):
    for prime in PRIMES:
        found = Field(prime).centre_residues(np.array(numbers, np.int64))
        assert found.tolist() == [centred(number, prime) for number in numbers]


@given(number=st.integers(-(2**70), 2**70), prime=st.sampled_from(PRIMES))
def test_inverse(number: int, prime: int):
    field = Field(prime)
    inverse = field.inverse(number)
    assert abs(inverse) <= field.half
    assert number * inverse % prime == (1 if number % prime else 0)


def test_the_order_with_a_scale():
    field = Field(16777213, 2**21)
    numbers = np.array([-np.inf, -1e6, -3, -2.5, -1, -0.5, -0.125, 0, 0.25, 1, 1.5, 3, 900, np.inf])
    ordered = field.to_ordered(field.residues(numbers))
    assert (np.diff(ordered) > 0).all()
    some = field.random(np.random.default_rng(0), (4000,))
    inside = np.abs(field.to_ordered(some)) < field.to_ordered(np.array(1))
    assert 0.2 < inside.mean() < 0.3  # with the scale 1 it would be none


def test_random_residues_fill_the_field():
    field = Field(257)
    numbers = field.random(np.random.default_rng(0), (50, 100))
    assert numbers.dtype == np.int64
    assert sorted(set(numbers.reshape(-1).tolist())) == list(range(-128, 129))


# Roots of unity.


def complex_powers(field: Field, root: tuple[int, int], count: int) -> list[tuple[int, int]]:
    powers, power = [(1, 0)], (1, 0)
    for _ in range(count - 1):
        real = power[0] * root[0] - power[1] * root[1]
        imaginary = power[0] * root[1] + power[1] * root[0]
        power = real % field.prime, imaginary % field.prime
        powers.append(power)
    return powers


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 30, 31, 64, 97, 100, 256])
def test_roots_of_unity(size: int):
    field = choose_field((), [size])
    assert field is not None
    root = field.root_of_unity(size)
    powers = complex_powers(field, root, size + 1)
    assert powers[size] == (1, 0)
    assert len(set(powers[:size])) == size  # the order is not less
    norm = (root[0] ** 2 + root[1] ** 2) % field.prime
    assert norm == 1  # so that the inverse is the conjugate


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 12, 15])
def test_the_fourier_matrix_times_its_conjugate(size: int):
    field = choose_field((), [size])
    assert field is not None
    real, imaginary = (part.astype(object) for part in field.fourier_matrix(size))
    assert real.shape == imaginary.shape == (size, size)
    p = field.prime
    assert np.array_equal((real @ real + imaginary @ imaginary) % p, size * np.eye(size, dtype=int))
    assert not ((imaginary @ real - real @ imaginary) % p).any()
    for j in range(size):
        for k in range(size):  # e(-j k) is the conjugate of e(j k)
            assert real[j, k] == real[-j % size, k]
            assert imaginary[j, k] == centred(-imaginary[-j % size, k], p)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_one_field_for_several_sizes(sizes: list[int]):
    field = choose_field((), sizes)
    if field is None:
        assert math.lcm(4, *sizes) > 500
        return
    for size in sizes:
        powers = complex_powers(field, field.root_of_unity(size), size)
        assert len(set(powers)) == size


@pytest.mark.parametrize("sizes", [[1009, 1013, 1021], [2**23], [2**25]])
def test_no_field_for_impossible_sizes(sizes: list[int]):
    assert choose_field((), sizes) is None


# The choice of a prime and a scale.

CONSTANTS = (
    (),
    (0.9,),
    (0.9, 1.0),
    (0.1, 0.9),
    (-1e9,),
    (1e-8,),
    (0.9, 1.0, -1e9, 1e-8),
    (-1.0, 1.0),
    (6.0,),
    (-1.0, 0.5, 1.0, 2.0, -2.0),
    (1000.0, 0.1),
    (448.0, 1e-12, -448.0),
    (65504.0, 1.0),
    (1e-6, 1e-5, 1e-3, 0.999, 0.95),
)


@pytest.mark.parametrize("constants", CONSTANTS, ids=str)
def test_constants_keep_their_signs_and_their_order(constants: tuple[float, ...]):
    as_float32 = [float(np.float32(c)) for c in constants]
    field = choose_field(as_float32)
    assert field is not None
    assert 2**23 < field.prime < 2**24
    assert all(field.prime % n for n in range(2, 5000))
    numbers = np.array(sorted({0.0, *as_float32}))
    ordered = field.to_ordered(field.residues(numbers))
    assert np.array_equal(np.sign(ordered), np.sign(numbers))
    assert (np.diff(ordered) > 0).all()


@pytest.mark.parametrize("constants", CONSTANTS[1:], ids=str)
def test_residues_are_between_any_two_constants(constants: tuple[float, ...]):
    """A branch for `x < 1` is taken by some numbers, and another one by others."""
    as_float32 = [float(np.float32(c)) for c in constants]
    field = choose_field(as_float32)
    assert field is not None
    numbers = np.array(sorted({0.0, *as_float32}))
    places = field.to_ordered(field.residues(numbers)) // 2**24
    bounds = [-field.half, *places.tolist(), field.half]
    assert min(np.diff(bounds)) > 2_000  # of 16 million


def test_the_choice_does_not_depend_on_the_order_of_the_constants():
    constants = [0.9, 1.0, -1e9, 1e-8, 0.1]
    fields = {
        choose_field(constants),
        choose_field(reversed(constants)),
        choose_field(iter(constants * 2)),
    }
    assert len(fields) == 1
    assert choose_field((), []) == choose_field([0.0]) == choose_field([-0.0])


def test_many_constants_do_not_take_long():
    field = choose_field([float(x) for x in np.random.default_rng(0).normal(size=500)])
    assert field is not None


def test_small_integers_keep_their_order_beside_usual_constants():
    field = choose_field([100.0])
    assert field is not None
    integers = np.concatenate([np.arange(-10_000, 10_001), np.arange(20_000, 2**20 - 2**10, 991)])
    assert (np.diff(field.to_ordered(field.residues(integers))) > 0).all()


@given(residue=st.integers(-(2**23) + 9, 2**23 - 9))
def test_the_order_is_odd_and_one_to_one(residue: int):
    field = Field(16777199, 77 * 2**12)
    key = int(field.to_ordered(np.array(residue)))
    assert int(field.to_ordered(np.array(-residue))) == -key
    assert (key + 2**23) % 2**24 - 2**23 == residue


# Hashes.


def test_hashes_depend_on_the_name_and_on_each_operand():
    field = Field(16777213)
    seen = {
        Hash(name).hash_numbers(field, operands)
        for name in ("sin", "cos")
        for operands in ((1, 2), (2, 1), (1,))
    }
    assert len(seen) == 6
    assert all(abs(number) <= field.half for number in seen)
    assert 0 <= Hash("sin").salt < 2**62


def test_hashes_are_spread_over_the_field():
    field = Field(16777213)
    numbers = np.array([Hash("exponential").hash_numbers(field, [n]) for n in range(2_000)])
    assert len(set(numbers.tolist())) > 1_990
    assert abs(np.mean(numbers) / field.half) < 0.05
    assert 0.45 < (numbers > 0).mean() < 0.55
