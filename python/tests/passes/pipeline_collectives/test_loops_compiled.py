"""pipeline-collectives as XLA:GPU and XLA:TPU schedule it: a scan over layers of FSDP weights.

The schedules are read by `benchmarks/loops_compiled.py`, which measures whole models.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tree import BENCHMARKS

from stablehlo_tools.api.transforming import run_pipeline
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.targets.topologies import Target, missing_package

DEVICES, LAYERS, WIDTH, ROWS = 8, 6, 4096, 8192
GATHERED = 2 * WIDTH * WIDTH * 2  # bytes of a layer's two weights
HARDWARE = {Target.GPU: "h100", Target.TPU: "tpu-v5e"}
DEVICE_KINDS = [
    pytest.param(
        target,
        id=target.value,
        marks=[
            pytest.mark.skipif(
                missing_package(target) is not None,
                reason=f"{target.title} needs {missing_package(target)}: pip install '.[aot]'",
            ),
            *([pytest.mark.soak] if target is Target.TPU else []),  # half a minute
        ],
    )
    for target in HARDWARE
]


def _benchmark() -> ModuleType:
    path = BENCHMARKS / "loops_compiled.py"
    spec = importlib.util.spec_from_file_location("loops_compiled", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


benchmark: Any = _benchmark()


@pytest.fixture(scope="module")
def scan() -> Artifact:
    """Two products a layer, each with a weight that is gathered first."""

    def layer(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        first, second = (lax.all_gather(w, "data", tiled=True) for w in weights)
        return jnp.tanh(jnp.tanh(x @ first) @ second), None

    def forward(x: jax.Array, *weights: jax.Array) -> jax.Array:
        after: tuple[jax.Array, Any] = lax.scan(layer, x, weights)
        return after[0]

    mesh = AbstractMesh((DEVICES,), ("data",))
    rows, shards = P("data"), P(None, "data")
    mapped: Any = jax.shard_map(
        forward, mesh=mesh, in_specs=(rows, shards, shards), out_specs=rows, check_vma=False
    )
    x = _placed((DEVICES * ROWS, WIDTH), NamedSharding(mesh, rows))
    weight = _placed((LAYERS, WIDTH, WIDTH), NamedSharding(mesh, shards))
    program = artifact.from_exported(export.export(jax.jit(mapped))(x, weight, weight), "scan")
    run_pipeline(program, Pipeline.parse("partition,create-reduce-scatter"))
    return program


def _placed(shape: tuple[int, ...], sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)


@pytest.mark.parametrize("target", DEVICE_KINDS)
def test_what_a_scan_gathers_is_hidden(scan: Artifact, target: Target) -> None:
    pipelined = scan.copy()
    steps = f"pipeline-collectives{{direction=prefetch hardware={HARDWARE[target]}}}"
    run_pipeline(pipelined, Pipeline.parse(steps))
    before = benchmark.compiled(scan, target.value, HARDWARE[target])
    after = benchmark.compiled(pipelined, target.value, HARDWARE[target])
    assert after.gathers >= 2, "both gathers are in the loop still"
    assert after.total <= before.total
    if target is Target.GPU:
        assert after.peak <= before.peak + GATHERED
        assert before.bare >= 1
        assert after.bare == 0
        assert after.exposed <= before.exposed / 2
