"""hold-collectives on a step of jax: the same values; XLA:GPU leaves the sums where they are."""

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
from stablehlo_tools.targets.compilation import compile_artifact
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


def stored_sums() -> Artifact:
    """Each layer's sum is scattered, and stored by the loop."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def layer(x: Any, w: Any) -> tuple[Any, Any]:
        y = jnp.tanh(x @ w)
        return y, jax.lax.psum_scatter(x.T @ y, "data", tiled=True)

    mapped = jax.shard_map(
        lambda x, w: jax.lax.scan(layer, x, w),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=(P("data"), P(None, "data")),
    )
    shapes = [(8 * WIDTH, WIDTH), (LAYERS, WIDTH, WIDTH)]
    arguments = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    return artifact.from_exported(export.export(jax.jit(mapped))(*arguments))


def test_xla_gpu_runs_them_in_each_iteration():
    """Without barriers it runs the last iteration's behind the loop."""
    program = stored_sums()
    assert {(), ("while body",)} == nesting_of_sums(program)
    assert {("while body",)} == nesting_of_sums(transform(program, "hold-collectives"))


def nesting_of_sums(program: Artifact) -> set[tuple[str, ...]]:
    events = compile_artifact(program, "gpu", 600.0).schedule.events
    return {event.nesting for event in events if event.kind == "reduce-scatter"}
