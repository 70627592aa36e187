"""What all forms of a table share: one cell's text, and a check of what the rows can bear out.

A cell is written `0F0`, `2SEND_F5`, `(0F7;7B3)OVERLAP_F_B`. Whether a schedule that was read is
right is for the validator; here it is only made sure that a misspelt number does not size anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.table import (
    Action,
    Kind,
    Pair,
    Placement,
    Row,
    Step,
    Table,
    parts,
    table_of,
)

_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)([A-Z_]*)")
_ACTION = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{0,9})")
_SUFFIX_OF_PAIRS = "OVERLAP_F_B"
_KINDS = {kind.value: kind for kind in Kind}
_OF_THE_RUNTIME = {  # PyTorch's, of what a rank does about parameters rather than microbatches
    "UNSHARD": "gathers parameters",
    "RESHARD": "frees gathered parameters",
    "REDUCE_GRAD": "reduces gradients across replicas",
}
_KNOWN = "STAGE, one of " + " ".join(_KINDS) + ", MICROBATCH"


def step_of(text: str) -> Step:
    """The step that a cell names. Raises ToolError saying what else it is."""
    pair = _PAIR.fullmatch(text)
    return _pair(text, *pair.groups()) if pair else _action(text)


def _pair(text: str, first: str, second: str, suffix: str) -> Pair:
    if suffix != _SUFFIX_OF_PAIRS:
        raise ToolError(f"{text!r} is no pair: its end is {_SUFFIX_OF_PAIRS}")
    forward, backward = _action(first.strip()), _action(second.strip())
    if forward.kind is not Kind.FORWARD or backward.kind is not Kind.BACKWARD:
        raise ToolError(f"{text!r} is no pair: a pair is one F and then one B, as in (0F7;7B3)")
    return Pair(forward, backward)


def _action(text: str) -> Action:
    match = _ACTION.fullmatch(text)
    name = match[2] if match else ""
    if name in _OF_THE_RUNTIME:
        raise ToolError(
            f"{text!r}: {name} {_OF_THE_RUNTIME[name]}, which a schedule of microbatches does not "
            "hold: leave out UNSHARD, RESHARD and REDUCE_GRAD"
        )
    if match is None or not match[3] or name not in _KINDS:
        raise ToolError(f"{text!r} is no action: an action is {_KNOWN}, as in 0F0 or 2SEND_F5")
    return Action(_KINDS[name], int(match[1]), int(match[3]))


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
