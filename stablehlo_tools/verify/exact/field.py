"""Arithmetic modulo a prime, which replaces floats when two programs are compared.

A float is a fraction m * 2**e, so it has a residue modulo any odd prime. Residues are centred, in
[-half, half]. They also have an order: for small integers it is that of the floats, and other
residues are at arbitrary places between these. Pure NumPy.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stablehlo_tools.verify.element_types import Array

_LARGEST = 2**24  # so that a product of two residues has at most 48 bits
RESIDUE_BITS = 24
INTEGERS = 2**20 - 2**10  # residues below it are integers, not 1/8 or 1/16
_ENDS = 2**8  # places at the ends of the order that no integer reaches
_USUAL = 2**12  # the largest constant for which the scale is chosen
_TRIED_PRIMES = 40
_TRIED_CONSTANTS = 40
_LEAST_EXPONENT, _EXPONENTS = -1140, 2200  # of the floats m * 2**e with an integer m below 2**53
_NAN = 1_234_567
# The factors of a hash after each operand, and at the end.
MULTIPLIER, FINAL_MULTIPLIER = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_WORD = 2**64


@dataclass(frozen=True)
class Field:
    """The integers modulo a prime below 2**24.

    `scale` is the place of 1 in their order, from 0 to half the prime. Without it, hardly any
    residue would be between -1 and 1."""

    prime: int
    scale: int = 1

    @property
    def half(self) -> int:
        """The largest centred residue."""
        return (self.prime - 1) // 2

    @property
    def shift(self) -> int:
        """A multiple of the prime, plus `half`, that makes any x with |x| < 2**62 positive:
        remainder(x + shift, prime) - half is x, centred."""
        return self.half + self.prime * (2**62 // self.prime)

    def centre_residues(self, values: Array) -> Array:
        """Returns the centred residues of 64-bit integers."""
        residues = np.mod(values, self.prime)
        return np.where(residues > self.half, residues - self.prime, residues)

    @property
    def beyond(self) -> int:
        """The place in the order from which on integers are too large for the scale."""
        return self.half - INTEGERS - _ENDS

    def to_ordered(self, residues: Array) -> Array:
        """Returns integers that sort like the residues, and have these in their lowest bits.

        `FieldBuilder.to_ordered` computes the same on tensors.
        """
        return self.ordered_by(residues, self.scale)

    def ordered_by(self, residues: Array, scale: int | Array) -> Array:
        """Returns the integers of `ordered` for another scale, or for several."""
        size, images = np.abs(residues), residues * scale
        limited = np.clip(images, -self.beyond - size, self.beyond + size)
        places = np.where(size < INTEGERS, limited, self.centre_residues(images))
        return places * 2**RESIDUE_BITS + residues

    def residue(self, number: float) -> int:
        """Returns the centred residue of one float."""
        return int(self.residues(np.asarray(number, np.float64)))

    def residues(self, floats: Array) -> Array:
        """Returns the centred residues of floats, as int64.

        Infinities are the first and the last in the order; NaN is an ordinary residue."""
        wide = np.asarray(floats, np.float64)
        finite = np.isfinite(wide)
        fractions, exponents = np.frexp(np.where(finite, wide, 0.0))
        # Exact, because the fraction of a double has 53 bits.
        integers = np.mod((fractions * 2.0**53).astype(np.int64), self.prime)
        scales = self._powers_of_two[exponents - 53 - _LEAST_EXPONENT]
        residues = self.centre_residues(integers * scales)
        ends = np.where(wide > 0, self._last, -self._last)
        return np.where(finite, residues, np.where(np.isnan(wide), _NAN % self.half, ends))

    @cached_property
    def _last(self) -> int:
        places = np.arange(self.half, self.half - _ENDS, -1)
        residues = self.centre_residues(places * self.inverse(self.scale)).tolist()
        return next((each for each in residues if abs(each) >= INTEGERS), self.half)

    @cached_property
    def _powers_of_two(self) -> Array:
        power = pow(pow(2, -1, self.prime), -_LEAST_EXPONENT, self.prime)
        powers: list[int] = []
        for _ in range(_EXPONENTS):
            powers.append(power)
            power = 2 * power % self.prime
        return np.array(powers, np.int64)

    def inverse(self, number: int) -> int:
        """Returns the centred residue whose product with a number is 1; 0 for 0."""
        return int(self.centre_residues(np.asarray(pow(number, self.prime - 2, self.prime))))

    def random(self, rng: np.random.Generator, shape: Sequence[int]) -> Array:
        """Returns uniform random centred residues."""
        return rng.integers(-self.half, self.half, size=shape, endpoint=True)

    def root_of_unity(self, order: int) -> tuple[int, int]:
        """Returns a complex residue (real, imaginary) of this order with its conjugate as inverse.

        The prime must be one of `choose_field` for this order.
        """
        for real in range(2, self.prime):  # (1 + ri)/(1 - ri) has the norm 1 for each real r
            scale = pow(1 + real * real, -1, self.prime)
            unit = ((1 - real * real) * scale % self.prime, 2 * real * scale % self.prime)
            root = self._complex_power(unit, (self.prime + 1) // order)
            divisors = (q for q in range(2, order + 1) if order % q == 0)
            if all(self._complex_power(root, order // q) != (1, 0) for q in divisors):
                return root
        raise AssertionError(f"there is no root of the order {order}")

    def _complex_power(self, base: tuple[int, int], exponent: int) -> tuple[int, int]:
        power = (1, 0)
        while exponent:
            if exponent % 2:
                power = self._complex_product(power, base)
            base = self._complex_product(base, base)
            exponent //= 2
        return power

    def _complex_product(self, one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
        real = one[0] * other[0] - one[1] * other[1]
        imaginary = one[0] * other[1] + one[1] * other[0]
        return real % self.prime, imaginary % self.prime

    def fourier_matrix(self, size: int) -> tuple[Array, Array]:
        """Returns the real and imaginary parts of root**(j * k), centred: shape [size, size]."""
        root, power = self.root_of_unity(size), (1, 0)
        powers = np.empty((size, 2), np.int64)
        for exponent in range(size):
            powers[exponent] = power
            power = self._complex_product(power, root)
        table = self.centre_residues(powers)[np.outer(np.arange(size), np.arange(size)) % size]
        return table[..., 0], table[..., 1]


def choose_field(compared: Iterable[float], fourier_sizes: Iterable[int] = ()) -> Field | None:
    """Chooses a field that keeps the sign and the order of most constants of comparisons.

    In another field, `0 <= u < 0.9` could hold for no residue, and a dropout mask would be all
    zero. The scale puts many residues between the constants. Each of `fourier_sizes` gets a root of
    unity; None if no prime has them all.
    """
    compared = sorted({0.0, *compared}, key=lambda c: (abs(c), c))[:_TRIED_CONSTANTS]
    constants = np.array(sorted(compared))
    order = math.lcm(4, *fourier_sizes)
    # A norm-1 complex residue of an order exists if the order divides p + 1 and -1 is not a square.
    primes = filter(_is_prime, range(_LARGEST // order * order - 1, _LARGEST // 2, -order))
    tried = _TRIED_PRIMES if len(constants) > 1 else 1
    usual = max(1.0, *(abs(c) for c in compared if abs(c) <= _USUAL))
    scales = np.arange(65, 129) * 2 ** int(math.log2(_LARGEST / 8 / 128 / usual))

    def best_scale(prime: int) -> tuple[list[int], Field]:
        """Finds the best scale for a prime: by signs, by order, and by room between constants."""
        field = Field(prime)
        keys = field.ordered_by(field.residues(constants), scales[:, None])
        signs = (np.sign(keys) == np.sign(constants)).sum(1)
        pairs = np.triu(keys[:, :, None] < keys[:, None, :], 1).sum((1, 2))
        end = prime * 2 ** (RESIDUE_BITS - 1)
        room = np.diff(np.sort(keys), prepend=-end, append=end).min(1)
        best = np.lexsort((room, pairs, signs))[-1]
        return [int(each[best]) for each in (signs, pairs, room)], Field(prime, int(scales[best]))

    fields = list(map(best_scale, itertools.islice(primes, tried)))
    return max(fields, key=lambda each: each[0])[1] if fields else None


@dataclass(frozen=True)
class Hash:
    """An uninterpreted function: a mixing hash of 64-bit integers, which depends on its name.

    `FieldBuilder.hash_residues` computes the same on tensors."""

    name: str

    @property
    def salt(self) -> int:
        """A number below 2**62 that depends only on the name."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2

    def hash_numbers(self, field: Field, numbers: Sequence[int]) -> int:
        """Returns the hash of some numbers, in [-half, half]."""
        state = self.salt
        for number in numbers:
            state = (state ^ number % _WORD) * MULTIPLIER % _WORD
            state ^= state >> 29
        state = state * FINAL_MULTIPLIER % _WORD
        return (state >> 3) % field.prime - field.half


def _is_prime(number: int) -> bool:
    # Fermat's test rejects almost all others before the division by all factors.
    if number % 2 == 0 or pow(2, number - 1, number) != 1:
        return False
    return bool((number % np.arange(3, math.isqrt(number) + 1, 2)).all())
