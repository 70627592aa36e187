"""`check-mpmd`: valid sets are proven, whatever their schedule; of others it says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from models.zoo import LAYER_SCANS
from proof_programs import write_expanded
from proof_sets import SCHEDULES, Case, by_hand, findings, name_of
from soaking import first

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.ir import carriers
from stablehlo_tools.ir.walk import functions_by_name
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.origins import Origin, Source
from stablehlo_tools.mpmd.proof.proof_findings import ProofRule
from stablehlo_tools.mpmd.proof.proving import SetProof, prove
from stablehlo_tools.mpmd.rank_set import RankSet, load, write
from stablehlo_tools.mpmd.reading import read_rank
from stablehlo_tools.schedules.table import ActionKind, actions_of
from stablehlo_tools.schedules.table_simulator import change_of_memory, simulate


def first_of(count: int, cases: Sequence[tuple[str, str, int]]) -> list[Any]:
    """The first cases for every run, the others for `make soak`."""
    return [
        pytest.param(
            *case, id="-".join(map(str, case)), marks=pytest.mark.soak if at >= count else ()
        )
        for at, case in enumerate(cases)
    ]


@cache
def expanded(case: Case) -> RankSet:
    """A set that expand-mpmd writes."""
    with TemporaryDirectory() as room:
        return load(write_expanded(Path(room), *case))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", first(5, SCHEDULES), ids=name_of)
def test_sets_written_by_hand_are_proven(case: Case, devices: int):
    assert not prove(by_hand(case, devices)).findings


@pytest.mark.parametrize("case", SCHEDULES[:-1], ids=name_of)
def test_expanded_sets_are_proven_and_their_memory_is_that_of_the_schedule(case: Case):
    """What is held is never more than the bound, and at its most as much. The bound without the
    messages is at most what the simulator has; the peak is what is fixed, held and temporary."""
    ranks = expanded(case)
    proof = prove(ranks)
    assert not proof.findings
    manifest = ranks.manifest
    assert proof.timeline.makespan == pytest.approx(
        simulate(manifest.table, manifest.costs).makespan
    )
    for memory, simulated in zip(proof.memory, proof.timeline.peak_bytes, strict=True):
        assert all(moment.held <= moment.bound for moment in memory.moments)
        assert memory.held == memory.bound
        assert memory.held <= memory.peak <= memory.limit
        assert phases_hold(proof, memory.rank) <= simulated - memory.weights
        assert phases_hold(proof, memory.rank) <= memory.bound


# Programs of the zoo with what the small step lacks, and the devices of a rank.
PROGRAMS = [
    ("remainder-gradients", "zb-v", 1),  # a gradient made two stages before its message is sent
    ("remainder-gradients", "interleaved-1f1b", 1),  # what is received goes to another stage
    ("mlp-step", "zb-h1", 2),
    ("tied-gradients", "dualpipe", 1),  # two stages of a rank take turns at a sum
    ("llama-clipped-step", "1f1b", 2),
    ("encoder-decoder-gradients", "zb-v", 1),
]


@pytest.mark.parametrize(("name", "schedule", "devices"), first_of(3, PROGRAMS))
def test_sets_of_other_programs_are_proven(name: str, schedule: str, devices: int, tmp_path: Path):
    exported = LAYER_SCANS[name].build(stage=1, data=devices, model=1, accumulate=4)
    chunks = 2 if schedule.startswith("interleaved") else None
    request = ExpansionRequest(schedule, 2, load_hardware("h100"), chunks=chunks)
    written = expand_mpmd(artifact.from_exported(exported), request)
    write(tmp_path, written.manifest, written.modules)
    assert not prove(load(tmp_path)).findings


def phases_hold(proof: SetProof, rank: int) -> float:
    """The most that the phases of a rank hold, by the costs of the stages alone."""
    actions = actions_of(proof.table.rows[rank])
    stages = proof.manifest.stages
    costs = proof.manifest.costs
    exact = replace(costs, activation=tuple(stage.activation for stage in stages))
    return max(accumulate(change_of_memory(action, exact) for action in actions))


# Memory: what is held for longer, or is more, than the schedule has it.


@pytest.mark.parametrize("cost", ["activation", "kept"])
def test_a_stage_that_holds_more_than_it_is_said_to(cost: str):
    ranks = expanded(("zb-h1", 3, 4, None))
    stages = [
        replace(stage, **{cost: getattr(stage, cost) - 4.0}) for stage in ranks.manifest.stages
    ]
    proof = prove(replace(ranks, manifest=replace(ranks.manifest, stages=tuple(stages))))
    found = findings(proof, ProofRule.MEMORY)
    assert len(found) == 3
    assert "rank_0.mlir:" in found[0]
    assert "of microbatches, but its schedule" in found[0]


def test_a_weight_gradient_that_holds_what_the_input_gradient_has_used():
    """All weight gradients of a stage take one more residual: nothing but memory tells."""
    with TemporaryDirectory() as room:
        ranks = load(write_expanded(Path(room), "zb-h1", 3, 4))
    module = ranks.programs[1].module
    reading = read_rank(module, 1, "rank_1.mlir")
    made = {c.action: c for c in reading.calls if c.action is not None}
    forward = next(call for call in reading.calls if call.function == "stage_1_forward")
    number = next(
        number
        for number in range(len(forward.op.results))
        if {
            reading.describe_event(use.event)
            for use in reading.origins.uses(Origin(Source.CALL, number, forward.index))
        }
        == {"1I0"}
    )
    function = functions_by_name(module)["stage_1_weight_gradient"]
    with module.context, ir.Location.unknown():
        carriers.append_arguments(function.regions[0].blocks[0], [forward.op.results[number].type])
        carriers.resize_function(function, 1, 0)
        for action, call in made.items():
            if call.function == "stage_1_weight_gradient":
                kept = made[action._replace(kind=ActionKind.FORWARD)].op.results[number]
                carriers.append(call.op, [kept], [])
    proof = prove(ranks)
    assert {finding.rule for finding in proof.findings} == {ProofRule.MEMORY}
    assert "rank_1.mlir:" in findings(proof, ProofRule.MEMORY)[0]
    assert "after 1I0 it holds" in findings(proof, ProofRule.MEMORY)[0]


@pytest.mark.soak
@pytest.mark.parametrize(
    "case", [("zb-h1", 8, 64, None), ("interleaved-1f1b", 8, 64, 4)], ids=name_of
)
def test_large_sets_are_proven(case: Case):
    assert not prove(by_hand(case)).findings
