"""offload on exported training steps: what fits, the compilers' own memory, values."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from exact_comparison import BITS, assert_identical
from jax import export, lax
from models.zoo import MODELS

import stablehlo_tools
from stablehlo_tools.analysis.tasks.graph import expected_run
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.transforms.parts.offload.rows_to_host import movable, move
from stablehlo_tools.verify.verification import verify_artifacts

ROWS, WIDTH, LAYERS = 16_384, 1024, 8
GIB = 2.0**30
STACK = LAYERS * ROWS * WIDTH * 4  # bytes of what every layer is given
LINKED_TPU = """
extends = "tpu-v5p"
name = "linked"
[host]
to_host = { value = 20, source = "a test" }
to_device = { value = 20, source = "a test" }
"""


def step(
    rows: int = ROWS, width: int = WIDTH, *, remat: bool = True, in_order: bool = False
) -> Artifact:
    """The gradient of a scan of layers, that keeps what each is given if it is to `remat`;
    `in_order`: a scan that reads what another has kept in the order in which it was kept."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + jnp.tanh(jnp.sin(x @ w) * x)

    chosen = jax.checkpoint(layer) if remat else layer

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        x, _ = lax.scan(lambda x, w: (chosen(x, w), None), x, weights)
        return jnp.square(x).mean()

    def twice(weights: jax.Array, x: jax.Array) -> jax.Array:
        def first(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = layer(x, w)
            return y, y

        x, kept = lax.scan(first, x, weights)
        return lax.scan(lambda x, y: (jnp.tanh(x) * y, None), x, kept)[0]

    weights = jax.ShapeDtypeStruct((LAYERS, width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    traced = jax.jit(twice if in_order else jax.grad(loss))
    return artifact.from_exported(export.export(traced, platforms=("cpu",))(weights, x))


def moved(program: Artifact) -> int:
    """How many copies there are, to the host's memory and from it."""
    return str(program.module).count("@annotate_device_placement")


@pytest.mark.parametrize("target", ["gpu", pytest.param("tpu", marks=pytest.mark.soak)])
def test_compilers_keep_the_rows_in_the_host_s_memory(target: str, tmp_path: Path):
    profile = tmp_path / "linked.toml"
    profile.write_text(LINKED_TPU)
    hardware = "h100" if target == "gpu" else str(profile)
    before = step()
    after = stablehlo_tools.transform(before, f"offload{{hardware={hardware} memory-limit=0.7}}")
    assert moved(after) == 2
    assert expected_run(after.module, load_hardware(hardware)).peak_bytes <= 0.7 * GIB
    peaks: list[float] = []
    for program in (before, after):
        made = compile_artifact(program, target, 900.0).memory
        peaks.append(made.peak_bytes or made.total_bytes)
    assert peaks[1] < peaks[0] - 0.8 * STACK * (LAYERS - 3) / LAYERS  # some rows are under way


@pytest.mark.parametrize("in_order", [False, True])
def test_values_are_the_same(in_order: bool):
    before = step(256, 256, in_order=in_order)
    peak = expected_run(before.module, load_hardware("h100")).peak_bytes / GIB
    after = stablehlo_tools.transform(before, f"offload{{memory-limit={0.95 * peak} margin=0.0}}")
    assert moved(after) == 2
    report = verify_artifacts(before, after, BITS)
    assert report.same
    data = after.to_exported().serialize()  # the custom call is one that jax keeps compatible
    assert export.deserialize(data).mlir_module().count("annotate_device_placement") == 2


def test_rows_read_in_order_are_copied_where_they_are():
    text = str(
        stablehlo_tools.transform(
            step(256, 256, in_order=True), "offload{memory-limit=0.005}"
        ).module
    )
    assert "dynamic_update_slice" in text
    assert text.count("stablehlo.while") == 2
    loops = [line for line in text.splitlines() if "= stablehlo.while(" in line]
    plain = [
        line
        for line in str(step(256, 256, in_order=True).module).splitlines()
        if "= stablehlo.while(" in line
    ]
    carried = [line.count("iterArg") for line in loops]
    assert carried == [line.count("iterArg") for line in plain], "nothing is handed on"


@pytest.mark.parametrize("share", [0.55, 0.7])
def test_rematerialize_is_no_slower_with_it(share: float):
    hardware = load_hardware("gb200")
    before = step(remat=False)
    limit = share * expected_run(before.module, hardware).peak_bytes / GIB
    runs = [
        expected_run(
            stablehlo_tools.transform(
                before, f"rematerialize{{hardware=gb200 memory-limit={limit}{option}}}"
            ).module,
            hardware,
        )
        for option in ("", " offload")
    ]
    assert all(run.peak_bytes <= limit * GIB for run in runs)
    assert runs[1].contended_ns <= 1.001 * runs[0].contended_ns


@cache
def divided_model() -> tuple[Artifact, Artifact]:
    """A model, and what is made of it with its first rows in the host's memory."""
    exported = MODELS["decoder-2d-scan-step"].build()
    assert isinstance(exported, export.Exported)
    before = artifact.from_exported(exported)
    after = before.copy()
    inline_all_calls(after.module)
    (rows, *_) = movable(after.module)
    move(rows)
    return before, stablehlo_tools.transform(after, "partition,create-reduce-scatter")


def test_partition_divides_what_is_placed():
    before, divided = divided_model()
    whole_program = before.copy()
    inline_all_calls(whole_program.module)
    whole = str(movable(whole_program.module)[0].updates[0].operands[1].type)
    placed = [line for line in str(divided.module).splitlines() if "@annotate_device" in line]
    assert len(placed) == 2
    assert not any(f"({whole}) ->" in line for line in placed)


@pytest.mark.soak  # half a minute of compiling; test_offload_state has values behind partition
def test_values_behind_partition():
    before, divided = divided_model()
    assert_identical(before, divided)
