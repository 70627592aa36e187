"""Programs chosen by what a compiler says of them, not by what is expected."""

from __future__ import annotations

import itertools
import math

import pytest

from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.rematerialize.compiled_candidates import (
    CompiledRun,
    fastest_compiled,
)
from stablehlo_tools.transforms.parts.rematerialize.memory_price import PlanSetting, Tried

MOST = 6


class Curve:
    """Programs of 1 to 40 expected bytes, of which more are faster; a compiler with factors of its
    own, that counts what it is asked."""

    def __init__(self, factors: list[float], whole: float = 100.0) -> None:
        modules = [ir.Module.parse("module {}", ir.Context()) for _ in range(41)]
        self.base = Tried(None, modules[0], 1000.0, whole)
        self.programs = [
            Tried(PlanSetting(float(size)), modules[size], 1000.0 - size, float(size))
            for size in range(1, 41)
        ]
        self.sizes = {id(modules[0]): whole} | {
            id(each.module): each.peak_bytes for each in self.programs
        }
        self.factors = factors
        self.asked = 0

    def fastest(self, limit: float) -> Tried:
        fitting = [each for each in self.programs if each.peak_bytes <= limit]
        return fitting[-1] if fitting else self.programs[0]

    def compiled(self, module: ir.Module) -> CompiledRun:
        self.asked += 1
        size = self.sizes[id(module)]
        return CompiledRun(1000.0 - size, size * self.factors[int(size) % len(self.factors)])


@pytest.mark.parametrize("limit", [3.0, 10.0, 25.0, 55.0])
@pytest.mark.parametrize(
    "factors", [list(each) for each in itertools.product((0.7, 1.0, 1.4), repeat=3)]
)
def test_the_limit_is_the_compilers(factors: list[float], limit: float):
    """Whatever factors the compiler has, what is taken fits, and little more would have."""
    curve = Curve(factors)
    found = fastest_compiled(curve.base, curve.fastest, curve.compiled, limit)
    assert curve.asked <= MOST
    assert found.run.peak_bytes <= limit
    most = max(
        (each.peak_bytes for each in curve.programs if each.peak_bytes * max(factors) <= limit),
        default=1.0,
    )
    assert found.tried.peak_bytes >= 0.6 * most


def test_one_factor_takes_one_look():
    """Where the compiler is off by one factor, the program after the first is the best one."""
    curve = Curve([1.25])
    found = fastest_compiled(curve.base, curve.fastest, curve.compiled, 25.0)
    assert found.tried.peak_bytes == 20
    assert curve.asked <= 3


def test_where_nothing_fits_it_is_the_least():
    curve = Curve([2.0])
    found = fastest_compiled(curve.base, curve.fastest, curve.compiled, 1.0)
    assert found.tried.peak_bytes == 1
    assert found.run.peak_bytes == 2


def test_a_program_that_the_compiler_refuses_is_never_taken():
    curve = Curve([1.0])

    def compiled(module: ir.Module) -> CompiledRun:
        run = curve.compiled(module)
        return CompiledRun(math.inf, run.peak_bytes) if run.peak_bytes > 30 else run

    found = fastest_compiled(curve.base, curve.fastest, compiled, 35.0)
    assert found.run.ns < math.inf
