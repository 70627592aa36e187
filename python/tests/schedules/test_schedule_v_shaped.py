"""ZB-V, V-Half and V-Min: their memory and bubbles in closed form, and PyTorch's table of ZB-V."""

from __future__ import annotations

from collections.abc import Callable
from operator import le

import pytest
from schedule_peers import TORCH, Record
from schedule_random import random_costs

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.generators.v_shaped import PERIOD, block, v_half, v_min, zb_v
from stablehlo_tools.schedules.setting import Costs, costs, unit_costs
from stablehlo_tools.schedules.table import Table
from stablehlo_tools.schedules.table_simulator import Timeline, simulate
from stablehlo_tools.schedules.validator import violations

Schedule = Callable[[int, int, Costs | None], Table]

SIZES = [(p, m) for p in (*range(1, 8), 16) for m in (1, p, 2 * p - 1, 3 * p + 2)]
ALL_SIZES = [(p, m) for p in range(1, 17) for m in range(1, 49)]
RECORDS = [record for record in TORCH if record["schedule"] == "ScheduleZBVZeroBubble"]

every = pytest.mark.parametrize("schedule", [zb_v, v_half, v_min])


def limits(schedule: Schedule, ranks: int, microbatches: int) -> list[int]:
    """The most activations that each rank may hold."""
    if schedule is zb_v:
        return [min(2 * ranks, 2 * microbatches, microbatches + r + 1) for r in range(ranks)]
    whole = (ranks + 2) // 2 if schedule is v_half else (ranks + 4) // 3
    return [2 * min(whole, microbatches)] * ranks


def bubble(schedule: Schedule, ranks: int) -> int:
    """Of the makespan with enough microbatches, what is no work, in phases."""
    if ranks < 3 or schedule is zb_v:
        return ranks - 1
    if schedule is v_half:
        return 3 * ranks - (4 if ranks % 2 else 7)
    return 4 * ranks - (5 if ranks % 3 == 1 else 7)


def timed(schedule: Schedule, ranks: int, microbatches: int, figures: Costs) -> Timeline:
    """The timeline of the schedule for these costs, which is valid and keeps to its memory."""
    table = schedule(ranks, microbatches, figures)
    assert violations(table) == []
    timeline = simulate(table, figures)
    allowed = limits(schedule, ranks, microbatches)
    assert all(map(le, timeline.peak_activations, allowed)), timeline.peak_activations
    assert timeline.messages == 4 * microbatches * (ranks - 1)
    return timeline


def check_even(schedule: Schedule, ranks: int, microbatches: int) -> None:
    """The closed form where all phases are alike."""
    timeline = timed(schedule, ranks, microbatches, unit_costs(2 * ranks))
    work = 6 * microbatches
    if microbatches >= (2 * ranks - 1 if schedule is zb_v else ranks):
        assert timeline.makespan == work + bubble(schedule, ranks)
        assert schedule is not zb_v or timeline.span == work
    assert timeline.makespan >= work + ranks - 1
    assert timeline.makespan <= work + 6 * (ranks - 1)  # 1F1B


@every
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_closed_forms(schedule: Schedule, ranks: int, microbatches: int) -> None:
    check_even(schedule, ranks, microbatches)


@pytest.mark.soak
@every
@pytest.mark.parametrize(("ranks", "microbatches"), ALL_SIZES)
def test_closed_forms_everywhere(schedule: Schedule, ranks: int, microbatches: int) -> None:
    check_even(schedule, ranks, microbatches)


@pytest.mark.parametrize("record", RECORDS, ids=[f"p{each['p']}-m{each['m']}" for each in RECORDS])
def test_no_slower_or_larger_than_pytorchs(record: Record) -> None:
    ranks = record["p"]
    timeline = simulate(zb_v(ranks, record["m"]), unit_costs(2 * ranks))
    assert timeline.makespan <= record["makespan"]
    assert timeline.span <= record["span"]
    assert all(map(le, timeline.peak_activations, record["peak_activations"]))
    assert timeline.messages == record["messages"]


# The makespans that the authors' own searches reach at these (F, I, W, hop), p = 8 and m = 24, with
# as many activations: sail-sg/zero-bubble-pipeline-parallelism, zbv.py and zbv_greedy.py, timed.
TIMES = [(10, 12, 8, 0), (10, 20, 10, 0), (18522, 18086, 9337, 601), (10, 5, 10, 0), (10, 14, 6, 1)]
AUTHORS: dict[Schedule, tuple[int, ...]] = {
    zb_v: (1524, 2060, 2356049, 1305, 1586),
    v_half: (1670, 2480, 2628695, 1365, 1842),
    v_min: (2010, 3230, 3231105, 1590, 2452),
}


@every
def test_no_slower_than_the_authors_where_phases_differ(schedule: Schedule) -> None:
    for (f, i, w, hop), makespan in zip(TIMES, AUTHORS[schedule], strict=True):
        timeline = timed(schedule, 8, 24, costs(16, f, i, w, communication=hop))
        assert timeline.makespan <= makespan


@every
@pytest.mark.parametrize("seed", range(7))
def test_any_costs(schedule: Schedule, seed: int) -> None:
    ranks, microbatches = 1 + seed % 7, 1 + seed * 3 % 17
    timeline = timed(schedule, ranks, microbatches, random_costs(seed, 2 * ranks))
    assert timeline.makespan >= max(timeline.busy)


@pytest.mark.soak
@every
@pytest.mark.parametrize("seed", range(400))
def test_any_costs_at_length(schedule: Schedule, seed: int) -> None:
    ranks, microbatches = 1 + seed % 13, 1 + seed * 5 % 37
    timed(schedule, ranks, microbatches, random_costs(seed, 2 * ranks))


@every
def test_costs_are_heeded(schedule: Schedule) -> None:
    figures = costs(12, 10, 20, 10, communication=2)
    blind = simulate(schedule(6, 18, None), figures)
    assert timed(schedule, 6, 18, figures).makespan < blind.makespan


@every
def test_the_table_is_always_the_same(schedule: Schedule) -> None:
    figures = random_costs(3, 10)
    assert schedule(5, 12, figures) == schedule(5, 12, figures)


@every
def test_tables_too_large_to_write_all_candidates(schedule: Schedule) -> None:
    ranks, microbatches = 6, 1390
    timeline = timed(schedule, ranks, microbatches, unit_costs(2 * ranks))
    assert timeline.makespan == 6 * microbatches + bubble(schedule, ranks)


def test_large_tables_keep_the_candidate_that_rehearses_best() -> None:
    figures = costs(16, 10, 20, 10)
    small, large = (timed(v_half, 8, m, figures) for m in (24, 1050))
    more = (large.makespan - small.makespan) / (1050 - 24)
    assert more <= (small.makespan - timed(v_half, 8, 16, figures).makespan) / 8 * 1.001


@every
def test_its_transfers_never_deadlock(schedule: Schedule) -> None:
    assert violations(with_communication(schedule(4, 9, None))) == []


@every
def test_costs_of_another_number_of_stages(schedule: Schedule) -> None:
    with pytest.raises(ToolError, match="the costs have 4 stages, but a V of 4 ranks has 8"):
        schedule(4, 8, unit_costs(4))


@pytest.mark.parametrize(("strides", "pauses"), [((4, 2, 4, 2), (1, 1, 1)), ((1,) * 4, (1, 3, 1))])
def test_a_block_fills_every_slot_once(strides: tuple[int, ...], pauses: tuple[int, ...]) -> None:
    found = block(9, strides, pauses)
    for row in found.slots:
        assert sorted(slot % PERIOD for slot in row) == list(range(PERIOD))
        forward, other, later, last, weight_of_later, weight_of_last = row
        assert forward < other < later < last
        assert later < weight_of_later
        assert last < weight_of_last


def test_what_a_block_holds_is_counted() -> None:
    found = block(5, (2, 1, 2, 1), (1, 1, 2))
    most = 0
    for row in found.slots:
        lives = [(row[0], row[5]), (row[1], row[4])]
        for slot in range(60, 60 + PERIOD):
            alive = sum(
                start + PERIOD * i <= slot < end + PERIOD * i
                for start, end in lives
                for i in range(-20, 20)
            )
            most = max(most, alive)
    assert found.peak == most == 6
