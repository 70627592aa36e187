"""How much memory every order of a graph needs, whatever it is.

While a task runs, all is alive that something before it made and something after it uses, where
"before" and "after" are what the dependences force. The most of that over the tasks is a bound; an
order that needs no more than that is the leanest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from stablehlo_tools.overlap.scheduling.problem import Problem
from stablehlo_tools.overlap.scheduling.reserve import Bytes

_GIB = 2**30
_DIGITS = 6


def least_bytes(problem: Problem) -> float:
    """No order of the tasks needs fewer bytes than this at its peak."""
    kept = _bits(problem.kept)
    made = [_bits(allocs) for allocs in problem.allocs]
    used = [_bits(reads) | kept for reads in problem.reads]
    before = _bits(problem.before)
    for task in range(problem.size):
        made[task] |= before
        for dep in problem.deps[task]:
            made[task] |= made[dep]
    for task in reversed(range(problem.size)):
        for user in problem.users[task]:
            used[task] |= used[user]
    sizes = np.array(problem.sizes, np.float64)
    least = _total(before, sizes)
    for task in range(problem.size):
        alive = _total(made[task] & used[task], sizes)
        least = max(least, alive + problem.within[task])
    return least


def gib(count: float) -> str:
    """Bytes in GiB with six digits, rounded up: as a limit it is enough."""
    if not count:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(count / _GIB)) + 1 - _DIGITS)
    digits = math.ceil(count / _GIB / unit)
    while float(f"{digits * unit:.{_DIGITS}g}") * _GIB < count:
        digits += 1
    return f"{digits * unit:.{_DIGITS}g}"


def _bits(storages: Iterable[int]) -> int:
    bits = 0
    for storage in storages:
        bits |= 1 << storage
    return bits


def _total(bits: int, sizes: Bytes) -> float:
    """The bytes of a set of storages."""
    packed = np.frombuffer(bits.to_bytes(len(sizes) // 8 + 1, "little"), np.uint8)
    return float(np.unpackbits(packed, bitorder="little")[: len(sizes)] @ sizes)
