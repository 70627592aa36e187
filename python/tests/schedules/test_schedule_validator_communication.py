"""Sends and receives as `with_communication` places them never deadlock, whatever the times."""

from __future__ import annotations

import pytest
from schedule_random import PLACEMENTS, random_costs, random_table
from schedule_tables import least_buffers

from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.table import Action, Row, Step, Table, drop_idle_cells
from stablehlo_tools.schedules.table_simulator import messages, simulate
from stablehlo_tools.schedules.validator import violations


def check_transfers(placement: str, microbatches: int, seed: int, training: bool) -> None:
    """Every buffering runs, the phases are as they were, and blocking transfers end too."""
    table = random_table(seed, PLACEMENTS[placement], microbatches, training)
    figures = random_costs(seed, table.stages)
    assert violations(table, figures) == []
    for late in (False, True):
        whole = with_communication(table, figures, late)
        for buffers in (0, 1, 2):
            assert violations(whole, figures, buffers=buffers) == [], (seed, late, buffers)
        assert least_buffers(whole) == 0
        assert tuple(map(computes, whole.rows)) == drop_idle_cells(table).rows
        assert transfers(whole) == 2 * messages(table)
        simulate(whole, figures, blocking=whole.communicates)


def computes(row: Row) -> Row:
    """The row without its transfers."""
    return tuple(step for step in row if not is_transfer(step))


def is_transfer(step: Step | None) -> bool:
    """Whether a step is a send or a receive."""
    return isinstance(step, Action) and not step.kind.is_compute


def transfers(table: Table) -> int:
    """The sends and receives of a table."""
    return sum(is_transfer(step) for row in table.rows for step in row)


@pytest.mark.parametrize("training", [True, False], ids=["training", "forward-only"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_random_tables_with_random_costs(placement: str, training: bool) -> None:
    for seed in range(12):
        check_transfers(placement, 1 + seed % 4, seed, training)


@pytest.mark.soak
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_more_random_tables_with_random_costs(placement: str) -> None:
    for seed in range(12, 1000):
        check_transfers(placement, 1 + seed % 6, seed, seed % 5 > 0)
