"""Defines `manifest.json`, the description of a set of rank programs, and their function names.

{"version": 1, "source": "step.jax_export", "digest": "5f…", "devices": 1, "form": "pairs",
 "schedule": {"name": "1f1b", …},               // a table, as `schedule --format json` writes it
 "ranks": [{"program": "rank_0.mlir", "stages": [0], "wiring": {"@finish_0": […], …}}, …],
 "stages": [{"stage": 0, "what": "…", "forward": 1e-3, …}, …],
 "inputs": [{"path": "[0]['embed']", "type": "tensor<64x16xf32>",
             "pieces": [{"rank": 0, "number": 0}]}, …],
 "outputs": [{"path": "[1]['w']", "type": "tensor<8x16x16xf32>",
              "pieces": [{"rank": 0, "number": 1, "dim": 0, "start": 0, "limit": 4}, …]}, …],
 "transfers": [{"channel": 1, "action": "0SEND_F0", "tensor": 0, "source": 0, "target": 1,
                "type": "tensor<4x16xf32>"}, …]}

The decoder checks the type and range of every field, and that fields agree with each other. So a
`Manifest` is always consistent. Each error names the field, `transfers[3].source`, and the line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

from stablehlo_tools.artifacts.parsing import AGAIN
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.files.json_text import JsonValue
from stablehlo_tools.schedules.forms import step_of, to_json, to_table
from stablehlo_tools.schedules.setting import Costs, costs
from stablehlo_tools.schedules.table import Action, ActionKind, Table
from stablehlo_tools.schedules.validator import violations

NAME = "manifest.json"
VERSION = 1
FORMS = ("pairs", "both-ends", "permutes")
PREPARE = "prepare"  # once, before the first action
FINISH = "finish"  # once for each round, after the last action: finish_0, finish_1, …
_PHASES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "input_gradient",
    ActionKind.WEIGHT_GRADIENT: "weight_gradient",
}
_KINDS = {name: kind for kind, name in _PHASES.items()}
_STAGE = re.compile(r"stage_(\d+)_(\w+)")
SUFFIXES = (".mlir", ".mlirbc", ".bc")
_LONGEST = 255  # bytes; the limit of file systems
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
_MOST = 1e100  # sums of such times or sizes are still finite
_NUMBER = r"(?:(?:f|bf|tf|i|si|ui)[0-9]\w*|index)"
_ELEMENT = rf"(?:{_NUMBER}|complex<{_NUMBER}>|!quant\.uniform<[^<>]*>)"
_TENSOR = re.compile(rf"tensor<((?:[0-9]{{1,18}}x)*){_ELEMENT}>")
_MOST_ELEMENTS = 2**58  # so that their bytes fit in 64 bits


@dataclass(frozen=True)
class ManifestPiece:
    """The part of an input or an output on one rank: argument or result `number` of its `main`.

    It consists of the rows `start` to `limit` of dimension `dim`, or is the whole if `dim` is None.
    An input may be on several ranks. The pieces of an output are disjoint and cover it.
    """

    rank: int
    number: int
    dim: int | None = None
    start: int = 0
    limit: int = 0


@dataclass(frozen=True)
class ManifestEntry:
    """An input or an output of the original program, in its order, and its pieces.

    An input that no op reads has no pieces.
    """

    path: str
    type: str
    pieces: tuple[ManifestPiece, ...]


@dataclass(frozen=True)
class ManifestTransfer:
    """A tensor that one rank sends to another, on its own channel.

    `action` is its send in the schedule, such as `0SEND_F3`, or `finish` after the schedule. A send
    may have several tensors, of which it is number `tensor`.
    """

    channel: int
    action: str
    tensor: int
    source: int
    target: int
    type: str

    def pairs(self, devices: int) -> tuple[tuple[int, int], ...]:
        """Returns the sending and the receiving device, for each device of a rank."""
        first, second = self.source * devices, self.target * devices
        return tuple((first + device, second + device) for device in range(devices))

    @property
    def is_scheduled(self) -> bool:
        """True if it belongs to an action of the schedule."""
        return self.action != FINISH


@dataclass(frozen=True)
class ManifestStage:
    """A stage: a description in words, and its costs for one microbatch.

    Times are in seconds. `activation` is in bytes, from the forward to the (input) gradient. `kept`
    is in bytes, from there to the weight gradient, 0 without a separate weight gradient. `weights`
    are the bytes of its parameters and of the sums of their gradients. `message` are the bytes that
    it sends forward.
    """

    stage: int
    what: str
    forward: float
    input_gradient: float
    weight_gradient: float
    backward: float
    activation: float
    kept: float
    weights: float
    message: float


_COSTS = [each.name for each in fields(ManifestStage) if each.name not in ("stage", "what")]


@dataclass(frozen=True)
class Rank:
    """The program of a rank: a file in the directory of the manifest.

    `wiring` has the origins of values outside the schedule (see `wiring`); it is empty if unknown.
    """

    program: str
    stages: tuple[int, ...]
    wiring: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])


@dataclass(frozen=True)
class Manifest:
    """The description of a set of rank programs.

    `devices` is the number of devices per rank: rank r runs on the devices from r * devices on.
    `form` is the form of the transfers. `hop` is the time of a transfer between ranks, in seconds.
    """

    source: str
    devices: int
    form: str
    table: Table
    ranks: tuple[Rank, ...]
    stages: tuple[ManifestStage, ...]
    hardware: str
    hop: float
    inputs: tuple[ManifestEntry, ...]
    outputs: tuple[ManifestEntry, ...]
    transfers: tuple[ManifestTransfer, ...]
    digest: str = ""  # SHA-256 of the original program's text; "" if unknown

    @property
    def costs(self) -> Costs:
        """The costs for the simulator."""
        return costs_of_stages(self.stages, self.hop)

    def of_channel(self) -> Mapping[int, ManifestTransfer]:
        """Returns the transfers by their channels."""
        return {transfer.channel: transfer for transfer in self.transfers}


def costs_of_stages(stages: Sequence[ManifestStage], hop: float) -> Costs:
    """Returns the costs for the simulator.

    If weight gradients are separate, `kept` may exceed the activation; then it counts from the
    forward on.
    """
    return costs(
        len(stages),
        forward=[stage.forward for stage in stages],
        input_gradient=[stage.input_gradient for stage in stages],
        weight_gradient=[stage.weight_gradient for stage in stages],
        backward=[stage.backward for stage in stages],
        communication=hop,
        activation=[max(stage.activation, stage.kept) for stage in stages],
        kept=[stage.kept for stage in stages],
        weights=[stage.weights for stage in stages],
        message=max((stage.message for stage in stages), default=0.0),
    )


def encode_manifest(manifest: Manifest) -> str:
    """Returns the manifest as JSON, a line for each entry of a list."""
    fields: dict[str, str] = {
        "version": str(VERSION),
        **{
            name: json.dumps(getattr(manifest, name))
            for name in ("source", "digest", "devices", "form", "hardware", "hop")
        },
        "ranks": _lines(manifest.ranks),
        "stages": _lines(manifest.stages),
        "inputs": _lines(manifest.inputs),
        "outputs": _lines(manifest.outputs),
        "transfers": _lines(manifest.transfers),
        "schedule": to_json(manifest.table).strip(),
    }
    return "{" + ",\n".join(f'"{name}": {text}' for name, text in fields.items()) + "}\n"


def _lines(items: Sequence[Any]) -> str:
    return "[" + ",\n ".join(json.dumps(asdict(item)) for item in items) + "]"


def function_of(kind: ActionKind, stage: int) -> str:
    """Returns the name of a phase's function: `stage_3_forward`. Its operand 0 is the
    microbatch."""
    return f"stage_{stage}_{_PHASES[kind]}"


@lru_cache(maxsize=4096)
def phase_of(name: str) -> tuple[ActionKind, int] | None:
    """Returns the phase and the stage that a function runs; None for any other function."""
    match = _STAGE.fullmatch(name)
    if match is None or match[2] not in _KINDS:
        return None
    return _KINDS[match[2]], int(match[1])


def is_reserved(name: str) -> bool:
    """Returns True if rank programs have functions of this name."""
    finish = re.fullmatch(rf"{FINISH}_\d+", name) is not None
    return name == PREPARE or finish or phase_of(name) is not None


def refusal_of_name(name: str) -> str:
    """Returns the reason why a program of a set cannot have this name; "" if it can."""
    if not name or name in (".", ".."):
        return f"{name!r} names no file"
    if "/" in name or "\\" in name or (len(name) > 1 and name[1] == ":"):
        return f"{name!r} must be a plain file name: programs are in the directory of the manifest"
    if not name.isprintable() or name != name.strip():
        return f"{name!r} has characters that are not allowed in a file name"
    if len(name.encode()) > _LONGEST:
        return f"the name has {len(name.encode())} bytes, more than the {_LONGEST} of a file name"
    if not name.endswith(SUFFIXES) or name.startswith("."):
        return f"{name!r} is not the name of a program: NAME{', NAME'.join(SUFFIXES)}"
    return ""


def decode_manifest(data: bytes | str) -> Manifest:
    """Returns the manifest in JSON. Raises ToolError for anything else."""
    said, hint = "not a manifest of rank programs", AGAIN
    try:
        document = JsonValue.from_text(data)
        hint = ""
        version = document.entries().get("version")
        if version is not None and version.content == VERSION:
            return _manifest(document.fields(_FIELDS, ("digest",)))
    except ToolError as error:
        told = error.diagnostic
        raise ToolError(f"{said}: {told.message}", told.place, hint=hint) from None
    said += f" of version {VERSION}"
    if version is None or type(version.content) is not int:
        raise ToolError(said)
    hint = "write the set again, or use the stablehlo-tools that wrote it"
    raise ToolError(f"{said}: its version is {version.content}", hint=hint)


def _manifest(fields: dict[str, JsonValue]) -> Manifest:
    fields["version"].whole(VERSION, VERSION)
    value = fields["schedule"]
    try:
        table = to_table(value.content)
        broken = violations(table)
    except ToolError as error:
        value.refuse(error.diagnostic.message)
    if broken:
        value.refuse(f"{table.name!r} is not valid: {broken[0]}")
    why = refusal(table.name, sliced=table.sequence_slices > 1, offloads=table.offloads)
    if why is not None:
        value.refuse(why)
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
        digest=fields["digest"].string() if "digest" in fields else "",
    )


def refusal(name: str, *, sliced: bool, offloads: bool) -> str | None:
    """Returns the reason why programs cannot run a valid schedule; None if they can."""
    if sliced:
        return (
            f"{name} cuts the sequences of microbatches into slices, but programs read whole "
            "sequences"
        )
    if offloads:
        return f"{name} copies activations to the host, but programs keep them on their devices"
    return None


def _ranks(value: JsonValue, table: Table) -> tuple[Rank, ...]:
    items = value.items()
    if len(items) != table.ranks:
        value.refuse(f"{len(items)} programs for the {table.ranks} ranks of the schedule")
    ranks = tuple(_rank(item, table) for item in items)
    names = [rank.program.casefold() for rank in ranks]
    for number, (item, name) in enumerate(zip(items, names, strict=True)):
        if name in names[:number]:
            program = item.entries()["program"]
            program.refuse(f"rank {names.index(name)} has the program {name!r}, too")
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


def _stages(value: JsonValue, table: Table) -> tuple[ManifestStage, ...]:
    items = value.items()
    if len(items) != table.stages:
        value.refuse(f"{len(items)} stages, but the schedule has {table.stages}")
    stages: list[ManifestStage] = []
    for number, item in enumerate(items):
        known = item.fields(("stage", "what", *_COSTS))
        costs = {name: known[name].amount(_MOST) for name in _COSTS}
        known["stage"].whole(number, number)
        stages.append(ManifestStage(number, known["what"].string(), **costs))
    return tuple(stages)


def _entries(value: JsonValue, ranks: int) -> tuple[ManifestEntry, ...]:
    """Returns inputs or outputs. An argument or result of a rank is a piece of at most one."""
    taken: set[tuple[int, int]] = set()
    entries: list[ManifestEntry] = []
    for each in value.items():
        fields = each.fields(("path", "type", "pieces"))
        type_, shape = _tensor(fields["type"])
        pieces: list[ManifestPiece] = []
        for item in fields["pieces"].items():
            piece = _piece(item, ranks, shape)
            if (piece.rank, piece.number) in taken:
                item.refuse(f"number {piece.number} of rank {piece.rank} is a piece of two tensors")
            taken.add((piece.rank, piece.number))
            pieces.append(piece)
        entries.append(ManifestEntry(fields["path"].string(), type_, tuple(pieces)))
    return tuple(entries)


def _piece(value: JsonValue, ranks: int, shape: Sequence[int]) -> ManifestPiece:
    fields = value.fields(("rank", "number"), ("dim", "start", "limit"))
    rank, number = fields["rank"].whole(0, ranks - 1), fields["number"].whole()
    dim = fields.get("dim")
    start, limit = (fields[end].whole() if end in fields else 0 for end in ("start", "limit"))
    if dim is None or dim.content is None:
        return ManifestPiece(rank, number, None, start, limit)
    if not shape:
        dim.refuse("a scalar has no dimension to cut")
    along = dim.whole(0, len(shape) - 1)
    if not start < limit <= shape[along]:
        value.refuse(
            f"rows {start} to {limit} are outside dimension {along}, which has {shape[along]}"
        )
    return ManifestPiece(rank, number, along, start, limit)


def _tensor(value: JsonValue) -> tuple[str, list[int]]:
    """Returns the text of a tensor type of static shape, and that shape."""
    text = value.string()
    match = _TENSOR.fullmatch(text)
    if match is None:
        value.refuse(f"{text[:60]!r} is not a tensor type, such as tensor<4x16xf32>")
    shape = [int(size) for size in match[1].split("x") if size]
    if math.prod(shape) > _MOST_ELEMENTS:
        value.refuse(f"{text[:60]} does not fit in any memory")
    return text, shape


def _transfers(value: JsonValue, ranks: int) -> tuple[ManifestTransfer, ...]:
    channels: set[int] = set()
    transfers: list[ManifestTransfer] = []
    for item in value.items():
        fields = item.fields(("channel", "action", "tensor", "source", "target", "type"))
        source, target = (fields[end].whole(0, ranks - 1) for end in ("source", "target"))
        if source == target:
            item.refuse(f"this transfer goes from rank {source} to itself")
        channel, action = fields["channel"].whole(1), _send(fields["action"])
        tensor, (type_, _) = fields["tensor"].whole(), _tensor(fields["type"])
        if channel in channels:
            item.refuse(f"channel {channel} has two transfers")
        channels.add(channel)
        transfers.append(ManifestTransfer(channel, action, tensor, source, target, type_))
    return tuple(transfers)


def _send(value: JsonValue) -> str:
    """Returns the send of a schedule that a transfer belongs to, or `finish`."""
    text = value.string()
    if text == FINISH:
        return text
    try:
        step = step_of(text)
    except ToolError as error:
        value.refuse(error.diagnostic.message)
    if not isinstance(step, Action) or not step.kind.is_send:
        value.refuse(f"{text!r} is neither a send of a schedule, such as 0SEND_F0, nor {FINISH!r}")
    return text
