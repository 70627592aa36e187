"""Tables as JSON: all that a table says, in one object, with a line for each rank.

    {"name": "1f1b", "ranks": 2, "stages": 2, "microbatches": 2, "training": true,
     "placement": {"form": "loop", "routes": [[0, 1]]},
     "rows": [["0F0", null, …], …]}

A timed table has besides `costs`, `metrics` and `timeline`, the start and end of every step, and
what a search found `search`; a reader of the table passes over these. Other keys are refused: they
would be a misspelling.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, cast

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.files.json_text import parse_json
from stablehlo_tools.schedules.forms.cells import checked_table, step_of
from stablehlo_tools.schedules.simulator import Timeline
from stablehlo_tools.schedules.table import Placement, Row, Step, Table

_NEEDED = ("name", "microbatches", "training", "placement", "rows")
_COUNTS = ("ranks", "stages")
_TIMED = ("costs", "metrics", "timeline", "search")


class Search(NamedTuple):
    """What a search says of the schedule that it found.

    origin: where the schedule comes from. bound: a makespan that no schedule on the placements that
    were looked at is below. gap: how far the schedule's is above it, as a share of it.
    """

    origin: str
    bound: float
    gap: float


def encode(table: Table) -> str:
    """The table alone."""
    return _object(_fields(table))


def encode_timed(timeline: Timeline, search: Search | None = None) -> str:
    """The table with its costs, its metrics, and when each step starts and ends."""
    times = (
        [[_plain(start), _plain(end)] for start, end in zip(starts, ends, strict=True)]
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
    )
    timed = {
        "costs": json.dumps(_plain(asdict(timeline.costs))),
        "metrics": json.dumps(_plain(metrics(timeline))),
        "timeline": _lines(times),
    }
    if search is not None:
        timed["search"] = json.dumps(_plain(search._asdict()))
    return _object(_fields(timeline.table) | timed)


def metrics(timeline: Timeline) -> dict[str, Any]:
    """The figures of a timed table; lists have an entry for each rank."""
    return {
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "span": timeline.span,
        "bubble_of_span": timeline.bubble_of_span,
        "idle": timeline.idle,
        "peak_activations": timeline.peak_activations,
        "peak_bytes": timeline.peak_bytes,
        "messages": timeline.messages,
        "bytes_sent": timeline.bytes_sent,
    }


def decode(text: str) -> Table:
    """The table in JSON text, timed or not. Raises ToolError naming the key or the cell."""
    return to_table(parse_json(text))


def to_table(content: object) -> Table:
    """The table in parsed JSON. Raises ToolError naming the key or the cell."""
    if not isinstance(content, dict):
        raise ToolError("a schedule is an object with the keys " + ", ".join(_NEEDED))
    return _table(cast("dict[str, Any]", content))


def _fields(table: Table) -> dict[str, str]:
    """The keys of a table and their JSON."""
    routes = {"form": table.placement.form, "routes": table.placement.routes}
    rows = ([None if step is None else str(step) for step in row] for row in table.rows)
    return {
        "name": json.dumps(table.name),
        "ranks": json.dumps(table.ranks),
        "stages": json.dumps(table.stages),
        "microbatches": json.dumps(table.microbatches),
        "training": json.dumps(table.training),
        "placement": json.dumps(routes),
        "rows": _lines(rows),
    }


def _object(fields: Mapping[str, str]) -> str:
    return "{\n" + ",\n".join(f' "{key}": {value}' for key, value in fields.items()) + "\n}\n"


def _lines(rows: Iterator[list[Any]]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"


def _plain(value: Any) -> Any:
    """Whole numbers without a point, in all of it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        named = cast("Mapping[str, Any]", value)
        return {key: _plain(each) for key, each in named.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast("Sequence[Any]", value)]
    return value


def _table(content: dict[str, Any]) -> Table:
    known = {*_NEEDED, *_COUNTS, *_TIMED}
    strange = next((key for key in content if key not in known), None)
    if strange is not None:
        raise ToolError(f"unknown key {strange!r}; a schedule has {', '.join(_NEEDED)}")
    missing = [key for key in _NEEDED if key not in content]
    if missing:
        raise ToolError(f"the schedule has no {' and no '.join(missing)}")
    name, training = content["name"], content["training"]
    if not isinstance(name, str) or not isinstance(training, bool):
        raise ToolError("the name of a schedule is a string, and training is true or false")
    rows = [_row(rank, row) for rank, row in enumerate(_list(content["rows"], "rows"))]
    placement = _placement(content["placement"], len(rows))
    microbatches = _count(content["microbatches"], "microbatches")
    for what, own in (("ranks", placement.ranks), ("stages", placement.stages)):
        if what in content and content[what] != own:
            raise ToolError(f"{what} is {content[what]!r}, but rows and routes have {own}")
    return checked_table(name, placement, microbatches, rows, training)


def _placement(content: Any, ranks: int) -> Placement:
    if not isinstance(content, dict) or "routes" not in content:
        raise ToolError("placement is an object with routes: for each, the rank of every stage")
    given = cast("dict[str, Any]", content)
    strange_key = next((key for key in given if key not in ("form", "routes")), None)
    if strange_key is not None:
        raise ToolError(f"unknown key {strange_key!r}; a placement has form and routes")
    routes = tuple(
        tuple(_count(rank, f"placement.routes[{number}]") for rank in _list(route, "a route"))
        for number, route in enumerate(_list(given["routes"], "placement.routes"))
    )
    if not routes or not routes[0] or any(len(route) != len(routes[0]) for route in routes):
        raise ToolError("placement.routes: one or more lists of ranks, all as long as each other")
    strange = next((rank for route in routes for rank in route if rank >= ranks), None)
    if strange is not None:
        raise ToolError(f"placement.routes names rank {strange}, and there are {ranks} rows")
    placement = Placement(ranks, routes)
    if given.get("form", placement.form) != placement.form:
        raise ToolError(f"placement.form is {given['form']!r}, but these routes {_are(placement)}")
    return placement


def _are(placement: Placement) -> str:
    return (
        "have none of the known forms: leave form out"
        if placement.form == "custom"
        else (f"are {placement.form!r}")
    )


def _row(rank: int, row: Any) -> Row:
    cells = _list(row, f"rows[{rank}]")
    return tuple(_step(cell, f"rows[{rank}][{at}]") for at, cell in enumerate(cells))


def _step(cell: Any, where: str) -> Step | None:
    if cell is None:
        return None
    if not isinstance(cell, str):
        raise ToolError(f"{where}: {cell!r} is neither an action in quotes nor null")
    try:
        return step_of(cell)
    except ToolError as error:
        raise ToolError(f"{where}: {error.diagnostic.message}") from None


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ToolError(f"{where} is no list: {value!r}")
    return cast("list[Any]", value)


def _count(value: Any, where: str) -> int:
    if type(value) is not int or value < 0:
        raise ToolError(f"{where}: {value!r} is no whole number from 0 up")
    return value
