"""Pipelines of expand-pipeline as XLA:CPU, XLA:GPU and XLA:TPU schedule them, and their memory."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from jax.export import Exported
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from models.zoo import LAYER_SCANS

import stablehlo_tools
from stablehlo_tools.artifacts.artifact import from_exported
from stablehlo_tools.targets.compilation import Compilation, compile_artifact
from stablehlo_tools.targets.topologies import Target, missing_package

STAGES, LAYERS, BATCH, SEQUENCE, WIDTH = 4, 16, 64, 256, 512


def compiled(before: Exported, options: str, target: Target) -> Compilation:
    """A pipeline of a program, its collectives explicit, in the hands of a compiler."""
    missing = missing_package(target)
    if missing is not None:
        pytest.skip(f"{target.title} needs {missing}: pip install '.[aot]'")
    pipeline = f"expand-pipeline{{{options}}},partition"
    return compile_artifact(from_exported(stablehlo_tools.transform(before, pipeline)), target)


def quick_or_soak() -> list[Any]:
    """1F1B for each compiler; the others in the soak."""
    schedules = ("schedule=1f1b", "schedule=gpipe", "schedule=circular repeats=2 layout=pipeline")
    return [
        pytest.param(target, schedule, marks=[] if "1f1b" in schedule else [pytest.mark.soak])
        for schedule, target in product(schedules, Target)
    ]


@pytest.mark.parametrize(("target", "schedule"), quick_or_soak())
def test_activations_go_both_ways_in_the_order_of_the_program(target: Target, schedule: str):
    done = compiled(LAYER_SCANS["mlp-gradients"].build(), f"microbatches=4 {schedule}", target)
    kinds = [op.kind for op in done.tagged]
    assert kinds.count("collective_permute") == 2
    assert "all_gather" not in kinds
    assert "collective-permute" in done.text
    assert "all-gather" not in done.text


def step(weights: Any, batch: jax.Array) -> Any:
    """Loss and gradients of residual blocks."""

    def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    return jax.value_and_grad(lambda w: jnp.mean(lax.scan(layer, batch, w)[0] ** 2))(weights)


@pytest.mark.soak
def test_1f1b_keeps_as_many_microbatches_as_there_are_stages():
    mesh = AbstractMesh((STAGES,), ("stage",), axis_types=(AxisType.Auto,))

    def shape(sizes: tuple[int, ...], *axes: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))

    weights = {
        "up": shape((LAYERS, WIDTH, 4 * WIDTH), "stage"),
        "down": shape((LAYERS, 4 * WIDTH, WIDTH), "stage"),
    }
    before = export.export(jax.jit(step))(weights, shape((BATCH, SEQUENCE, WIDTH)))
    taken = {
        schedule: compiled(before, f"microbatches=16 schedule={schedule}", Target.TPU).memory
        for schedule in ("gpipe", "1f1b")
    }
    assert taken["1f1b"].temp_bytes <= 1.15 * STAGES / 16 * taken["gpipe"].temp_bytes
    assert taken["1f1b"].argument_bytes == taken["gpipe"].argument_bytes
