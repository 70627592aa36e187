"""decompose-collective-permute{validity}: pipelines of JAX keep their bits and XLA their order."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax.numpy as jnp
import kept_values
import numpy as np
import pipeline_programs as programs
import pytest
from compile_targets import TARGETS
from jax import ShapeDtypeStruct, export, jit, lax, shard_map
from jax.export import Exported
from jax.sharding import PartitionSpec as P
from models.devices import mesh

import stablehlo_tools
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.topologies import Target

PERMUTES = "decompose-collective-permute{form=collective-permute validity}"
TRANSFERS = "break-permute-cycles,decompose-collective-permute{validity}"
BROKEN = f"break-permute-cycles,{PERMUTES}"


@cache
def program(name: str) -> Exported:
    return {
        "forward": lambda: programs.forward(4, 4),
        "shards": lambda: programs.forward(4, 3, output="shards"),
        "circular": lambda: programs.circular(4, 5, 2),
        "training": lambda: programs.training(4, 3, "guarded"),
        "training-plain": lambda: programs.training(4, 3),
        "ring-attention": lambda: programs.ring_attention(4),
        "beside-data": lambda: programs.forward(4, 3, data=2),
    }[name]()


def arguments(exported: Exported, bad: float | None = None) -> list[np.ndarray]:
    """Normal numbers; in the inputs of one microbatch and the weights of one stage, some bad."""
    random = np.random.default_rng(0)
    given = [random.standard_normal(a.shape).astype(a.dtype) for a in exported.in_avals]
    if bad is not None:
        for array in given:
            array[1, 0] = bad
    return given


def values(exported: Exported, bad: float | None = None) -> list[bytes]:
    return [array.tobytes() for array in kept_values.run(exported, arguments(exported, bad))]


def notes(exported: Exported, pipeline: str) -> list[str]:
    """What the pass says, `explain` being its last option."""
    diagnostics = Diagnostics()
    module = artifact.from_exported(exported).module
    Pipeline.parse(pipeline.replace("validity}", "validity explain}")).run(
        module, diagnostics, None
    )
    return [found.message for found in diagnostics.collected]


def skipped(exported: Exported, pipeline: str) -> list[str]:
    return [text.split("; ")[-1] for text in notes(exported, pipeline) if "skipped" in text]


BY_DEFAULT = [("forward", PERMUTES), ("circular", BROKEN), ("training", PERMUTES)]
SOAKED = [
    ("shards", PERMUTES),
    ("forward", BROKEN),
    ("circular", PERMUTES),
    ("training", BROKEN),
    ("training-plain", PERMUTES),
    ("ring-attention", PERMUTES),
    ("ring-attention", BROKEN),
    ("beside-data", PERMUTES),
]


@pytest.mark.parametrize(
    ("name", "pipeline"),
    [*BY_DEFAULT, *(pytest.param(*case, marks=pytest.mark.soak) for case in SOAKED)],
)
def test_values_stay(name: str, pipeline: str) -> None:
    """Garbage is NaN in the programs as they are; bits that depend on it would show it."""
    before = program(name)
    after = stablehlo_tools.transform(before, pipeline)
    assert skipped(before, pipeline)
    assert values(before) == values(after)


@pytest.mark.parametrize("bad", [np.inf, pytest.param(np.nan, marks=pytest.mark.soak)])
def test_what_is_no_number_arrives(bad: float) -> None:
    before = program("forward")
    after = stablehlo_tools.transform(before, PERMUTES)
    first = kept_values.run(before, arguments(before, bad))
    second = kept_values.run(after, arguments(before, bad))
    assert not all(np.isfinite(array).all() for array in first)
    assert [a.tobytes() for a in first] == [a.tobytes() for a in second]


def test_what_is_skipped() -> None:
    assert skipped(program("forward"), PERMUTES) == ["9 of 21 transfers are skipped"]
    assert skipped(program("circular"), PERMUTES) == ["17 of 52 transfers are skipped"]
    # Of the broken ring, the edge that closes it is a permute of its own.
    assert skipped(program("circular"), BROKEN) == [
        "8 of 13 transfers are skipped",
        "9 of 39 transfers are skipped",
    ]


def test_two_platforms() -> None:
    """Permutes in branches are of no platform."""

    def local(weights: jnp.ndarray, inputs: jnp.ndarray) -> jnp.ndarray:
        stage = lax.axis_index("stage")

        def step(arriving: jnp.ndarray, number: jnp.ndarray) -> tuple[jnp.ndarray, jnp.ndarray]:
            fed = inputs[jnp.minimum(number, 1)]
            computed = jnp.tanh(jnp.where(stage == 0, fed, arriving) @ weights[0])
            return lax.ppermute(computed, "stage", programs.ring(4, closed=False)), computed

        first = lax.pcast(jnp.full_like(inputs[0], jnp.nan), ("stage",), to="varying")
        computed = lax.scan(step, first, jnp.arange(5))[1][3:]
        return lax.psum(jnp.where(stage == 3, computed, 0), "stage")

    mapped = shard_map(local, mesh=mesh(stage=4), in_specs=(P("stage"), P()), out_specs=P())
    shapes = [ShapeDtypeStruct(s, jnp.float32) for s in ((4, 4, 4), (2, 2, 4))]
    before = export.export(jit(mapped), platforms=("cpu", "cuda"))(*shapes)
    after = stablehlo_tools.transform(before, PERMUTES)
    assert after.platforms == before.platforms == ("cpu", "cuda")
    assert skipped(before, PERMUTES) == ["9 of 15 transfers are skipped"]
    assert values(before) == values(after)


def transformed(name: str, pipeline: str) -> Artifact:
    result = artifact.from_exported(program(name))
    Pipeline.parse(pipeline).run(result.module, Diagnostics(), None)
    return result


COMPILED = {Target.GPU: TRANSFERS, Target.TPU: PERMUTES}


@pytest.mark.parametrize("name", ["circular", pytest.param("training", marks=pytest.mark.soak)])
@pytest.mark.parametrize("target", [t for t in TARGETS if t.values[0] in COMPILED])
def test_compiles(name: str, target: Target, tmp_path: Path) -> None:
    """What stands in branches is ordered, and the compiler keeps it so."""
    after = transformed(name, COMPILED[target])
    kinds = {c.kind for c in find_collectives(after.module)}
    assert ("send" in kinds, "collective_permute" in kinds) == (
        target is Target.GPU,
        target is not Target.GPU,
    )
    path = tmp_path / "pipeline.mlir"
    path.write_text(artifact.to_text(after.module))
    assert main(["check-order", str(path)]) == 0
    compiled = compile_artifact(after, target)
    assert compiled.order.same_order
    assert len(compiled.program_ids) == len(find_collectives(after.module))
