"""Prefix sums are divided along the dimensions that they do not run over, with the same values."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools

MESH = Mesh(
    np.array(jax.devices()).reshape(4, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2
)
X = np.random.default_rng(0).integers(0, 5, (8, 16, 4)).astype(np.int32)
SCANS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sum": lambda x: jnp.cumsum(x, 1),
    "reverse": lambda x: jax.lax.cumsum(x, 1, reverse=True),
    "maximum": lambda x: jax.lax.cummax(x, 1),
    "of floats": lambda x: jnp.cumsum(x.astype(jnp.float32) / 7, 1),
}


@pytest.mark.parametrize("case", SCANS)
def test_a_scan_runs_on_parts(case: str) -> None:
    scan = SCANS[case]
    divided = NamedSharding(MESH, P("data", None, "expert"))
    partitioned = stablehlo_tools.jit(scan, "partition", in_shardings=(divided,))
    text = partitioned.export(X).mlir_module()
    assert "reduce_window" in text
    assert "stablehlo.while" not in text
    assert "stablehlo.all_" not in text
    np.testing.assert_allclose(
        partitioned(X), scan(jnp.asarray(X)), rtol=1e-6 * (case == "of floats")
    )
