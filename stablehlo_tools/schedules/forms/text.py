"""Tables as text to read: a line for the table, then a line for each rank, `.` where it is idle.

    schedule 1f1b, loop of 2 ranks x 1, 2 microbatches, training
    rank 0: 0F0 0F1  .   0B0  .   0B1
    rank 1:  .  1F0 1B0  1F1 1B1

A placement of no known form is written as its routes: `routes 0 2 1; 2 0 1 of 3 ranks`. A name
other than letters, digits and `-_.+` stands in quotes. Blank lines and lines after `#` are passed
over.
"""

from __future__ import annotations

import json
import re
from itertools import zip_longest

from stablehlo_tools.diagnostics import Place, ToolError
from stablehlo_tools.schedules.forms.cells import check_ranks, checked_table, step_of
from stablehlo_tools.schedules.table import (
    Placement,
    Row,
    Step,
    Table,
    bidirectional,
    loop,
    v_shape,
)

FIRST_WORD = "schedule"
_IDLE = "."
_SILENT = re.compile(r"\s*(?:#.*)?")
_BARE_NAME = re.compile(r"[\w.+-]+")
_HEADER = re.compile(
    r'schedule (?P<name>[\w.+-]+|"(?:[^"\\]|\\.)*"), '
    r"(?:(?P<form>loop|v|bidirectional)|routes (?P<routes>[0-9]{1,9}(?:;? [0-9]{1,9})*)) "
    r"of (?P<ranks>[0-9]{1,9}) ranks(?: x (?P<chunks>[0-9]{1,9}))?, "
    r"(?P<microbatches>[0-9]{1,9}) microbatches, (?P<use>training|forward only)"
)
_ROW = re.compile(r"rank ([0-9]{1,9}):(.*)")


def encode(table: Table) -> str:
    """The rows as they stand, columns below each other."""
    cells = [[_IDLE if step is None else str(step) for step in row] for row in table.rows]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    label = len(f"rank {table.ranks - 1}:")
    lines = [
        " ".join(
            [
                f"rank {rank}:".ljust(label),
                *(cell.center(width) for cell, width in zip(row, widths, strict=False)),
            ]
        ).rstrip()
        for rank, row in enumerate(cells)
    ]
    return "\n".join([_header(table), *lines]) + "\n"


def decode(text: str) -> Table:
    """The table in such text. Raises ToolError naming line and column."""
    lines = enumerate(text.splitlines(), start=1)
    said = [(number, line) for number, line in lines if not _SILENT.fullmatch(line)]
    if not said:
        raise ToolError("there is no schedule in it: no line says anything")
    number, first = said[0]
    header = _HEADER.fullmatch(first.strip())
    if header is None:
        raise ToolError(
            "the first line of a schedule is as this one: schedule 1f1b, loop of 4 ranks x 1, "
            "8 microbatches, training",
            Place(line=number, column=1),
        )
    name = _name(header["name"], number)
    rows = [_row(line, number, rank) for rank, (number, line) in enumerate(said[1:])]
    check_ranks(len(rows), int(header["ranks"]))
    placement = _placement(header, number, max(map(len, rows), default=0))
    microbatches = int(header["microbatches"])
    return checked_table(name, placement, microbatches, rows, header["use"] == "training")


def _name(said: str, line: int) -> str:
    if not said.startswith('"'):
        return said
    try:
        return json.loads(said)
    except json.JSONDecodeError as error:
        column = 1 + len(f"{FIRST_WORD} ") + error.colno - 1
        raise ToolError(
            f"the name is no JSON string: {error.msg}", Place(line=line, column=column)
        ) from None


def _header(table: Table) -> str:
    name = table.name if _BARE_NAME.fullmatch(table.name) else json.dumps(table.name)
    use = "training" if table.training else "forward only"
    return (
        f"{FIRST_WORD} {name}, {_said(table.placement)}, {table.microbatches} microbatches, {use}"
    )


def _said(placement: Placement) -> str:
    form, ranks = placement.form, f"of {placement.ranks} ranks"
    if form == "custom":
        return (
            f"routes {'; '.join(' '.join(map(str, route)) for route in placement.routes)} {ranks}"
        )
    return f"{form} {ranks}" + ("" if form == "bidirectional" else f" x {placement.chunks}")


def _placement(header: re.Match[str], line: int, longest: int) -> Placement:
    """What the first line says of it; no rank has more stages than the longest row has steps."""
    ranks, chunks = int(header["ranks"]), int(header["chunks"] or 1)
    if not ranks or not 1 <= chunks <= max(longest, 1):
        raise ToolError(
            f"{ranks} ranks x {chunks}: a rank has 1 stage or more, and no more than steps",
            Place(line=line, column=1),
        )
    if header["form"] == "bidirectional":
        return bidirectional(ranks)
    if header["form"] is not None:
        return (loop if header["form"] == "loop" else v_shape)(ranks, chunks)
    routes = tuple(tuple(map(int, route.split())) for route in header["routes"].split(";"))
    stages = {len(route) for route in routes}
    if len(stages) != 1 or 0 in stages or max(map(max, routes)) >= ranks:
        raise ToolError(
            f"routes name a rank below {ranks} for every stage, each route for as many stages",
            Place(line=line, column=header.start("routes") + 1),
        )
    return Placement(ranks, routes)


def _row(line: str, number: int, rank: int) -> Row:
    match = _ROW.fullmatch(line.strip())
    if match is None or int(match[1]) != rank:
        raise ToolError(f"here stands 'rank {rank}: ' and its steps", Place(line=number, column=1))
    start = line.index(":") + 1
    cells = re.finditer(r"\S+", line[start:])
    return tuple(_step(cell, number, start + cell.start() + 1) for cell in cells)


def _step(cell: re.Match[str], line: int, column: int) -> Step | None:
    if cell[0] == _IDLE:
        return None
    try:
        return step_of(cell[0])
    except ToolError as error:
        raise ToolError(error.diagnostic.message, Place(line=line, column=column)) from None
