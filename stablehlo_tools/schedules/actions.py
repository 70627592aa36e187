"""What a rank does in one step: a phase of one stage for one microbatch, or a transfer beside it.

Written as PyTorch writes them: `0F0`, `3I2`, `3W2`, `1B4`, `2SEND_F5`, `3RECV_F5`, and
`(0F7;7B3)OVERLAP_F_B` for a forward and a backward that run at once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple


class Kind(enum.Enum):
    """A phase of a stage, or one end of a transfer; the value is how it is written."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients at once
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SEND_F"  # the stage's activation, to the next stage
    RECEIVE_FORWARD = "RECV_F"  # the stage's input, from the stage before
    SEND_BACKWARD = "SEND_B"  # the gradient of the stage's input, to the stage before
    RECEIVE_BACKWARD = "RECV_B"  # the gradient of the stage's activation, from the next stage

    __hash__ = object.__hash__  # a member is one object, and Enum's own hash is slow

    @property
    def is_compute(self) -> bool:
        """Whether it occupies the rank's compute."""
        return self in COMPUTE

    @property
    def is_send(self) -> bool:
        """Whether it is the sending end of a transfer."""
        return self in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


class Action(NamedTuple):
    """One phase or one end of a transfer, of one stage for one microbatch; both count from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


class Pair(NamedTuple):
    """A forward and a full backward that share one step, each hiding the other's communication."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step = Action | Pair


def parts(step: Step) -> tuple[Action, ...]:
    """The actions of a step: itself, or the two of a pair."""
    return (step,) if isinstance(step, Action) else (step.forward, step.backward)


def actions_of(row: tuple[Step | None, ...]) -> Iterator[Action]:
    """The actions of a rank in order, pairs taken apart, idle cells left out."""
    for step in row:
        if isinstance(step, Action):
            yield step
        elif step is not None:
            yield from step


def forward(stage: int, microbatch: int) -> Action:
    """`0F0`."""
    return Action(Kind.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """`0B0`: both gradients."""
    return Action(Kind.BACKWARD, stage, microbatch)


def input_gradient(stage: int, microbatch: int) -> Action:
    """`0I0`."""
    return Action(Kind.INPUT_GRADIENT, stage, microbatch)


def weight_gradient(stage: int, microbatch: int) -> Action:
    """`0W0`."""
    return Action(Kind.WEIGHT_GRADIENT, stage, microbatch)
