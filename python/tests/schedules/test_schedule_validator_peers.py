"""What other validators of pipeline schedules let pass, or refuse though it is right.

Measured on torch.distributed.pipelining of PyTorch 2.13: its 1F1B table is wrong and passes, as do
duplicates and receives that deadlock; every schedule of several stages a rank is rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from schedule_random import random_table
from schedule_tables import least_buffers, written

from stablehlo_tools.schedules.constraints import ScheduleRule
from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.generators.by_rule import one_f_one_b
from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    Placement,
    Row,
    Step,
    Table,
    backward,
    forward,
    loop,
    table_of,
    v_shape,
)
from stablehlo_tools.schedules.validator import violations

SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 4) for microbatches in range(ranks, 7)]


def with_row(table: Table, rank: int, row: list[Step | None]) -> Table:
    """The table with another row for one rank."""
    rows: list[Row] = list(table.rows)
    rows[rank] = tuple(row)
    return replace(table, rows=tuple(rows))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_1f1b_whose_last_rank_counts_its_forwards_from_one(ranks: int, microbatches: int) -> None:
    last = ranks - 1
    row: list[Step | None] = [None] * last
    for i in range(microbatches):
        row += [forward(last, i + 1), backward(last, i)]
    found = violations(with_row(one_f_one_b(ranks, microbatches), last, row))
    beyond, missing, *early = found
    at = last + 2 * (microbatches - 1)
    assert beyond[:4] == (last, at, f"{last}F{microbatches}", ScheduleRule.RANGE)
    assert missing[:4] == (last, len(row), "", ScheduleRule.COMPLETE)
    assert missing.message == f"{last}F0 is missing"
    assert not early


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_1f1b_whose_backward_comes_before_its_forward(ranks: int, microbatches: int) -> None:
    table = one_f_one_b(ranks, microbatches)
    for rank in range(ranks):
        warm_up = min(ranks - rank, microbatches) - 1  # one forward too few, and backwards on time
        steady: list[Step | None] = []
        for i in range(microbatches):
            ahead = i + warm_up
            steady += [backward(rank, i)] + [forward(rank, ahead)] * (ahead < microbatches)
        row: list[Step | None] = [*(forward(rank, i) for i in range(warm_up)), *steady]
        found = violations(with_row(table, rank, row))
        if warm_up:
            assert found == []  # slower, but right
            continue
        assert [one.rule for one in found] == [ScheduleRule.ROW_ORDER] * microbatches
        assert found[0][:3] == (rank, 0, f"{rank}B0")


@pytest.mark.parametrize(("ranks", "microbatches"), [size for size in SIZES if size[0] > 1])
def test_1f1b_whose_steady_state_waits_in_a_circle(ranks: int, microbatches: int) -> None:
    table = one_f_one_b(ranks, microbatches)
    first = [forward(0, 0), backward(0, 0), *table.rows[0][1:]]
    first = [step for i, step in enumerate(first) if step not in first[:i]]
    rest = [forward(1, i) for i in range(microbatches)] + [
        backward(1, i) for i in range(microbatches)
    ]
    found = violations(with_row(with_row(table, 0, first), 1, list(rest)))
    if microbatches == 1:
        assert found == []
        return
    assert {one.rule for one in found} == {ScheduleRule.DEADLOCK}
    assert found[0][:3] == (0, 1, "0B0")
    assert found[1][:3] == (1, 1, "1F1")
    assert {one.rank for one in found} == set(range(ranks))


@pytest.mark.parametrize(
    "kind", [ActionKind.FORWARD, ActionKind.BACKWARD], ids=["forward", "backward"]
)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_duplicates(ranks: int, microbatches: int, kind: ActionKind) -> None:
    table = one_f_one_b(ranks, microbatches)
    for rank, row in enumerate(table.rows):
        again = Action(kind, rank, microbatches // 2)
        found = violations(with_row(table, rank, [*row, again]))
        assert [one[:4] for one in found] == [(rank, len(row), str(again), ScheduleRule.ONCE)]


SENDS = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"


def test_receives_out_of_order() -> None:
    swapped = "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    for buffers in range(4):
        found = violations(written(loop(2), 2, SENDS, swapped), buffers=buffers)
        assert [one[:4] for one in found] == [(1, 0, "1RECV_F1", ScheduleRule.CHANNEL)]


def test_a_receive_before_the_send_that_leads_to_it() -> None:
    early = SENDS.replace("0SEND_F0 0F1", "0RECV_B0 0SEND_F0 0F1").replace("0RECV_B0 0B0", "0B0")
    other = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    table = written(loop(2), 2, early, other)
    for buffers in range(4):
        first, second = violations(table, buffers=buffers)
        assert first[:4] == (0, 1, "0RECV_B0", ScheduleRule.DEADLOCK)
        assert first.message == (
            "waits for 1SEND_B0 of rank 1, step 3; deadlock: rank 0 waits for 1SEND_B0 of rank 1, "
            "which waits for 0SEND_F0 of rank 0"
        )
        assert second[:4] == (1, 0, "1RECV_F0", ScheduleRule.DEADLOCK)
    assert least_buffers(table) is None


def interleaved(ranks: int, microbatches: int, placement: Placement) -> Table:
    """Every forward by stages, then every backward by stages from the last."""
    rows: list[list[Step]] = [[] for _ in range(ranks)]
    for stage in range(placement.stages):
        for i in range(microbatches):
            rows[placement.rank_of(stage, i)].append(forward(stage, i))
    for stage in reversed(range(placement.stages)):
        for i in range(microbatches):
            rows[placement.rank_of(stage, i)].append(backward(stage, i))
    return table_of("looped", placement, microbatches, rows)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("place", [loop, v_shape], ids=["loop", "v"])
def test_several_stages_a_rank_are_accepted(
    place: Callable[[int, int], Placement], ranks: int, chunks: int
) -> None:
    placement = place(ranks, chunks)
    tables = [interleaved(ranks, 4, placement)]
    tables += [random_table(seed, placement, 4) for seed in range(3)]
    for table in tables:
        assert violations(table) == []
        for late in (False, True):
            assert violations(with_communication(table, late=late)) == []
