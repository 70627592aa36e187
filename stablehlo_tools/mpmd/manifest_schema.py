"""What a manifest may say: every field with its type and its range, and what fields say of each
other, checked while it is read. Whoever has a `Manifest` from here can count on it.

Each error names the field, `transfers[3].source`, and the line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.files.json_text import JsonValue
from stablehlo_tools.mpmd.manifest import (
    FINISH,
    FORMS,
    VERSION,
    Entry,
    Manifest,
    Piece,
    Rank,
    Stage,
    Transfer,
)
from stablehlo_tools.mpmd.set_files import refusal_of_name
from stablehlo_tools.schedules.forms import json_form
from stablehlo_tools.schedules.forms.cells import step_of
from stablehlo_tools.schedules.table import Action, Table
from stablehlo_tools.schedules.validator import violations

_FIELDS = (
    "version",
    "source",
    "devices",
    "form",
    "hardware",
    "hop",
    "ranks",
    "stages",
    "inputs",
    "outputs",
    "transfers",
    "schedule",
)
_COSTS = (
    "forward",
    "input_gradient",
    "weight_gradient",
    "backward",
    "activation",
    "kept",
    "weights",
    "message",
)
_MOST = 1e100  # sums of so large times or sizes are still finite
_NUMBER = r"(?:(?:f|bf|tf|i|si|ui)[0-9]\w*|index)"
_ELEMENT = rf"(?:{_NUMBER}|complex<{_NUMBER}>|!quant\.uniform<[^<>]*>)"
_TENSOR = re.compile(rf"tensor<((?:[0-9]{{1,18}}x)*){_ELEMENT}>")
_MOST_ELEMENTS = 2**58  # so that bytes of it are counted in 64 bits


def decode(data: bytes | str) -> Manifest:
    """The manifest in JSON. Raises a located ToolError for what is none."""
    try:
        document = JsonValue.of(data)
        version = document.entries().get("version")
        if version is None or version.content != VERSION:
            raise ToolError(f"this is no manifest of rank programs of version {VERSION}")
        return _manifest(document.fields(_FIELDS))
    except ToolError as error:
        message, place = error.diagnostic.message, error.diagnostic.place
        if message.startswith("this is no manifest"):
            raise
        raise ToolError(f"this is no manifest of rank programs: {message}", place) from None


def _manifest(fields: dict[str, JsonValue]) -> Manifest:
    fields["version"].whole(VERSION, VERSION)
    table = _table(fields["schedule"])
    ranks = _ranks(fields["ranks"], table)
    return Manifest(
        source=fields["source"].string(),
        devices=fields["devices"].whole(1),
        form=fields["form"].one_of(FORMS),
        table=table,
        ranks=ranks,
        stages=_stages(fields["stages"], table),
        hardware=fields["hardware"].string(),
        hop=fields["hop"].amount(_MOST),
        inputs=_entries(fields["inputs"], len(ranks)),
        outputs=_entries(fields["outputs"], len(ranks)),
        transfers=_transfers(fields["transfers"], len(ranks)),
    )


def _table(value: JsonValue) -> Table:
    try:
        table = json_form.to_table(value.content)
        broken = violations(table)
    except ToolError as error:
        value.refuse(error.diagnostic.message)
    if broken:
        value.refuse(f"{table.name!r} is not valid: {broken[0]}")
    return table


def _ranks(value: JsonValue, table: Table) -> tuple[Rank, ...]:
    items = value.items()
    if len(items) != table.ranks:
        value.refuse(f"there are {len(items)} programs for the {table.ranks} ranks of the schedule")
    ranks = tuple(_rank(item, table) for item in items)
    names = [rank.program.casefold() for rank in ranks]
    for number, (item, name) in enumerate(zip(items, names, strict=True)):
        if name in names[:number]:
            program = item.entries()["program"]
            program.refuse(f"rank {names.index(name)} has the program {name!r} as well")
    return ranks


def _rank(value: JsonValue, table: Table) -> Rank:
    fields = value.fields(("program", "stages"), ("wiring",))
    program = fields["program"].string()
    refusal = refusal_of_name(program)
    if refusal:
        fields["program"].refuse(refusal)
    stages = tuple(item.whole(0, table.stages - 1) for item in fields["stages"].items())
    wiring: dict[str, tuple[str, ...]] = {}
    if "wiring" in fields:
        for name, taken in fields["wiring"].entries().items():
            wiring[name] = tuple(item.string() for item in taken.items())
    return Rank(program, stages, wiring)


def _stages(value: JsonValue, table: Table) -> tuple[Stage, ...]:
    items = value.items()
    if len(items) != table.stages:
        value.refuse(f"there are {len(items)} stages, and the schedule has {table.stages}")
    return tuple(_stage(item, number) for number, item in enumerate(items))


def _stage(value: JsonValue, number: int) -> Stage:
    fields = value.fields(("stage", "what", *_COSTS))
    costs = {name: fields[name].amount(_MOST) for name in _COSTS}
    return Stage(fields["stage"].whole(number, number), fields["what"].string(), **costs)


def _entries(value: JsonValue, ranks: int) -> tuple[Entry, ...]:
    """Inputs or outputs; an argument or a result of a rank is a piece of one of them."""
    taken: set[tuple[int, int]] = set()
    return tuple(_entry(item, ranks, taken) for item in value.items())


def _entry(value: JsonValue, ranks: int, taken: set[tuple[int, int]]) -> Entry:
    fields = value.fields(("path", "type", "pieces"))
    kind, shape = _tensor(fields["type"])
    pieces: list[Piece] = []
    for item in fields["pieces"].items():
        piece = _piece(item, ranks, shape)
        if (piece.rank, piece.number) in taken:
            item.refuse(f"number {piece.number} of rank {piece.rank} is a piece of two things")
        taken.add((piece.rank, piece.number))
        pieces.append(piece)
    return Entry(fields["path"].string(), kind, tuple(pieces))


def _piece(value: JsonValue, ranks: int, shape: Sequence[int]) -> Piece:
    fields = value.fields(("rank", "number"), ("dim", "start", "limit"))
    rank, number = fields["rank"].whole(0, ranks - 1), fields["number"].whole()
    dim = fields.get("dim")
    start, limit = (fields[end].whole() if end in fields else 0 for end in ("start", "limit"))
    if dim is None or dim.content is None:
        return Piece(rank, number, None, start, limit)
    if not shape:
        dim.refuse("a number has no dimensions to be cut along")
    along = dim.whole(0, len(shape) - 1)
    if not start < limit <= shape[along]:
        value.refuse(f"rows {start} to {limit} are none of the {shape[along]} of dimension {along}")
    return Piece(rank, number, along, start, limit)


def _tensor(value: JsonValue) -> tuple[str, list[int]]:
    """The text of a tensor type of static shape, and that shape."""
    text = value.string()
    found = _TENSOR.fullmatch(text)
    if found is None:
        value.refuse(f"{text[:60]!r} is no type of a tensor, as tensor<4x16xf32> is")
    shape = [int(size) for size in found[1].split("x") if size]
    if math.prod(shape) > _MOST_ELEMENTS:
        value.refuse(f"{text[:60]} is larger than any memory")
    return text, shape


def _transfers(value: JsonValue, ranks: int) -> tuple[Transfer, ...]:
    channels: set[int] = set()
    found: list[Transfer] = []
    for item in value.items():
        transfer = _transfer(item, ranks)
        if transfer.channel in channels:
            item.refuse(f"channel {transfer.channel} has two transfers")
        channels.add(transfer.channel)
        found.append(transfer)
    return tuple(found)


def _transfer(value: JsonValue, ranks: int) -> Transfer:
    fields = value.fields(("channel", "action", "tensor", "source", "target", "type"))
    source, target = (fields[end].whole(0, ranks - 1) for end in ("source", "target"))
    if source == target:
        value.refuse(f"this goes from rank {source} to itself")
    return Transfer(
        fields["channel"].whole(1),
        _send(fields["action"]),
        fields["tensor"].whole(),
        source,
        target,
        _tensor(fields["type"])[0],
    )


def _send(value: JsonValue) -> str:
    """The send of a schedule that a transfer belongs to, or `finish`."""
    text = value.string()
    if text == FINISH:
        return text
    try:
        step = step_of(text)
    except ToolError as error:
        value.refuse(error.diagnostic.message)
    if not isinstance(step, Action) or not step.kind.is_send:
        value.refuse(f"{text!r} is no send of a schedule, as 0SEND_F0 is, and not {FINISH!r}")
    return text
