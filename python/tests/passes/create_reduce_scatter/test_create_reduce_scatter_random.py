"""create-reduce-scatter on random programs for eight devices: the collectives that are expected
after it, and bitwise the same values. Sums are of small whole numbers, so exact in any order.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from soaking import first
from test_create_reduce_scatter_offsets import DEVICES, Module
from test_create_reduce_scatter_programs import random_module

from stablehlo_tools import bindings
from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.passes.pipeline import Pipeline


def after(program: Artifact) -> Artifact:
    result = program.copy()
    transforming.run_pipeline(result, Pipeline.parse("create-reduce-scatter"))
    return result


def collectives(program: Artifact) -> list[str]:
    """The kinds of the module's collectives, sorted."""
    kinds = "all_reduce|all_gather|all_to_all|reduce_scatter|collective_permute"
    return sorted(re.findall(rf'"stablehlo\.({kinds})"', artifact.to_text(program.module)))


def arguments(module: Module) -> list[list[Any]]:
    """Small whole numbers for each argument and device; the same scalars everywhere."""
    rng = np.random.default_rng(module.count)
    types: dict[str, Any] = {
        "f32": np.float32,
        "f64": np.float64,
        "bf16": jax.numpy.bfloat16,
        "i32": np.int32,
        "ui8": np.uint8,
        "i1": np.bool_,
    }
    values: list[list[Any]] = []
    for kind in module.arguments:
        *shape, element = kind[len("tensor<") : -1].split("x")
        made = [
            rng.integers(0, 3, [int(size) for size in shape]).astype(types[element])
            for _ in range(DEVICES)
        ]
        values.append(made if shape else made[:1] * DEVICES)
    return values


def run(program: Artifact, module: Module) -> list[list[bytes]]:
    devices = jax.devices()[:DEVICES]
    executable = bindings.compile_for_devices(
        bindings.write_bytecode(program.module),
        module.replicas,
        module.partitions,
        devices,
        partitioned=False,
    )
    results = bindings.run_on_devices(executable, arguments(module), devices)
    return [[np.asarray(part).tobytes() for part in parts] for parts in results]


def check(seed: int) -> None:
    module = random_module(seed)
    before = artifact.parse(module.text().encode())
    done = after(before)
    text = artifact.to_text(done.module, locations=True)
    assert collectives(done) == sorted(module.expected), module.text()
    assert artifact.to_text(after(done).module, locations=True) == text
    with jax.enable_x64(True):
        assert run(before, module) == run(done, module), module.text()


@pytest.mark.parametrize("seed", first(4, range(12)))
def test_expected_collectives_and_values(seed: int):
    check(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_expected_collectives_and_values_soak(seed: int):
    check(seed)
