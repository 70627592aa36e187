"""Inputs that reach edge cases: residues for floats, and integers in and out of index ranges.

Floats are uniform residues in each input. Integers have one style after another.
"""

from __future__ import annotations

import enum
import math

import numpy as np

from stablehlo_tools.analysis.argument_ranges import steering_arguments
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import CONSTANTS, splat_element
from stablehlo_tools.ir.walk import ops_named
from stablehlo_tools.verify.element_types import Array, ElementKind, ElementType, element_type
from stablehlo_tools.verify.exact.field import Field
from stablehlo_tools.verify.random_inputs import random_words
from stablehlo_tools.verify.signatures import SignatureValue

_USUAL = 8  # the default range of integers without a known limit
_OUTSIDE = 1 / 4  # share of integers out of range in the style OUTSIDE
_LONGEST = 64  # longest trip count that a scalar may give a loop
_LARGEST = 2**31
_TRIED = 80  # most scalars tried for one program


class IntegerStyle(enum.Enum):
    """The range of random integers.

    In the three styles, a scalar index is below its limit, past it, and -1. Other scalars are
    several, 1 and 0, because they may be trip counts."""

    INSIDE = "inside of the range"
    OUTSIDE = "some of them outside"
    EQUAL = "all the same"


def make_input(
    value: SignatureValue,
    field: Field,
    key: tuple[int, ...],
    style: IntegerStyle,
    scalar: int | None = None,
) -> Array:
    """Returns random numbers for an input; `scalar`, if given, is the value of integer scalars."""
    if value.role == "key":
        return random_words(value.shape, key)
    element = element_type(value.element)
    if value.role != "data" or element is None:
        return np.zeros(value.shape, np.bool_ if element is None else element.dtype)
    rng = np.random.default_rng(key)
    if element.kind is ElementKind.COMPLEX:
        return field.random(rng, value.shape) + 1j * field.random(rng, value.shape)
    if element.kind is ElementKind.FLOAT:
        return field.random(rng, value.shape)
    if element.kind is ElementKind.BOOLEAN:
        return rng.integers(2, size=() if style is IntegerStyle.EQUAL else value.shape).astype(
            np.bool_
        ) | np.zeros(value.shape, np.bool_)
    if not value.shape and scalar is not None:
        return _in_type(np.asarray(scalar, np.int64), element)
    return _in_type(_integers(value, rng, style, element), element)


def fixed_input(value: SignatureValue, field: Field, number: float) -> Array:
    """Returns an input with one number in all elements; floats become its residue."""
    element = element_type(value.element)
    assert element is not None, value
    if not element.is_inexact:
        return np.full(value.shape, number).astype(element.dtype)
    stored = np.complex128 if element.kind is ElementKind.COMPLEX else np.int64
    return np.full(value.shape, field.residue(number), stored)


def _integers(
    value: SignatureValue, rng: np.random.Generator, style: IntegerStyle, element: ElementType
) -> Array:
    below = value.below or _USUAL
    if not value.shape:
        several = int(rng.integers(min(2, below - 1), below))
        outside = below + int(rng.integers(2)) if value.below else 1
        last = -1 if value.below else 0
        numbers = {IntegerStyle.INSIDE: several, IntegerStyle.OUTSIDE: outside}
        return np.asarray(numbers.get(style, last), np.int64)
    if style is IntegerStyle.EQUAL:
        return np.full(value.shape, rng.integers(below), np.int64)
    inside = rng.integers(below, size=value.shape)
    if style is IntegerStyle.INSIDE:
        return inside
    low = -below - 1 if element.kind is ElementKind.SIGNED else 0
    outside = rng.integers(low, 2 * below + 1, size=value.shape, endpoint=True)
    mixed = np.where(rng.random(value.shape) < _OUTSIDE, outside, inside)
    ends = [n for n in (below, -1, 0) if n >= low][: mixed.size]
    mixed.flat[rng.permutation(mixed.size)[: len(ends)]] = ends
    return mixed


def _in_type(values: Array, element: ElementType) -> Array:
    bits = element.bits
    if element.kind is ElementKind.SIGNED:
        return np.clip(values, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1).astype(element.dtype)
    return np.clip(values, 0, 2 ** min(bits, 62) - 1).astype(element.dtype)


def tempting_scalars(module: ir.Module) -> list[int]:
    """Returns values for integer scalars that may decide a branch, the smallest first.

    They are small numbers (indices of branches) and the program's constants, each with its
    neighbours. They are at most `_LONGEST` if a scalar decides a trip count."""
    found = set(range(_USUAL))
    for op in ops_named(module.operation, CONSTANTS):
        number = splat_element(op)
        if isinstance(number, ir.IntegerAttr):
            found.update((number.value - 1, number.value, number.value + 1))
        elif isinstance(number, ir.FloatAttr) and abs(number.value) < _LARGEST:
            found.update((math.floor(number.value), math.floor(number.value) + 1))
    below = _LONGEST if steering_arguments(module, of_loops=True) else _LARGEST
    return sorted(n for n in found if 0 <= n < below)[:_TRIED]
