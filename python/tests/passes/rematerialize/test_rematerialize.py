"""rematerialize on exported training steps: what fits, what is kept, values, and the compilers."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import pytest
from exact_comparison import assert_identical
from jax import export, lax
from models.zoo import MODELS, ZOO
from soaking import first

import stablehlo_tools
from stablehlo_tools.analysis.tasks.graph import expected_run
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import Diagnostics, ToolError, size
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.transforms.partition import PartitionPass
from stablehlo_tools.transforms.parts.rematerialize.compiled_candidates import compiled_run
from stablehlo_tools.transforms.rematerialize import RematerializePass

ROWS, WIDTH, LAYERS = 16_384, 1024, 8
GIB = 2.0**30
POLICIES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")


@cache
def step(*, scan: bool, policy: str = "", layers: int = LAYERS) -> export.Exported:
    """Gradients of layers with a few activations each, 64 MiB apiece."""

    def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        return x + jnp.tanh(jnp.sin(x @ weights[0]) * x) @ weights[1]

    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        rule = getattr(jax.checkpoint_policies, policy) if policy else None
        chosen = jax.checkpoint(layer, policy=rule) if policy else layer
        if scan:
            x, _ = lax.scan(lambda x, w: (chosen(x, w), None), x, weights)
        else:
            for number in range(layers):
                x = chosen(x, (weights[0][number], weights[1][number]))
        return jnp.square(x).mean()

    weights = (jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.float32),) * 2
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return export.export(jax.jit(jax.grad(loss)), platforms=("cpu",))(weights, x)


def rematerialized(exported: export.Exported, limit: float | None = None) -> Artifact:
    """A program behind the pass."""
    after = artifact.from_exported(exported)
    RematerializePass(memory_limit=limit, margin=0.05).run(after.module, Diagnostics())
    return after


def peak(program: Artifact) -> float:
    """GiB as expected."""
    return expected_run(program.module, load_hardware("h100")).peak_bytes / GIB


def least(exported: export.Exported) -> float:
    """The least GiB that are found."""
    with pytest.raises(ToolError, match=r"\(P3\)") as caught:
        rematerialized(exported, 1e-3)
    found = re.search(r"was found is ([\d.e+-]+) GiB", caught.value.diagnostic.message)
    assert found
    return float(found.group(1))


@pytest.mark.parametrize("scan", first(1, [True, False]))
def test_what_is_found_is_within_the_limit(scan: bool):
    before = step(scan=scan)
    smallest, whole = least(before), peak(artifact.from_exported(before))
    assert smallest < 0.65 * whole
    for limit in (smallest * 1.06, (smallest + whole) / 2):
        assert peak(rematerialized(before, limit)) <= limit


@pytest.mark.parametrize("scan", first(1, [True, False]))
@pytest.mark.parametrize("policy", first(1, POLICIES))
def test_no_policy_of_jax_is_better(scan: bool, policy: str):
    """In no more memory the artifact is expected to take no longer, whoever chose before."""
    hardware = load_hardware("h100")
    theirs = artifact.from_exported(step(scan=scan, policy=policy))
    bound = expected_run(theirs.module, hardware)
    for start in ("", policy):
        ours = rematerialized(step(scan=scan, policy=start), 1.05 * bound.peak_bytes / 0.95 / GIB)
        run = expected_run(ours.module, hardware)
        assert run.peak_bytes <= bound.peak_bytes * 1.05
        assert run.contended_ns <= bound.contended_ns * 1.04


@pytest.mark.parametrize("scan", first(1, [True, False]))
def test_the_choice_is_made_once(scan: bool):
    once = rematerialized(step(scan=scan), 2.0)
    text = str(once.module)
    assert text == str(rematerialized(step(scan=scan), 2.0).module), "the same twice"
    before = expected_run(once.module, load_hardware("h100"))
    RematerializePass(memory_limit=2.0).run(once.module, Diagnostics())
    again = expected_run(once.module, load_hardware("h100"))
    assert again.contended_ns == pytest.approx(before.contended_ns, rel=0.02)


# XLA:TPU takes half a minute to two for each of these programs, XLA:GPU a quarter for the unrolled.
@pytest.mark.parametrize("target", ["cpu", "gpu", pytest.param("tpu", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("scan", "layers"),
    [
        (True, LAYERS),
        pytest.param(True, 2, marks=pytest.mark.soak),
        pytest.param(False, LAYERS, marks=pytest.mark.soak),
    ],
)
def test_compilers_keep_it(target: str, scan: bool, layers: int):
    """XLA's own figure falls as expected: nothing was merged, or run early."""
    before = step(scan=scan, layers=layers)
    limit = least(before) * 1.07
    machines = {"gpu": "h100", "tpu": "tpu-v5e"}
    hardware = load_hardware(machines[target]) if target in machines else None
    after = rematerialized(before, limit)
    sizes: list[float] = []
    for program in (artifact.from_exported(before), after):
        compiled = compile_artifact(program, target, 600.0, hardware=hardware)
        assert compiled.memory is not None
        sizes.append(compiled.memory.total_bytes / GIB)
    assert sizes[1] < 0.75 * sizes[0]
    assert sizes[1] < 1.35 * peak(after)


@pytest.mark.parametrize(
    ("compiler", "hardware"),
    [("gpu", "h100"), pytest.param("tpu", "tpu-v5e", marks=pytest.mark.soak)],
)
def test_the_compiler_holds_the_limit(compiler: Literal["gpu", "tpu"], hardware: str):
    """The least that the compiler can be held to, and a program of little more memory."""
    exported = step(scan=True)

    def held(limit: float) -> tuple[Artifact, Diagnostics]:
        after, notes = artifact.from_exported(exported), Diagnostics()
        RematerializePass(limit, 0.0, hardware, compiler, explain=True).run(after.module, notes)
        return after, notes

    with pytest.raises(ToolError, match=r"\(P3\)") as caught:
        held(1e-3)
    said = re.search(r"was found is ([\d.e+-]+) GiB", caught.value.diagnostic.message)
    assert said
    limit = 1.1 * float(said.group(1))
    program, notes = held(limit)
    profile = load_hardware(hardware)
    run = compiled_run(program.module, Target(compiler), profile)
    whole = compiled_run(artifact.from_exported(exported).module, Target(compiler), profile)
    assert run.peak_bytes <= limit * GIB
    assert run.peak_bytes < whole.peak_bytes
    told = [each.message for each in notes.collected if " needs " in each.message]
    assert len(told) == 1
    assert f" needs {size(run.peak_bytes)} and " in told[0]


@pytest.mark.soak  # a model of full size, partitioned twice
def test_logits_are_not_made_again_where_that_takes_more():
    """Of the loss around a scan more is alive, made again, than in the layers: the least memory is
    no more than jax.checkpoint's for every layer."""
    name = "tpu-v5p"
    plain = MODELS["decoder-2d-scan-step"].full()
    theirs = artifact.from_exported(MODELS["decoder-2d-scan-step"].full(remat=True))
    PartitionPass(hardware=name).run(theirs.module, Diagnostics())
    ours = artifact.from_exported(plain)
    PartitionPass(hardware=name).run(ours.module, Diagnostics())
    with pytest.raises(ToolError, match=r"\(P3\)") as caught:
        RematerializePass(1e-3, 0.0, name).run(ours.module, Diagnostics())
    found = re.search(r"was found is ([\d.e+-]+) GiB", caught.value.diagnostic.message)
    assert found
    bound = expected_run(theirs.module, load_hardware(name)).peak_bytes / GIB
    assert float(found.group(1)) <= bound


SMALL = (
    ("decoder-2d-scan-step", {"optimizer": "sgd"}),
    ("decoder-2d-scan-step", {}),
    ("decoder-2d-step", {"remat": True}),
    ("decoder-2d-scan-step", {"remat": True, "policy": "dots_saveable"}),
    ("decoder-2d-step", {}),
    ("decoder-2d-scan-step", {"remat": True}),
    ("mamba-scan-step", {}),
    ("moe-step", {}),
    ("moe-shard-map-step", {}),
    ("encoder-decoder-step", {}),
    ("nnx-llama-step", {}),
    ("vit-step", {}),
)


# Half a minute to one for each; programs that are not partitioned also run in test_random_steps.
@pytest.mark.soak
@pytest.mark.parametrize("partition", ["partition,", ""])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_values_of_models(case: tuple[str, dict[str, object]], partition: str):
    """On 8 devices, in exact arithmetic."""
    name, options = case
    before = ZOO[name].build(**options)
    assert isinstance(before, export.Exported)
    if partition:
        before = stablehlo_tools.transform(before, partition.removesuffix(","))
    after = rematerialized(before)
    assert_identical(artifact.from_exported(before), after)


def test_explains_with_the_policy_of_jax():
    diagnostics = Diagnostics()
    program = artifact.from_exported(step(scan=True))
    limit = least(step(scan=True)) * 1.07
    RematerializePass(memory_limit=limit, explain=True).run(program.module, diagnostics)
    texts = [each.message for each in diagnostics.collected]
    assert "jax.checkpoint" in texts[0]
    assert any(text.startswith("kept: ") and "of each of 8 layers" in text for text in texts)
    assert any(text.startswith("recomputed: dot_general") for text in texts)


def test_random_numbers_are_not_drawn_anew():
    """A mask of dropout is the same in both directions: it follows from its key, not from when."""

    def loss(weights: jax.Array, key: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            mask = jax.random.bernoulli(pair[1], 0.5, x.shape)
            return jnp.tanh(x @ pair[0]) * mask, None

        keys = jax.random.split(jax.random.wrap_key_data(key), weights.shape[0])
        return jnp.square(lax.scan(layer, x, (weights, keys))[0]).sum()

    arguments = (
        jax.ShapeDtypeStruct((3, 16, 16), jnp.float32),
        jax.ShapeDtypeStruct((2,), jnp.uint32),
        jax.ShapeDtypeStruct((8, 16), jnp.float32),
    )
    before = export.export(jax.jit(jax.grad(loss)))(*arguments)
    after = rematerialized(before)
    assert_identical(artifact.from_exported(before), after)
