"""Each cause is found where it is, with what it gains, and not where it nearly is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from advice_programs import gathered_weight, layer_scan, microbatches

from stablehlo_tools.advice.advise import Detector
from stablehlo_tools.advice.loops_and_batches import reductions_in_every_iteration
from stablehlo_tools.advice.precision import wide_collectives
from stablehlo_tools.advice.program import Program
from stablehlo_tools.advice.shardings import batch_gathered_in_loops
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.report.document import Advice
from stablehlo_tools.report.exposure import explicit_collectives

Build = Callable[[], Artifact]
CAUSES: dict[str, tuple[Detector, Build, Build]] = {
    "batch-gathered-in-loop": (
        batch_gathered_in_loops,
        partial(layer_scan, constrained=False),
        partial(layer_scan, constrained=True),
    ),
    "reduced-in-every-iteration": (
        reductions_in_every_iteration,
        partial(microbatches, reduced_each=True),
        partial(microbatches, reduced_each=False),
    ),
    "wide-collective": (
        wide_collectives,
        partial(gathered_weight, sent="f32"),
        partial(gathered_weight, sent="bf16"),
    ),
}


def found(detect: Detector, given: Artifact, hardware: str = "h100") -> dict[str, Advice]:
    """What a detector says is to do, by its cause."""
    explicit, _ = explicit_collectives(given)
    clock = Clock(load_hardware(hardware), ModuleFacts.of(explicit.module).grid.size)
    return {item.id: item for item in detect(Program(given, explicit, clock))}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_found_with_its_gain_and_its_near_miss_is_not(cause: str):
    detect, build, near_miss = CAUSES[cause]
    item = found(detect, build())[cause]
    assert item.share >= 0.01
    assert item.gain_ns > 0 or item.gain_bytes > 0
    assert "advice_programs.py" in item.place
    assert cause not in found(detect, near_miss())
