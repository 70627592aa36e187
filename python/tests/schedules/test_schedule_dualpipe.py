"""DualPipe and DualPipeV: the counts they are published with, and PyTorch's table of DualPipeV."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from schedule_peers import TORCH, Record
from schedule_random import random_costs

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.generators.by_rule import dualpipe, dualpipe_v, fastest
from stablehlo_tools.schedules.setting import costs, unit_costs
from stablehlo_tools.schedules.table import ActionPair, Table
from stablehlo_tools.schedules.table_simulator import simulate
from stablehlo_tools.schedules.validator import violations

BOTH_WAYS = [(p, m) for p in (2, 4, 6, 8, 12, 16) for m in (2 * p, 2 * p + 2, 4 * p + 6)]
FOLDED = [(p, m) for p in (*range(1, 9), 12, 16) for m in (2 * p, 2 * p + 1, 48) if m >= 2 * p]
TIMES = [(1, 1, 1, 1), (4, 4, 3, 1), (4, 4, 2, 0.75), (3, 3, 1, 0.8), (4, 4, 2, 0.6)]
RECORDS = [record for record in TORCH if record["schedule"] == "ScheduleDualPipeV"]

either = pytest.mark.parametrize("write", [dualpipe, dualpipe_v])


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize(("ranks", "microbatches"), BOTH_WAYS)
def test_dualpipe_is_valid_within_its_memory(
    ranks: int, microbatches: int, overlapped: bool
) -> None:
    table = dualpipe(ranks, microbatches, overlapped)
    assert violations(table) == []
    timeline = simulate(table, unit_costs(ranks))
    assert timeline.peak_activations == (ranks + 1,) * ranks
    assert timeline.messages == 2 * microbatches * (ranks - 1)


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize(("ranks", "microbatches"), FOLDED)
def test_dualpipe_v_is_valid_within_its_memory(
    ranks: int, microbatches: int, overlapped: bool
) -> None:
    table = dualpipe_v(ranks, microbatches, overlapped)
    assert violations(table) == []
    timeline = simulate(table, unit_costs(2 * ranks))
    assert max(timeline.peak_activations) == min(2 * ranks + 1, 2 * microbatches)
    assert timeline.messages == 4 * microbatches * (ranks - 1)


@pytest.mark.parametrize(("f", "i", "w", "overlapped"), TIMES)
def test_idles_as_published(f: float, i: float, w: float, overlapped: float) -> None:
    bubble = overlapped * (f + i + w) + (i + w) - 3 * w
    for ranks, microbatches in BOTH_WAYS:
        times = costs(ranks, f, i, w, overlapped=overlapped)
        idle = simulate(dualpipe(ranks, microbatches), times).idle
        assert max(idle) == pytest.approx((ranks / 2 - 1) * bubble)
        assert overlapped < 1 or len(set(idle)) == 1
    for ranks, microbatches in FOLDED:
        times = costs(2 * ranks, f, i, w, overlapped=overlapped)
        idle = simulate(dualpipe_v(ranks, microbatches), times).idle
        assert max(idle) == pytest.approx((ranks - 1) * bubble)
        assert overlapped < 1 or len(set(idle)) == 1


@pytest.mark.parametrize("record", RECORDS, ids=[f"p{each['p']}-m{each['m']}" for each in RECORDS])
def test_no_slower_or_larger_than_pytorchs(record: Record) -> None:
    ranks, microbatches = record["p"], record["m"]
    apart = simulate(dualpipe_v(ranks, microbatches, False), unit_costs(2 * ranks))
    assert apart.makespan <= record["makespan"]
    assert apart.span <= record["span"]
    pairs = simulate(dualpipe_v(ranks, microbatches), unit_costs(2 * ranks))
    assert pairs.makespan <= record["makespan_of_pairs"]
    for timeline in (apart, pairs):
        assert max(timeline.peak_activations) <= max(record["peak_activations"])
        assert sum(timeline.peak_activations) <= sum(record["peak_activations"])
        assert timeline.messages == record["messages"]


@either
def test_pairs_are_the_steady_state(write: Callable[[int, int], Table]) -> None:
    for row in write(4, 24).rows:
        paired = [isinstance(step, ActionPair) for step in row]
        middle = paired[len(row) // 2 - 3 : len(row) // 2 + 3]
        assert all(middle)
        assert not any(paired[:4] + paired[-4:])


@either
def test_pairs_stay_where_they_are_faster(write: Callable[[int, int, bool], Table]) -> None:
    stages = write(4, 8, True).stages
    hiding, hidden = costs(stages, overlapped=0.7), costs(stages, overlapped=1.0)
    assert fastest(write, 4, 8, hiding) == write(4, 8, True)
    assert fastest(write, 4, 8, hidden) == write(4, 8, False)


@either
@pytest.mark.parametrize("seed", range(12))
def test_runs_at_any_costs(write: Callable[[int, int], Table], seed: int) -> None:
    table = write(6, 14)
    figures = random_costs(seed, table.stages)
    floor = max(simulate(table, figures).busy)
    assert simulate(table, figures).makespan >= floor > 0


@either
def test_its_transfers_never_deadlock(write: Callable[[int, int], Table]) -> None:
    assert violations(with_communication(write(4, 10))) == []


@pytest.mark.parametrize(("ranks", "microbatches"), [(3, 8), (4, 9), (4, 6), (1, 2)])
def test_dualpipe_says_where_it_exists(ranks: int, microbatches: int) -> None:
    with pytest.raises(ToolError, match="even number of ranks, and an even number of microbatches"):
        dualpipe(ranks, microbatches)


def test_dualpipe_v_says_where_it_exists() -> None:
    with pytest.raises(ToolError, match="at least twice as many microbatches as ranks, here 8"):
        dualpipe_v(4, 7)
