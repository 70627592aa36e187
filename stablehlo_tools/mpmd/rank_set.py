"""A set of rank programs in memory: read from a directory and checked, written whole or not at all.

DIR/manifest.json      what belongs to the set
DIR/rank_0.mlir …      the program of each rank

A name in a manifest is that of a file in the set's own directory, and nothing else: no path, no
control character, a suffix that programs have. A link is followed within the directory only. So a
manifest that comes from elsewhere leads to no other file, read or written.

What a manifest may say: every field with its type and its range, and what fields say of each
other, checked while it is read. Whoever has a `Manifest` from here can count on it.

Each error names the field, `transfers[3].source`, and the line.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stablehlo_tools.analysis.entry import main_function
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact, Form
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.files.atomic import write_all_atomically
from stablehlo_tools.files.json_text import JsonValue, read_bounded
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.mpmd import manifest as manifests
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
from stablehlo_tools.schedules.forms import step_of, to_table
from stablehlo_tools.schedules.table import Action, Table
from stablehlo_tools.schedules.validator import violations

SUFFIXES = (".mlir", ".mlirbc", ".bc")
_LONGEST = 255  # bytes; no file system takes more
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


def refusal_of_name(name: str) -> str:
    """Why a program of a set cannot be called so; empty where it can."""
    if not name or name in (".", ".."):
        return f"{name!r} names no file"
    if "/" in name or "\\" in name or (len(name) > 1 and name[1] == ":"):
        return f"{name!r} is a path, and a program lies beside its manifest: a plain file name"
    if not name.isprintable() or name != name.strip():
        return f"{name!r} has characters that a file name should not have"
    if len(name.encode()) > _LONGEST:
        return f"the name has {len(name.encode())} bytes, and a file's has {_LONGEST} at most"
    if not name.endswith(SUFFIXES) or name.startswith("."):
        return f"{name!r} is no name of a program: NAME{', NAME'.join(SUFFIXES)}"
    return ""


def files_in(root: Path, names: Sequence[str]) -> list[Path]:
    """The files of these names in a set's directory, there or not.

    Raises ToolError for what is no regular file, a link that leads out of the directory, and names
    that lead to one and the same file.
    """
    files = [root / name for name in names]
    own = Path(os.path.realpath(root))
    taken: dict[str, str] = {}
    for name, file in zip(names, files, strict=True):
        target = Path(os.path.realpath(file))
        if target.parent != own:
            raise _refused_file(file, f"the link leads to {os.fspath(target)!r}, out of the set")
        if target.exists() and not target.is_file():
            raise _refused_file(file, "this is no regular file")
        other = taken.setdefault(os.fspath(target).casefold(), name)
        if other != name:
            raise _refused_file(file, f"this is the same file as {other!r}")
    return files


def _refused_file(file: Path, message: str) -> ToolError:
    error = ToolError(message)
    error.input_name = os.fspath(file)
    return error


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
        table = to_table(value.content)
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
    type_, shape = _tensor(fields["type"])
    pieces: list[Piece] = []
    for item in fields["pieces"].items():
        piece = _piece(item, ranks, shape)
        if (piece.rank, piece.number) in taken:
            item.refuse(f"number {piece.number} of rank {piece.rank} is a piece of two things")
        taken.add((piece.rank, piece.number))
        pieces.append(piece)
    return Entry(fields["path"].string(), type_, tuple(pieces))


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
    match = _TENSOR.fullmatch(text)
    if match is None:
        value.refuse(f"{text[:60]!r} is no type of a tensor, as tensor<4x16xf32> is")
    shape = [int(size) for size in match[1].split("x") if size]
    if math.prod(shape) > _MOST_ELEMENTS:
        value.refuse(f"{text[:60]} is larger than any memory")
    return text, shape


def _transfers(value: JsonValue, ranks: int) -> tuple[Transfer, ...]:
    channels: set[int] = set()
    transfers: list[Transfer] = []
    for item in value.items():
        transfer = _transfer(item, ranks)
        if transfer.channel in channels:
            item.refuse(f"channel {transfer.channel} has two transfers")
        channels.add(transfer.channel)
        transfers.append(transfer)
    return tuple(transfers)


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


@dataclass(frozen=True)
class RankSet:
    """The manifest, and the program of each rank in order; `name` is used in messages only."""

    name: str
    manifest: Manifest
    programs: tuple[Artifact, ...]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.programs)

    def main(self, rank: int) -> ir.Operation:
        """The entry function of a rank."""
        main = main_function(self.programs[rank].module)
        assert main is not None, "load refuses a program without one"
        return main


def load(directory: str | os.PathLike[str]) -> RankSet:
    """Reads a set and checks that manifest and programs speak of the same values.

    Raises ToolError, about the file that is missing or odd.
    """
    root = Path(directory)
    if root.exists() and not root.is_dir():
        raise _in_file(ToolError("this is no directory of rank programs"), os.fspath(root))
    (path,) = files_in(root, [manifests.NAME])
    with naming(os.fspath(path)):
        manifest = decode(read_bounded(path))
    files = files_in(root, [rank.program for rank in manifest.ranks])
    programs = tuple(map(artifact.load, files))
    loaded = RankSet(os.fspath(root), manifest, programs)
    for rank, program in enumerate(programs):
        with naming(program.name):
            _check_main(program)
            _check_grid(program, manifest)
            _check_pieces(loaded, rank)
    return loaded


def check_writable(directory: str | os.PathLike[str]) -> None:
    """Raises ToolError early where a set could not be written to a directory."""
    root = Path(directory)
    if root.exists() and not root.is_dir():
        raise ToolError(f"cannot write to {os.fspath(root)!r}: it is no directory")
    parent = next(p for p in (root, *root.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        raise ToolError(f"cannot write to {os.fspath(root)!r}: permission denied")


def write(
    directory: str | os.PathLike[str], manifest: Manifest, modules: Sequence[ir.Module]
) -> None:
    """Writes a set: all its files or none, each in the form that its suffix names. The directory is
    made where it is missing."""
    root = Path(directory)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(f"cannot write {os.fspath(root)!r}: {error.strerror}") from None
    names = [rank.program for rank in manifest.ranks]
    refused = next(filter(None, map(refusal_of_name, names)), None)
    if refused is not None:
        raise ToolError(f"cannot write a program of a set: {refused}")
    *files, listed = files_in(root, [*names, manifests.NAME])
    written = [
        artifact.encode(Artifact(name, Form.TEXT, module), artifact.output_form(name))
        for name, module in zip(names, modules, strict=True)
    ]
    content = manifests.encode(manifest).encode()
    write_all_atomically([*zip(files, written, strict=True), (listed, content)])


def piece_type(entry: Entry, piece: Piece) -> str:
    """The type of what a rank has of an input or output: `tensor<4x16xf32>`."""
    if piece.dim is None:
        return entry.type
    sizes = entry.type.removeprefix("tensor<").split("x")
    sizes[piece.dim] = str(piece.limit - piece.start)
    return "tensor<" + "x".join(sizes)


def _check_main(program: Artifact) -> None:
    main = main_function(program.module)
    if main is None or not len(main.regions[0].blocks):
        raise ToolError("there is no @main: this is no program of a rank")


def _check_grid(program: Artifact, manifest: Manifest) -> None:
    count = manifest.devices * len(manifest.ranks)
    stated = program.module.operation.attributes.get("mhlo.num_partitions")
    stated_count = 1 if stated is None else ir.IntegerAttr(stated).value
    if stated_count != count:
        raise ToolError(
            f"the program is for {stated_count} devices, and the set is for {count}: "
            f"{len(manifest.ranks)} ranks of {manifest.devices}"
        )


def _check_pieces(loaded: RankSet, rank: int) -> None:
    """Every argument and result of a rank is a piece of an input or output, of that type."""
    main = loaded.main(rank)
    block = main.regions[0].blocks[0]
    sides = (
        ("argument", loaded.manifest.inputs, list(block.arguments)),
        ("result", loaded.manifest.outputs, list(terminator(block).operands)),
    )
    for what, entries, values in sides:
        expected: dict[int, tuple[str, str]] = {}
        for entry in entries:
            for piece in entry.pieces:
                if piece.rank == rank:
                    expected[piece.number] = (entry.path, piece_type(entry, piece))
        for number, value in enumerate(values):
            path, type_ = expected.pop(number, ("", ""))
            if not type_ and loaded.manifest.form == "permutes" and number == len(values) - 1:
                continue  # what keeps watched permutes alive
            if not type_:
                raise ToolError(
                    f"the manifest does not say what {what} {number} of @main is", main.location
                )
            if type_ != str(value.type):
                raise ToolError(
                    f"{what} {number} of @main is {value.type}, and as a piece of {path} the "
                    f"manifest has it as {type_}",
                    main.location,
                )
        if expected:
            number = min(expected)
            raise ToolError(
                f"@main has no {what} {number}, which the manifest has as a piece of "
                f"{expected[number][0]}",
                main.location,
            )


def _in_file(error: ToolError, name: str) -> ToolError:
    error.input_name = name
    return error
