"""hold-collectives on a step of jax: the same values in the same order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.api.transforming import transform
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.verify.verification import verify_artifacts

LAYERS, WIDTH = 4, 64


def gradients_of_layers() -> Artifact:
    """FSDP over 8 devices: each layer's gradients are summed in the backward loop."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))

    @jax.checkpoint
    def layer(x: Any, w: tuple[Any, Any]) -> tuple[Any, None]:
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    def loss(w: Any, x: Any) -> Any:
        return jnp.square(jax.lax.scan(layer, x, w)[0]).mean()

    def sharded(*shape: int, axes: tuple[Any, ...]) -> Any:
        sharding = NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    weight = sharded(LAYERS, WIDTH, WIDTH, axes=(None, "data"))
    arguments = ((weight, weight), sharded(8 * WIDTH, WIDTH, axes=("data",)))
    exported = export.export(jax.jit(jax.grad(loss)))(*arguments)
    return transform(artifact.from_exported(exported), "partition,create-reduce-scatter")


def test_values_are_the_same_bits_and_the_collectives_in_their_order():
    before = gradients_of_layers()
    after = transform(before, "hold-collectives")
    assert str(after.module) != str(before.module)
    assert str(transform(after, "hold-collectives").module) == str(after.module)
    one, other = (find_collectives(each.module) for each in (before, after))
    assert [c.op.name for c in one] == [c.op.name for c in other]
    assert verify_artifacts(before, after).same
