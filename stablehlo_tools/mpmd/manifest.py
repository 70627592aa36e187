"""What belongs to a set of rank programs, `manifest.json`, and how functions of a rank are called.

{"version": 1, "source": "step.jax_export", "devices": 1, "form": "pairs",
 "schedule": {"name": "1f1b", …},               // a table, as `schedule --format json` writes it
 "ranks": [{"program": "rank_0.mlir", "stages": [0], "wiring": {"@finish_0": […], …}}, …],
 "stages": [{"stage": 0, "what": "…", "forward": 1e-3, …}, …],
 "inputs": [{"path": "[0]['embed']", "type": "tensor<64x16xf32>",
             "pieces": [{"rank": 0, "number": 0}]}, …],
 "outputs": [{"path": "[1]['w']", "type": "tensor<8x16x16xf32>",
              "pieces": [{"rank": 0, "number": 1, "dim": 0, "start": 0, "limit": 4}, …]}, …],
 "transfers": [{"channel": 1, "action": "0SEND_F0", "tensor": 0, "source": 0, "target": 1,
                "type": "tensor<4x16xf32>"}, …]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stablehlo_tools.schedules.forms import to_json
from stablehlo_tools.schedules.setting import Costs, costs
from stablehlo_tools.schedules.table import Kind, Table

NAME = "manifest.json"
VERSION = 1
FORMS = ("pairs", "both-ends", "permutes")
PREPARE = "prepare"  # once, before the first action
FINISH = "finish"  # once for each round, behind the last action: finish_0, finish_1, …
_PHASES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input_gradient",
    Kind.WEIGHT_GRADIENT: "weight_gradient",
}
_KINDS = {name: kind for kind, name in _PHASES.items()}
_STAGE = re.compile(r"stage_(\d+)_(\w+)")


@dataclass(frozen=True)
class Piece:
    """What one rank has of an input or an output: argument or result `number` of its `main`.

    Rows `start` to `limit` of dimension `dim`; all of it where `dim` is None. An input may be on
    several ranks; the pieces of an output are disjoint, and together all of it.
    """

    rank: int
    number: int
    dim: int | None = None
    start: int = 0
    limit: int = 0


@dataclass(frozen=True)
class Entry:
    """An input or an output of the original program, in its order, and where it lies.

    An input that nothing reads has no pieces.
    """

    path: str
    type: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Transfer:
    """A tensor that goes from a rank to another one, on a channel of its own.

    `action` is the send of the schedule that it belongs to, `0SEND_F3`; a send may have several
    tensors, of which it is number `tensor`. Behind the schedule: `finish`.
    """

    channel: int
    action: str
    tensor: int
    source: int
    target: int
    type: str

    @property
    def is_scheduled(self) -> bool:
        """Whether it belongs to an action of the schedule."""
        return self.action != FINISH


@dataclass(frozen=True)
class Stage:
    """A stage: what of the program it is, in words, and what it costs for one microbatch.

    Times in seconds. `activation`: bytes held from the forward to the (input) gradient, `kept`:
    from there to the weight gradient, 0 where that is not split off. `weights`: bytes of its
    parameters and of the sums of their gradients. `message`: bytes that it sends forward.
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


@dataclass(frozen=True)
class Rank:
    """The program of a rank: a file beside the manifest. `wiring` says what goes where outside of
    the schedule (see `wiring`); nothing where that is not known."""

    program: str
    stages: tuple[int, ...]
    wiring: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])


@dataclass(frozen=True)
class Manifest:
    """All that is known of a set of rank programs.

    `devices` is how many each rank has: rank r runs on devices r * devices and following. `form`
    says how transfers are written. `hop` is the time of a transfer between ranks, in seconds.
    """

    source: str
    devices: int
    form: str
    table: Table
    ranks: tuple[Rank, ...]
    stages: tuple[Stage, ...]
    hardware: str
    hop: float
    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    transfers: tuple[Transfer, ...]

    @property
    def costs(self) -> Costs:
        """What the simulator takes."""
        return costs_of_stages(self.stages, self.hop)

    def of_channel(self) -> Mapping[int, Transfer]:
        """The transfers by their channels."""
        return {transfer.channel: transfer for transfer in self.transfers}


def costs_of_stages(stages: Sequence[Stage], hop: float) -> Costs:
    """What the simulator takes; where weight gradients are apart, what is kept for them may be more
    than what was held before, and counts from the forward on."""
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


def encode(manifest: Manifest) -> str:
    """The manifest as JSON, a line for each entry of a list."""
    fields: dict[str, str] = {
        "version": str(VERSION),
        **{
            name: json.dumps(getattr(manifest, name))
            for name in ("source", "devices", "form", "hardware", "hop")
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


def function_of(kind: Kind, stage: int) -> str:
    """`stage_3_forward`: what runs a phase of a stage, for the microbatch that operand 0 says."""
    return f"stage_{stage}_{_PHASES[kind]}"


def phase_of(name: str) -> tuple[Kind, int] | None:
    """The phase and the stage that a function runs; None for any other function."""
    match = _STAGE.fullmatch(name)
    if match is None or match[2] not in _KINDS:
        return None
    return _KINDS[match[2]], int(match[1])


def is_reserved(name: str) -> bool:
    """Whether the writer of a rank gives this name to a function of its own."""
    finish = re.fullmatch(rf"{FINISH}_\d+", name) is not None
    return name == PREPARE or finish or phase_of(name) is not None
