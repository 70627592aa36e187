"""The forms of transfers: both ends beside each other, and permutes of all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rank_sets import ROWS, WIDTH, write_set
from soaking import first
from test_run_mpmd import CASES, Case, edited, first_two_channels_swapped, played, table_of, written

from stablehlo_tools import bindings
from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob
from stablehlo_tools.bindings import ir
from stablehlo_tools.cli import main as command_line
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.manifest import ManifestTransfer
from stablehlo_tools.mpmd.rank_set import RankSet, load, write
from stablehlo_tools.mpmd.reading import body_of
from stablehlo_tools.mpmd.running.origin_inputs import make_inputs
from stablehlo_tools.mpmd.running.processes import run_processes
from stablehlo_tools.mpmd.running.rank_child import cut_pieces, join_pieces
from stablehlo_tools.mpmd.running.rank_compilation import compile_ranks
from stablehlo_tools.mpmd.transfers import rounds_of, with_both_ends, with_permutes
from stablehlo_tools.order.order_findings import Verdict
from stablehlo_tools.order.program import CompiledOrder
from stablehlo_tools.order.verdict import decide
from stablehlo_tools.targets.topologies import Target, missing_package

Lower = Callable[[RankSet], RankSet]
each_case = pytest.mark.parametrize(
    "case", first(3, CASES), ids=lambda case: f"{case[0]}-{case[-1]}"
)
for_gpu = pytest.mark.skipif(
    missing_package(Target.GPU) is not None, reason="XLA:GPU is not installed"
)


def loaded(directory: Path, case: Case) -> RankSet:
    """The set of a case."""
    write_set(directory, table_of(case), case[-1])
    return load(directory)


def ops_of(ranks: RankSet, rank: int, *names: str) -> list[ir.Operation]:
    """The ops of a rank's `main` with these names."""
    block = body_of(ranks.main(rank))
    return [v.operation for v in block.operations if v.operation.name in names]


def channel_of(op: ir.Operation) -> int:
    """The channel of an op."""
    return bindings.ChannelHandle(op.attributes["channel_handle"]).handle


@each_case
def test_both_ends_stand_beside_each_other(case: Case, tmp_path: Path) -> None:
    before = loaded(tmp_path, case)
    after = with_both_ends(before)
    for rank in range(before.ranks):
        ends = ("stablehlo.send", "stablehlo.recv")
        own = [channel_of(op) for op in ops_of(before, rank, *ends)]
        both = ops_of(after, rank, *ends)
        assert [(op.name, channel_of(op)) for op in both] == [
            (name, channel) for channel in own for name in ends
        ]
        for one, other in pairwise(both):
            assert other.operands[len(other.operands) - 1] == one.results[len(one.results) - 1]
        assert after.programs[rank].module.operation.verify()
    assert decide(_programs(after)).finding is None


def test_both_ends_keep_an_order_that_deadlocks(tmp_path: Path) -> None:
    loaded(tmp_path, ("gpipe", 2, 2, None, 1))
    edited(tmp_path, 1, first_two_channels_swapped)
    finding = decide(_programs(with_both_ends(load(tmp_path)))).finding
    assert finding is not None
    assert finding.verdict is Verdict.MAY_DEADLOCK


@each_case
def test_all_ranks_issue_the_same_permutes(case: Case, tmp_path: Path) -> None:
    before = loaded(tmp_path, case)
    after = with_permutes(before)
    rows = [
        [
            (channel_of(op), str(op.attributes["source_target_pairs"]), str(op.results[0].type))
            for op in ops_of(after, rank, "stablehlo.collective_permute")
        ]
        for rank in range(after.ranks)
    ]
    assert all(row == rows[0] for row in rows)
    assert not any(ops_of(after, rank, "stablehlo.send", "stablehlo.recv") for rank in range(2))
    assert len(rows[0]) <= len(before.manifest.transfers)
    assert all(program.module.operation.verify() for program in after.programs)
    assert decide(_programs(after)).finding is None


def _programs(ranks: RankSet) -> list[CompiledOrder]:
    job = ProgramJob(tuple(program.copy() for program in ranks.programs), JobOptions())
    return [issued.program for issued in job.read()]


def test_transfers_that_are_ready_together_share_a_permute(tmp_path: Path) -> None:
    before = loaded(tmp_path, ("dualpipe", 4, 8, None, 1))
    permutes = ops_of(with_permutes(before), 0, "stablehlo.collective_permute")
    assert len(permutes) < len(before.manifest.transfers)


@pytest.mark.parametrize("transfers", ["both-ends", "permutes"])
def test_values_stay_the_same(transfers: str, tmp_path: Path) -> None:
    written(tmp_path / "set", ("zb-h1", 3, 3, None, 1))
    target = tmp_path / "lowered"
    words = ["lower-mpmd", str(tmp_path / "set"), "-o", str(target), "--transfers", transfers]
    assert command_line.main(words) == 0
    for one, other in zip(played(tmp_path / "set")[1], played(target)[1], strict=True):
        np.testing.assert_array_equal(one, other)


def with_ring(text: str) -> str:
    """Rows in `forward` go to the next device of the rank first; the first one gets none."""
    attributes = (
        "{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, "
        "source_target_pairs = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>}"
    )
    kind = f"tensor<{ROWS}x{WIDTH}xf32>"
    return re.sub(
        r"%p = stablehlo\.dot_general (%\w+),",
        rf'%r = "stablehlo.collective_permute"(\1) {attributes} : ({kind}) -> {kind}\n'
        r"    %p = stablehlo.dot_general %r,",
        text,
    )


def test_permutes_inside_of_a_rank_are_its_own(tmp_path: Path) -> None:
    loaded(tmp_path / "set", ("1f1b", 2, 2, None, 2))
    before = played(tmp_path / "set")[1]
    for rank in range(2):
        edited(tmp_path / "set", rank, with_ring)
    lowered = with_permutes(load(tmp_path / "set"))
    modules = [program.module for program in lowered.programs]
    assert not any("pairs = dense<[[0, 1], [2, 3]]>" in str(module) for module in modules)
    write(tmp_path / "lowered", lowered.manifest, modules)
    one, other = played(tmp_path / "set")[1], played(tmp_path / "lowered")[1]
    for array, same, unlike in zip(one, other, before, strict=True):
        np.testing.assert_array_equal(array, same)
        assert (array != unlike).any()


@pytest.mark.soak
def test_permutes_inside_of_a_rank_run_in_processes(tmp_path: Path) -> None:
    loaded(tmp_path, ("1f1b", 2, 2, None, 2))
    for rank in range(2):
        edited(tmp_path, rank, with_ring)
    ranks = load(tmp_path)
    room = tmp_path / "room"
    room.mkdir()
    pieces = cut_pieces(ranks.manifest, make_inputs(ranks.manifest, None, 0, {}).arrays)
    found = join_pieces(ranks.manifest, run_processes(ranks, pieces, room, 100).results)
    for one, other in zip(found, played(tmp_path)[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@for_gpu
@pytest.mark.parametrize("case", [("1f1b", 2, 2, None, 2)], ids=["1f1b-2"])
def test_every_rank_compiles_for_gpu(case: Case, tmp_path: Path) -> None:
    found = compile_ranks(loaded(tmp_path, case), 100)
    assert [(rank.refusal, rank.in_order) for rank in found] == [("", True)] * 2
    assert all(rank.transfers == rank.expected > 0 for rank in found)
    assert all(rank.temporaries > 0 for rank in found)


@pytest.mark.parametrize("lower", [with_both_ends, with_permutes], ids=["both-ends", "permutes"])
def test_only_pairs_are_rewritten(lower: Lower, tmp_path: Path) -> None:
    lowered = lower(loaded(tmp_path, CASES[0]))
    with pytest.raises(ToolError, match="made only from the form pairs"):
        lower(lowered)


def test_a_broken_chain_is_refused(tmp_path: Path) -> None:
    loaded(tmp_path, ("gpipe", 2, 2, None, 1))
    path = tmp_path / "rank_0.mlir"
    lines = path.read_text().splitlines()
    sends = [i for i, line in enumerate(lines) if '"stablehlo.send"' in line]
    token = lines[sends[0]].split('"(')[1].split(")")[0].split(", ")[1]
    given = lines[sends[1]].split('"(')[1].split(")")[0].split(", ")[1]
    lines[sends[1]] = lines[sends[1]].replace(f"{given})", f"{token})")
    path.write_text("\n".join(lines))
    with pytest.raises(ToolError, match="must read the token of the transfer before it"):
        with_permutes(load(tmp_path))


def test_an_order_that_no_run_has_is_refused() -> None:
    one, other = (ManifestTransfer(i, f"0SEND_F{i}", 0, 0, 1, "tensor<f32>") for i in (1, 2))
    with pytest.raises(ToolError, match="wait for each other forever") as raised:
        rounds_of([[one, other], [other, one]])
    assert len(raised.value.diagnostic.notes) == 2


def test_types_are_not_mixed_in_a_permute() -> None:
    small = ManifestTransfer(1, "0SEND_F0", 0, 0, 1, "tensor<f32>")
    large = ManifestTransfer(2, "2SEND_F0", 0, 2, 3, "tensor<8xf32>")
    same = ManifestTransfer(3, "4SEND_F0", 0, 4, 5, "tensor<f32>")
    rows = [[small], [small], [large], [large], [same], [same]]
    assert rounds_of(rows) == [(small, same), (large,)]
