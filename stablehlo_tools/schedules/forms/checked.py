"""Builds a table that was read, and refuses numbers that its rows cannot bear out.

Whether the schedule is right is for the validator; here it is only made sure that a misspelt number
does not size anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.actions import parts
from stablehlo_tools.schedules.placement import Placement
from stablehlo_tools.schedules.table import Row, Table, table_of


def check_ranks(rows: int, ranks: int) -> None:
    """Raises ToolError unless there is a row for each rank of the placement."""
    if rows != ranks:
        raise ToolError(f"{rows} rows for a placement of {ranks} ranks: there is one row a rank")


def checked_table(
    name: str, placement: Placement, microbatches: int, rows: Sequence[Row], training: bool
) -> Table:
    """The table. Raises ToolError for another number of rows than ranks, for no microbatch, and
    for far more stages or microbatches than there are actions."""
    check_ranks(len(rows), placement.ranks)
    if microbatches < 1:
        raise ToolError(f"microbatches: {microbatches}; a schedule has 1 or more")
    actions = sum(len(parts(step)) for row in rows for step in row if step is not None)
    for what, count in (("stages", placement.stages), ("microbatches", microbatches)):
        if count > max(2 * actions, 1):  # some may be missing, which the validator names
            raise ToolError(f"{count} {what}, but all rows together have {actions} actions")
    return table_of(name, placement, microbatches, rows, training)
