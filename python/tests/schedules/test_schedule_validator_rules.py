"""Each rule of the validator is broken by a test named for it, and says where."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_tables import least_buffers, written

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.constraints import ScheduleRule, Violation
from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.generators.by_rule import one_f_one_b
from stablehlo_tools.schedules.setting import unit_costs
from stablehlo_tools.schedules.table import Placement, Table, bidirectional, loop, v_shape
from stablehlo_tools.schedules.validator import check, violations

ONE = loop(1)
TWO = loop(2)
THREE = loop(3)


def only(table: Table, buffers: int = 0) -> Violation:
    """The only violation of a table."""
    found = violations(table, buffers=buffers)
    assert len(found) == 1, found
    return found[0]


def rules(table: Table) -> list[ScheduleRule]:
    """The rules that a table breaks, as listed."""
    return [violation.rule for violation in violations(table)]


def test_rules_are_numbered_from_c1_each_with_a_meaning() -> None:
    assert [rule.number for rule in ScheduleRule] == [f"C{i + 1}" for i in range(len(ScheduleRule))]
    assert all(rule.meaning for rule in ScheduleRule)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_accepts_what_is_valid(ranks: int) -> None:
    table = one_f_one_b(ranks, 4)
    for form in (table, with_communication(table), with_communication(table, late=True)):
        assert violations(form) == []
        check(form)


def test_c1_rows_and_ranks_differ() -> None:
    table = one_f_one_b(3, 2)
    for rows in (table.rows[:2], (*table.rows, ()), ()):
        found = only(replace(table, rows=rows))
        assert found.rule is ScheduleRule.ROWS
        assert f"{len(rows)} rows for 3 ranks" in found.message


@pytest.mark.parametrize(
    ("placement", "microbatches", "said"),
    [
        pytest.param(Placement(0, ((0,),)), 1, "0 ranks", id="no-ranks"),
        pytest.param(Placement(1, ()), 1, "0 routes", id="no-routes"),
        pytest.param(ONE, 0, "0 microbatches", id="no-microbatches"),
        pytest.param(Placement(1, ((),)), 1, "route 0 has 0 stages", id="no-stages"),
        pytest.param(Placement(1, ((0,), (0, 0))), 1, "route 1 has 2 stages", id="uneven-routes"),
        pytest.param(
            Placement(1, ((0, 1),)),
            1,
            "stage 1 is on rank 1, but there are 1 ranks",
            id="no-such-rank",
        ),
        pytest.param(
            Placement(1, ((-1,),)), 1, "stage 0 is on rank -1, but there are 1 ranks", id="negative"
        ),
    ],
)
def test_c1_nothing_to_compute_or_no_place_for_it(
    placement: Placement, microbatches: int, said: str
) -> None:
    found = only(written(placement, microbatches, *[""] * placement.ranks))
    assert found.rule is ScheduleRule.ROWS
    assert said in found.message


@pytest.mark.parametrize("action", ["1F0", "-1F0", "0F1", "0F-1", "1SEND_F0", "0RECV_B7"])
def test_c2_no_such_stage_or_microbatch(action: str) -> None:
    found = only(written(ONE, 1, f"0F0 {action} 0B0"))
    assert found[:4] == (0, 1, action, ScheduleRule.RANGE)


@pytest.mark.parametrize("action", ["-1F0", "0F-1", "1F0", "0F1"])
def test_c2_what_is_out_of_range_takes_no_place(action: str) -> None:
    beyond, missing = violations(written(ONE, 1, f"{action} 0B0"))
    assert beyond[:4] == (0, 0, action, ScheduleRule.RANGE)
    assert missing.message == "0F0 is missing"


@pytest.mark.parametrize("action", ["0B0", "0I0", "0W0", "0RECV_B0"])
def test_c3_a_forward_only_table_runs_no_backward(action: str) -> None:
    table = written(TWO, 1, f"0F0 {action}", "1F0", training=False)
    assert only(table)[:4] == (0, 1, action, ScheduleRule.PHASE)


def test_c4_wrong_rank_is_named_with_the_right_one() -> None:
    moved, missing = violations(written(TWO, 1, "0F0", "1F0 1B0 0B0"))
    assert moved[:4] == (1, 2, "0B0", ScheduleRule.RANK)
    assert "stage 0 is on rank 0" in moved.message
    assert missing[:4] == (0, 1, "", ScheduleRule.COMPLETE)
    assert "0B0" in missing.message


def test_c4_each_microbatch_takes_its_own_route() -> None:
    both_down = written(bidirectional(2), 2, "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    found = violations(both_down)
    assert [f[:4] for f in found if f.rule is ScheduleRule.RANK] == [
        (0, 1, "0F1", ScheduleRule.RANK),
        (0, 3, "0B1", ScheduleRule.RANK),
        (1, 1, "1F1", ScheduleRule.RANK),
        (1, 3, "1B1", ScheduleRule.RANK),
    ]
    assert violations(written(bidirectional(2), 2, "0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1")) == []


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("0F0 (0F1;0I0)OVERLAP_F_B 0W0 0B1", id="input-gradient"),
        pytest.param("0F0 0F1 (0B0;0B1)OVERLAP_F_B", id="two-backwards"),
        pytest.param("(0F0;0F1)OVERLAP_F_B 0B0 0B1", id="two-forwards"),
        pytest.param("0F0 (0B0;0F1)OVERLAP_F_B 0B1", id="backward-first"),
        pytest.param("(0F0;0B0)OVERLAP_F_B 0F1 0B1", id="one-microbatch"),
    ],
)
def test_c5_a_pair_of_anything_else(row: str) -> None:
    found = only(written(ONE, 2, row))
    assert found.rule is ScheduleRule.PAIR
    assert found.action == row.split()[found.step]


def test_c5_no_transfer_inside_a_pair() -> None:
    row = "0F0 0SEND_F0 0F1 (0RECV_B0;0SEND_F1)OVERLAP_F_B 0B0 0RECV_B1 0B1"
    other = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    assert only(written(TWO, 2, row, other))[:4] == (0, 3, row.split()[3], ScheduleRule.PAIR)


def test_c5_a_pair_across_stages_of_one_microbatch() -> None:
    table = written(v_shape(1), 1, "0F0 (1F0;0B0)OVERLAP_F_B 1B0")
    assert only(table).rule is ScheduleRule.PAIR


@pytest.mark.parametrize("action", ["0F0", "0B0"])
@pytest.mark.parametrize("at", range(3))
def test_c6_duplicate_forward_or_backward(action: str, at: int) -> None:
    cells = ["0F0", "0B0"]
    cells.insert(at, action)
    found = violations(written(ONE, 1, " ".join(cells)))
    first = cells.index(action)
    assert found[0].rule is ScheduleRule.ONCE
    assert found[0].step == cells.index(action, first + 1)
    assert f"{action} a second time; the first is at step {first}" in found[0].message


def test_c6_in_a_pair() -> None:
    found = only(written(ONE, 2, "0F0 0F1 (0F1;0B0)OVERLAP_F_B 0B1"))
    assert found[:4] == (0, 2, "(0F1;0B0)OVERLAP_F_B", ScheduleRule.ONCE)


@pytest.mark.parametrize("left_out", ["0F0", "0B0", "1F0", "1I0", "1W0"])
def test_c7_what_is_missing_is_named_on_its_rank(left_out: str) -> None:
    rows = ["0F0 0B0", "1F0 1I0 1W0"]
    found = only(written(TWO, 1, *(row.replace(left_out, "") for row in rows)))
    rank = int(left_out[0])
    assert found[:4] == (rank, len(rows[rank].split()) - 1, "", ScheduleRule.COMPLETE)
    assert found.message.startswith(f"{left_out} is missing")


def test_c7_forward_only() -> None:
    assert violations(written(TWO, 2, "0F0 0F1", "1F1 1F0", training=False)) == []
    assert only(written(TWO, 2, "0F0 0F1", "1F1", training=False)).message == "1F0 is missing"


@pytest.mark.parametrize("split", ["0I0", "0W0", "0I0 0W0"])
def test_c8_full_excludes_split(split: str) -> None:
    table = written(ONE, 1, f"0F0 0B0 {split}")
    assert rules(table) == [ScheduleRule.FULL_OR_SPLIT] * len(split.split())
    assert [found.action for found in violations(table)] == split.split()
    assert "0B0 at step 1 computes both" in violations(table)[0].message


@pytest.mark.parametrize(
    ("row", "action", "before"),
    [("0B0 0F0", "0B0", "0F0"), ("0I0 0F0 0W0", "0I0", "0F0"), ("0F0 0W0 0I0", "0W0", "0I0")],
)
def test_c9_phases_out_of_order(row: str, action: str, before: str) -> None:
    found = only(written(ONE, 1, row))
    cells = row.split()
    assert found[:4] == (0, cells.index(action), action, ScheduleRule.ROW_ORDER)
    assert f"before {before}, which is at step {cells.index(before)}" in found.message


def transferring(row_0: str, row_1: str) -> Table:
    """Two ranks, one microbatch: `0F0 0SEND_F0 0RECV_B0 0B0` and its counterpart when valid."""
    return written(TWO, 1, row_0, row_1)


DOWN, UP = "0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"


def test_c10_no_transfer_beyond_the_ends_or_within_a_rank() -> None:
    assert violations(transferring(DOWN, UP)) == []
    for row, action, what in (
        ("0RECV_F0 " + DOWN, "0RECV_F0", "stage -1 does not exist"),
        (DOWN + " 0SEND_B0", "0SEND_B0", "stage -1 does not exist"),
    ):
        found = only(transferring(row, UP))
        assert found[:4] == (0, row.split().index(action), action, ScheduleRule.NO_TRANSFER)
        assert what in found.message
    inside = written(loop(1, 2), 1, "0F0 0SEND_F0 1F0 1B0 0B0")
    assert "stage 1 is on rank 0 too" in only(inside).message


@pytest.mark.parametrize("end", ["0SEND_F0", "0RECV_B0", "1RECV_F0", "1SEND_B0"])
def test_c11_each_end_is_there(end: str) -> None:
    found = only(transferring(DOWN.replace(end, ""), UP.replace(end, "")))
    assert found[:4] == (int(end[0]), 3, "", ScheduleRule.TRANSFER)
    assert found.message.startswith(f"{end} is missing")


def test_c11_all_transfers_or_none() -> None:
    assert violations(transferring("0F0 0B0", "1F0 1B0")) == []
    assert rules(transferring("0F0 0SEND_F0 0B0", "1F0 1B0")) == [ScheduleRule.TRANSFER] * 3


@pytest.mark.parametrize(
    ("row_0", "row_1", "rank", "action", "phase"),
    [
        ("0SEND_F0 0F0 0RECV_B0 0B0", UP, 0, "0SEND_F0", "0F0"),
        ("0F0 0SEND_F0 0B0 0RECV_B0", UP, 0, "0RECV_B0", "0B0"),
        (DOWN, "1F0 1RECV_F0 1B0 1SEND_B0", 1, "1RECV_F0", "1F0"),
        (DOWN, "1RECV_F0 1F0 1SEND_B0 1B0", 1, "1SEND_B0", "1B0"),
        (DOWN, "1RECV_F0 1F0 1SEND_B0 1I0 1W0", 1, "1SEND_B0", "1I0"),
    ],
)
def test_c12_sent_before_it_is_made_or_received_after_its_use(
    row_0: str, row_1: str, rank: int, action: str, phase: str
) -> None:
    found = only(transferring(row_0, row_1))
    row = (row_0, row_1)[rank].split()
    assert found[:4] == (rank, row.index(action), action, ScheduleRule.TRANSFER_ORDER)
    assert f"{phase}, step {row.index(phase)}" in found.message


def test_c13_messages_arrive_in_order() -> None:
    table = written(
        TWO,
        2,
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    for buffers in (0, 1, 2):
        found = only(table, buffers=buffers)
        assert found[:4] == (1, 0, "1RECV_F1", ScheduleRule.CHANNEL)
        assert "receive 0 from rank 0, whose send 0 is 0SEND_F0, step 1" in found.message
    assert least_buffers(table) is None


def test_many_violations_are_counted() -> None:
    table = written(loop(1), 40, " ".join(f"0F{i}" for i in range(40)))
    found = violations(table)
    assert len(found) == 10
    assert found[-1].message == "0B9 is missing, or 0I9 and 0W9; 30 more break the same rule"


def test_check_raises_the_first_and_notes_the_others() -> None:
    table = written(THREE, 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1")
    with pytest.raises(ToolError) as error:
        check(table)
    diagnostic = error.value.diagnostic
    assert diagnostic.message.startswith("by hand is not valid: rank 0, step 1: 0B0 waits for 1B0")
    assert diagnostic.message.endswith("which waits for 0F1 of rank 0 (C14)")
    assert [note.message for note in diagnostic.notes] == [
        "rank 1, step 1: 1F1 waits for 0F1 of rank 0, step 2 (C14)",
        "rank 2, step 1: 2F1 waits for 1F1 of rank 1, step 1, which is stuck as well (C14)",
    ]


def test_check_counts_what_it_leaves_out() -> None:
    with pytest.raises(ToolError) as error:
        check(written(loop(1), 40, "0F40 " * 15))
    notes = error.value.diagnostic.notes
    assert len(notes) == 11
    assert notes[-1].message == "and 84 more"  # of 15 of C2, 40 forwards and 40 backwards


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"buffers": -1}, "buffers: -1"),
        ({"limit": 3.0}, "needs costs"),
        ({"limit": -1.0, "costs": unit_costs(2)}, "memory limit is -1"),
        ({"limit": float("nan"), "costs": unit_costs(2)}, "memory limit is nan"),
        ({"costs": unit_costs(3)}, "the costs have 3 stages, but the schedule has 2"),
    ],
    ids=["buffers", "no-costs", "negative-limit", "nan-limit", "stages"],
)
def test_arguments_that_make_no_sense(options: dict[str, float], said: str) -> None:
    with pytest.raises(ToolError, match=said):
        violations(one_f_one_b(2, 2), **options)  # pyright: ignore[reportArgumentType]
