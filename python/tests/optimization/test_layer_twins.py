"""Searches with twins of a program that has few of its layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compile_targets import TARGETS
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_searching import FIGURES

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.optimization.crew import CandidateModule
from stablehlo_tools.optimization.figures import NEVER, Figures
from stablehlo_tools.optimization.layer_twins import TwinCrew, twin_crew
from stablehlo_tools.optimization.optimizer import OptimizationRequest, optimize
from stablehlo_tools.targets.chips import Target

GPU = next(each for each in TARGETS if each.values == (Target.GPU,))
LAYERS = 14


class Rewriter:
    """A crew whose figures are `fixed + layers * each`, by the passes that a module has."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.compiled: list[str] = []
        self.options: list[str] = []

    def rewrite(self, module: CandidateModule | None, passes: str) -> CandidateModule:
        before = "" if module is None else module.digest
        return CandidateModule(f"{before},{passes}".strip(","), False, 10.0, 20.0)

    def evaluate(self, module: CandidateModule | None, more: object) -> Figures:
        digest = "" if module is None else module.digest
        self.compiled.append(digest)
        self.options.append(str(more))
        if digest == "crash":
            raise ToolError("the compiler was ended by SIGSEGV")
        if digest == "large":
            return replace(FIGURES, total_ns=NEVER, contended_ns=NEVER, peak_bytes=1e12)
        ns = 50.0 + self.layers * (7.0 if digest == "partition,bucket" else 10.0)
        return replace(
            FIGURES, total_ns=ns, contended_ns=ns, peak_bytes=8.0 * self.layers, compiler_bytes=0
        )

    def keep_layers(self, kept: int, least: int) -> tuple[str | None, int]:
        return (f"{kept} layers", 30) if least <= 30 else (None, 0)


def crew_of_twins() -> tuple[Any, Any, TwinCrew]:
    longer, shorter = Rewriter(4), Rewriter(2)
    return longer, shorter, TwinCrew(longer, shorter, 30)  # pyright: ignore[reportArgumentType]


def test_figures_of_twins_give_those_of_all_layers():
    longer, shorter, crew = crew_of_twins()
    module = crew.rewrite(crew.rewrite(crew.rewrite(None, ""), "partition"), "bucket")
    figures = crew.evaluate(module)
    assert figures.total_ns == 50.0 + 30 * 7.0
    assert figures.peak_bytes == 8 * 30
    assert longer.compiled == shorter.compiled == ["partition,bucket"]
    assert crew.evaluate(None).total_ns == 50.0 + 30 * 10.0


def test_a_twin_that_does_not_run_gives_no_time_and_a_crash_is_an_error():
    _, _, crew = crew_of_twins()
    large = crew.evaluate(crew.rewrite(None, "large"))
    assert not large.runs
    with pytest.raises(ToolError, match="SIGSEGV"):
        crew.evaluate(crew.rewrite(None, "crash"))


def test_twins_of_a_large_program_get_their_share_of_the_memory():
    longer, shorter = Rewriter(4), Rewriter(2)
    crew = TwinCrew(longer, shorter, 30, memory=300.0)  # pyright: ignore[reportArgumentType]
    assert crew.evaluate(None).needed_bytes == 8 * 30
    crew.evaluate(crew.rewrite(None, "partition"))
    of_longer, of_shorter = (
        f"xla_gpu_memory_limit_slop_factor={95 * layers / 30:.0f}" for layers in (4, 2)
    )
    assert longer.options[1:] == [of_longer] * 2
    assert shorter.options[1:] == [of_shorter] * 2
    assert of_longer not in longer.options[0]


def test_a_program_with_few_layers_has_no_twins():
    crew: Any = Rewriter(30)
    made: list[str] = []

    def crew_of(digest: str) -> Any:
        made.append(digest)
        return Rewriter(int(digest[0]))

    twins = twin_crew(crew, crew_of)
    assert twins is not None
    assert (twins.layers, made) == (30, ["4 layers", "2 layers"])
    crew.keep_layers = lambda *_: (None, 0)
    assert twin_crew(crew, crew_of) is None


@cache
def written_out() -> Artifact:
    """A training step with adam of `LAYERS` written-out layers, with divided weights."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows, split = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = x + jnp.tanh(x @ w["in"]) @ w["out"]
        return jnp.square(x).mean()

    def step(weights: Any, first: Any, second: Any, x: jax.Array) -> Any:
        gradients = jax.grad(loss)(weights, x)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, gradients)
        scaled = jax.tree.map(lambda m, v: 1e-3 * m / (jnp.sqrt(v) + 1e-8), first, second)
        return jax.tree.map(jnp.subtract, weights, scaled), first, second

    shape = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    weights = [{"in": shape, "out": shape} for _ in range(LAYERS)]
    jitted = jax.jit(step, in_shardings=(split, split, split, rows), out_shardings=split)
    batch = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    exported = export.export(jitted, platforms=["cuda"])(weights, weights, weights, batch)
    return artifact.from_exported(exported, "written out")


@pytest.mark.soak  # seven compilations
@pytest.mark.parametrize("target", [GPU])
def test_candidates_are_compared_with_few_layers_and_the_best_compiled_with_all(
    target: Target, tmp_path: Path
):
    request = OptimizationRequest(
        target=target.value, candidates=2, cache=tmp_path, try_options=False
    )
    optimum = optimize(written_out(), request)
    assert (
        f"before, 2 candidates with 4 and with 2 of {LAYERS} layers: 2 candidates were"
        in optimum.ended
    )
    assert optimum.changed
    (best,) = (t for t in optimum.trials if str(t.candidate) == optimum.pipeline)
    assert best.figures is not None
    # The time that the twins gave is near the time with all layers.
    assert best.expected_ns == pytest.approx(best.figures.contended_ns, rel=0.05)
    again = optimize(written_out(), request)
    assert again.pipeline == optimum.pipeline
    assert "read from an earlier run" in again.ended
