"""Reads the figures of a hardware profile: numbers in a range, each with its source.

memory = { value = 80, source = "https://…" }      ==>      80.0, and the source kept beside it
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Mapping
from typing import cast

from stablehlo_tools.diagnostics import ToolError

_MOST = 1e300  # a whole number beyond is no float

type Table = dict[str, object]


class Allowed(enum.Enum):
    """Which numbers a figure may be."""

    POSITIVE = "a number above 0"
    SHARE = "a share, above 0 and at most 1"
    COUNT = "a whole number above 0"
    DURATION = "a number of 0 or more"
    SPEED_UP = "a number of 1 or more"
    DIMENSIONS = "1, 2 or 3"

    def holds(self, value: object) -> bool:
        """Whether `value` is such a number; true and false are none, nor are nan and inf."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if not abs(value) < _MOST:  # nor is NaN
            return False
        match self:
            case Allowed.POSITIVE:
                return value > 0
            case Allowed.SHARE:
                return 0 < value <= 1
            case Allowed.COUNT:
                return value > 0 and value == int(value)
            case Allowed.DURATION:
                return value >= 0
            case Allowed.SPEED_UP:
                return value >= 1
            case Allowed.DIMENSIONS:
                return value in (1, 2, 3)


def subtable(table: Table, key: str, where: str) -> Table:
    """The table `key`; where it is missing, an empty one, whose figures are then missed."""
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise ToolError(f"{where} is a table, not {value!r}")
    return cast("Table", value)


def text(table: Table, key: str, where: str) -> str:
    """A string that must be there. Raises ToolError for anything else."""
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ToolError(
            f"{where}{key} is {_shown(value)}, and must be a string that says something"
        )
    return value


def refuse_unknown(table: Table, known: Iterable[str], where: str) -> None:
    """Raises ToolError for the first key that is not among `known`."""
    names = list(known)
    for key in table:
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(names)}"
            raise ToolError(f"{where}{key} is not known; {hint}")


def read_figures(
    table: Table,
    where: str,
    allowed: Mapping[str, Allowed],
    required: Iterable[str],
    beside: Iterable[str] = (),
) -> tuple[dict[str, float], dict[str, str]]:
    """The numbers of the figures among `allowed` that `table` has, and their sources.

    `where` begins each name in messages and in the sources; `beside` are keys of the table that are
    no figures. Raises ToolError for a key that is neither, a required figure that is missing, a
    value out of range, and a figure without a source.
    """
    refuse_unknown(table, (*allowed, *beside), where)
    for name in required:
        if name not in table:
            raise ToolError(f"{where}{name} is missing")
    values: dict[str, float] = {}
    sources: dict[str, str] = {}
    for name, rule in allowed.items():
        if name in table:
            values[name], sources[where + name] = _figure(table[name], where + name, rule)
    return values, sources


def _figure(entry: object, name: str, rule: Allowed) -> tuple[float, str]:
    if not isinstance(entry, dict):
        raise ToolError(
            f"{name} is {entry!r} without a source; "
            f'write {name.rpartition(".")[2]} = {{ value = {entry}, source = "…" }}'
        )
    table = cast("Table", entry)
    refuse_unknown(table, ("value", "source"), f"{name}.")
    value = table.get("value")
    if not rule.holds(value):
        raise ToolError(f"{name} is {_shown(value)}, and must be {rule.value}")
    source = table.get("source")
    if not isinstance(source, str) or not source.strip():
        raise ToolError(f"{name} has no source; say where the figure is published or derived from")
    return float(cast("float", value)), source


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)
