"""schedule-overlap on random programs: what it writes verifies, and gives the same bits."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from counting import op_counts
from overlap_programs import PROFILE, fenced, peak, total, with_profile
from random_overlap import DEVICES, random_arguments, random_program

from stablehlo_tools import bindings
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.transforms import schedule_overlap

# By seed: what a barrier cannot hold (15), ops without results (220, 231), what a reduction itself
# reads (256, 579), what begins behind one (144, 660).
ONCE_WRONG = (15, 144, 220, 231, 256, 579, 660)
OPTIONS = ("", "streams=0", "streams=2", "no-compute-reorder")
RUN = (0, 3, 4, 8, 9, 11)


@pytest.fixture(autouse=True)
def every_plan_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that hides too little: it must be right all the same."""
    monkeypatch.setattr(schedule_overlap, "_HIDES", -1.0)
    monkeypatch.setattr(schedule_overlap, "_WORTH", float("inf"))


def run(program: Artifact, values: list[list[Any]]) -> list[list[bytes]]:
    devices = jax.devices()[:DEVICES]
    executable = bindings.compile_for_devices(
        bindings.write_bytecode(program.module), DEVICES, 1, devices, partitioned=False
    )
    results = bindings.run_on_devices(executable, values, devices)
    return [[np.asarray(part).tobytes() for part in parts] for parts in results]


def check(seed: int) -> tuple[Artifact, Artifact]:
    """A random program before and after, verified, with each op that it had."""
    before = artifact.parse(random_program(seed)[0].encode())
    after = fenced(before, OPTIONS[seed % len(OPTIONS)])
    after.module.operation.verify()
    had, has = op_counts(before.module), op_counts(after.module)
    has.pop("stablehlo.optimization_barrier", None)
    assert had == has
    return before, after


@pytest.mark.parametrize("seed", [*range(14), *ONCE_WRONG])
def test_random_programs_verify_and_keep_their_ops(seed: int):
    check(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 3000))
def test_random_programs_verify_soak(seed: int):
    check(seed)


@pytest.mark.parametrize("seed", RUN)
def test_random_programs_keep_their_values(seed: int):
    before, after = check(seed)
    text, runs = random_program(seed)
    assert runs
    values = random_arguments(text, seed)
    assert run(before, values) == run(after, values)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3000, 3200))
def test_random_programs_keep_their_values_soak(seed: int):
    text, runs = random_program(seed)
    before, after = check(seed)
    if runs:
        values = random_arguments(text, seed)
        assert run(before, values) == run(after, values)


def test_the_same_bytes_come_out_every_time():
    program = artifact.parse(random_program(8)[0].encode())
    assert artifact.to_text(fenced(program).module) == artifact.to_text(fenced(program).module)


@pytest.mark.parametrize("seed", range(12))
def test_totals_do_not_grow(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    """Where vector ops are nearly free, so that what a barrier keeps from being fused is."""
    monkeypatch.undo()
    quick = with_profile(tmp_path, vector="0.001")
    before = artifact.parse(random_program(seed)[0].encode())
    after = fenced(before, hardware=quick)
    assert total(after, quick) <= 1.02 * total(before, quick)


@pytest.mark.parametrize("seed", range(12))
def test_the_memory_limit_holds_as_written(seed: int):
    before = artifact.parse(random_program(seed)[0].encode())
    limit = peak(before, PROFILE)
    after = fenced(before, f"memory-limit={(limit + 1) / 2**30:.15f}")
    assert peak(after, PROFILE) <= limit + 1
