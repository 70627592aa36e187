"""Tables as files: text, the CSV of PyTorch's pipelines, JSON; each keeps every cell.

A cell is written `0F0`, `2SEND_F5`, `0OFFLOAD3`, `(0F7;7B3)OVERLAP_F_B`. The validator checks a
schedule that was read. This module only rejects numbers that are too large for the table, so that a
typing error cannot allocate a huge table.

Text: a line for the table, then a line for each rank, `.` where it is idle.

    schedule 1f1b, loop of 2 ranks x 1, 2 microbatches, training
    rank 0: 0F0 0F1  .   0B0  .   0B1
    rank 1:  .  1F0 1B0  1F1 1B1

Any other placement is written as its routes: `routes 0 2 1; 2 0 1 of 3 ranks`. A name with
characters other than letters, digits and `-_.+` is quoted. Blank lines and text after `#` are
ignored.

CSV, as PyTorch's pipeline schedules dump and load it: a line for each rank, a cell a step.

    0F0,0F1,0B0,0B1
    ,1F0,1B0,1F1,1B1

An empty cell is idle. Cells may be quoted or surrounded by spaces, any line ending is accepted, and
blank lines at the end are ignored. CSV states neither the placement nor the number of microbatches:
they are inferred. A stage belongs to the rank that runs its forwards. If stages run on two ranks,
by the parity of the microbatch as in two opposite pipelines, the placement is bidirectional.
Otherwise a stage belongs to the rank with most of its forwards; the validator reports the others.

JSON: the whole table in one object, with a line for each rank.

    {"name": "1f1b", "ranks": 2, "stages": 2, "microbatches": 2, "training": true,
     "placement": {"form": "loop", "routes": [[0, 1]]},
     "rows": [["0F0", null, …], …]}

If sequences are sliced, text has `2 microbatches of 4 slices` and JSON `"sequence_slices": 4`. The
rows then number slices; four consecutive ones form a microbatch. CSV cannot express slices.

A timed table also has `costs`, `metrics` and `timeline` (the start and end of every step), and the
result of a search has `search`. A reader of the table ignores these keys. Other keys are rejected,
because they are probably misspelt.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, cast

from stablehlo_tools.diagnostics import Place, ToolError, naming
from stablehlo_tools.files.atomic import STDIN, read_input
from stablehlo_tools.files.json_text import parse_json
from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    ActionPair,
    Placement,
    Row,
    Step,
    Table,
    actions_of,
    bidirectional,
    loop,
    parts,
    table_of,
    v_shape,
)
from stablehlo_tools.schedules.table_simulator import Timeline

_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)([A-Z_]*)")
_ACTION = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{0,9})")
_SUFFIX_OF_PAIRS = "OVERLAP_F_B"
_KINDS = {kind.value: kind for kind in ActionKind}
_OF_THE_RUNTIME = {  # PyTorch's actions on parameters, not on microbatches
    "UNSHARD": "gathers parameters",
    "RESHARD": "frees gathered parameters",
    "REDUCE_GRAD": "reduces gradients across replicas",
}
_KNOWN = "STAGE, one of " + " ".join(_KINDS) + ", MICROBATCH"
FIRST_WORD = "schedule"
_IDLE_TEXT = "."
_SILENT = re.compile(r"\s*(?:#.*)?")
_BARE_NAME = re.compile(r"[\w.+-]+")
_HEADER = re.compile(
    r'schedule (?P<name>[\w.+-]+|"(?:[^"\\]|\\.)*"), '
    r"(?:(?P<form>loop|v|bidirectional)|routes (?P<routes>[0-9]{1,9}(?:;? [0-9]{1,9})*)) "
    r"of (?P<ranks>[0-9]{1,9}) ranks(?: x (?P<chunks>[0-9]{1,9}))?, "
    r"(?P<microbatches>[0-9]{1,9}) microbatches(?: of (?P<slices>[0-9]{1,9}) slices)?, "
    r"(?P<use>training|forward only)"
)
_ROW = re.compile(r"rank ([0-9]{1,9}):(.*)")
_OF_TRAINING = {
    *(ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT),
    *(ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD),
}
_LINE_END = re.compile(r"\r\n|\n|\r")
_CSV_CELL = re.compile(r'\s*(?:"(?P<quoted>[^"]*)"|(?P<plain>[^,"]*))\s*(?P<end>,|$)')
_ONE_IDLE_CELL = '""'  # an empty line is a row without cells
_NEEDED = ("name", "microbatches", "training", "placement", "rows")
_COUNTS = ("ranks", "stages")
_SLICES = "sequence_slices"
_TIMED = ("costs", "metrics", "timeline", "search")
SUFFIXES = (".csv", ".json", ".txt")


def read_table(path: str) -> Table:
    """Reads the table in a file; `-` is standard input. A table from CSV is named after its file.

    The suffix .csv or .json decides the form, else the content does. Raises ToolError, with the
    name of the file, if it cannot be read as a table.
    """
    data, shown = read_input(path)
    with naming(shown):
        try:
            content = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ToolError(f"not a text file: byte {error.start} is not UTF-8") from None
        if not content.strip():
            raise ToolError("the file is empty")
        name = "stdin" if path == STDIN else Path(path).stem
        suffix, said = Path(path).suffix.lower(), (line.strip() for line in content.splitlines())
        first = next((line for line in said if line and not line.startswith("#")), "")
        if suffix != ".csv" and (suffix == ".json" or content.lstrip().startswith(("{", "["))):
            table = from_json(content)
        elif suffix != ".csv" and first.split(" ")[0] == FIRST_WORD:
            table = from_text(content)
        else:
            table = from_csv(content, name)
        printed = "".join(letter if letter.isprintable() else "?" for letter in table.name)
        return replace(table, name=printed)


def to_text(table: Table) -> str:
    """Returns the table as text, with aligned columns."""
    cells = [[_IDLE_TEXT if step is None else str(step) for step in row] for row in table.rows]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    label = len(f"rank {table.ranks - 1}:")
    lines: list[str] = []
    for rank, row in enumerate(cells):
        aligned = [cell.center(width) for cell, width in zip(row, widths, strict=False)]
        lines.append(" ".join([f"rank {rank}:".ljust(label), *aligned]).rstrip())
    name = table.name if _BARE_NAME.fullmatch(table.name) else json.dumps(table.name)
    use = "training" if table.training else "forward only"
    slices = f" of {table.sequence_slices} slices" if table.sequence_slices > 1 else ""
    placement = table.placement
    form, chunks = placement.form, ""
    if form == "custom":
        form = "routes " + "; ".join(" ".join(map(str, route)) for route in placement.routes)
    elif form != "bidirectional":
        chunks = f" x {placement.chunks}"
    header = (
        f"{FIRST_WORD} {name}, {form} of {placement.ranks} ranks{chunks}, "
        f"{table.sequences} microbatches{slices}, {use}"
    )
    return "\n".join([header, *lines]) + "\n"


def from_text(text: str) -> Table:
    """Parses a table in the text form. Raises ToolError naming line and column."""
    lines = enumerate(text.splitlines(), start=1)
    said = [(number, line) for number, line in lines if not _SILENT.fullmatch(line)]
    if not said:
        raise ToolError("empty schedule: every line is blank or a comment")
    number, first = said[0]
    header = _HEADER.fullmatch(first.strip())
    if header is None:
        raise ToolError(
            "the first line of a schedule must be like: schedule 1f1b, loop of 4 ranks x 1, 8 "
            "microbatches, training",
            Place(line=number, column=1),
        )
    name = header["name"]
    if name.startswith('"'):
        try:
            name = json.loads(name)
        except json.JSONDecodeError as error:
            place = Place(line=number, column=len(f"{FIRST_WORD} ") + error.colno)
            raise ToolError(f"the name is not a JSON string: {error.msg}", place) from None
    rows = [_text_row(line, number, rank) for rank, (number, line) in enumerate(said[1:])]
    check_ranks(len(rows), int(header["ranks"]))
    placement = _text_placement(header, number, max(map(len, rows), default=0))
    microbatches, slices = int(header["microbatches"]), int(header["slices"] or 1)
    return checked_table(name, placement, microbatches, rows, header["use"] == "training", slices)


def to_csv(table: Table) -> str:
    """Returns the rows as CSV, including idle cells."""
    lines = (
        _ONE_IDLE_CELL
        if row == (None,)
        else ",".join("" if step is None else str(step) for step in row)
        for row in table.rows
    )
    return "".join(f"{line}\n" for line in lines)


def from_csv(text: str, name: str = "table", placement: Placement | None = None) -> Table:
    """The table in a CSV file's text. Raises ToolError naming line, column and cell.

    The placement is inferred unless it is given; with it, lines at the end may be blank rows.
    """
    lines = _LINE_END.split(text.removeprefix("\ufeff"))
    ranks = 0 if placement is None else placement.ranks
    # With a given placement, a blank line may be the row of a rank without work.
    while len(lines) > ranks and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise ToolError("empty schedule: no line has a cell")
    rows = [_csv_row(line, rank) for rank, line in enumerate(lines)]
    return inferred_table(name, rows, placement)


def to_json(table: Table) -> str:
    """Returns the table as JSON, without times."""
    return _object(_fields(table))


def from_json(text: str) -> Table:
    """Parses a table in JSON text, timed or not. Raises ToolError naming the key or the cell."""
    return to_table(parse_json(text))


def to_table(content: object) -> Table:
    """Reads a table from parsed JSON. Raises ToolError naming the key or the cell."""
    if not isinstance(content, dict):
        raise ToolError("a schedule must be an object with the keys " + ", ".join(_NEEDED))
    content = cast("dict[str, Any]", content)
    known = {*_NEEDED, *_COUNTS, _SLICES, *_TIMED}
    strange = next((key for key in content if key not in known), None)
    if strange is not None:
        raise ToolError(f"unknown key {strange!r}; a schedule has {', '.join(_NEEDED)}")
    missing = [key for key in _NEEDED if key not in content]
    if missing:
        raise ToolError(f"the schedule has no {' and no '.join(missing)}")
    name, training = content["name"], content["training"]
    if not isinstance(name, str) or not isinstance(training, bool):
        raise ToolError("the name of a schedule must be a string, and training true or false")
    rows: list[Row] = []
    for rank, row in enumerate(_list(content["rows"], "rows")):
        steps: list[Step | None] = []
        for at, cell in enumerate(_list(row, f"rows[{rank}]")):
            where = f"rows[{rank}][{at}]: "
            if cell is not None and not isinstance(cell, str):
                raise ToolError(f"{where}{cell!r} is neither an action in quotes nor null")
            steps.append(None if cell is None else _step_at(cell, where))
        rows.append(tuple(steps))
    placement = _json_placement(content["placement"], len(rows))
    microbatches = _count(content["microbatches"], "microbatches")
    for what, own in (("ranks", placement.ranks), ("stages", placement.stages)):
        if what in content and content[what] != own:
            raise ToolError(f"{what} is {content[what]!r}, but rows and routes have {own}")
    slices = _count(content.get(_SLICES, 1), _SLICES)
    return checked_table(name, placement, microbatches, rows, training, slices)


def encode_timed(timeline: Timeline, search: SearchSummary | None = None) -> str:
    """The table with its costs, its metrics, and when each step starts and ends."""
    times = (
        [[_plain(start), _plain(end)] for start, end in zip(starts, ends, strict=True)]
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
    )
    figures = asdict(timeline.costs)
    if not timeline.table.offloads:
        figures = {key: each for key, each in figures.items() if key not in ("offloaded", "copy")}
    timed = {
        "costs": json.dumps(_plain(figures)),
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


class SearchSummary(NamedTuple):
    """The facts that a search states about its result.

    origin: the source of the schedule. bound: a lower bound on the makespan of every schedule on
    the searched placements. gap: (makespan - bound) / bound.
    """

    origin: str
    bound: float
    gap: float


def _text_placement(header: re.Match[str], line: int, longest: int) -> Placement:
    """Returns the placement that the first line states.

    Raises ToolError if a rank has more stages than `longest`, the steps of the longest row.
    """
    ranks, chunks = int(header["ranks"]), int(header["chunks"] or 1)
    if not ranks or not 1 <= chunks <= max(longest, 1):
        raise ToolError(
            f"{ranks} ranks x {chunks}: give at least 1 of each, and at most as many stages a rank "
            "as steps",
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
            f"each route must name a rank below {ranks} for every stage, and all must be equally "
            "long",
            Place(line=line, column=header.start("routes") + 1),
        )
    return Placement(ranks, routes)


def _text_row(line: str, number: int, rank: int) -> Row:
    match = _ROW.fullmatch(line.strip())
    if match is None or int(match[1]) != rank:
        raise ToolError(f"write 'rank {rank}: ' and its steps here", Place(line=number, column=1))
    start = line.index(":") + 1
    steps: list[Step | None] = []
    for cell in re.finditer(r"\S+", line[start:]):
        idle, column = cell[0] == _IDLE_TEXT, start + cell.start() + 1
        steps.append(None if idle else _step_at(cell[0], "", number, column))
    return tuple(steps)


def _step_at(text: str, where: str, line: int = 0, column: int = 0) -> Step:
    """Parses a cell. Raises ToolError at `line` and `column`; `where` names the cell in words."""
    try:
        return step_of(text)
    except ToolError as error:
        place = Place(line=line, column=column) if line else Place()
        raise ToolError(where + error.diagnostic.message, place) from None


class _Standing(NamedTuple):
    """An action and the rank whose row contains it."""

    rank: int
    action: Action


def inferred_table(name: str, rows: Sequence[Row], placement: Placement | None = None) -> Table:
    """Returns the table of these rows, with the given placement or the one that they follow.

    Raises ToolError if the rows have no action, or if no rank or several ranks run a stage. Also if
    the number of rows differs from the ranks of the placement.
    """
    standing = [
        _Standing(rank, action) for rank, row in enumerate(rows) for action in actions_of(row)
    ]
    if not standing:
        raise ToolError("empty schedule: no row has an action")
    _check_count(standing, "microbatch")
    if placement is None:
        _check_count(standing, "stage")
        placement = _inferred_placement(len(rows), standing)
    microbatches = 1 + max(each.action.microbatch for each in standing)
    training = any(each.action.kind in _OF_TRAINING for each in standing)
    return checked_table(name, placement, microbatches, rows, training)


def _check_count(standing: Sequence[_Standing], what: str) -> None:
    """Raises ToolError for a number too large for the table, before any allocation by it."""
    rank, action = max(standing, key=lambda each: getattr(each.action, what))
    if getattr(action, what) >= len(standing):
        raise ToolError(
            f"rank {rank}: {action}: {what} {getattr(action, what)} is too large for "
            f"{len(standing)} actions; stages and microbatches count from 0 without gaps"
        )


def _inferred_placement(ranks: int, standing: Sequence[_Standing]) -> Placement:
    votes = _votes(standing)
    forwards = [each for each in standing if each.action.kind is ActionKind.FORWARD]
    most = [max(counts, key=lambda rank: (counts[rank], -rank)) for counts in votes]
    alone = Placement(ranks, (tuple(most),))
    opposite = bidirectional(ranks)
    # Opposite pipelines run each stage on two ranks, so a majority alone would be wrong.
    if opposite.stages == len(votes) and _count_as_placed(opposite, forwards) > _count_as_placed(
        alone, forwards
    ):
        return opposite
    for stage, counts in enumerate(votes):
        if 2 * counts[most[stage]] <= counts.total():
            ranks_of_stage = " and ".join(map(str, sorted(counts)))
            raise ToolError(
                f"stage {stage} runs on ranks {ranks_of_stage}, but no rank runs most of it and "
                "the rows are not two opposite pipelines: the placement is unknown; give the table "
                "as JSON, which states it"
            )
    return alone


def _votes(standing: Sequence[_Standing]) -> list[Counter[int]]:
    """Returns, for each stage, the number of its forwards by rank; of any phases if it has none."""
    stages = 1 + max(each.action.stage for each in standing)
    forwards: list[Counter[int]] = [Counter() for _ in range(stages)]
    phases: list[Counter[int]] = [Counter() for _ in range(stages)]
    for rank, action in standing:
        if action.kind is ActionKind.FORWARD:
            forwards[action.stage][rank] += 1
        if action.kind.is_compute:
            phases[action.stage][rank] += 1
    votes = [one or other for one, other in zip(forwards, phases, strict=True)]
    missing = next((stage for stage, counts in enumerate(votes) if not counts), None)
    if missing is not None:
        raise ToolError(
            f"no rank runs stage {missing}, but the actions name stages up to {stages - 1}"
        )
    return votes


def _count_as_placed(placement: Placement, forwards: Sequence[_Standing]) -> int:
    """Returns the number of forwards that are on the rank that the placement names."""
    return sum(
        placement.rank_of(action.stage, action.microbatch) == rank for rank, action in forwards
    )


def _csv_row(line: str, rank: int) -> Row:
    if not line.strip():
        return ()
    steps: list[Step | None] = []
    at, ended = 0, False
    while not ended:
        where = f"rank {rank}, cell {len(steps) + 1}: "
        cell = _CSV_CELL.match(line, at)
        if cell is None:
            raise ToolError(
                f"{where}a quote in the middle of a cell, or never closed",
                Place(line=rank + 1, column=at + 1),
            )
        group = "plain" if cell["quoted"] is None else "quoted"
        text = cell[group].strip()
        column = cell.start(group) + cell[group].index(text) + 1
        steps.append(_step_at(text, where, rank + 1, column) if text else None)
        at, ended = cell.end(), cell["end"] == ""
    return tuple(steps)


def _fields(table: Table) -> dict[str, str]:
    """The keys of a table and their JSON."""
    routes = {"form": table.placement.form, "routes": table.placement.routes}
    rows = ([None if step is None else str(step) for step in row] for row in table.rows)
    slices = {_SLICES: json.dumps(table.sequence_slices)}
    return {
        "name": json.dumps(table.name),
        "ranks": json.dumps(table.ranks),
        "stages": json.dumps(table.stages),
        "microbatches": json.dumps(table.sequences),
        **(slices if table.sequence_slices > 1 else {}),
        "training": json.dumps(table.training),
        "placement": json.dumps(routes),
        "rows": _lines(rows),
    }


def _object(fields: Mapping[str, str]) -> str:
    return "{\n" + ",\n".join(f' "{key}": {value}' for key, value in fields.items()) + "\n}\n"


def _lines(rows: Iterator[list[Any]]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"


def _plain(value: Any) -> Any:
    """Replaces floats that are whole numbers by ints, recursively."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast("Sequence[Any]", value)]
    return value


def _json_placement(content: Any, ranks: int) -> Placement:
    if not isinstance(content, dict) or "routes" not in content:
        raise ToolError(
            "placement must be an object with routes, each a list with the rank of every stage"
        )
    given = cast("dict[str, Any]", content)
    strange_key = next((key for key in given if key not in ("form", "routes")), None)
    if strange_key is not None:
        raise ToolError(f"unknown key {strange_key!r}; a placement has form and routes")
    routes = tuple(
        tuple(_count(rank, f"placement.routes[{number}]") for rank in _list(route, "a route"))
        for number, route in enumerate(_list(given["routes"], "placement.routes"))
    )
    if not routes or not routes[0] or any(len(route) != len(routes[0]) for route in routes):
        raise ToolError("placement.routes must be one or more lists of ranks, all of one length")
    strange = next((rank for route in routes for rank in route if rank >= ranks), None)
    if strange is not None:
        raise ToolError(f"placement.routes names rank {strange}, but there are {ranks} rows")
    placement = Placement(ranks, routes)
    if given.get("form", placement.form) != placement.form:
        own = f"are {placement.form!r}"
        if placement.form == "custom":
            own = "have none of the known forms: leave form out"
        raise ToolError(f"placement.form is {given['form']!r}, but these routes {own}")
    return placement


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ToolError(f"{where} is not a list: {value!r}")
    return cast("list[Any]", value)


def _count(value: Any, where: str) -> int:
    if type(value) is not int or value < 0:
        raise ToolError(f"{where}: {value!r} is not a whole number from 0 up")
    return value


def step_of(text: str) -> Step:
    """Parses the step that a cell names. Raises ToolError with the reason if it names none."""
    pair = _PAIR.fullmatch(text)
    if pair is None:
        return _action_of(text)
    if pair[3] != _SUFFIX_OF_PAIRS:
        raise ToolError(f"{text!r} is not a pair: it must end in {_SUFFIX_OF_PAIRS}")
    forward, backward = _action_of(pair[1].strip()), _action_of(pair[2].strip())
    if forward.kind is not ActionKind.FORWARD or backward.kind is not ActionKind.BACKWARD:
        raise ToolError(f"{text!r} is not a pair: a pair is one F and then one B, as in (0F7;7B3)")
    return ActionPair(forward, backward)


def checked_table(
    name: str,
    placement: Placement,
    microbatches: int,
    rows: Sequence[Row],
    training: bool,
    slices: int = 1,
) -> Table:
    """Returns the table; each microbatch has `slices` slices.

    Raises ToolError if the number of rows is not that of ranks, a count is below 1, or there are
    far more stages or microbatches than actions.
    """
    check_ranks(len(rows), placement.ranks)
    for what, count in (("microbatches", microbatches), ("slices", slices)):
        if count < 1:
            raise ToolError(f"{what}: {count}; a schedule needs 1 or more")
    microbatches *= slices
    actions = sum(len(parts(step)) for row in rows for step in row if step is not None)
    for what, count in (("stages", placement.stages), ("microbatches", microbatches)):
        if count > max(2 * actions, 1):  # some may be missing, which the validator names
            raise ToolError(f"{count} {what}, but all rows together have {actions} actions")
    return table_of(name, placement, microbatches, rows, training, slices)


def check_ranks(rows: int, ranks: int) -> None:
    """Raises ToolError unless there is a row for each rank of the placement."""
    if rows != ranks:
        raise ToolError(f"{rows} rows for a placement of {ranks} ranks: give one row a rank")


def _action_of(text: str) -> Action:
    match = _ACTION.fullmatch(text)
    name = match[2] if match else ""
    if name in _OF_THE_RUNTIME:
        raise ToolError(
            f"{text!r}: {name} {_OF_THE_RUNTIME[name]}, which a schedule of microbatches does not "
            "contain: leave out UNSHARD, RESHARD and REDUCE_GRAD"
        )
    if match is None or not match[3] or name not in _KINDS:
        raise ToolError(f"{text!r} is not an action: an action is {_KNOWN}, as in 0F0 or 2SEND_F5")
    return Action(_KINDS[name], int(match[1]), int(match[3]))
