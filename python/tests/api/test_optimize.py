"""`stablehlo_tools.optimize`, and `jit` with pipeline="auto"."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.api import jitted, optimizing
from stablehlo_tools.artifacts.artifact import Artifact, from_exported
from stablehlo_tools.diagnostics import ToolError

MESH = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
ROWS = NamedSharding(MESH, P("data"))
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the search is asked; it answers that tokens are fastest."""
    seen: list[dict[str, Any]] = []

    def found(exported: export.Exported, target: str, hardware: str | None, **rest: Any) -> Any:
        seen.append({"target": target, "hardware": hardware, "of": exported.fun_name, **rest})
        return SimpleNamespace(
            exported=stablehlo_tools.transform(exported, "partition,thread-tokens")
        )

    monkeypatch.setattr(optimizing, "optimize", found)
    return seen


def scaled(w: jax.Array, x: jax.Array) -> jax.Array:
    return (jax.lax.with_sharding_constraint(x, ROWS) @ w).sum()


def test_auto_searches_once_for_each_kind_of_call(asked: list[dict[str, Any]]) -> None:
    @stablehlo_tools.jit(hardware="tpu-v5e", budget=9.0)
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return scaled(w, x)

    rest = {"memory_limit": None, "budget": 9.0, "candidates": None}
    for _ in range(2):
        np.testing.assert_allclose(step(X, X), np.sum(X @ X), rtol=1e-4)
    assert asked == [{"target": "tpu", "hardware": "tpu-v5e", "of": "step", **rest}]
    jax.grad(step)(X, X)
    assert len(asked) == 3
    text = stablehlo_tools.jit(scaled, target="gpu").lower(X, X).as_text()
    assert "stablehlo_tools.token_link" in text
    assert (asked[-1]["target"], asked[-1]["hardware"]) == ("gpu", None)


def test_auto_is_for_the_device_that_jax_runs_on(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = stablehlo_tools.jit(scaled)
    with pytest.raises(ToolError, match="none is known for 'cpu': name the hardware") as raised:
        step(X, X)
    assert raised.value.input_name == "scaled"
    called = SimpleNamespace(device_kind="TPU v6 lite")
    monkeypatch.setattr(jitted.jax, "devices", lambda: [called])
    step.export(X, X)
    assert (asked[0]["target"], asked[0]["hardware"]) == ("tpu", "tpu-v6e")


def test_the_search_s_options_are_not_a_pass_s() -> None:
    with pytest.raises(ToolError, match="hardware, candidates needs pipeline='auto'"):
        stablehlo_tools.jit(scaled, "fsdp", hardware="h100", candidates=3)
    with pytest.raises(ToolError, match="no-such"):
        stablehlo_tools.jit(scaled, hardware="no-such")(X, X)


def test_a_target_that_nothing_is_known_of() -> None:
    exported = export.export(jax.jit(scaled))(X, X)
    with pytest.raises(ToolError, match="target 'cpu': a program is optimized for gpu or tpu"):
        stablehlo_tools.optimize(exported, target="cpu")
    with pytest.raises(ToolError, match="XLA:GPU does not compile for tpu-v5e"):
        stablehlo_tools.optimize(exported, target="gpu", hardware="tpu-v5e")
    with pytest.raises(ToolError, match="it is not known where the step will run"):
        stablehlo_tools.optimize(exported)


@pytest.mark.soak
def test_a_real_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STABLEHLO_TOOLS_CACHE", str(tmp_path))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ w

    divided: dict[str, Any] = {"in_shardings": (ROWS, ROWS)}
    shapes = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    exported = export.export(jax.jit(step, **divided))(shapes, shapes)
    found = stablehlo_tools.optimize(exported, target="gpu", candidates=2)
    assert found.after.total_ns <= found.before.total_ns
    assert (found.exported is exported) == (not found.pipeline)
    assert "scheduled by XLA:GPU" in str(found.report)
    assert found.report.to_json()["pipeline"] == found.pipeline
    assert found.report.to_html().startswith("<!")
    given = from_exported(exported)
    again = stablehlo_tools.optimize(given, target="gpu", candidates=2)
    assert isinstance(again.exported, Artifact)
    assert (again.pipeline, again.after) == (found.pipeline, found.after)
    ours = stablehlo_tools.jit(step, target="gpu", candidates=1, **divided)
    weights = np.eye(1024, dtype=jnp.bfloat16)
    np.testing.assert_allclose(
        np.asarray(ours(weights, weights), np.float32), np.tanh(1) * np.eye(1024), atol=1e-2
    )
