"""Whether every rank stays within its memory: C15."""

from __future__ import annotations

from stablehlo_tools.schedules.actions import parts
from stablehlo_tools.schedules.costs import Costs
from stablehlo_tools.schedules.simulator import change_of_memory, peak_bytes
from stablehlo_tools.schedules.table import Row, Table
from stablehlo_tools.schedules.validation.rules import Findings, Rule, Violation

_ROUNDING = 1e-9  # of the limit: what sums of shares of a byte count may be off by


def check_memory(table: Table, costs: Costs, limit: float, findings: Findings) -> None:
    """C15, once C1 to C9 hold: the first step of each rank that holds more than the limit."""
    most = limit * (1 + _ROUNDING)
    held = table.placement.held
    for rank, (row, peak) in enumerate(zip(table.rows, peak_bytes(table, costs), strict=True)):
        if peak <= most:
            continue
        weights = sum(costs.weights[stage] for stage in held[rank])
        findings.add(_violation(rank, row, costs, weights, (limit, most)))


def _violation(
    rank: int, row: Row, costs: Costs, weights: float, limits: tuple[float, float]
) -> Violation:
    limit, most = limits
    if weights > most:
        message = f"the rank's weights alone take {weights:.15g} bytes of {limit:.15g}"
        return Violation(rank, 0, "", Rule.MEMORY, message)
    position, held = _first_over(row, costs, weights, most)
    activations = held - weights
    message = (
        f"makes the rank hold {held:.15g} bytes, {activations:.15g} of them activations; the limit "
        f"is {limit:.15g}"
    )
    return Violation(rank, position, str(row[position]), Rule.MEMORY, message)


def _first_over(row: Row, costs: Costs, weights: float, most: float) -> tuple[int, float]:
    """The first step at which a rank holds more than the most, and what it holds."""
    alive = 0.0
    for position, step in enumerate(row):
        for action in () if step is None else parts(step):
            alive += change_of_memory(action, costs)
            if weights + alive > most:
                return position, weights + alive
    raise AssertionError("a row whose peak is over the limit has a step that is")
