"""One cell of a table as it is written in every form: `0F0`, `2SEND_F5`, `(0F7;7B3)OVERLAP_F_B`."""

from __future__ import annotations

import re

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.actions import Action, Kind, Pair, Step

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
    found = _ACTION.fullmatch(text)
    name = found[2] if found else ""
    if name in _OF_THE_RUNTIME:
        raise ToolError(
            f"{text!r}: {name} {_OF_THE_RUNTIME[name]}, which a schedule of microbatches does not "
            "hold: leave out UNSHARD, RESHARD and REDUCE_GRAD"
        )
    if found is None or not found[3] or name not in _KINDS:
        raise ToolError(f"{text!r} is no action: an action is {_KNOWN}, as in 0F0 or 2SEND_F5")
    return Action(_KINDS[name], int(found[1]), int(found[3]))
