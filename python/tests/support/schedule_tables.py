"""Tables written by hand, and how many messages the channels of one must hold, by search.

A row is `0F0 - (0F1;0B0)OVERLAP_F_B 0SEND_F1`, with `-` for idle.
"""

from __future__ import annotations

import re

from stablehlo_tools.schedules.setting import unit_costs
from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    ActionPair,
    Placement,
    Step,
    Table,
    table_of,
)
from stablehlo_tools.schedules.table_simulator import execute
from stablehlo_tools.schedules.validator import _structural

_ACTION = re.compile(r"(-?\d+)(SEND_F|RECV_F|SEND_B|RECV_B|OFFLOAD|RELOAD|F|B|I|W)(-?\d+)")


def written(
    placement: Placement, microbatches: int, *rows: str, training: bool = True, slices: int = 1
) -> Table:
    """A table by the rows of its ranks; `microbatches` counts the slices, where there are any."""
    steps = [[_step(cell) for cell in row.split()] for row in rows]
    return table_of("by hand", placement, microbatches, steps, training, slices)


def _step(cell: str) -> Step | None:
    found = [
        Action(ActionKind(kind), int(stage), int(microbatch))
        for stage, kind, microbatch in _ACTION.findall(cell)
    ]
    if len(found) == 2:
        return ActionPair(*found)
    return found[0] if found else None


def least_buffers(table: Table) -> int | None:
    """The fewest messages that channels have to hold for the run to end; 0 for rendezvous.

    None where the run ends with no number of them, or the table breaks another rule. 0 for a valid
    table that names no transfers.
    """
    if _structural(table)[0].count:
        return None
    most = max(map(len, table.rows))  # with so many, no send ever waits
    if not _runs(table, most):
        return None
    fewest, enough = 0, 0
    while not _runs(table, enough):
        fewest, enough = enough + 1, min(2 * enough + 1, most)
    while fewest < enough:
        middle = (fewest + enough) // 2
        if _runs(table, middle):
            enough = middle
        else:
            fewest = middle + 1
    return enough


def _runs(table: Table, buffers: int) -> bool:
    """Returns True if a table that keeps C1 to C13 ends. Times do not change that."""
    return not execute(table, unit_costs(table.stages), buffers).stuck
