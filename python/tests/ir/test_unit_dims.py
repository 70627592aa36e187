"""What is written for a dimension of one element becomes what holds of more, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import gather_numbers, scatter_numbers
from stablehlo_tools.ir.unit_dims import batch_units, reshape_units
from stablehlo_tools.ir.walk import ops_named


def test_rows_go_along_a_dimension_of_one_element():
    """Of a gather and of the scatter that its gradient is."""
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 3, 5)), jnp.float32)
    labels = jnp.asarray([[[[1], [4], [0]]], [[[2], [2], [3]]]])

    def picked(scores: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.square(jnp.take_along_axis(scores, labels, -1)).sum((1, 3))

    step = jax.jit(jax.value_and_grad(lambda s, labels: picked(s, labels).sum()))
    given = artifact.from_exported(export.export(step)(scores, labels))
    root = given.module.operation
    with given.module.context, ir.Location.unknown():
        batch_units(root)
        reshape_units(root)
    root.verify()
    (gather,) = ops_named(root, {"stablehlo.gather"})
    (scatter,) = ops_named(root, {"stablehlo.scatter"})
    assert gather_numbers(gather).operand_batching == (0, 1, 2)
    assert scatter_numbers(scatter).operand_batching == (0, 1, 2)
    after = export.deserialize(bytearray(artifact.encode(given, artifact.ArtifactForm.JAX_EXPORT)))
    for one, other in zip(step(scores, labels), after.call(scores, labels), strict=True):
        np.testing.assert_array_equal(one, other)
