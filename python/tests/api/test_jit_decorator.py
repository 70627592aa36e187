"""`stablehlo_tools.jit` as a decorator, and what `jax.jit` gives beside the call."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.diagnostics import ToolError

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
MESH = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
ROWS = NamedSharding(MESH, P("data"))
PIPELINE = "partition,thread-tokens"


@stablehlo_tools.jit(pipeline=PIPELINE, donate_argnums=0, static_argnames="power")
def stepped(state: dict[str, jax.Array], x: jax.Array, *, power: int, rate: Any = 0.5) -> Any:
    """One step."""
    x = jax.lax.with_sharding_constraint(x, ROWS)
    return {"w": state["w"] - rate * (x**power).mean(0, keepdims=True)}


def state() -> dict[str, jax.Array]:
    return {"w": jnp.asarray(X)}


def test_a_decorator_with_options() -> None:
    assert (stepped.__name__, stepped.__doc__) == ("stepped", "One step.")
    given = state()
    result = stepped(given, X, power=2)
    np.testing.assert_allclose(result["w"], X - 0.5 * (X**2).mean(0), rtol=1e-5, atol=1e-7)
    assert given["w"].is_deleted()
    with pytest.raises(ToolError, match="unknown pass"):
        stablehlo_tools.jit(pipeline="no-such-pass")


def test_methods_and_partials() -> None:
    class Model:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        @partial(stablehlo_tools.jit, pipeline="strip-tokens", static_argnums=0)
        def scaled(self, x: jax.Array) -> jax.Array:
            return (self.scale * x).sum()

    model = Model(3.0)
    np.testing.assert_allclose(jax.grad(model.scaled)(X), np.full_like(X, 3))
    assert Model.scaled.lower(model, X).out_info.shape == ()


def test_lower_is_of_the_transformed_program() -> None:
    lowered = stepped.lower(state(), X, power=3, rate=0.25)
    assert isinstance(lowered, jax.stages.Lowered)
    text = lowered.as_text()
    assert "jit_stepped" in text
    assert "stablehlo_tools.token_link" in text
    assert "stablehlo.all_reduce" in text
    compiled = lowered.compile()
    given = {"w": jax.device_put(X, NamedSharding(MESH, P()))}
    result = compiled(given, jax.device_put(X, NamedSharding(MESH, P())), rate=jnp.float32(0.25))
    np.testing.assert_allclose(result["w"], X - 0.25 * (X**3).mean(0), rtol=1e-5, atol=1e-7)
    assert given["w"].is_deleted()
    assert compiled.memory_analysis() is not None


def test_lower_takes_shapes_and_shardings() -> None:
    placed = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=ROWS)
    doubled = stablehlo_tools.jit(lambda x: x @ x, PIPELINE)
    lowered = doubled.lower(placed)
    assert lowered.compile().input_shardings[0][0].is_equivalent_to(ROWS, 2)
    traced = doubled.trace(placed)
    assert isinstance(traced, jax.stages.Traced)
    assert "artifact_call" in str(traced.jaxpr)
    assert doubled.eval_shape(placed).shape == (8, 8)


def test_weak_types_are_the_program_s() -> None:
    doubled = stablehlo_tools.jit(lambda x: x * 2, "strip-tokens")
    assert doubled.lower(1.0).as_text() == doubled.lower(2.0).as_text()
    assert doubled(1.0).weak_type is jax.jit(lambda x: x * 2)(1.0).weak_type
    assert doubled.lower(1.0).compile()(1.0) == 2.0


def test_inspect_is_the_command_s_report() -> None:
    found = stepped.inspect(state(), X, power=2, hardware="h100")
    document = json.loads(json.dumps(found.to_json()))
    program = document["programs"][0]
    assert program["hardware"].startswith("NVIDIA H100")
    assert [row["kind"] for row in program["collectives"]] == ["all_reduce"]
    assert "stepped" in str(found)
    assert "all_reduce" in str(found)
    with pytest.raises(ToolError, match="no-such"):
        stepped.inspect(state(), X, power=2, hardware="no-such")


def test_results_are_committed_where_those_of_jax_are() -> None:
    for given in (X, jnp.asarray(X), jax.device_put(X, jax.devices()[1]), jax.device_put(X, ROWS)):
        ours, theirs = (
            jit(lambda x: x * 2)(given)
            for jit in (partial(stablehlo_tools.jit, pipeline="strip-tokens"), jax.jit)
        )
        assert (ours.committed, ours.sharding) == (theirs.committed, theirs.sharding)
