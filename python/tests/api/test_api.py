"""`stablehlo_tools.jit` behaves like `jax.jit` on the transformed program."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.api.jitted import Jitted
from stablehlo_tools.diagnostics import ToolError

X = np.arange(32, dtype=np.float32).reshape(8, 4)


def mesh(order: int = 1) -> Mesh:
    devices = np.array(jax.devices()[::order]).reshape(4, 2)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def summed(scale: int, x: jax.Array, *, shift: jax.Array) -> dict[str, jax.Array]:
    def local(block: jax.Array) -> jax.Array:
        return jax.lax.psum(block, "data") + jax.lax.axis_index("data")

    mapped = jax.shard_map(local, mesh=mesh(-1), in_specs=P("data"), out_specs=P("data"))
    return {"out": scale * mapped(x) + shift}


def test_like_jit_on_uncommitted_arguments_and_a_mesh_in_its_own_order():
    ours = stablehlo_tools.jit(summed, "thread-tokens", static_argnums=0)
    theirs = jax.jit(summed, static_argnums=0)
    shift = jnp.float32(2)
    result, expected = ours(3, X, shift=shift)["out"], theirs(3, X, shift=shift)["out"]
    assert np.asarray(result).tobytes() == np.asarray(expected).tobytes()
    assert result.sharding.is_equivalent_to(expected.sharding, 2)


def test_one_artifact_for_each_kind_of_call():
    ours = stablehlo_tools.jit(summed, "thread-tokens", static_argnames="scale")
    assert isinstance(ours, Jitted)
    ours(3, X, shift=1.0)
    ours(3, X + 1, shift=2.0)
    assert len(ours.calls) == 1
    ours(4, X, shift=1.0)
    ours(scale=4, x=X.astype(np.float16), shift=1.0)
    placed = jax.device_put(X, NamedSharding(mesh(-1), P(None, "model")))
    ours(4, placed, shift=1.0)
    assert len(ours.calls) == 4


def test_callable_inside_another_jit():
    ours = stablehlo_tools.jit(summed, "thread-tokens", static_argnums=0)
    inside = jax.jit(lambda x: ours(2, x, shift=x.sum())["out"].sum())(X)
    assert inside == jax.jit(lambda x: summed(2, x, shift=x.sum())["out"].sum())(X)


def test_export_gives_the_transformed_artifact():
    ours = stablehlo_tools.jit(summed, "thread-tokens", static_argnums=0)
    artifact = ours.export(
        2, jax.ShapeDtypeStruct((8, 4), jnp.float32), shift=jax.ShapeDtypeStruct((), jnp.float32)
    )
    assert "stablehlo_tools.token_link" in artifact.mlir_module()


def test_scalars_and_donation():
    ours = stablehlo_tools.jit(lambda x: x * 2, "thread-tokens", donate_argnums=0)
    assert ours(1.5) == 3.0
    given = jnp.ones((4,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_array_equal(ours(given), 2 * np.ones(4))


def test_a_bad_pipeline_is_refused_before_any_call():
    with pytest.raises(ToolError, match="unknown pass"):
        stablehlo_tools.jit(lambda x: x, "no-such-pass")


def test_unknown_attributes_are_attribute_errors():
    with pytest.raises(AttributeError):
        _ = stablehlo_tools.nothing  # type: ignore[attr-defined]


def test_code_of_other_platforms_still_folds_away():
    """The cusolver call of the CUDA branch has no handler on a CPU: it must be gone there."""
    plain = Mesh(np.array(jax.devices()).reshape(2, 4), ("d", "s"), axis_types=(AxisType.Auto,) * 2)

    def local(a: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.linalg.cholesky(a @ a.T + 8 * jnp.eye(8)), "s")

    mapped = jax.shard_map(local, mesh=plain, in_specs=P(), out_specs=P(), check_vma=False)
    exported = export.export(jax.jit(mapped), platforms=["cpu", "cuda"])(
        jax.ShapeDtypeStruct((8, 8), jnp.float32)
    )
    given = jax.device_put(np.eye(8, dtype=np.float32), NamedSharding(plain, P()))
    threaded = stablehlo_tools.transform(exported, "thread-tokens")
    before, after = (np.asarray(jax.jit(e.call)(given)) for e in (exported, threaded))
    np.testing.assert_allclose(before, after, rtol=1e-6)
