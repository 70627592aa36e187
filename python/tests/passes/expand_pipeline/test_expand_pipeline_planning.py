"""What expand-pipeline decides before it writes: chunks, exchanges, lockstep schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.schedules.lockstep import training_lockstep
from stablehlo_tools.transforms.expand_pipeline import ExpandPipelinePass
from stablehlo_tools.transforms.parts.expand_pipeline.emit import mirror_direction, waiting_slots
from stablehlo_tools.transforms.parts.expand_pipeline.expansion_plan import LayerChunks
from stablehlo_tools.transforms.parts.expand_pipeline.stacks import rounds
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import mean_runs

LIT = Path(__file__).parents[4] / "lit_tests/transforms/expand_pipeline_layout.mlir"


def test_even_chunks_take_every_layer_once() -> None:
    chunks = LayerChunks(ranks=2, repeats=2, trips=8)
    assert chunks.is_even
    assert chunks.order() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_uneven_chunks_end_in_rows_that_nobody_reads() -> None:
    chunks = LayerChunks(ranks=4, repeats=1, trips=6)
    assert chunks.sizes == (2, 2, 1, 1)
    assert chunks.order() == [0, 1, 2, 3, 4, -1, 5, -1]


@pytest.mark.parametrize(("ranks", "repeats"), [(2, 2), (4, 2), (4, 3), (3, 5)])
def test_in_a_round_every_rank_sends_one_chunk_and_receives_one(ranks: int, repeats: int) -> None:
    turns = rounds(ranks, repeats)
    assert sorted(p for sent in turns for p in sent) == list(range(ranks * repeats))
    for sent in turns:
        assert [p % ranks for p in sent] == list(range(ranks))
        assert {p // repeats for p in sent} == set(range(ranks))


def test_a_schedule_mirrored_twice_is_the_schedule() -> None:
    forward = training_lockstep(4, 8, 2, True).forward
    assert forward is not None
    assert mirror_direction(forward, 2) != forward
    assert mirror_direction(mirror_direction(forward, 2), 2) == forward


def test_activations_wait_for_the_head_no_longer_than_the_schedule_says() -> None:
    assert 1 <= waiting_slots(training_lockstep(4, 8, 1, True), rank=3, chunk=0) <= 8


@pytest.mark.parametrize("together", [False, True])
def test_loops_run_as_often_as_on_the_slowest_rank_of_a_tick(together: bool) -> None:
    ranks, microbatches, layers = 4, 8, 16
    schedule = training_lockstep(ranks, microbatches, 1, together)
    chunks = LayerChunks(ranks, 1, layers)
    ahead, back = mean_runs(schedule.directions, [chunks, chunks], [False, True])
    ramp, each = ranks - 1, layers / ranks
    if together:  # forwards alone, both, backwards alone
        expected = each * (ramp + microbatches), each * (ramp + microbatches)
    else:  # once there are backwards, some rank runs one in every tick
        expected = each * ranks, each * (schedule.ticks - ranks)
    assert (ahead * schedule.ticks, back * schedule.ticks) == pytest.approx(expected)


def test_the_stacks_of_weights_are_found_and_the_module_stays() -> None:
    text = LIT.read_text().split("\n// -----\n")[0]
    module = artifact.parse(text.encode()).module
    before = str(module)
    stacks = ExpandPipelinePass(microbatches=2, layout="pipeline").stack_orders(module)
    assert str(module) == before
    assert stacks.orders
    assert all(order.arguments for order in stacks.orders)
