"""Loops over layers in a shard_map over other axes than that of the stages become pipelines."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from gpipe_programs import Case  # first: sets up the devices
from kept_values import run
from shard_map_steps import BOTH, MEGATRON, Form, Weights, mean_over, shard_map_step
from soaking import first

import jax  # isort: skip
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.diagnostics import ToolError

SHARDED: dict[str, P] = {name: P(None, "data") for name in MEGATRON}


def _clipped(value: Any, gradients: Weights) -> tuple[Any, Weights]:
    """By the global norm of what is joined over devices."""
    value, gradients = lax.pmean((value, gradients), "data")
    norm = sum((g * g).sum() for g in jax.tree.leaves(gradients)) ** 0.5
    return value, jax.tree.map(lambda g: g / (1.0 + norm), gradients)


def _counted(value: Any, gradients: Weights) -> tuple[Any, Weights]:
    """With a sum over devices of an integer that all have, moved."""
    value, gradients = lax.pmean((value, gradients), "data")
    count = (gradients["up"] > 0).sum()
    return value + 1e-3 * lax.psum(jnp.broadcast_to(count, (3,)), "data")[1], gradients


def _wrapped(value: Any, gradients: Weights) -> tuple[Any, Weights]:
    """With a float of a count that has wrapped around on each device."""
    count = (gradients["up"] > 0).sum() - 1000
    own = count.astype(jnp.uint32).astype(jnp.float32)
    value, gradients, total = lax.pmean((value, gradients, 1e-9 * own), "data")
    return value + total, gradients


FORMS: dict[str, Form] = {
    "megatron, unchecked": Form(axes=BOTH, tensor="model", specs=MEGATRON, checks=False),
    "sequence-parallel": Form(
        P(None, "model"), frozenset({"model"}), "model", scatters=True, specs=MEGATRON
    ),
    "ulysses, inside": Form(P(None, "data"), ulysses=True, checks=False, joined=mean_over("data")),
    "data": Form(),
    "data, unchecked, inside": Form(checks=False, joined=mean_over("data")),
    "two axes in one dimension": Form(P(("data", "model")), BOTH),
    "two axes in one dimension, inside": Form(
        P(("data", "model")), BOTH, checks=False, joined=mean_over(("data", "model"))
    ),
    "data, counted, inside": Form(checks=False, joined=_counted),
    "data, clipped, inside": Form(checks=False, joined=_clipped),
    "megatron": Form(axes=BOTH, tensor="model", specs=MEGATRON),
    "fully sharded": Form(gathers="data", specs=SHARDED),
    "fully sharded, unchecked": Form(gathers="data", specs=SHARDED, checks=False),
    "ulysses": Form(P(None, "data"), ulysses=True),
}


@pytest.mark.parametrize("name", first(2, FORMS))
@pytest.mark.parametrize("schedule", first(1, ["eager-1f1b", "gpipe"]))
def test_a_step_becomes_a_pipeline(name: str, schedule: str):
    """With partition behind it, for XLA's own partitioner may write what is a deadlock."""
    case = shard_map_step(FORMS[name])
    check(case, f"expand-pipeline{{microbatches=4 schedule={schedule}}},partition")


def check(case: Case, pipeline: str) -> None:
    after = stablehlo_tools.transform(case.exported, pipeline)
    assert "collective_permute" in after.mlir_module()
    values = run(case.exported, case.arguments), run(after, case.arguments)
    for before, own in zip(*values, strict=True):
        scale = float(np.abs(before).max())
        np.testing.assert_allclose(own, before, rtol=1e-4, atol=1e-5 * scale)


def test_a_schedule_that_skips_asks_for_partition_where_weights_are_divided():
    case, asked = shard_map_step(FORMS["fully sharded"]), '"data" divides values of the layers'
    with pytest.warns(UserWarning, match=asked):
        stablehlo_tools.transform(case.exported, "expand-pipeline{microbatches=4 schedule=1f1b}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stablehlo_tools.transform(case.exported, "expand-pipeline{microbatches=4}")
        stablehlo_tools.transform(
            case.exported, "expand-pipeline{microbatches=4 schedule=1f1b},partition"
        )


def _own(value: Any, gradients: Weights) -> tuple[Any, Weights]:
    return lax.pmean(value, "data"), gradients


def _by_rank(value: Any, gradients: Weights) -> tuple[Any, Weights]:
    weight = 1.0 + lax.axis_index("data").astype(np.float32)
    return lax.pmean((value * weight, gradients), "data")


def _squared(value: Any, gradients: Weights) -> tuple[Any, Weights]:
    return lax.psum(value * value, "data"), lax.pmean(gradients, "data")


def _largest(value: Any, gradients: Weights) -> tuple[Any, Weights]:
    return lax.pmax(value, "data"), lax.pmean(gradients, "data")


TAKEN = "it reads a term of a sum over devices before an all_reduce adds up the terms"


@pytest.mark.parametrize(
    ("joined", "why"),
    [
        (_own, "each device holds a term of a sum that no all_reduce completes"),
        (_wrapped, TAKEN),
        (_by_rank, "its value depends on the position of the device"),
        pytest.param(_squared, TAKEN, marks=pytest.mark.soak),
        pytest.param(_largest, TAKEN, marks=pytest.mark.soak),
    ],
)
def test_what_one_program_does_not_compute_is_refused(joined: Any, why: str):
    case = shard_map_step(Form(checks=False, joined=joined))
    with pytest.raises(ToolError) as raised:
        stablehlo_tools.transform(case.exported, "expand-pipeline{microbatches=4}")
    assert why in str(raised.value)
    assert 'axis "data" cannot be left to the partitioner (P2)' in str(raised.value)
