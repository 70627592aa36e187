"""The CSV that PyTorch's pipeline schedules dump and load: a line for each rank, a cell a step.

    0F0,0F1,0B0,0B1
    ,1F0,1B0,1F1,1B1

An empty cell is idle. Cells may be quoted or stand among spaces, lines end as on any system, and
blank lines at the end mean nothing. The form says neither placement nor number of microbatches:
they are inferred. A stage belongs to the rank that runs it forward. Where stages run on two ranks
and that is how two opposite pipelines do it, by the parity of the microbatch, the placement is
bidirectional. Otherwise a forward on another rank than most of its stage's is left for the
validator to report.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from stablehlo_tools.diagnostics import Place, ToolError
from stablehlo_tools.schedules.forms.cells import checked_table, step_of
from stablehlo_tools.schedules.table import (
    Action,
    Kind,
    Placement,
    Row,
    Step,
    Table,
    actions_of,
    bidirectional,
)

_OF_TRAINING = {
    *(Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT),
    *(Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD),
}

_LINE_END = re.compile(r"\r\n|\n|\r")
_CELL = re.compile(r'\s*(?:"(?P<quoted>[^"]*)"|(?P<plain>[^,"]*))\s*(?P<end>,|$)')
_ONE_IDLE_CELL = '""'  # an empty line is a row without cells


class _Standing(NamedTuple):
    """An action and the rank in whose row it stands."""

    rank: int
    action: Action


def inferred_table(name: str, rows: Sequence[Row], placement: Placement | None = None) -> Table:
    """The table of these rows, by a placement that is given or by the one they follow.

    Raises ToolError for rows without actions, for stages that nobody or that several ranks run, and
    for rows that are not as many as the placement has ranks.
    """
    standing = [
        _Standing(rank, action) for rank, row in enumerate(rows) for action in actions_of(row)
    ]
    if not standing:
        raise ToolError("no rank does anything: there is no action in any row")
    _check_count(standing, "microbatch")
    if placement is None:
        _check_count(standing, "stage")
        placement = _placement(len(rows), standing)
    microbatches = 1 + max(each.action.microbatch for each in standing)
    training = any(each.action.kind in _OF_TRAINING for each in standing)
    return checked_table(name, placement, microbatches, rows, training)


def _check_count(standing: Sequence[_Standing], what: str) -> None:
    """Refuses a number that no table so small can have, before anything is sized by it."""
    rank, action = max(standing, key=lambda each: getattr(each.action, what))
    if getattr(action, what) >= len(standing):
        raise ToolError(
            f"rank {rank}: {action}: there is no {what} {getattr(action, what)} among "
            f"{len(standing)} actions; stages and microbatches count from 0 without gaps"
        )


def _placement(ranks: int, standing: Sequence[_Standing]) -> Placement:
    votes = _votes(standing)
    forwards = [each for each in standing if each.action.kind is Kind.FORWARD]
    most = [max(counts, key=lambda rank: (counts[rank], -rank)) for counts in votes]
    alone = Placement(ranks, (tuple(most),))
    opposite = bidirectional(ranks)
    if opposite.stages == len(votes) and _followed(opposite, forwards) > _followed(alone, forwards):
        return opposite
    for stage, counts in enumerate(votes):
        if 2 * counts[most[stage]] <= counts.total():
            ranks_of_stage = " and ".join(map(str, sorted(counts)))
            raise ToolError(
                f"stage {stage} runs on ranks {ranks_of_stage}, none of which runs most of it, and "
                "not as two opposite pipelines do: the placement cannot be told; give the table "
                "as JSON, which names it"
            )
    return alone


def _votes(standing: Sequence[_Standing]) -> list[Counter[int]]:
    """For each stage, how many of its forwards each rank runs; any phases where it has none."""
    stages = 1 + max(each.action.stage for each in standing)
    forwards: list[Counter[int]] = [Counter() for _ in range(stages)]
    phases: list[Counter[int]] = [Counter() for _ in range(stages)]
    for rank, action in standing:
        if action.kind is Kind.FORWARD:
            forwards[action.stage][rank] += 1
        if action.kind.is_compute:
            phases[action.stage][rank] += 1
    votes = [one or other for one, other in zip(forwards, phases, strict=True)]
    missing = next((stage for stage, counts in enumerate(votes) if not counts), None)
    if missing is not None:
        raise ToolError(f"no rank runs stage {missing}, and there are stages up to {stages - 1}")
    return votes


def _followed(placement: Placement, forwards: Sequence[_Standing]) -> int:
    """How many forwards stand where a placement has them."""
    return sum(
        placement.rank_of(action.stage, action.microbatch) == rank for rank, action in forwards
    )


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
