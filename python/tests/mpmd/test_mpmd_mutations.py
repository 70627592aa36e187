"""No small mistake in the program of a rank goes unnoticed by `check-mpmd`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import message_mutations
import pytest
from proof_programs import write_expanded
from rank_mutations import KINDS, OUTSIDE, mutants
from rank_sets import write_set
from soaking import first

from stablehlo_tools.mpmd.proof.proof_findings import ProofRule
from stablehlo_tools.mpmd.proof.proving import SetProof, prove
from stablehlo_tools.mpmd.rank_set import RankSet, load
from stablehlo_tools.schedules.catalogue import build
from stablehlo_tools.schedules.setting import ScheduleSetting, unit_costs

# A schedule, its ranks, microbatches and chunks, and the devices of a rank; 0: the set is one that
# expand-mpmd writes, with several tensors in a message and rounds behind the schedule.
Case = tuple[str, int, int, int | None, int]
SMALL: list[Case] = [("1f1b", 2, 2, None, 1), ("1f1b", 2, 3, None, 1), ("zb-h1", 2, 2, None, 0)]
SAMPLED: list[Case] = [
    ("interleaved-1f1b", 2, 4, 2, 0),
    ("1f1b", 2, 2, None, 2),
    ("dualpipe", 2, 4, None, 0),
    ("zb-v", 2, 4, None, 0),
    ("gpipe", 2, 3, None, 0),
    ("dualpipe-v", 2, 4, None, 1),
    ("zb-h1", 3, 4, None, 2),
    ("1f1b", 4, 4, None, 0),
    ("looped-bfs", 2, 4, 2, 1),
    ("v-min", 2, 4, None, 0),
    ("dualpipe", 4, 8, None, 2),
]
NAMED = ("send-removed", "sends-swapped", "receive-moved-up")  # on every set, all of them


@cache
def set_of(case: Case) -> RankSet:
    """A valid set."""
    name, ranks, microbatches, chunks, devices = case
    with TemporaryDirectory() as room:
        if devices:
            setting = ScheduleSetting(ranks, microbatches, unit_costs(ranks), chunks=chunks)
            write_set(Path(room), build(name, setting), devices)
        else:
            write_expanded(Path(room), name, ranks, microbatches, chunks)
        loaded = load(room)
    assert prove(loaded).is_proven
    return loaded


def identifier(value: object) -> str | None:
    """The name of a case."""
    if not isinstance(value, tuple):
        return None
    name, ranks, microbatches, _, devices = value  # pyright: ignore[reportUnknownVariableType]
    kind = f"devices{devices}" if devices else "expanded"
    return f"{name}-{ranks}x{microbatches}-{kind}"


def unnoticed(case: Case, kind: str, most: int | None) -> tuple[list[str], int]:
    """The mutants that are proven, and how many there are."""
    found = [(said, prove(mutant)) for said, mutant in mutants(set_of(case), kind, most)]
    return [said for said, proof in found if proof.is_proven], len(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", first(1, SMALL), ids=identifier)
def test_every_mutation_of_a_small_set_is_noticed(case: Case, kind: str):
    missed, _ = unnoticed(case, kind, None)
    assert not missed


@pytest.mark.parametrize("case", first(2, SAMPLED), ids=identifier)
def test_mutations_of_every_kind_are_noticed(case: Case):
    missed = [said for kind in KINDS for said in unnoticed(case, kind, 2)[0]]
    assert not missed


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SAMPLED, ids=identifier)
def test_more_mutations_are_noticed(case: Case, kind: str):
    missed, _ = unnoticed(case, kind, None if kind in NAMED else 60)
    assert not missed


@pytest.mark.parametrize("kind", OUTSIDE)
@pytest.mark.parametrize(
    "case", first(2, [case for case in SAMPLED if not case[-1]]), ids=identifier
)
def test_exchanges_outside_of_the_schedule_are_noticed(case: Case, kind: str):
    missed, _ = unnoticed(case, kind, 20)
    assert not missed


def first_of(case: Case, kind: str) -> SetProof:
    """The proof of the first mutant of a kind."""
    return prove(next(mutants(set_of(case), kind))[1])


def test_a_missing_send_is_named():
    proof = first_of(SMALL[0], "send-removed")
    assert proof.findings[0].rank == 0
    assert "channel 1 (0SEND_F0) is sent 0 times, not once (M5)" in str(proof.findings[0])


def test_two_swapped_sends_are_named():
    proof = first_of(("gpipe", 2, 3, None, 0), "sends-swapped")
    assert any(finding.rule is ProofRule.MESSAGES for finding in proof.findings)


def test_a_receive_before_the_send_that_it_waits_for_is_a_deadlock():
    """The schedule read back waits for itself: rank 0 for a gradient of what it is yet to send."""
    proof = first_of(SMALL[0], "receive-moved-up")
    assert any(finding.rule is ProofRule.SCHEDULE for finding in proof.findings)


@pytest.mark.parametrize("devices", [1, 2])
def test_parts_of_sums_that_are_swapped_are_noticed(monkeypatch: pytest.MonkeyPatch, devices: int):
    monkeypatch.setitem(KINDS, "parts-swapped", message_mutations.parts_swapped)
    missed, count = unnoticed(("dualpipe", 2, 4, None, devices), "parts-swapped", None)
    assert count
    assert not missed
