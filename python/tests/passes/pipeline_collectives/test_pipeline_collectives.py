"""pipeline-collectives on loops that JAX writes: the same bits, and what moved."""

from __future__ import annotations

import pytest
from kept_values import run
from loop_programs import PROGRAMS, exported, whole_numbers

import stablehlo_tools

AHEAD = ("scan", "unroll", "reverse", "fori", "negative-index", "while-down", "nested", "cond")
STEPS = ("scan-step", "remat-step")
SIMILAR = ("unroll", "fori", "while-down")  # for `make soak`: much as the others


def check(name: str, options: str, *, changes: bool, **export: object) -> None:
    before = exported(name, **export)
    after = stablehlo_tools.transform(before, f"pipeline-collectives{{{options}}}")
    assert (after.mlir_module() != before.mlir_module()) == changes
    if changes:
        first, second = run(before, whole_numbers()), run(after, whole_numbers())
        assert any(array.any() for array in first)
        assert [a.tobytes() for a in first] == [a.tobytes() for a in second]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.soak if n in SIMILAR else ()) for n in AHEAD + STEPS]
)
def test_gathers_go_ahead(name: str):
    check(name, "direction=prefetch", changes=True)


@pytest.mark.parametrize("name", ["sums", *STEPS])
def test_sums_end_late(name: str):
    check(name, "direction=delay", changes=True)


@pytest.mark.parametrize("name", ["ring", "unroll"])
def test_what_cannot_go_two_ahead_stays(name: str):
    check(name, "direction=prefetch distance=2", changes=False)


def test_donated_arguments():
    check("scan", "direction=prefetch", changes=True, donate_argnums=(1,))


def test_what_stands_in_equal_branches_by_platform_moves():
    check("scan", "direction=prefetch", changes=True, platforms=("cpu", "cuda"))


@pytest.mark.soak
@pytest.mark.parametrize("options", ["direction=auto", "direction=delay distance=2"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_keeps_its_values_soak(name: str, options: str):
    before = exported(name)
    after = stablehlo_tools.transform(before, f"pipeline-collectives{{{options}}}")
    first, second = run(before, whole_numbers()), run(after, whole_numbers())
    assert [a.tobytes() for a in first] == [a.tobytes() for a in second]
