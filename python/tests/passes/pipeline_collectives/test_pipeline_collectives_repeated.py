"""pipeline-collectives run again or elsewhere: the same bytes; on a model: the same executions."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jax.export import Exported
from kept_values import assert_kept, compared
from loop_programs import exported
from models.zoo import ZOO
from sink_programs import surveyed

import stablehlo_tools
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import key_of

DIRECTIONS = ("prefetch", "delay", "sink", "auto")
SUITED = {"prefetch": "remat-step", "delay": "sums", "sink": "sums", "auto": "sums"}
BITWISE = {"prefetch", "delay"}  # sink adds up in another order, and auto may sink
MODEL = "decoder-2d-scan-step"
OPTIONS: dict[str, Any] = {"fsdp": 8, "model": 1, "remat": True}


def moved(program: Exported, direction: str) -> Exported:
    return stablehlo_tools.transform(program, f"pipeline-collectives{{direction={direction}}}")


@functools.cache
def partitioned() -> Exported:
    """A training step whose layers are a scan, in both passes, with explicit collectives."""
    program = ZOO[MODEL].build(**OPTIONS)
    assert isinstance(program, Exported)
    return stablehlo_tools.transform(program, "partition{choices=shardy},create-reduce-scatter")


def executed(program: Exported) -> Counter[tuple[str, int | None]]:
    """How often a run executes each kind of collective, by the bytes that it makes."""
    text = artifact.from_exported(program)
    inline_all_calls(text.module)
    trips = {key_of(loop.body.loop): loop.trips for loop in surveyed(text)}
    counts: Counter[tuple[str, int | None]] = Counter()
    for found in find_collectives(text.module):
        counts[found.kind, found.bytes_out] += _times(found.op, trips)
    return counts


def _times(op: ir.Operation, trips: dict[Any, int | None]) -> int:
    times = 1
    while (around := op.parent) is not None:
        op = around.operation
        known = trips.get(key_of(op), 1)
        assert known is not None, "the loops of these programs have known trip counts"
        times *= known
    return times


def check_once_is_enough(before: Exported, direction: str) -> None:
    once = moved(before, direction)
    assert once.mlir_module() != before.mlir_module()
    assert moved(once, direction).mlir_module_serialized == once.mlir_module_serialized


@pytest.mark.parametrize(("direction", "name"), SUITED.items())
def test_a_second_run_changes_nothing(direction: str, name: str):
    check_once_is_enough(exported(name), direction)


@pytest.mark.soak
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_second_run_changes_nothing_in_a_model_soak(direction: str):
    check_once_is_enough(partitioned(), direction)


def in_a_process(path: Path, direction: str, seed: str) -> bytes:
    """What the pass makes of a file in a process whose hashes start from a seed."""
    steps = f"pipeline-collectives{{direction={direction}}}"
    command = [sys.executable, "-m", "stablehlo_tools.cli.main", "opt", str(path), "-p", steps]
    made = path.with_suffix(f".{seed}.jax_export")
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    subprocess.run([*command, "-o", str(made)], check=True, env=environment)
    return made.read_bytes()


@pytest.mark.parametrize(
    "direction",
    [pytest.param(d, marks=() if d == "auto" else pytest.mark.soak) for d in DIRECTIONS],
)
def test_two_processes_write_the_same_bytes(direction: str, tmp_path: Path):
    path = tmp_path / "sums.jax_export"
    path.write_bytes(exported("sums").serialize())
    first, second = (in_a_process(path, direction, seed) for seed in ("1", "2"))
    assert first == second


def test_prefetch_executes_what_the_model_executes():
    before = partitioned()
    after = moved(before, "prefetch")
    assert after.mlir_module() != before.mlir_module()
    assert executed(after) == executed(before)
    assert sum(executed(before).values()) > len(executed(before))


@pytest.mark.soak
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_model_keeps_its_values_soak(direction: str):
    before = partitioned()
    after = moved(before, direction)
    assert after.mlir_module() != before.mlir_module()
    outputs = compared(before, after, ZOO[MODEL].arguments(0, **OPTIONS))
    assert_kept(outputs, bitwise=direction in BITWISE)
