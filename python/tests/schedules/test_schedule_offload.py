"""Activations on the host between forward and gradient: never slower, and memory as published.

Source: PipeOffload, arXiv 2503.01328v2. Full offload is free where k = T_o / T_c, the round trip of
an activation over its compute, is at most 1 (section 1); what is in flight then is a small constant
number of activations, whatever the number of devices (PO-F, sections 3.2 and 5.3, figure 10); of
two stages a device under interleaved 1F1B, offloading the first takes off about a half of
vd + d - 1 (8 devices; figure 2 and section 3.1); too short a life is skipped (4.4). Its own
schedule, which repeats uniformly, is not in the catalogue.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_settings import drawn_setting
from soaking import one_in

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.activation_offload import offload_activations
from stablehlo_tools.schedules.catalogue import build, entries, time_schedule
from stablehlo_tools.schedules.constraints import ScheduleRule
from stablehlo_tools.schedules.explicit_tables import align_columns, with_communication
from stablehlo_tools.schedules.forms import from_csv, from_json, from_text, to_csv, to_json, to_text
from stablehlo_tools.schedules.generators.by_rule import (
    circular,
    dualpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    seq1f1b,
)
from stablehlo_tools.schedules.setting import Costs, ScheduleSetting, costs, unit_costs
from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    Table,
    actions_of,
    backward,
    drop_idle_cells,
    forward,
    loop,
    table_of,
)
from stablehlo_tools.schedules.table_simulator import Timeline, simulate
from stablehlo_tools.schedules.validator import violations

NAMES = [entry.name for entry in entries() if entry.name != "auto" and entry.training]
AWAY, BACK = Action(ActionKind.OFFLOAD, 0, 0), Action(ActionKind.RELOAD, 0, 0)


def with_copies(table: Table, setting: ScheduleSetting, share: float, copy: float) -> Timeline:
    """The timeline with copies of a table that is valid with them."""
    result = offload_activations(table, setting.costs_of(table), share, copy)
    assert violations(result.table) == []
    return simulate(result.table, result.costs)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_full_offload_holds_a_constant_number_of_activations(p: int) -> None:
    """With k = 1, T_o = 3 = T_c: one at work, one on its way out, one on its way back."""
    setting = ScheduleSetting(p, 4 * p, unit_costs(p))
    table = one_f_one_b(p, 4 * p)
    timeline = with_copies(table, setting, 1, 1.5)
    assert max(timeline.peak_bytes) == min(p, 3)
    assert max(timeline.peak_activations) == p
    assert timeline.makespan == simulate(table, unit_costs(p)).makespan


def test_the_first_of_two_stages_is_half_of_the_peak() -> None:
    setting = ScheduleSetting(8, 32, unit_costs(8), 2)
    table = interleaved_one_f_one_b(8, 32, 2)
    peak = max(simulate(table, setting.costs_of(table)).peak_bytes)
    assert peak == (2 * 8 + 8 - 1) / 2  # vd + d - 1, of half a device's share each
    result = offload_activations(table, setting.costs_of(table), 0.5, 0.75)
    moved = {action.stage for row in result.table.rows for action in actions_of(row)
             if action.kind is ActionKind.OFFLOAD}  # fmt: skip
    assert moved == set(range(8))  # the first of each device's two, whole
    assert max(simulate(result.table, result.costs).peak_bytes) == pytest.approx(peak / 2, rel=0.05)


@pytest.mark.parametrize("share", [0.25, 0.5, 1])
@pytest.mark.parametrize("name", NAMES)
def test_no_schedule_is_slower_or_larger_for_it(name: str, share: float) -> None:
    entry = next(each for each in entries() if each.name == name)
    setting = ScheduleSetting(4, 12, unit_costs(4), sequence_slices=4 if entry.sliced else None)
    table = build(name, setting)
    plain = simulate(drop_idle_cells(table), setting.costs_of(table))
    least = max(plain.peak_bytes)
    for copy in (0, 0.25, 1.5):
        timeline = with_copies(table, setting, share, copy)
        assert timeline.makespan == pytest.approx(plain.makespan)
        assert timeline.busy == pytest.approx(plain.busy)
        assert timeline.peak_activations == plain.peak_activations
        assert max(timeline.peak_bytes) <= max(plain.peak_bytes) + 1e-9
        least = min(least, max(timeline.peak_bytes))
    assert least < max(plain.peak_bytes)


def least_time(table: Table, figures: Costs) -> float:
    """What a microbatch takes on the rank that computes least, for a copy as large as the mean."""
    mean = sum(figures.activation) / table.ranks
    shares = [
        sum(figures.microbatch[stage] for stage in held)
        * mean
        / sum(figures.activation[stage] for stage in held)
        for held in table.placement.held
    ]
    return min(shares) * (1 - 1e-6)


@pytest.mark.parametrize("number", one_in(3, range(30)))
def test_nor_at_any_costs(number: int) -> None:
    drawn = drawn_setting(number, least=2)
    setting = replace(drawn, limit=None)
    for name in ("1f1b", "interleaved-1f1b", "hanayo", "zb-h1"):
        chunks = setting.chunks if name in ("interleaved-1f1b", "zb-h1") else None
        table = build(name, replace(setting, chunks=chunks))
        plain = simulate(table, setting.costs_of(table))
        least = least_time(table, setting.costs_of(table))
        for share, copy in ((1.0, least / 8), (1.0, least / 2), (0.5, least)):
            timeline = with_copies(table, setting, share, copy)
            assert timeline.makespan <= plain.makespan * (1 + 1e-9)
            assert all(a <= b + 1e-9 for a, b in
                       zip(timeline.peak_bytes, plain.peak_bytes, strict=True))  # fmt: skip


def test_copies_take_turns_and_gradients_wait_for_them() -> None:
    """Out: 1 to 3, then 3 to 5, for the lane is taken; back: 5 to 7 and 7 to 9."""
    away, back = AWAY._replace(microbatch=1), BACK._replace(microbatch=1)
    row = [forward(0, 0), forward(0, 1), AWAY, away, BACK, back, backward(0, 0), backward(0, 1)]
    table = table_of("by hand", loop(1), 2, [row])
    slow = replace(costs(1, activation=4), offloaded=(3.0,), copy=(2.0,))
    assert violations(table, slow, 8) == []
    timeline = simulate(table, slow)
    assert timeline.starts[0] == [0, 1, 2, 3, 5, 5, 7, 9]
    assert timeline.ends[0] == [1, 2, 3, 5, 5, 5, 9, 11]
    assert timeline.busy == (6,)
    assert timeline.peak_bytes == (8,)
    assert [each.rule for each in violations(table, slow, 7)] == [ScheduleRule.MEMORY]
    free = simulate(table, unit_costs(1))  # a file's copies, of which nothing else is said
    assert (free.makespan, free.peak_bytes) == (6, (2,))


@pytest.mark.parametrize(
    "row",
    [
        [AWAY, forward(0, 0), BACK, backward(0, 0)],
        [forward(0, 0), BACK, AWAY, backward(0, 0)],
        [forward(0, 0), AWAY, backward(0, 0), BACK],
        [forward(0, 0), AWAY, backward(0, 0)],
        [forward(0, 0), BACK, backward(0, 0)],
    ],
)
def test_copies_out_of_place(row: list[Action]) -> None:
    [fault] = violations(table_of("wrong", loop(1), 1, [row]))
    assert fault.rule is ScheduleRule.COPY
    assert "the order must be 0F0, 0OFFLOAD0, 0RELOAD0, and then the gradient" in fault.message


def test_what_stands_twice_or_elsewhere() -> None:
    twice = [forward(0, 0), AWAY, AWAY, BACK, backward(0, 0)]
    assert ScheduleRule.ONCE in {
        each.rule for each in violations(table_of("t", loop(1), 1, [twice]))
    }
    rows = [[forward(0, 0), backward(0, 0)], [AWAY, BACK, forward(1, 0), backward(1, 0)]]
    assert ScheduleRule.RANK in {each.rule for each in violations(table_of("t", loop(2), 1, rows))}


@pytest.mark.parametrize("table", [one_f_one_b(3, 6), seq1f1b(2, 2, 4), dualpipe(4, 8, True)])
def test_forms_transfers_and_columns_keep_copies(table: Table) -> None:
    setting = ScheduleSetting(table.ranks, table.sequences, unit_costs(table.ranks))
    figures = setting.costs_of(table)
    made, moving = offload_activations(table, figures, 1, 0.25)
    assert (made.offloads, made.communicates) == (True, False)
    spread = align_columns(made)
    assert drop_idle_cells(spread) == made
    assert from_text(to_text(spread)) == spread
    assert from_json(to_json(made)) == made
    assert from_csv(to_csv(made)).rows == made.rows
    explicit = with_communication(made, moving)
    assert violations(explicit) == []
    assert time_schedule(made, moving, transfers=True).makespan == simulate(made, moving).makespan


def test_a_tables_own_copies_stay() -> None:
    table = one_f_one_b(2, 4)
    once = offload_activations(table, unit_costs(2), 1, 0.5)
    again = offload_activations(once.table, unit_costs(2), 0.5, 0.5)
    assert again.table == once.table
    assert again.costs.offloaded == (0.5, 0.5)
    assert again.costs.copy == (0.25, 0.25)


def test_refusals() -> None:
    table, figures = one_f_one_b(4, 8), unit_costs(4)
    refusal = (
        "the copies of rank 0 take 32 in both directions, longer than its compute of 24: "
        r"offload a share of at most 0\.75$"
    )
    with pytest.raises(ToolError, match=refusal):
        offload_activations(table, figures, 1, 2)
    assert offload_activations(table, figures, 0.75, 2).table.offloads
    with pytest.raises(ToolError, match="give a share from 0 to 1"):
        offload_activations(table, figures, 1.5, 1)
    with pytest.raises(ToolError, match="a schedule without sends and receives"):
        offload_activations(with_communication(table), figures, 1, 1)
    with pytest.raises(ToolError, match="this one has no backward"):
        offload_activations(circular(2, 4, 1, training=False), unit_costs(2), 1, 1)
    assert offload_activations(table, figures, 0, 1).table == table


def test_shares_are_of_bytes_and_leave_no_crumbs() -> None:
    figures = costs(6, activation=[3, 3, 2, 2, 1, 1])
    table = interleaved_one_f_one_b(2, 8, 3)
    for share, moved in ((0.5, (3, 3, 0, 0, 0, 0)), (1 / 3, (2, 2, 0, 0, 0, 0)), (0.7, None)):
        result = offload_activations(table, figures, share, 0.5)
        assert sum(result.costs.offloaded) == pytest.approx(share * 12)
        assert moved is None or result.costs.offloaded == pytest.approx(moved)
        stages = {a.stage for row in result.table.rows for a in actions_of(row) if a.kind.is_copy}
        assert stages == {0, 1} if moved else {0, 1, 2, 3}
