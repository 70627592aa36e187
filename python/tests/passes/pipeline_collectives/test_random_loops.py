"""pipeline-collectives on random loops: verified, the same bits, as many collectives run."""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_loops import random_loop_program

from stablehlo_tools import bindings
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.transforms.parts.pipeline_collectives import holding

SLOW = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
SHAPES = ((8, 4), (8, 4), (6, 8, 4), (6, 8, 4))


@pytest.fixture(autouse=True)
def every_plan_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it hides little: it must be right all the same."""
    monkeypatch.setattr(holding, "_LARGE", 0.0)
    monkeypatch.setattr(holding, "_LEAST_NS", -1.0)


def devices(text: str) -> int:
    return 8 if "num_partitions = 8" in text else 4


def arguments(text: str) -> list[list[Any]]:
    """Small numbers, others on each device where the program does not say how to divide them."""
    rng = np.random.default_rng(0)
    dtype = np.int32 if "x4xi32" in text else np.float32
    count = devices(text)
    values = [[rng.integers(-5, 6, s).astype(dtype) for _ in range(count)] for s in SHAPES]
    return [[v[0]] * count for v in values] if "sdy.manual" in text else values


def run(program: Artifact, text: str) -> list[list[bytes]]:
    there = jax.devices()[: devices(text)]
    executable = bindings.compile_for_devices(
        bindings.write_bytecode(program.module),
        1,
        len(there),
        there,
        partitioned="sdy.manual" in text,
        skipped_passes=bindings.REROUNDING_PASSES,
    )
    results = bindings.run_on_devices(executable, arguments(text), there)
    return [[np.asarray(part).tobytes() for part in parts] for parts in results]


def check(chosen: random.Random) -> None:
    """A random loop, moved in a random way, gives the same."""
    text = random_loop_program(chosen)
    before = artifact.parse(text.encode())
    after = before.copy()
    direction = chosen.choice(["prefetch", "prefetch", "delay", "delay", "auto"])
    options = f"distance={chosen.choice([1, 1, 2, 3])} hold={chosen.choice(['true', 'false'])}"
    pipeline = Pipeline.parse(f"pipeline-collectives{{direction={direction} {options}}}")
    pipeline.run(after.module, Diagnostics(), None)
    after.module.operation.verify()
    if artifact.to_text(after.module) != artifact.to_text(before.module):
        assert run(before, text) == run(after, text), f"{direction} {options}\n{text}"


@settings(max_examples=6, suppress_health_check=SLOW, derandomize=True)
@given(st.integers(0, 2**32))
def test_random_loops_keep_their_values(seed: int):
    check(random.Random(seed))


@pytest.mark.soak
@settings(max_examples=1000, suppress_health_check=SLOW)
@given(st.integers(0, 2**32))
def test_random_loops_keep_their_values_soak(seed: int):
    check(random.Random(seed))
