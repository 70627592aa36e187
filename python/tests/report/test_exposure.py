"""Exposure analysis end to end: zoo models on several devices, compiled schedules, memory."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import export
from models.zoo import MODELS

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact, ArtifactForm, encode
from stablehlo_tools.cost.clock import MeasuredProfile
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.report.document import ProgramReport
from stablehlo_tools.report.exposure import Question, explicit_collectives, exposure, hardware_for
from stablehlo_tools.targets.compilation import compile_artifact

PROGRAMS = (
    "llama",
    "llama-remat",
    "decoder-2d-scan-step",
    "moe-shard-map-step",
    "mamba-forward",
    "vit-forward",
    "control-flow",
    "permute-loop",
    "two-platforms",
    "unsharded",
)
# Their collectives and loops are of the kinds that the others have.
LONG = ("llama-remat", "moe-shard-map-step")
each_program = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if name in LONG else ()) for name in PROGRAMS],
)


@cache
def program(name: str) -> Artifact:
    """A model, with its collectives in it."""
    built = MODELS[name].build()
    assert not isinstance(built, str)
    return explicit_collectives(artifact.from_exported(built))[0]


@cache
def report(name: str, hardware: str) -> ProgramReport:
    """What a model costs on a device."""
    (timed,) = exposure([program(name)], Question(load_hardware(hardware)))
    return timed


@pytest.mark.parametrize("hardware", ["h100", "tpu-v5e", "trainium2"])
@each_program
def test_the_figures_agree_with_each_other(name: str, hardware: str):
    timed = report(name, hardware)
    rows = timed.collectives
    assert timed.floor_ns <= timed.total_ns * (1 + 1e-9)
    assert timed.exposed_ns == pytest.approx(timed.total_ns - timed.compute_ns)
    assert sum(row.exposed_ns for row in rows) == pytest.approx(timed.exposed_ns, abs=1e-3)
    assert sum(row.ns for row in rows) >= timed.communication_ns * (1 - 1e-9)
    for row in rows:
        hidden = sum(hider.ns for hider in row.hidden_by)
        assert hidden + row.exposed_ns <= row.ns * (1 + 1e-6) + 1e-3
        assert row.hideable_ns <= row.ns * (1 + 1e-9)
    assert timed.peak_bytes == max((alive for _, alive in timed.memory), default=0)
    assert timed.peak_bytes >= sum(held.bytes for held in timed.alive) * (1 - 1e-9)


@each_program
def test_what_is_drawn_is_what_was_timed(name: str):
    timed = report(name, "h100")
    events = timed.events
    assert not any(event.folded for event in events)  # all iterations of these fit
    compute = [event for event in events if event.stream == 0]
    for kind, expected in (("compute", timed.compute_ns), ("wait", timed.exposed_ns)):
        drawn = sum(event.end - event.begin for event in compute if event.kind == kind)
        assert drawn == pytest.approx(expected, abs=1e-3)
    for stream in range(len(timed.streams)):
        own = [event for event in events if event.stream == stream]
        assert all(a.end <= b.begin + 1e-6 for a, b in pairwise(own))
    runs = [event.collective for event in events if event.kind == "collective"]
    assert {row.number: row.times for row in timed.collectives if row.times} == {
        number: runs.count(number) for number in set(runs)
    }


def test_a_training_step_of_two_loops_keeps_them():
    loops = report("decoder-2d-scan-step", "h100").loops
    assert [(loop.trips, loop.depth) for loop in loops] == [(2, 0), (2, 0)]


def test_a_program_that_leaves_its_collectives_to_the_compiler_says_so():
    exported = MODELS["decoder-tp-forward"].build()
    assert not isinstance(exported, str)
    (timed,) = exposure([artifact.from_exported(exported)], Question(load_hardware("h100")))
    assert timed.collectives
    assert timed.notes[0].startswith("the program leaves its collectives to the compiler")
    assert not report("llama", "h100").notes


@pytest.mark.parametrize("target", [pytest.param("gpu", marks=pytest.mark.soak), "tpu"])
def test_a_compiler_s_schedule_stands_beside_the_program(target: str):
    hardware = {"gpu": "h100", "tpu": "tpu-v5e"}[target]
    written, compiled = exposure(
        [program("moe-shard-map-forward")],
        Question(load_hardware(hardware), ("as-written", target)),
    )
    assert (written.target, compiled.target) == ("as written", f"XLA:{target.upper()}")
    assert compiled.devices == written.devices
    assert compiled.collectives
    assert compiled.floor_ns <= compiled.total_ns * (1 + 1e-9)
    kinds = [{row.kind for row in timed.collectives} for timed in (written, compiled)]
    assert kinds[1] <= kinds[0] | {"all_gather", "all_reduce"}


def test_a_measured_profile_goes_before_the_model(tmp_path: Path):
    row = report("llama", "h100").collectives[0]
    line = row.place.partition(" in ")[0]
    file = tmp_path / "measured.json"
    file.write_text(
        f'{{"schema": "stablehlo-tools/measured/1", "source": "a test", "ops": {{"{line}": 7e6}}}}'
    )
    question = Question(load_hardware("h100"), measured=MeasuredProfile.load(file))
    (timed,) = exposure([program("llama")], question)
    assert timed.collectives[0].ns == 7e6
    assert timed.notes[-1] == "times of 1 ops are measured: a test"


def test_a_measured_profile_of_another_program_is_refused(tmp_path: Path):
    file = tmp_path / "measured.json"
    file.write_text(
        '{"schema": "stablehlo-tools/measured/1", "source": "a test", "ops": {"fusion.99": 1}}'
    )
    question = Question(load_hardware("h100"), measured=MeasuredProfile.load(file))
    with pytest.raises(ToolError, match="none of its 1 ops"):
        exposure([program("llama")], question)


def test_the_hardware_is_what_the_program_was_exported_for():
    def exported(*platforms: str) -> Artifact:
        made = export.export(jax.jit(jnp.sin), platforms=platforms)(jnp.ones(4))
        return artifact.from_exported(made)

    assert hardware_for(exported("tpu"), None).name == "tpu-v5e"
    assert hardware_for(exported("cuda"), None).name == "h100"
    assert hardware_for(exported("cpu"), None).name == "h100"
    assert hardware_for(exported("tpu"), "a100").name == "a100"


def test_the_same_input_gives_the_same_report():
    data = encode(program("llama"), ArtifactForm.JAX_EXPORT)
    question = Question(load_hardware("h100"))
    first, again = (exposure([artifact.parse(data, "x")], question) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("layers", [pytest.param(1, marks=pytest.mark.soak), 4])
def test_the_memory_peak_is_near_the_compiler_s(layers: int):
    """A gradient step on one device: within a third of what XLA:CPU allocates."""

    def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(weights: list[jax.Array]) -> jax.Array:
            hidden = x
            for weight in weights:
                hidden = jnp.tanh(hidden @ weight)
            return (hidden**2).mean()

        return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * layers
    made = export.export(jax.jit(step))(weights, jax.ShapeDtypeStruct((1024, 256), jnp.float32))
    loaded = artifact.from_exported(made)
    (timed,) = exposure([loaded], Question(load_hardware("h100")))
    allocated = compile_artifact(loaded, "cpu").memory.total_bytes
    assert timed.peak_bytes == pytest.approx(allocated, rel=1 / 3)


def test_collectives_of_branches_that_are_not_timed_are_noted():
    (timed,) = exposure([program("control-flow")], Question(load_hardware("h100")))
    assert [note.partition(": ")[2] for note in timed.notes if "branches" in note] == [
        f"of {count} branches the one with the most work is timed; the others hold 1 collectives"
        for count in (3, 2)
    ]
