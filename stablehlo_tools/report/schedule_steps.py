"""What every picture of a schedule shows of a step, and where the marks of a time axis stand."""

from __future__ import annotations

from stablehlo_tools.schedules.simulator import Timeline
from stablehlo_tools.schedules.table import Action, Pair, Step

NAMES = {
    "F": "forward",
    "B": "backward, both gradients",
    "I": "input gradient",
    "W": "weight gradient",
    "P": "forward and backward at once",
    ">": "send",
    "<": "receive",
}
_ROUNDING = 1e-6


def letter_of(step: Step) -> str:
    """What a step is drawn with."""
    if isinstance(step, Pair):
        return "P"
    if step.kind.is_compute:
        return step.kind.value
    return ">" if step.kind.is_send else "<"


def chunk_of(timeline: Timeline, rank: int, step: Step) -> int:
    """Which of its rank's stages a step is of, a pair by its forward."""
    stage = step.stage if isinstance(step, Action) else step.forward.stage
    held = timeline.table.placement.held[rank]
    return held.index(stage) if stage in held else 0


def microbatch_of(step: Step) -> str:
    """The number in a step, the two numbers in a pair."""
    if isinstance(step, Action):
        return str(step.microbatch)
    return f"{step.forward.microbatch}/{step.backward.microbatch}"


def axis_step(least: float) -> float:
    """The distance of the marks of an axis: 1, 2 or 5 times a power of ten, from `least` up."""
    power = 10.0 ** (len(str(int(least))) - 1) if least >= 1 else 1.0
    while power > least:
        power /= 10
    return next(
        power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - _ROUNDING)
    )
