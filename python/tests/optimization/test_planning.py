"""Plans of real exported steps: what is divided, what stays, and that values are the same."""

from __future__ import annotations

import itertools
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.artifacts.artifact import from_exported
from stablehlo_tools.cli.main import main
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.optimization.plan_request import PlanRequest, parse_specs
from stablehlo_tools.optimization.planning import NoPlanError, plan
from stablehlo_tools.verify.verification import verify_artifacts
from stablehlo_tools.verify.verification_job import Options

LAYERS = 4

by_model = partial(stablehlo_tools.plan, budget=0)


def step_of(width: int, rows: int, layers: int = LAYERS) -> export.Exported:
    """A training step with momentum, layers in a scan, for one device and without shardings."""

    def step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        def loss(weights: dict[str, jax.Array]) -> jax.Array:
            def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
                return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

            return jnp.mean(jax.lax.scan(layer, batch, weights)[0] ** 2)

        value, gradient = jax.value_and_grad(loss)(state["w"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], gradient)
        weights = jax.tree.map(lambda w, m: w - 1e-3 * m, state["w"], momentum)
        return {"w": weights, "m": momentum}, value

    shapes = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    jitted = jax.jit(step, donate_argnums=0)
    return export.export(jitted)({"w": weights, "m": weights}, batch)


def test_rows_are_divided_if_weights_are_small():
    planned = by_model(step_of(1024, 2**20), "h100", 8)
    assert planned.mesh == {"data": 8}
    ((_, batch), _) = planned.specs
    assert batch == P("data", None)
    assert planned.exported.nr_devices == 8


def test_weights_are_divided_if_they_do_not_fit_otherwise():
    exported = step_of(8192, 2**16, layers=16)  # 64 GiB of weights and momentum
    planned = by_model(exported, "h100", 8)
    ((state, _), _) = planned.specs
    assert all(any(spec) for spec in jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, P)))
    assert planned.to_json()["peak_bytes"] < 80e9


def test_state_keeps_its_division_and_momentum_may_have_its_own():
    planned = by_model(step_of(4096, 2**15), "h100", 8)
    exported = planned.exported
    state = len(jax.tree.leaves(planned.specs[0][0], is_leaf=lambda s: isinstance(s, P)))
    given, returned = exported._in_named_shardings, exported._out_named_shardings
    assert given[:state] == returned[:state]


@pytest.mark.parametrize("devices", [2, 3, 6, 7, 16])
def test_values_are_those_of_one_device(devices: int):
    exported = step_of(16, 48)
    found = plan(from_exported(exported), PlanRequest(load_hardware("h100"), devices))
    given = from_exported(exported), from_exported(found.artifact.to_exported())
    assert verify_artifacts(*given, Options(trials=1)).same


def test_the_answer_is_as_good_as_each_division_by_hand():
    """Brute force, by the model: all divisions of weights and rows over a mesh of 2 x 2."""
    exported = step_of(1024, 2**13, layers=2)
    hardware, axes = load_hardware("h100"), (("data", 2), ("model", 2))
    given = from_exported(exported)
    best = plan(given, PlanRequest(hardware, 4, axes=axes, passes="")).best.choices.ns
    weights = ("P()", "P(None, 'data')", "P(None, 'model')", "P(None, None, 'model')")
    rows = ("P('data')", "P(('data', 'model'))", "P()")
    for up, down, batch in itertools.product(weights, weights[:3], rows):
        keep = [f"state['w']['up']={up}", f"state['w']['down']={down}", f"batch={batch}"]
        request = PlanRequest(hardware, 4, axes=axes, keep=parse_specs(keep, axes), passes="")
        by_hand = plan(given, request).best.choices.ns
        assert best <= 1.03 * by_hand, keep


def test_what_is_kept_is_kept():
    exported = step_of(64, 64)
    keep = ["state['w']['up']=P(None, None, 'model')", "batch=P('data')"]
    planned = by_model(exported, "h100", 4, axes={"data": 2, "model": 2}, keep=keep)
    ((state, batch), _) = planned.specs
    assert state["w"]["up"] == P(None, None, "model")
    assert batch == P("data", None)


def test_a_limit_that_nothing_meets_says_the_least_memory():
    with pytest.raises(NoPlanError, match=r"the least memory found is .* MiB a device"):
        by_model(step_of(512, 512), "h100", 2, memory_limit=0.001)


def test_shardings_of_the_export_stay():
    exported = step_of(64, 64)
    axes = {"data": 2, "model": 2}
    keep = ["state['w']['up']=P(None, None, 'model')", "batch=P('data')"]
    stated = by_model(exported, "h100", 4, axes=axes, keep=keep, passes="")
    planned = by_model(stated.exported, "h100", 4)
    assert planned.mesh == axes
    assert planned.specs == stated.specs


@pytest.mark.parametrize("devices", [4, 8])
def test_a_pipeline_has_the_values_of_one_device(devices: int):
    exported = step_of(16, 128, layers=8)
    planned = by_model(exported, "h100", devices, pipeline="always")
    assert "stage" in planned.mesh
    ((state, _), _) = planned.specs
    assert state["w"]["up"][0] == "stage"
    given = from_exported(exported), from_exported(planned.exported)
    assert verify_artifacts(*given, Options(trials=1)).same


def test_a_pipeline_is_a_program_for_each_rank(tmp_path: Path):
    source, ranks = tmp_path / "step.jax_export", tmp_path / "ranks"
    source.write_bytes(step_of(16, 128, layers=8).serialize())
    words = [
        "--hardware",
        "h100",
        "--budget",
        "0",
        "--devices",
        "4",
        "--pipeline",
        "always",
        "--ranks",
        str(ranks),
    ]
    assert main(["plan", str(source), *words]) == 0
    assert main(["check-mpmd", str(ranks), "--of", str(source)]) == 0


def test_residuals_are_recomputed_if_memory_is_short():
    exported = step_of(256, 2**16, layers=8)
    roomy = by_model(exported, "h100", 4)
    peak = roomy.to_json()["peak_bytes"] / 2**30
    tight = by_model(exported, "h100", 4, memory_limit=0.7 * peak)
    told = tight.to_json()
    assert "rematerialize" in told["passes"] or "accumulate-gradients" in told["passes"]
    assert told["peak_bytes"] <= 0.7 * peak * 2**30


def test_the_gap_bounds_what_another_division_may_gain():
    found = plan(from_exported(step_of(1024, 2**13)), PlanRequest(load_hardware("h100"), 4))
    assert 0 <= found.gap < 1
    for each in found.candidates:
        assert each.choices.least_ns <= each.choices.ns


def test_the_compiler_of_the_hardware_decides_within_the_budget():
    told = stablehlo_tools.plan(step_of(256, 2**14), "h100", 4).to_json()
    assert told["timed_by"] == "XLA:GPU", "the extra aot is installed for tests"
    assert told["total_ns"] == min(each["total_ns"] or math.inf for each in told["candidates"])
    assert by_model(step_of(256, 2**14), "h100", 4).to_json()["timed_by"] != "XLA:GPU"


def test_random_keys_are_divided_without_their_words():
    def step(weights: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        noise = jax.vmap(lambda key: jax.random.normal(key, (4096,)))(keys)
        folded = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
        return weights + jnp.tanh(noise @ weights).mean(), folded

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4096))
    weights = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    exported = export.export(jax.jit(step))(weights, keys)
    assert "@empty_mesh" in exported.mlir_module(), "jax states a mesh for one device"
    planned = by_model(exported, "h100", 4, axes={"data": 4}, keep=["keys=P('data')"])
    again = export.deserialize(planned.exported.serialize())
    assert again.in_avals[1].ndim == 1
    assert verify_artifacts(from_exported(exported), planned.plan.artifact, Options(trials=1)).same
    assert planned.specs[0][1] == P("data")


def test_a_profile_of_ones_own_is_used_by_the_passes(tmp_path: Path):
    profile = tmp_path / "own.toml"
    profile.write_text('extends = "h100"\nname = "own"\ntitle = "own"\n')
    planned = by_model(step_of(256, 2**12, layers=2), str(profile), 4)
    assert f"partition{{hardware={profile}}}" in planned.to_json()["passes"]


def test_jit_plans_for_all_devices():
    def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(weights)
        return weights - gradient, value

    planned = stablehlo_tools.jit(step, "", plan="auto", hardware="h100", donate_argnums=0)
    weights = jax.random.normal(jax.random.key(0), (32, 32))
    batch = jax.random.normal(jax.random.key(1), (64, 32))
    expected, mine = weights, jnp.copy(weights)
    for _ in range(3):
        expected, value = jax.jit(step)(expected, batch)
        mine, mean = planned(mine, batch)
        assert jnp.allclose(value, mean)
    assert jnp.allclose(expected, mine, atol=1e-6)
    assert planned.export(weights, batch).nr_devices == len(jax.devices()) > 1
    with pytest.raises(ToolError, match="plans a whole program"):
        jax.grad(lambda w: planned(w, batch)[1])(weights)


def test_a_divided_export_is_planned_anew_only_if_asked():
    planned = by_model(step_of(64, 64), "h100", 4, passes="")
    with pytest.raises(ToolError, match="for 4 devices already"):
        by_model(planned.exported, "h100", 2)
    again = by_model(planned.exported, "h100", 2, replan=True)
    assert again.exported.nr_devices == 2


def test_the_same_plan_each_time():
    exported = step_of(1024, 4096)
    texts = [
        json.dumps({**by_model(exported, "h100", 8).to_json(), "seconds": 0}) for _ in range(2)
    ]
    assert texts[0] == texts[1]
