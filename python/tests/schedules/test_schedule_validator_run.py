"""The rules of the run and of memory: what waits for what, and the first step over the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_tables import least_buffers, written

from stablehlo_tools.schedules.constraints import ScheduleRule
from stablehlo_tools.schedules.generators.by_rule import gpipe, one_f_one_b
from stablehlo_tools.schedules.setting import costs, unit_costs
from stablehlo_tools.schedules.table import Placement, Table, bidirectional, loop
from stablehlo_tools.schedules.table_simulator import peak_bytes
from stablehlo_tools.schedules.validator import violations

ONE = loop(1)
TWO = loop(2)
THREE = loop(3)


def test_c14_a_cycle_is_printed_and_every_rank_that_waits_is_named() -> None:
    table = written(THREE, 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 - 2F1 2B0 2B1")
    first, second, behind = violations(table)
    assert first[:4] == (0, 1, "0B0", ScheduleRule.DEADLOCK)
    assert "waits for 1B0 of rank 1, step 2" in first.message
    assert "rank 0 waits for 1B0 of rank 1, which waits for 0F1 of rank 0" in first.message
    assert second[:4] == (1, 1, "1F1", ScheduleRule.DEADLOCK)
    assert second.message == "waits for 0F1 of rank 0, step 2"
    assert behind[:4] == (2, 2, "2F1", ScheduleRule.DEADLOCK)
    assert behind.message == "waits for 1F1 of rank 1, step 1, which is stuck as well"


def test_c14_a_rank_that_waits_for_itself() -> None:
    (found,) = violations(written(loop(1, 2), 1, "1F0 0F0 1B0 0B0"))
    assert found[:4] == (0, 0, "1F0", ScheduleRule.DEADLOCK)
    assert found.message == "waits for 0F0, which comes after it, at step 1"


def test_c14_two_cycles() -> None:
    four = Placement(4, ((0, 1, 0, 1), (2, 3, 2, 3)))
    row = "2F{m} 0F{m} 2B{m} 0B{m}", "1F{m} 3F{m} 3B{m} 1B{m}"
    table = written(four, 2, *(half.format(m=m) for m in (0, 1) for half in row))
    found = violations(table)
    assert [one.rank for one in found] == [0, 1, 2, 3]
    assert ["deadlock" in one.message for one in found] == [True, False, True, False]


def test_c14_a_pair_waits_for_both_of_its_inputs() -> None:
    table = written(TWO, 2, "0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1F1 1B0 1B1")
    first, second = violations(table)
    assert first[:4] == (0, 1, "(0F1;0B0)OVERLAP_F_B", ScheduleRule.DEADLOCK)
    assert second[:4] == (1, 1, "1F1", ScheduleRule.DEADLOCK)
    assert violations(written(TWO, 2, "0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1")) == []


def test_c14_buffers_decide_where_both_ranks_send_first() -> None:
    table = written(
        bidirectional(2),
        2,
        "0F0 0SEND_F0 1RECV_F1 1F1 1B1 1SEND_B1 0RECV_B0 0B0",
        "0F1 0SEND_F1 1RECV_F0 1F0 1B0 1SEND_B0 0RECV_B1 0B1",
    )
    first, second = violations(table)
    assert first[:4] == (0, 1, "0SEND_F0", ScheduleRule.DEADLOCK)
    assert "waits for 1RECV_F0 of rank 1, step 2" in first.message
    assert second[:4] == (1, 1, "0SEND_F1", ScheduleRule.DEADLOCK)
    assert violations(table, buffers=1) == []
    assert least_buffers(table) == 1


def sending_first(messages: int) -> Table:
    """Both ranks send all their messages before they receive the first."""
    rows = [
        [f"0F{i} 0SEND_F{i}" for i in range(rank, 2 * messages, 2)]
        + [f"1RECV_F{i} 1F{i}" for i in range(1 - rank, 2 * messages, 2)]
        for rank in range(2)
    ]
    return written(bidirectional(2), 2 * messages, *map(" ".join, rows), training=False)


@pytest.mark.parametrize("messages", range(1, 9))
def test_c14_a_full_channel_waits_for_an_earlier_receive(messages: int) -> None:
    table = sending_first(messages)
    assert least_buffers(table) == messages
    assert violations(table, buffers=messages) == []
    for buffers in range(1, messages):
        first, second = violations(table, buffers=buffers)
        assert first[:3] == (0, 2 * buffers + 1, f"0SEND_F{2 * buffers}")
        assert f"waits for 1RECV_F0 of rank 1, step {2 * messages};" in first.message
        assert second[:3] == (1, 2 * buffers + 1, f"0SEND_F{2 * buffers + 1}")


def test_c15_the_first_step_over_the_limit() -> None:
    figures = costs(2, activation=[3.0, 2.0], weights=[10.0, 20.0])
    table = gpipe(2, 3)
    assert peak_bytes(table, figures) == (19.0, 26.0)
    assert violations(table, figures, limit=26) == []
    found = violations(table, figures, limit=25)
    assert [one[:4] for one in found] == [(1, 2, "1F2", ScheduleRule.MEMORY)]
    assert "26 bytes, 6 of them activations; the limit is 25" in found[0].message
    found = violations(table, figures, limit=13)
    assert [one[:3] for one in found] == [(0, 1, "0F1"), (1, 0, "")]
    assert "weights alone need 20 bytes, more than the limit of 13" in found[1].message


def test_c15_what_is_kept_for_the_weight_gradient() -> None:
    figures = costs(1, activation=4.0, kept=3.0)
    table = written(ONE, 3, "0F0 0I0 - 0F1 0I1 0F2 0W0 0I2 0W1 0W2")
    assert peak_bytes(table, figures) == (10.0,)
    assert violations(table, figures, limit=10) == []
    assert [one[:3] for one in violations(table, figures, limit=9.5)] == [(0, 5, "0F2")]
    grows = replace(costs(1, activation=1.0), kept=(3.0,))
    table = written(ONE, 1, "0F0 0I0 0W0")
    assert [one[:3] for one in violations(table, grows, limit=2)] == [(0, 1, "0I0")]


def test_c15_a_pair_holds_the_new_before_it_frees_the_old() -> None:
    table = written(ONE, 2, "0F0 - (0F1;0B0)OVERLAP_F_B 0B1")
    found = violations(table, unit_costs(1), limit=1)
    assert [one[:3] for one in found] == [(0, 2, "(0F1;0B0)OVERLAP_F_B")]


def test_c15_sums_of_shares_may_be_off_by_rounding() -> None:
    table = gpipe(1, 10)
    tenth = costs(1, activation=0.1)
    assert peak_bytes(table, tenth) == (pytest.approx(1.0, rel=1e-12),)
    assert violations(table, tenth, limit=1 - 1e-15) == []
    assert rules_with_limit(table, 0.999) == [ScheduleRule.MEMORY]


def test_c15_nothing_held_fits_into_nothing() -> None:
    table = gpipe(1, 2)
    assert violations(table, costs(1, activation=0.0), limit=0) == []
    assert [one[:3] for one in violations(table, unit_costs(1), limit=0)] == [(0, 0, "0F0")]


def rules_with_limit(table: Table, limit: float) -> list[ScheduleRule]:
    """The rules that a table of activations of a tenth of a byte breaks."""
    return [one.rule for one in violations(table, costs(1, activation=0.1), limit)]


def test_memory_and_deadlock_are_both_reported() -> None:
    table = written(TWO, 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    found = violations(table, unit_costs(2), limit=1)
    assert [one.rule for one in found] == [
        ScheduleRule.DEADLOCK,
        ScheduleRule.DEADLOCK,
        ScheduleRule.MEMORY,
    ]


def test_least_buffers_of_tables_without_transfers() -> None:
    assert least_buffers(one_f_one_b(3, 4)) == 0
    assert least_buffers(written(ONE, 1, "0F0")) is None
    assert least_buffers(written(TWO, 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")) is None
