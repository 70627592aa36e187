"""The names of functions in the program of a rank."""

from __future__ import annotations

import re

from stablehlo_tools.schedules.table import Kind

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


def function_of(kind: Kind, stage: int) -> str:
    """`stage_3_forward`: what runs a phase of a stage, for the microbatch that operand 0 says."""
    return f"stage_{stage}_{_PHASES[kind]}"


def phase_of(name: str) -> tuple[Kind, int] | None:
    """The phase and the stage that a function runs; None for any other function."""
    found = _STAGE.fullmatch(name)
    if found is None or found[2] not in _KINDS:
        return None
    return _KINDS[found[2]], int(found[1])


def is_reserved(name: str) -> bool:
    """Whether the writer of a rank gives this name to a function of its own."""
    finish = re.fullmatch(rf"{FINISH}_\d+", name) is not None
    return name == PREPARE or finish or phase_of(name) is not None
