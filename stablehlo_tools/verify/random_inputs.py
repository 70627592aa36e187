"""Random inputs: the same seed gives the same values, whatever the number of devices.

Pure NumPy and ml_dtypes.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from stablehlo_tools.verify.element_types import Array, ElementType, Kind, real_part

SPECIAL_SHARE = 1 / 8


def random_array(
    element: ElementType,
    shape: tuple[int, ...],
    key: tuple[int, ...],
    *,
    wide: bool = False,
    specials: bool = False,
) -> Array:
    """Random values of an element type; `key` is what the values depend on.

    Floats are normally distributed, scaled so that products of matrices keep about unit size: a
    program that overflows proves nothing. Integers are in [0, 8), which suits indices and trip
    counts; arrays of them are, where `wide`, in [-128, 128) as far as the type reaches. `specials`
    replaces about an eighth of the elements, one at least of two or more, by `special_values`.
    """
    rng = np.random.default_rng(key)
    if element.kind is Kind.COMPLEX:
        part = real_part(element)
        pairs = random_array(part, (*shape, 2), key, specials=specials)
        return pairs.view(element.dtype).reshape(shape)
    values = _ordinary(element, shape, rng, wide and bool(shape))
    if specials and element.kind is not Kind.BOOLEAN:
        chosen = rng.random(shape) < SPECIAL_SHARE
        if values.size > 1 and not chosen.any():
            chosen.flat[rng.integers(values.size)] = True
        table = special_values(element)
        values = np.where(chosen, table[rng.integers(len(table), size=shape)], values)
    return np.asarray(values, element.dtype)


def random_words(shape: tuple[int, ...], key: tuple[int, ...]) -> Array:
    """Uniform 32-bit words, which is what PRNG keys are made of."""
    return np.random.default_rng(key).integers(2**32, size=shape, dtype=np.uint32)


def special_values(element: ElementType) -> Array:
    """The values at the edges of an element type.

    Floats: quiet NaNs of several payloads and both signs, infinities, zeros, denormals and the
    largest and smallest normals. Integers: the extremes, 0 and -1. Signalling NaNs are left out:
    every processor quiets them where it likes.
    """
    if element.kind is not Kind.FLOAT:
        low, high = _integer_range(element)
        return np.array([low, high, 0, -1 if low else high - 1], element.dtype)
    if element.bits > 8:
        return _ieee_specials(element)
    patterns = np.arange(2**element.bits, dtype=np.uint8)
    values = patterns.view(element.dtype)
    wide = values.astype(np.float64)
    smallest = float(ml_dtypes.finfo(element.dtype).smallest_normal)
    largest = float(ml_dtypes.finfo(element.dtype).max)
    odd = ~np.isfinite(wide) | (np.abs(wide) < smallest) | (np.abs(wide) == largest)
    quiet_bit = 1 << max(ml_dtypes.finfo(element.dtype).nmant - 1, 0)
    signalling = np.isnan(wide) & (patterns & quiet_bit == 0) & _has_quiet_nan(wide, patterns)
    return values[odd & ~signalling]


def _ordinary(
    element: ElementType, shape: tuple[int, ...], rng: np.random.Generator, wide: bool
) -> Array:
    if element.kind is Kind.BOOLEAN:
        return rng.integers(2, size=shape).astype(np.bool_)
    if element.kind is not Kind.FLOAT:
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
    if element.kind is Kind.SIGNED:
        return -(1 << (element.bits - 1)), (1 << (element.bits - 1)) - 1
    return 0, (1 << element.bits) - 1


def _ieee_specials(element: ElementType) -> Array:
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
    patterns = [pattern | bit for pattern in magnitudes for bit in (0, sign)]
    return np.array(patterns, f"u{element.dtype.itemsize}").view(element.dtype)


def _has_quiet_nan(wide: Array, patterns: Array) -> bool:
    """Whether the type tells quiet from signalling NaNs; those with one NaN do not."""
    signs = patterns[np.isnan(wide)] >> 7
    return bool(signs.size > 2)
