"""Arguments count as the exported function has them, whether or not a platform's index is first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax

from stablehlo_tools.analysis.entry import argument_name
from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.platform_index import fix_platform, own_arguments, platform_arguments
from stablehlo_tools.ir.walk import entry_function, ops_named
from stablehlo_tools.mpmd.rank_set import argument_paths
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.verify import Options, verify_artifacts

ONE, SEVERAL = ("cpu",), ("cpu", "cuda", "tpu")
BOTH = pytest.mark.parametrize("platforms", [ONE, SEVERAL])


def step(weights: jax.Array, rows: jax.Array, times: jax.Array) -> jax.Array:
    """A product, whose lowering is each platform's own, repeated as often as an argument says."""
    return lax.fori_loop(0, times, lambda _, x: jnp.sort(x) @ weights, rows)


def loaded(platforms: tuple[str, ...], *, as_text: bool = False) -> Artifact:
    shapes = ((4, 4), (8, 4))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    times = jax.ShapeDtypeStruct((), jnp.int32)
    exported = export.export(jax.jit(step), platforms=platforms)(*arguments, times)
    if as_text:
        return artifact.parse(exported.mlir_module().encode(), "step.mlir")
    return artifact.from_exported(exported, "step")


@BOTH
def test_arguments_count_without_the_index(platforms: tuple[str, ...]) -> None:
    read = loaded(platforms)
    main = entry_function(read.module)
    assert platform_arguments(main) == ([] if platforms == ONE else [0])
    named = [argument_name(argument) for argument in own_arguments(main)]
    assert named == ["weights (argument 0)", "rows (argument 1)", "times (argument 2)"]
    paths = argument_paths(loaded(platforms, as_text=True))
    assert paths[-3:] == ["weights", "rows", "times"]
    assert paths[:-3] == ([] if platforms == ONE else [""])


@BOTH
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("arguments=3", "there is no argument 3: the program takes 3"),
        ("arguments=0 dimension=2", r"argument 0, tensor<4x4xf32>, has no dimension 2"),
        ("arguments=1", "argument 1 has 8 elements, which 3 microbatches do not divide"),
    ],
)
def test_passes_name_them_so(platforms: tuple[str, ...], options: str, told: str) -> None:
    pipeline = Pipeline.parse(f"accumulate-gradients{{microbatches=3 {options}}}")
    with pytest.raises(ToolError, match=told):
        transforming.run_pipeline(loaded(platforms), pipeline)


@BOTH
@pytest.mark.parametrize("as_text", [False, True])
def test_verify_sets_them_so(platforms: tuple[str, ...], as_text: bool) -> None:
    one, other = (loaded(platforms, as_text=as_text) for _ in range(2))
    answer = verify_artifacts(one, other, Options(trials=1, fixed={2: 3.0}))
    assert answer.same
    with pytest.raises(
        ToolError, match="there is no input 3 to set: the program has 3, counted from 0"
    ):
        verify_artifacts(one, other, Options(trials=1, fixed={3: 1.0}))


def test_a_module_becomes_one_for_a_platform() -> None:
    module = loaded(SEVERAL).module
    assert ops_named(module.operation, {"stablehlo.case"})
    fix_platform(module, 0)
    assert not ops_named(module.operation, {"stablehlo.case"})
    assert module.operation.verify()
