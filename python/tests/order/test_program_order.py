"""Programs of `jax.experimental.overlap.program_order`, which lowers to barriers, in every pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.experimental.overlap import program_order
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from soaking import one_in

from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob
from stablehlo_tools.order.verdict import decide
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.topologies import Target
from stablehlo_tools.verify.verification import Options as VerifyOptions
from stablehlo_tools.verify.verification import verify_artifacts

BARRIER = "stablehlo.optimization_barrier"
PIPELINES = (
    "cse,canonicalize",
    "create-reduce-scatter",
    "bucket-collectives",
    "pipeline-collectives",
    "schedule-overlap",
    "thread-tokens",
    "thread-tokens{form=composite}",
    "thread-tokens{minimal}",
    "thread-tokens,strip-tokens",
)


def exported() -> Artifact:
    """Two collectives that only the order of the text ties, kept in it by jax."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

    @program_order(enforce=True, strict_in_out=True)
    def ordered(a: Any, b: Any) -> Any:
        s = jax.lax.psum(jnp.sin(a), "x")
        g = jax.lax.all_gather(jnp.tanh(b), "x", tiled=True)
        return s * 2, g + 1

    step = jax.jit(
        jax.shard_map(
            ordered, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=(P(), P("x")), check_vma=False
        )
    )
    given = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    return artifact.from_exported(export.export(step)(given, given))


def is_ordered(loaded: Artifact) -> bool:
    """Whether copies for each device, compiled apart, cannot deadlock."""
    copies = (loaded.copy(), loaded.copy())
    return (
        decide([part.program for part in ProgramJob(copies, JobOptions()).read()]).finding is None
    )


def test_jax_orders_by_barriers() -> None:
    loaded = exported()
    assert BARRIER in artifact.to_text(loaded.module)
    compiled = compile_artifact(loaded, Target.CPU)
    assert compiled.order.same_order


@pytest.mark.parametrize("pipeline", one_in(len(PIPELINES), PIPELINES))
def test_every_pass_keeps_order_and_values(pipeline: str) -> None:
    loaded = exported()
    was_ordered = is_ordered(loaded)
    rewritten = transforming.transform(exported(), pipeline)
    assert (
        artifact.to_text(rewritten.module).count(BARRIER)
        >= artifact.to_text(loaded.module).count(BARRIER)
        or "composite" in pipeline
    )
    assert is_ordered(rewritten) >= was_ordered
    assert verify_artifacts(loaded, rewritten, VerifyOptions(trials=1)).same
    assert compile_artifact(rewritten, Target.CPU).order.same_order
