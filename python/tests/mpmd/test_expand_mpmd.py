"""`expand-mpmd` on exported training steps: the same values under every schedule, proven; who owns
what; stages that users name; several devices a rank; refusals."""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path

import pytest
from mpmd_steps import Step
from soaking import one_in

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.expansion import (
    Expansion,
    ExpansionRequest,
    compare_schedules,
    expand_mpmd,
)
from stablehlo_tools.mpmd.manifest import ManifestEntry
from stablehlo_tools.mpmd.proof.proving import prove
from stablehlo_tools.mpmd.rank_set import RankSet, load, write
from stablehlo_tools.mpmd.running.set_outcome import SetOptions, run_set
from stablehlo_tools.report.mpmd_report import summary as summary_of
from stablehlo_tools.report.mpmd_report import summary_text
from stablehlo_tools.schedules.table import actions_of
from stablehlo_tools.schedules.table_simulator import simulate

HARDWARE = load_hardware("h100")
# A schedule, its ranks and chunks, and a step.
Case = tuple[str, int, int | None, Step]
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")
COUNTS = (4, 5, 8, 9)  # of microbatches; 5 and 9 divide by no number of ranks
MANY = [
    (name, ranks, 2 if name == "interleaved-1f1b" else None, Step(layers=8, microbatches=count))
    for name in SCHEDULES
    for ranks in (2, 4)
    for count in COUNTS
    if name != "dualpipe-v" or count >= 2 * ranks
]
OTHERS: list[Case] = [
    ("zb-h1", 2, None, Step(devices=2)),
    ("1f1b", 3, None, Step(accumulate="fori")),
    ("zb-h1", 2, None, Step(accumulate="whole", microbatches=4)),
    ("1f1b", 2, None, Step(form="unrolled", scopes=2)),
    ("zb-2p", 2, None, Step()),
    ("1f1b", 1, None, Step()),
    ("zb-v", 2, None, Step(form="unrolled")),
    ("dualpipe", 2, None, Step(microbatches=4)),
    ("chimera", 2, None, Step(microbatches=4)),
    ("hanayo", 2, 4, Step(layers=8, microbatches=4)),
    ("v-min", 2, None, Step(microbatches=4)),
    ("looped-bfs", 2, 3, Step()),
    ("auto", 2, None, Step()),
]


@cache
def expanded(name: str, ranks: int, chunks: int | None, step: Step) -> Expansion:
    """What the pass makes of a step, for tests that change nothing in it."""
    return expanded_anew(name, ranks, chunks, step)


def expanded_anew(name: str, ranks: int, chunks: int | None, step: Step) -> Expansion:
    wanted = step.microbatches if step.accumulate == "whole" else None
    request = ExpansionRequest(name, ranks, HARDWARE, chunks, wanted)
    return expand_mpmd(artifact.from_exported(step.export()), request)


def written(directory: Path, expansion: Expansion) -> RankSet:
    write(directory, expansion.manifest, expansion.modules)
    return load(directory)


def title(case: Case) -> str:
    name, ranks, chunks, step = case
    changed = [f"{key}-{value}" for key, value in vars(step).items() if value != vars(Step())[key]]
    return "-".join([name, f"p{ranks}", *([f"v{chunks}"] if chunks else []), *changed])


def check(case: Case, directory: Path) -> None:
    """That the set is proven, takes as long as the schedule, and gives the step's values."""
    expansion = expanded(*case)
    written_set = written(directory, expansion)
    proof = prove(written_set)
    assert proof.is_proven, [str(finding) for finding in proof.findings]
    manifest = expansion.manifest
    assert proof.timeline.bubble == pytest.approx(simulate(manifest.table, manifest.costs).bubble)
    outcome = run_set(written_set, artifact.from_exported(case[3].export()), SetOptions())
    assert outcome.values is not None
    different = [output.name for output in outcome.values.outputs if output.differing]
    assert outcome.same, different
    assert outcome.values.exact is not None


@pytest.mark.parametrize("case", one_in(len(MANY), MANY), ids=title)
def test_every_schedule_gives_the_values_of_the_step(case: Case, tmp_path: Path):
    check(case, tmp_path)


@pytest.mark.parametrize("case", one_in(len(OTHERS), OTHERS), ids=title)
def test_other_steps_too(case: Case, tmp_path: Path):
    check(case, tmp_path)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_proven(name: str, tmp_path: Path):
    chunks = 2 if name == "interleaved-1f1b" else None
    proof = prove(written(tmp_path, expanded(name, 4, chunks, Step(layers=8, microbatches=9))))
    assert proof.is_proven, [str(finding) for finding in proof.findings]


@pytest.mark.parametrize(
    "devices", [pytest.param(1, marks=pytest.mark.soak), 2], ids=["stage", "stage-data"]
)
def test_the_batch_is_found_beside_an_axis_for_stages(devices: int, tmp_path: Path):
    """The partitioner divides samples over an axis that the batch is not on."""
    step = Step(accumulate="whole", microbatches=2, samples=4, devices=devices, stages=2)
    check(("1f1b", 2, None, step), tmp_path)
    summary = summary_text(summary_of(load(tmp_path).manifest, 1.0))
    assert summary.startswith(f"1f1b: 2 ranks of {2 * devices} devices, 2 microbatches, ")


def ranks_of(entry: ManifestEntry) -> set[int]:
    return {piece.rank for piece in entry.pieces}


def ir_size(kind: str) -> int:
    """The elements of a tensor type, by its text."""
    *sizes, _ = kind.removeprefix("tensor<").split("x")
    return prod(map(int, sizes))


def test_optimizers_run_where_the_weights_are():
    manifest = expanded("1f1b", 2, None, Step()).manifest
    given = {entry.path: entry for entry in manifest.outputs}
    for path, entry in given.items():
        if "['layers']" in path:
            assert [(p.rank, p.start, p.limit) for p in entry.pieces] == [(0, 0, 3), (1, 3, 6)]
    assert ranks_of(given["[0]['words']"]) == {0}
    taken = {entry.path: entry for entry in manifest.inputs}
    assert ranks_of(taken["[0]['words']"]) == {0, 1}, "both ends of the model use it"
    assert ranks_of(taken["[1][1][0].mu['words']"]) == {0}
    finish = [each.type for each in manifest.transfers if not each.is_scheduled]
    assert finish.count("tensor<24x16xf32>") == 1, "of gradients only the shared weight's travels"
    numbers = [kind for kind in finish if kind != "tensor<24x16xf32>"]
    assert all(ir_size(kind) <= 64 for kind in numbers)
    assert len(numbers) <= 4, "numbers of one type go together: those of the norm, the loss"


def test_a_stage_keeps_to_the_layers_that_its_author_names():
    step = Step(form="unrolled", layers=6, scopes=3)
    manifest = expanded("1f1b", 3, None, step).manifest
    for entry in manifest.inputs:
        if entry.path.startswith("[0]['layers']"):
            layer = int(entry.path.split("[")[3].rstrip("]"))
            assert ranks_of(entry) == {layer // 2}, entry


def test_stages_are_balanced():
    step = Step(layers=16, width=64, words=512)
    for ranks in (2, 4):
        stages = expanded("1f1b", ranks, None, step).manifest.stages
        times = [stage.forward + stage.backward for stage in stages]
        assert max(times) < 1.25 * sum(times) / ranks


def test_weight_gradients_stand_apart_only_where_the_schedule_has_them_apart():
    whole, apart = (
        [str(module) for module in expanded(name, 2, None, Step()).modules]
        for name in ("1f1b", "zb-h1")
    )
    assert not any("weight_gradient" in text for text in whole)
    assert all("@stage_" in text and "_weight_gradient" in text for text in apart)


def test_programs_grow_with_the_actions_alone():
    sizes: dict[int, int] = {}
    counts: dict[int, int] = {}
    for microbatches in (8, 16, 32):
        expansion = expanded("zb-h1", 4, None, Step(layers=8, microbatches=microbatches))
        sizes[microbatches] = sum(len(str(module)) for module in expansion.modules)
        rows = expansion.manifest.table.rows
        counts[microbatches] = sum(len(list(actions_of(row))) for row in rows)
    each = (sizes[16] - sizes[8]) / (counts[16] - counts[8])
    assert (sizes[32] - sizes[16]) / (counts[32] - counts[16]) == pytest.approx(each, rel=0.05)


def test_the_same_program_gives_the_same_bytes():
    one, other = (
        [str(module) for module in expanded_anew("zb-v", 2, None, Step()).modules] for _ in range(2)
    )
    assert one == other


def test_ranks_are_meshes():
    expansion = expanded("1f1b", 2, None, Step(devices=2))
    assert expansion.manifest.devices == 2
    text = str(expansion.modules[1])
    assert '<["rank"=2, "data"=2]>' in text
    assert "replica_groups = dense<[[0, 1], [2, 3]]>" in text
    assert "source_target_pairs = dense<[[0, 2], [1, 3]]>" in text


def test_schedules_are_compared_with_the_stages_that_they_would_get():
    request = ExpansionRequest("", 2, HARDWARE)
    compared = compare_schedules(artifact.from_exported(Step(layers=8).export()), request)
    found = {(each.name, each.chunks) for each in compared.candidates}
    assert {("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2)} <= found
    times = [each.makespan for each in compared.candidates]
    assert times[0] == min(times)


def test_a_set_that_is_slower_than_one_rank_is_told_with_both_times():
    found = expanded("1f1b", 2, None, Step(accumulate="whole", microbatches=4))
    (warning,) = found.warnings
    makespan = simulate(found.manifest.table, found.manifest.costs).makespan
    assert makespan > found.alone
    assert f"{makespan * 1e3:.3f} ms a step on 2 ranks, and " in warning.message
    assert f"{found.alone * 1e3:.3f} ms for the step on one" in warning.message
    assert not expanded("1f1b", 1, None, Step()).warnings


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        (2, "4 rows, 2 on each of 2 devices; take 2 microbatches, or a batch of a multiple of 8"),
        (1, "2 rows, 1 on each of 2 devices; take a batch of a multiple of 8"),
    ],
)
def test_a_batch_of_another_size_is_told_in_numbers_of_all_devices(samples: int, told: str):
    """Not as a weight that the microbatches happen to divide, nor in rows of one device."""
    step = Step(accumulate="whole", microbatches=2, samples=samples, devices=2)
    with pytest.raises(ToolError) as refused:
        expand_mpmd(
            artifact.from_exported(step.export()), ExpansionRequest("1f1b", 2, HARDWARE, None, 4)
        )
    assert refused.value.diagnostic.message.endswith(
        f"4 microbatches do not divide the batch: batch (argument 10) has {told} (P3)"
    )


def test_a_batch_that_is_not_found_is_told_with_the_way_to_name_it():
    step = Step(accumulate="whole", microbatches=1, samples=11)
    with pytest.raises(ToolError) as refused:
        expand_mpmd(
            artifact.from_exported(step.export()), ExpansionRequest("1f1b", 2, HARDWARE, None, 4)
        )
    error, *notes = str(refused.value).splitlines()
    assert "no argument has a dimension that 4 microbatches divide" in error
    assert "batch (argument 10) has 11 rows, which 4 do not divide" in notes[0]
    first = "opt -p 'accumulate-gradients{microbatches=4 arguments=N}'"
    assert notes[-1].startswith(f"try: stablehlo-tools {first}")


@pytest.mark.parametrize(
    ("request_", "step", "reason"),
    [
        (
            ExpansionRequest("1f1b", 2, HARDWARE),
            Step(accumulate="whole"),
            "no loop over microbatches",
        ),
        (
            ExpansionRequest("1f1b", 2, HARDWARE, None, 3),
            Step(accumulate="whole"),
            "3 microbatches do not divide the batch: batch",
        ),
        (
            ExpansionRequest("1f1b", 2, HARDWARE, None, 4),
            Step(),
            "already has a loop over 5 microbatches",
        ),
        (ExpansionRequest("1f1b", 60, HARDWARE), Step(), "iterations over layers for 60 stages"),
        (
            ExpansionRequest("1f1b", 2, HARDWARE),
            Step(form="unrolled", scopes=3),
            "names stage_0, stage_1",
        ),
        (
            ExpansionRequest("dualpipe-v", 4, HARDWARE),
            Step(),
            "at least twice as many microbatches",
        ),
    ],
    ids=["no-loop", "does-not-divide", "another-loop", "too-many-stages", "scopes", "dualpipe-v"],
)
def test_refusals_say_what_is_wrong(request_: ExpansionRequest, step: Step, reason: str):
    with pytest.raises(ToolError, match=reason):
        expand_mpmd(artifact.from_exported(step.export()), request_)
