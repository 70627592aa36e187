"""Phases, layers and the purpose of memory, as the timeline and its card show them."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import export
from report_browser import Open
from report_documents import tiny
from tree import ROOT

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.report.document import Band, CandidatePoint, Document, ProgramReport
from stablehlo_tools.report.exposure import Question, exposure

sys.path.append(str(ROOT / "python" / "examples"))
import export_step


def report(exported: export.Exported) -> ProgramReport:
    loaded = artifact.parse(bytes(exported.serialize()), "step")
    (program,) = exposure([loaded], Question(load_hardware("h100")), None)
    return program


@pytest.fixture(scope="module")
def step() -> ProgramReport:
    return report(export_step.exported(layers=3, width=256, rows=512, stages=1, dtype="float32"))


def labels(program: ProgramReport, level: int) -> list[str]:
    return [band.label for band in program.bands if band.level == level]


def test_forward_comes_before_backward(step: ProgramReport):
    assert labels(step, 0)[:2] == ["forward", "backward"]
    bands = [band for band in step.bands if band.level == 0]
    assert all(one.end <= other.begin for one, other in itertools.pairwise(bands))


def test_iterations_of_both_loops_are_layers(step: ProgramReport):
    assert labels(step, 1) == ["1", "2", "3"] * 2


def test_numbered_modules_are_layers_without_a_loop():
    def forward(x: jax.Array) -> jax.Array:
        for number in range(3):
            with jax.named_scope(f"layers_{number}"):
                x = jnp.tanh(x @ x)
        return x

    of_matrix = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    program = report(export.export(jax.jit(forward))(of_matrix))
    assert labels(program, 1) == ["layers_0", "layers_1", "layers_2"]
    assert labels(program, 0) == []


def test_the_peak_is_the_sum_of_its_parts(step: ProgramReport):
    assert sum(step.peak_parts.values()) == pytest.approx(step.peak_bytes)
    assert step.peak_parts["weights and inputs"] > 0
    assert step.peak_parts["activations"] > 0


def test_state_that_only_the_update_reads_is_the_optimizers():
    def step(weight: jax.Array, momentum: jax.Array, x: jax.Array):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(weight)
        momentum = 0.9 * momentum + gradient
        return weight - momentum, momentum

    square, batch = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (8, 64)))
    parts = report(export.export(jax.jit(step))(square, square, batch)).peak_parts
    assert parts["optimizer state"] == 64 * 64 * 4
    assert parts["weights and inputs"] == (64 * 64 + 8 * 64) * 4
    assert parts["results"] == 2 * 64 * 64 * 4


def test_bands_move_the_lanes_down(opened: Open):
    (program,) = tiny().programs
    plain = opened(tiny()).data()["lanes"][0]
    bands = (Band(0.0, 4e3, "forward", 0), Band(4e3, 9e3, "backward", 0))
    banded = Document("tiny", "1", (_with(program, bands),))
    assert opened(banded).data()["lanes"][0] == [plain[0] + 16, plain[1]]


def _with(program: ProgramReport, bands: tuple[Band, ...]) -> ProgramReport:
    return replace(program, bands=bands)


def test_candidates_are_points_of_a_chart(opened: Open):
    points = tuple(
        CandidatePoint(t * 1e6, b * 2.0**30, str(t)) for t, b in ((9, 2), (5, 3), (7, 1))
    )
    page = opened(Document("tiny", "1", tiny().programs, candidates=points)).page
    assert page.locator("#candidates canvas").is_visible()
    assert "the answer" in page.locator("#candidates").inner_text()
    assert not opened(tiny()).page.locator("#candidates-section").is_visible()
