"""Vector operations of an op for each element: one table for StableHLO and HLO.

An op that is not in the table has one. A polynomial has about as many as its length, a function of
several others has the sum of theirs. StableHLO's readers leave out ops that only move elements,
because compilers compute their positions where they are read.
"""

from __future__ import annotations

import math

OPERATIONS: dict[str, int] = {
    **dict.fromkeys(("divide", "sqrt", "rsqrt", "remainder"), 4),
    **dict.fromkeys(("exponential", "exponential_minus_one", "log", "log_plus_one", "cbrt"), 8),
    **dict.fromkeys(("logistic", "tanh", "erf", "erfc", "sine", "cosine", "tan"), 12),
    **dict.fromkeys(("power", "atan2", "acos", "asin", "atan"), 16),
    **dict.fromkeys(("acosh", "asinh", "atanh", "cosh", "sinh"), 16),
    **dict.fromkeys(("erf_inv", "bessel_i1e"), 24),
    **dict.fromkeys(("digamma", "lgamma", "polygamma", "zeta"), 40),
    # threefry2x32: 20 rounds of an addition, a rotation and an exclusive or give two words, and
    # five injections of the key add two numbers to each.
    **dict.fromkeys(("rng", "rng_bit_generator"), 40),
}


def element_operations(name: str) -> int:
    """Returns the operations for each element of an op's result, by the op's name in StableHLO."""
    return OPERATIONS.get(name, 1)


def sort_operations(length: int) -> float:
    """Returns the comparisons for each element of a bitonic sort of rows of this length.

    Source: Batcher, "Sorting networks and their applications", 1968; compilers for GPUs and TPUs
    sort so, because the order of comparisons does not depend on the elements."""
    depth = math.log2(max(2, length))
    return depth * (depth + 1) / 2
