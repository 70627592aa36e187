"""`check-mpmd` says of a set what is wrong with it, where, and by which rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from proof_sets import SCHEDULES, by_hand, files, findings

from stablehlo_tools.cli import main as command_line
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.manifest import Manifest, ManifestPiece
from stablehlo_tools.mpmd.proof import proving
from stablehlo_tools.mpmd.proof.proof_findings import ProofRule, RankFindings
from stablehlo_tools.mpmd.proof.proving import check_all_rules, prove, read_set, sound
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.reading import RankReading

NO_OP = "%extra = stablehlo.add %w0, %w0 : tensor<1x4x4xf32>"


def replaced(old: str, new: str, count: int = 1) -> Callable[[str], str]:
    """A change of the text of a program."""
    return lambda text: text.replace(old, new, count)


def inserted(before: str, line: str) -> Callable[[str], str]:
    """A line in front of the first one with a text."""
    return lambda text: text.replace(before, f"{line}\n  {before}", 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            inserted("%v3 = ", NO_OP),
            "stablehlo.add is in @main, which may hold only calls, barriers",
        ),
        (
            inserted("%v3 = ", "%extra = stablehlo.optimization_barrier %w0 : tensor<1x4x4xf32>"),
            "a barrier belongs to no action (M2)",
        ),
        (
            replaced(
                "func.func private @stage_0_forward",
                "func.func private @unused() {\n"
                "    %t = stablehlo.after_all : !stablehlo.token\n"
                '    %s = "stablehlo.recv"(%t) <{channel_handle = '
                "#stablehlo.channel_handle<handle = 1, type = 1>, is_host_transfer = false}> "
                ": (!stablehlo.token) -> !stablehlo.token\n    return\n}\n"
                "func.func private @stage_0_forward",
            ),
            "stablehlo.recv is in @unused, but messages are allowed in @main only (M1)",
        ),
        (
            replaced("@stage_0_backward", "@stage_1_backward", 9),
            "@stage_1_backward is called, but this rank has only the stages 0 (M1)",
        ),
        (
            replaced("@prepare", "@setup", 2),
            "@setup is called, but is not a stage, prepare or a round",
        ),
        (
            replaced("@finish_0", "@prepare_again", 2),
            "@prepare_again is called, but is not a stage, prepare or a round of the finish (M1)",
        ),
        (
            replaced("num_partitions = 2", "num_partitions = 4"),
            "the program is for 4 devices, not 2 ranks of 1 (M1)",
        ),
    ],
    ids=["op", "barrier", "message", "stage", "prepare", "finish", "devices"],
)
def test_main_holds_nothing_else(change: Callable[[str], str], said: str):
    proof = prove(by_hand(SCHEDULES[0], 1, change))
    assert any(said in str(finding) for finding in proof.findings), proof.findings
    assert all(finding.rank in (0, 1, None) for finding in proof.findings)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replaced("[[0, 1], [2, 3]]", "[[0, 2], [1, 3]]", 9), "which belong to several ranks (M1)"),
        (
            replaced(
                "dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, use",
                "dense<[[0, 1], [3, 2]]> : tensor<2x2xi64>, use",
                9,
            ),
            "has different groups of devices on different ranks (M1)",
        ),
        (
            replaced('<@mesh, [{}, {"data"}, {}]>]', '<@mesh, [{}, {"rank"}, {}]>]'),
            'divides a value over the ranks, axis "rank" (M1)',
        ),
        (
            replaced('["rank"=2, "data"=2]', '["data"=2, "rank"=2]'),
            "divides a value over the ranks, axis",
        ),
        (
            replaced('["rank"=2, "data"=2]', '["rank"=2, "data"=2], device_ids=[0, 2, 1, 3]'),
            "is over a mesh whose slowest axis is not 2 ranks of 2 devices in order (M1)",
        ),
        (
            replaced('manual_axes={"rank", "data"}', 'manual_axes={"data"}'),
            "is not over all axes of its mesh (M1)",
        ),
        (
            replaced(
                "source_target_pairs = dense<[[0, 2], [1, 3]]>",
                "source_target_pairs = dense<[[0, 3], [1, 2]]>",
            ),
            "its pairs are [[0, 3], [1, 2]], not [[0, 2], [1, 3]] (M5)",
        ),
    ],
    ids=["crossing", "uneven", "sharding", "slowest", "device-ids", "axes", "pairs"],
)
def test_a_rank_keeps_to_its_devices(change: Callable[[str], str], said: str):
    proof = prove(by_hand(SCHEDULES[0], 2, change))
    assert any(said in str(finding) for finding in proof.findings), proof.findings


def with_pieces(manifest: Manifest, number: int, pieces: Sequence[ManifestPiece]) -> Manifest:
    outputs = list(manifest.outputs)
    outputs[number] = replace(outputs[number], pieces=tuple(pieces))
    return replace(manifest, outputs=tuple(outputs))


@pytest.mark.parametrize(
    ("change", "rule", "said"),
    [
        (
            lambda m: with_pieces(m, 0, m.outputs[0].pieces[:1]),
            ProofRule.ENDS,
            "the pieces of output [0] overlap or do not cover it (M9)",
        ),
        (
            lambda m: with_pieces(m, 1, m.outputs[2].pieces),
            ProofRule.ENDS,
            "belongs to [1] and [2] in the manifest (M9)",
        ),
        (
            lambda m: replace(m, transfers=m.transfers[1:]),
            ProofRule.MESSAGES,
            "the send on channel 1: the manifest has no such channel (M5)",
        ),
        (
            lambda m: replace(
                m, transfers=(replace(m.transfers[0], action="0SEND_B0"), *m.transfers[1:])
            ),
            ProofRule.MESSAGES,
            "channel 1 is for 0SEND_B0, but stage -1 does not exist (M5)",
        ),
        (
            lambda m: replace(m, ranks=m.ranks[::-1]),
            ProofRule.FORM,
            "the manifest gives rank 0 the stages 1, but its schedule gives it 0 (M1)",
        ),
    ],
    ids=["missing-rows", "twice", "no-channel", "no-stage", "other-rank"],
)
def test_the_manifest_is_held_against_the_programs(
    change: Callable[[Manifest], Manifest], rule: ProofRule, said: str
):
    ranks = by_hand(SCHEDULES[0])
    proof = prove(replace(ranks, manifest=change(ranks.manifest)))
    assert any(said in one for one in findings(proof, rule)), proof.findings


def test_another_schedule_is_told_from_the_one_asked_for():
    """The programs of GPipe beside the manifest of 1F1B, which has the same actions."""
    programs = by_hand(("gpipe", 2, 3, None)).programs
    ranks = replace(by_hand(("1f1b", 2, 3, None)), programs=programs)
    proof = prove(ranks)
    assert findings(proof, ProofRule.ROWS)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_program_of_a_set_of_another_schedule_is_told(rank: int):
    mine, other = by_hand(("1f1b", 2, 4, None)), by_hand(("gpipe", 2, 4, None))
    programs = list(mine.programs)
    programs[rank] = other.programs[rank]
    (found,) = findings(prove(replace(mine, programs=tuple(programs))), ProofRule.ROWS)
    assert found.startswith(f"rank_{rank}.mlir:")
    assert f"rank {rank}: step {4 - rank} is " in found


def test_a_manifest_without_the_costs_of_a_stage_is_refused():
    ranks = by_hand(SCHEDULES[0])
    with pytest.raises(ToolError, match="describes the stages 0, but its schedule has 2"):
        prove(replace(ranks, manifest=replace(ranks.manifest, stages=ranks.manifest.stages[:1])))


def test_programs_that_are_lowered_are_refused():
    ranks = by_hand(SCHEDULES[0])
    with pytest.raises(ToolError, match="the messages are in the form 'permutes'; give the set"):
        prove(replace(ranks, manifest=replace(ranks.manifest, form="permutes")))


def test_what_the_finish_takes_is_held_against_the_wiring_of_the_manifest():
    ranks = by_hand(SCHEDULES[0])
    expected = {"@prepare": (), "@finish_0": ("argument 0", "result 0 of 0B1"), "return": ()}
    first = replace(ranks.manifest.ranks[0], wiring=expected)
    manifest = replace(ranks.manifest, ranks=(first, *ranks.manifest.ranks[1:]))
    found = findings(prove(replace(ranks, manifest=manifest)), ProofRule.OUTSIDE)
    assert len(found) == 3
    assert found[0].startswith("rank_0.mlir:")
    assert (
        "@finish_0 takes result 0 of 0B2 as number 1, but the manifest has result 0 of 0B1"
        in found[0]
    )
    assert (
        "@main returns result 0 of @finish_0 as number 0, but the manifest has nothing" in found[1]
    )
    assert "is outside the schedule, but the manifest does not list it there" in found[2]


# The command.


def written(directory: Path, change: Callable[[str], str] | None = None) -> str:
    for name, text in files(SCHEDULES[0]).items():
        (directory / name).write_text(text)
    if change is not None:
        path = directory / "rank_0.mlir"
        path.write_text(change(path.read_text()))
    return str(directory)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = command_line.main(list(arguments))
    return code, capsys.readouterr().out


def test_check_mpmd_says_what_is_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, text = printed(capsys, "check-mpmd", written(tmp_path))
    assert code == 0
    assert text.startswith("proven: 1f1b: 2 ranks, 2 stages (loop), 3 microbatches\n")
    code, text = printed(capsys, "check-mpmd", str(tmp_path), "--json")
    data: dict[str, Any] = json.loads(text)
    assert code == 0
    assert data["proven"]
    assert all(rank["peak"] <= rank["limit"] for rank in data["memory"])


def test_check_mpmd_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    directory = written(tmp_path, replaced("handle = 1,", "handle = 2,"))
    code, text = printed(capsys, "check-mpmd", directory)
    assert code == 1
    assert text.startswith("not proven\n")
    assert f"{tmp_path}/rank_0.mlir:" in text
    code, text = printed(capsys, "check-mpmd", directory, "--json")
    data: dict[str, Any] = json.loads(text)
    assert code == 1
    assert not data["proven"]
    assert data["found"] == len(data["findings"])


def test_check_mpmd_refuses_what_is_no_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert printed(capsys, "check-mpmd", str(tmp_path))[0] == 2


DIVIDED = ("1f1b", 8, 3, None)  # enough ranks for a fork to judge some


def unknown_channel(text: str) -> str:
    return re.sub(r"handle = \d+", "handle = 4000", text, count=1)


@pytest.mark.parametrize(
    ("rank", "change", "said"),
    [
        (0, replaced("dense<1> : tensor<i32>", "dense<2> : tensor<i32>"), "0F1"),
        (7, replaced("dense<1> : tensor<i32>", "dense<2> : tensor<i32>"), "7F1"),
        (7, inserted("%v3 = ", NO_OP), "stablehlo.add is in @main"),
        (3, unknown_channel, "the manifest has no such channel"),
    ],
    ids=["constant", "constant of the fork", "op of the fork", "message"],
)
def test_ranks_that_a_fork_judges_are_told_like_others(
    rank: int, change: Callable[[str], str], said: str
):
    ranks = by_hand(DIVIDED, 1, change, rank)
    proof = prove(ranks)
    assert not proof.is_proven
    assert any(said in str(finding) for finding in proof.findings), proof.findings


def test_two_processes_prove_what_one_does():
    ranks = by_hand(DIVIDED)
    readings = read_set(ranks)
    shared, alone = sound(ranks, readings), check_all_rules(ranks, readings)
    assert shared == alone
    assert len(alone.memory) == len(readings)


def test_an_order_that_may_deadlock_is_found_beside_the_ranks(monkeypatch: pytest.MonkeyPatch):
    def broken(_: RankSet, __: Sequence[RankReading], found: RankFindings) -> None:
        found.add(ProofRule.ORDER, "they wait for each other")

    monkeypatch.setattr(proving, "_check_order", broken)
    proof = prove(by_hand(DIVIDED))
    assert [finding.rule for finding in proof.findings] == [ProofRule.ORDER]
    assert not proof.memory
