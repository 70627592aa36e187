"""Tables written by hand: a row is `0F0 - (0F1;0B0)OVERLAP_F_B 0SEND_F1`, with `-` for idle."""

from __future__ import annotations

import re

from stablehlo_tools.schedules.table import Action, Kind, Pair, Placement, Step, Table, table_of

_ACTION = re.compile(r"(-?\d+)(SEND_F|RECV_F|SEND_B|RECV_B|OFFLOAD|RELOAD|F|B|I|W)(-?\d+)")


def written(
    placement: Placement, microbatches: int, *rows: str, training: bool = True, slices: int = 1
) -> Table:
    """A table by the rows of its ranks; `microbatches` counts the slices, where there are any."""
    steps = [[_step(cell) for cell in row.split()] for row in rows]
    return table_of("by hand", placement, microbatches, steps, training, slices)


def _step(cell: str) -> Step | None:
    found = [
        Action(Kind(kind), int(stage), int(microbatch))
        for stage, kind, microbatch in _ACTION.findall(cell)
    ]
    if len(found) == 2:
        return Pair(*found)
    return found[0] if found else None
