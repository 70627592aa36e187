"""The CSV that PyTorch's pipeline schedules dump and load: a line for each rank, a cell a step.

    0F0,0F1,0B0,0B1
    ,1F0,1B0,1F1,1B1

An empty cell is idle. Cells may be quoted or stand among spaces, lines end as on any system, and
blank lines at the end mean nothing. The form says neither placement nor number of microbatches:
they are inferred (inference.py).
"""

from __future__ import annotations

import re

from stablehlo_tools.diagnostics import Place, ToolError
from stablehlo_tools.schedules.actions import Step
from stablehlo_tools.schedules.forms.cells import step_of
from stablehlo_tools.schedules.forms.inference import inferred_table
from stablehlo_tools.schedules.placement import Placement
from stablehlo_tools.schedules.table import Row, Table

_LINE_END = re.compile(r"\r\n|\n|\r")
_CELL = re.compile(r'\s*(?:"(?P<quoted>[^"]*)"|(?P<plain>[^,"]*))\s*(?P<end>,|$)')
_ONE_IDLE_CELL = '""'  # an empty line is a row without cells


def encode(table: Table) -> str:
    """The rows, idle cells and all."""
    return "".join(f"{_line(row)}\n" for row in table.rows)


def decode(text: str, name: str = "table", placement: Placement | None = None) -> Table:
    """The table in a CSV file's text. Raises ToolError naming line, column and cell.

    The placement is inferred unless it is given; with it, lines at the end may be blank rows.
    """
    lines = _LINE_END.split(text.removeprefix("\ufeff"))
    ranks = 0 if placement is None else placement.ranks
    while len(lines) > ranks and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise ToolError("there is no schedule in it: no line has a cell")
    rows = [_row(line, rank) for rank, line in enumerate(lines)]
    return inferred_table(name, rows, placement)


def _line(row: Row) -> str:
    if row == (None,):
        return _ONE_IDLE_CELL
    return ",".join("" if step is None else str(step) for step in row)


def _row(line: str, rank: int) -> Row:
    if not line.strip():
        return ()
    steps: list[Step | None] = []
    at, ended = 0, False
    while not ended:
        cell = _CELL.match(line, at)
        if cell is None:
            raise ToolError(
                f"rank {rank}, cell {len(steps) + 1}: a quote in the middle of a cell, or never "
                "closed",
                Place(line=rank + 1, column=at + 1),
            )
        steps.append(_step(cell, rank, len(steps) + 1))
        at, ended = cell.end(), cell["end"] == ""
    return tuple(steps)


def _step(cell: re.Match[str], rank: int, number: int) -> Step | None:
    group = "plain" if cell["quoted"] is None else "quoted"
    text = cell[group].strip()
    if not text:
        return None
    try:
        return step_of(text)
    except ToolError as error:
        column = cell.start(group) + cell[group].index(text) + 1
        message = f"rank {rank}, cell {number}: {error.diagnostic.message}"
        raise ToolError(message, Place(line=rank + 1, column=column)) from None
