"""Random inputs: the same seed gives the same values, on any number of devices.

Pure NumPy and ml_dtypes.
"""

from __future__ import annotations

import enum
import math

import ml_dtypes
import numpy as np

from stablehlo_tools.verify.element_types import Array, ElementKind, ElementType, real_part

SPECIAL_SHARE = 1 / 8
_LEAST = 1 / 64  # the least value of floats that must not be zero


class Specials(enum.Enum):
    """The special values that are mixed in.

    TAME leaves out values that spread: NaNs, infinities, the largest values, and integers, which
    may be indices. So the outputs of a program of many operations are not all NaN.
    """

    NONE = "none"
    TAME = "tame"
    ALL = "all"


def random_array(
    element: ElementType,
    shape: tuple[int, ...],
    key: tuple[int, ...],
    *,
    wide: bool = False,
    specials: Specials = Specials.NONE,
) -> Array:
    """Returns random values of an element type, which depend only on `key`.

    Floats are normally distributed, scaled so that products of matrices keep about unit size,
    because a program that overflows proves nothing. Integers are in [0, 8), which suits indices and
    trip counts; with `wide`, arrays of them are in [-128, 128), within the type's range. `specials`
    replace about an eighth of the elements, and at least one if there are two.
    """
    if element.kind is ElementKind.COMPLEX:
        part = real_part(element)
        pairs = random_array(part, (*shape, 2), key, specials=specials)
        return pairs.view(element.dtype).reshape(shape)
    rng = np.random.default_rng(key)
    values = _ordinary(element, shape, rng, wide and bool(shape))
    table = special_values(element, specials)
    if not table.size:
        return values
    chosen = rng.random(shape) < SPECIAL_SHARE
    if chosen.size > 1 and not chosen.any():
        chosen.flat[rng.integers(chosen.size)] = True
    picked = table[rng.integers(len(table), size=shape)]
    return np.asarray(np.where(chosen, picked, values), element.dtype)


def made_valid(values: Array, element: ElementType, below: int) -> Array:
    """Makes random values valid for most programs: floats above zero, indices below their limit.

    `below` is the limit of indices, 0 for none. Complex numbers are returned unchanged."""
    if element.kind is ElementKind.FLOAT:
        return np.asarray(np.abs(values.astype(np.float64)) + _LEAST).astype(element.dtype)
    if element.kind not in (ElementKind.SIGNED, ElementKind.UNSIGNED) or not below:
        return values
    return np.asarray(values.astype(np.int64) % below).astype(element.dtype)


def put_about_zero(values: Array, element: ElementType, below: int) -> Array:
    """Returns the values, which are on both sides of zero; signed indices in [-below, below).

    Negative indices count from the end of the range."""
    if element.kind is not ElementKind.SIGNED or not below:
        return values
    wide = values.astype(np.int64)
    return np.asarray(wide % below - np.where(wide % 2, below, 0)).astype(element.dtype)


def random_words(shape: tuple[int, ...], key: tuple[int, ...]) -> Array:
    """Returns uniform 32-bit words, for PRNG keys."""
    return np.random.default_rng(key).integers(2**32, size=shape, dtype=np.uint32)


def special_values(element: ElementType, specials: Specials = Specials.ALL) -> Array:
    """Returns the extreme values of an element type that is not complex; none for booleans.

    Floats: quiet NaNs of several payloads and both signs, infinities, zeros, denormals, the
    largest and the smallest normals. Integers: the extremes, 0 and -1. Signalling NaNs are left
    out, because processors may quiet them at any op.
    """
    if specials is Specials.NONE or element.kind is ElementKind.BOOLEAN:
        return np.array([], element.dtype)
    if element.kind is not ElementKind.FLOAT:
        if specials is Specials.TAME:
            return np.array([], element.dtype)
        low, high = _integer_range(element)
        return np.array([low, high, 0, -1 if low else high - 1], element.dtype)
    patterns = _ieee_patterns(element) if element.bits > 8 else _small_patterns(element)
    values = patterns.view(element.dtype)
    if specials is Specials.ALL:
        return values
    return values[np.abs(values.astype(np.float64)) <= _smallest_normal(element)]


def _ordinary(
    element: ElementType, shape: tuple[int, ...], rng: np.random.Generator, wide: bool
) -> Array:
    if element.kind is ElementKind.BOOLEAN:
        return rng.integers(2, size=shape).astype(np.bool_)
    if element.kind is not ElementKind.FLOAT:
        low, high = _integer_range(element)
        bounds = (max(low, -128), min(high, 127)) if wide else (0, min(high, 7))
        return rng.integers(*bounds, size=shape, endpoint=True).astype(element.dtype)
    if element.name == "f8E8M0FNU":  # powers of two, and nothing else
        return np.exp2(rng.integers(-3, 4, size=shape)).astype(element.dtype)
    precise = np.float64 if element.bits == 64 else np.float32
    values = rng.standard_normal(shape, dtype=precise)
    if len(shape) > 1 and element.bits >= 8:
        values = values / precise(math.sqrt(max(shape[-2], 1)))
    return np.asarray(values).astype(element.dtype)


def _integer_range(element: ElementType) -> tuple[int, int]:
    if element.kind is ElementKind.SIGNED:
        return -(1 << (element.bits - 1)), (1 << (element.bits - 1)) - 1
    return 0, (1 << element.bits) - 1


def _ieee_patterns(element: ElementType) -> Array:
    mantissa = ml_dtypes.finfo(element.dtype).nmant
    quiet = 1 << (mantissa - 1)
    infinity = ((1 << (element.bits - 1 - mantissa)) - 1) << mantissa
    magnitudes = [
        *(infinity | quiet | payload for payload in (0, 1, 0x2A, quiet - 1)),
        infinity,
        infinity - 1,  # the largest finite value
        1 << mantissa,  # the smallest normal
        (1 << mantissa) - 1,  # the largest denormal
        1,  # the smallest denormal
        0,
    ]
    sign = 1 << (element.bits - 1)
    return np.array(
        [magnitude | bit for magnitude in magnitudes for bit in (0, sign)],
        f"u{element.dtype.itemsize}",
    )


def _small_patterns(element: ElementType) -> Array:
    """Returns the bit patterns of special values, found among all patterns of the type."""
    patterns = np.arange(2**element.bits, dtype=np.uint8)
    values = patterns.view(element.dtype).astype(np.float64)
    size = np.abs(values)
    largest = size[np.isfinite(size)].max()
    special = ~np.isfinite(values) | (size < _smallest_normal(element)) | (size == largest)
    nan = np.isnan(values)
    if nan.sum() > 2:  # no more than one of each sign: then they are all quiet
        quiet = 1 << (ml_dtypes.finfo(element.dtype).nmant - 1)
        special &= ~nan | (patterns & quiet != 0)
    return patterns[special]


def _smallest_normal(element: ElementType) -> float:
    return float(ml_dtypes.finfo(element.dtype).smallest_normal)
