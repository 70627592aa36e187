"""What jax derives from a `stablehlo_tools.jit`, and what contains one, is transformed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.api import transforming
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.passes.pipeline import Pipeline

PIPELINE = "partition{choices=shardy},create-reduce-scatter,thread-tokens"
LINK = "stablehlo_tools.token_link"
Call = Callable[..., Any]
MESH = Mesh(
    np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
)
W = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
X = np.linspace(-2, 1, 64, dtype=np.float32).reshape(8, 8)


def on(*axes: str | None) -> NamedSharding:
    return NamedSharding(MESH, P(*axes))


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    """FSDP: the rows of the weights lie over the axis of the batch, and are gathered."""
    return jnp.mean(jnp.tanh(jax.lax.with_sharding_constraint(x @ w, on("data"))) ** 2)


DIVIDED: dict[str, Any] = {"in_shardings": (on("data", "model"), on("data"))}


@pytest.fixture
def transformed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Of each program that is transformed: the function, the pipeline, the module after it."""
    seen: list[tuple[str, str, str]] = []
    original: Call = transforming.transform

    def recorded(program: export.Exported, pipeline: Pipeline) -> export.Exported:
        after = original(program, pipeline)
        seen.append((program.fun_name, str(pipeline), after.mlir_module()))
        return after

    monkeypatch.setattr(transforming, "transform", recorded)
    return seen


DERIVATIONS: dict[str, tuple[Callable[[Call], Any], int]] = {
    "grad": (lambda f: jax.grad(f)(W, X), 2),
    "value_and_grad": (lambda f: jax.value_and_grad(f, argnums=(0, 1))(W, X), 2),
    "jvp": (lambda f: jax.jvp(f, (W, X), (X, W)), 1),
    "linearize": (lambda f: jax.linearize(f, W, X)[1](X, W), 2),
    "vmap": (lambda f: jax.vmap(f, (None, 0))(W, np.stack([X, W])), 1),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(f), (None, 0))(W, np.stack([X, W])), 2),
    "grad of vmap": (
        lambda f: jax.grad(lambda w: jax.vmap(f, (None, 0))(w, np.stack([X, W])).sum())(W),
        2,
    ),
    "checkpoint": (lambda f: jax.grad(jax.checkpoint(f))(W, X), 3),
    "second derivative": (lambda f: jax.grad(lambda w: jax.grad(f)(w, X).sum())(W), 4),
    "jit of grad": (lambda f: jax.jit(jax.grad(f))(W, X), 2),
    "grad of jit": (lambda f: jax.grad(jax.jit(f))(W, X), 2),
    "scan": (
        lambda f: jax.lax.scan(lambda c, x: (c + f(W, x), c), jnp.float32(0), np.stack([X, W])),
        1,
    ),
    "grad of scan": (
        lambda f: jax.grad(
            lambda w: jax.lax.scan(lambda c, x: (c + f(w, x), c), jnp.float32(0), np.stack([X, W]))[
                0
            ]
        )(W),
        3,
    ),
}


# Between them they have every rule: of the rest, each takes its seconds.
QUICK = ("value_and_grad", "vmap of grad", "checkpoint", "scan", "jit of grad")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.soak) for c in DERIVATIONS]
)
def test_the_derived_programs_are_transformed(case: str, transformed: list[Any]) -> None:
    derive, programs = DERIVATIONS[case]
    ours = stablehlo_tools.jit(loss, PIPELINE, **DIVIDED)
    derive(ours)
    results = derive(ours)  # nothing is transformed anew
    expected = derive(jax.jit(loss, **DIVIDED))
    for given, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-7)
        assert given.sharding.is_equivalent_to(wanted.sharding, given.ndim), (
            given.sharding,
            wanted.sharding,
        )
    assert len(transformed) == programs
    assert sum(LINK in module for _, _, module in transformed) >= min(programs, 2)


def test_an_inner_one_is_part_of_the_outer_program(transformed: list[Any]) -> None:
    inner = stablehlo_tools.jit(loss, "strip-tokens", **DIVIDED)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(
            lambda w: inner(w, x) + jax.vmap(inner, (None, 0))(w, x[None])[0]
        )(w)

    ours = stablehlo_tools.jit(step, PIPELINE)
    outer = [jax.device_put(W, on("data", "model")), jax.device_put(X, on("data"))]
    result = ours(*outer)
    np.testing.assert_allclose(result, jax.jit(step)(*outer), rtol=1e-5, atol=1e-7)
    # The comparison has called the inner one within a `jax.jit`: by itself, as the programs show.
    assert [(name, pipeline) for name, pipeline, _ in transformed[:1]] == [("step", PIPELINE)]
    assert {(name, pipeline) for name, pipeline, _ in transformed[1:]} == {("loss", "strip-tokens")}


def test_a_constant_call_within_an_outer_one_is_part_of_it(transformed: list[Any]) -> None:
    inner = stablehlo_tools.jit(lambda x: x + 1, "strip-tokens")
    assert stablehlo_tools.jit(lambda y: inner(np.float32(1)) * y, "symbol-dce")(2.0) == 4.0
    assert [pipeline for _, pipeline, _ in transformed] == ["symbol-dce"]


def test_what_closes_over_tracers(transformed: list[Any]) -> None:
    def outer(jit: Call, w: jax.Array) -> jax.Array:
        return jit(lambda x: loss(w, x))(X) * 2

    given = jax.grad(lambda w: outer(lambda f: stablehlo_tools.jit(f, PIPELINE), w))(W)
    np.testing.assert_allclose(
        given, jax.grad(lambda w: outer(jax.jit, w))(W), rtol=1e-5, atol=1e-7
    )
    assert len(transformed) == 2


def test_programs_of_jaxprs_that_are_gone_are_forgotten() -> None:
    held: list[Any] = [W]
    ours = stablehlo_tools.jit(lambda x: held[0] * x, "strip-tokens")

    def scaled(w: jax.Array) -> jax.Array:
        held[0] = w
        return ours(X).sum()

    for _ in range(3):
        np.testing.assert_allclose(jax.grad(scaled)(W), X)
        ours.jitted.clear_cache()
    gc.collect()
    assert len(ours.calls) < 6


def test_custom_derivatives_hold() -> None:
    @jax.custom_vjp
    def clipped(x: jax.Array) -> jax.Array:
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))
    ours = stablehlo_tools.jit(lambda x: (clipped(x) * 5).sum(), "strip-tokens")
    np.testing.assert_array_equal(jax.grad(ours)(X), np.ones_like(X))


def test_donation_is_of_the_program_that_is_called_only() -> None:
    ours = stablehlo_tools.jit(lambda x: x**2, "strip-tokens", donate_argnums=0)
    given = jnp.asarray(X)
    np.testing.assert_allclose(jax.grad(lambda x: ours(x).sum())(given), 2 * X)
    assert not given.is_deleted()
    ours(given)
    assert given.is_deleted()


def test_the_outermost_of_a_shard_map_is_transformed(transformed: list[Any]) -> None:
    inner = stablehlo_tools.jit(lambda x: jax.lax.psum(x, "data"), "strip-tokens")
    mapped = jax.shard_map(inner, mesh=MESH, in_specs=P("data"), out_specs=P())
    np.testing.assert_allclose(
        stablehlo_tools.jit(mapped, "thread-tokens")(X), X.reshape(4, 2, 8).sum(0), rtol=1e-6
    )
    assert [pipeline for _, pipeline, _ in transformed] == ["thread-tokens"]
    with pytest.raises(ToolError, match=r"<lambda> is called inside jax\.shard_map"):
        jax.jit(mapped)(X)


def test_an_outer_export_holds_it_for_its_platforms(transformed: list[Any]) -> None:
    ours = stablehlo_tools.jit(loss, PIPELINE, **DIVIDED)
    exported = export.export(jax.jit(jax.grad(ours)), platforms=["tpu"])(W, X)
    assert exported.platforms == ("tpu",)
    assert exported.nr_devices == 8
    assert LINK in exported.mlir_module()


def test_explicit_shardings_are_kept() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))

    def types(jit: Call) -> list[str]:
        f = jit(lambda x: jnp.sin(x) @ W)
        return [str(jax.typeof(call(given))) for call in (f, jax.grad(lambda x: f(x).sum()))]

    with jax.set_mesh(mesh):
        given = jax.device_put(X, P("data"))
        assert types(lambda f: stablehlo_tools.jit(f, "strip-tokens")) == types(jax.jit)


def test_python_runs_where_jit_is_disabled() -> None:
    seen: list[Any] = []
    ours = stablehlo_tools.jit(lambda x: seen.append(x) or x, "strip-tokens")
    with jax.disable_jit():
        ours(X)
    assert isinstance(seen[0], np.ndarray)
