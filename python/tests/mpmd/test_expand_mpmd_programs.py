"""Programs of many kinds are cut into rank programs that are proven and give the same values, with
no message that is not needed; what cannot be taken apart is refused where it stands."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from mpmd_programs import PROGRAMS, program
from soaking import first

from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.expansion import Expansion, ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.manifest import Manifest
from stablehlo_tools.mpmd.proof.proving import prove
from stablehlo_tools.mpmd.rank_set import RankSet, load, write
from stablehlo_tools.mpmd.running.set_outcome import SetOptions, run_set

REFUSED = [
    ("rows-twice", "1f1b", "is not a sum"),
    ("rows-that-overlap", "1f1b", "is not a sum"),
    ("cut-off-to-integers", "1f1b", "is not a sum"),
    ("moving-average", "1f1b", "is not a sum"),
    ("rows-beside-others", "dualpipe", "cannot be added up"),
]
TAKEN = [name for name in PROGRAMS if name not in {name for name, _, _ in REFUSED}]
SCHEDULES = ["zb-v", "1f1b", "dualpipe", "zb-h1", "dualpipe-v", "interleaved-1f1b", "gpipe"]
CASES = [(name, schedule) for schedule in SCHEDULES for name in TAKEN]
FOUR_STAGES = {"zb-v", "dualpipe-v", "interleaved-1f1b"}
LEFT_OUT = {
    ("unrolled-by-two", "dualpipe"),  # which is of two microbatches then
    ("unrolled-by-two", "dualpipe-v"),
    *(("scoped", schedule) for schedule in FOUR_STAGES),  # which names two stages
}


@cache
def expansion(name: str, schedule: str, ranks: int = 2) -> Expansion:
    """The rank programs of a program."""
    chunks = 2 if schedule == "interleaved-1f1b" else None
    request = ExpansionRequest(schedule, ranks, load_hardware("h100"), chunks)
    return expand_mpmd(program(name).copy(), request)


def written(room: Path, name: str, schedule: str, ranks: int = 2) -> RankSet:
    """The set, in files."""
    found = expansion(name, schedule, ranks)
    write(room, found.manifest, found.modules)
    return load(room)


def sent(manifest: Manifest, source: int, target: int) -> int:
    """How many tensors of the schedule a rank sends another one for a microbatch."""
    transfers = manifest.transfers
    found = [t for t in transfers if t.is_scheduled and (t.source, t.target) == (source, target)]
    return len(found) // manifest.table.microbatches


@pytest.mark.parametrize("case", first(2 * len(TAKEN), CASES), ids="-".join)
def test_sets_of_many_programs_are_proven(case: tuple[str, str], tmp_path: Path):
    if case not in LEFT_OUT:
        assert not prove(written(tmp_path, *case)).findings


@pytest.mark.parametrize("case", first(1, [("losses-set", "dualpipe"), *CASES]), ids="-".join)
def test_sets_of_many_programs_give_the_same_values(case: tuple[str, str], tmp_path: Path):
    if case not in LEFT_OUT:
        assert run_set(written(tmp_path, *case), program(case[0]), SetOptions()).same


@pytest.mark.parametrize(("name", "schedule", "why"), REFUSED)
def test_what_cannot_be_added_up_apart_is_refused_where_it_stands(
    name: str, schedule: str, why: str
):
    with pytest.raises(ToolError, match=why) as refused:
        expansion(name, schedule)
    assert re.search(r"mpmd_programs\.py:\d+", str(refused.value))


@pytest.mark.parametrize("name", ["sharing", "sharing-in-a-loop"])
def test_gradients_of_weights_that_stages_share_meet_once_behind_the_schedule(name: str):
    """Each stage sums up its own: only the activation and its gradient go between the ranks."""
    ranks = expansion(name, "1f1b").manifest
    assert (sent(ranks, 0, 1), sent(ranks, 1, 0)) == (1, 1)
    assert sum(not each.is_scheduled for each in ranks.transfers) == 1


@pytest.mark.parametrize("name", ["sharing", "sharing-in-a-loop"])
def test_layers_that_share_their_weights_are_cut(name: str):
    stages = expansion(name, "1f1b").manifest.stages
    times = [stage.forward + stage.backward for stage in stages]
    assert max(times) < 1.5 * min(times)


def test_a_scan_is_of_the_stage_that_its_ops_name():
    first_stage, second_stage = expansion("scoped", "1f1b").manifest.stages
    assert first_stage.forward > 4 * second_stage.forward


def test_slopes_of_skipped_activations_are_made_where_they_are_read():
    """What goes down are the gradients of what goes up, one each, and no slope of an activation."""
    ranks = expansion("with-skips", "1f1b").manifest
    assert sent(ranks, 0, 1) == sent(ranks, 1, 0)


@pytest.mark.parametrize(("schedule", "ranks"), [("gpipe", 8), ("zb-v", 4), ("1f1b", 11)])
def test_stages_without_a_backward_hold_what_they_pass_on(
    schedule: str, ranks: int, tmp_path: Path
):
    """There are more stages than layers: some have nothing to compute in a phase."""
    assert not prove(written(tmp_path, "finite-only", schedule, ranks)).findings


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_one_rank_sends_nothing(schedule: str, tmp_path: Path):
    ranks = written(tmp_path, "with-skips", schedule, 1)
    assert not ranks.manifest.transfers
    assert not prove(ranks).findings
