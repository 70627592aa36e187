"""Loops in which some mesh axes are left free: sharding constraints stand on every value, counters
included."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from kept_values import run

import stablehlo_tools


def _exported() -> export.Exported:
    """An FSDP scan over five layers, manual along `data` alone."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))

    def local(weights: Any, x: Any) -> Any:
        def layer(x: Any, weight: Any) -> tuple[Any, Any]:
            whole = lax.all_gather(weight, "data", tiled=True)
            return jnp.abs(x @ whole), x.sum()

        x, sums = lax.scan(layer, x, weights)
        return x + sums.sum()

    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(None, "data"), P("data")),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )
    shapes = ((5, 16, 16), P(None, "data", "model")), ((8, 16), P("data"))
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in shapes
    ]
    return export.export(jax.jit(step))(*arguments)


@pytest.mark.parametrize("distance", [1, 3])
def test_gathers_go_ahead_beside_free_axes(distance: int):
    before = _exported()
    options = f"direction=prefetch distance={distance}"
    after = stablehlo_tools.transform(before, f"pipeline-collectives{{{options}}}")
    assert after.mlir_module().count('"stablehlo.all_gather"') == 1 + distance
    rng = np.random.default_rng(0)
    values = [rng.integers(-2, 3, a.shape).astype(np.float32) for a in before.in_avals]
    first, second = run(before, values), run(after, values)
    assert [a.tobytes() for a in first] == [a.tobytes() for a in second]
