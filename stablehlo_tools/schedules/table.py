"""Schedules as data: the actions of a rank, the placement of the stages, the table of all ranks.

An action is a phase of one stage for one microbatch, one end of a transfer, or one end of a copy to
the host and back. Actions are written as in PyTorch: `0F0`, `3I2`, `3W2`, `1B4`, `2SEND_F5`,
`3RECV_F5`, and `(0F7;7B3)OVERLAP_F_B` for a forward and a backward that overlap; copies are
`0OFFLOAD3` and `0RELOAD3`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple


class ActionKind(enum.Enum):
    """A phase of a stage, one end of a transfer or of a copy; the value is its spelling."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients in one phase
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SEND_F"  # the stage's activation, to the next stage
    RECEIVE_FORWARD = "RECV_F"  # the stage's input, from the previous stage
    SEND_BACKWARD = "SEND_B"  # the gradient of the stage's input, to the previous stage
    RECEIVE_BACKWARD = "RECV_B"  # the gradient of the stage's activation, from the next stage
    OFFLOAD = "OFFLOAD"  # waits until the activation, copied since its forward, is on the host
    RELOAD = "RELOAD"  # allocates it on the device again and starts the copy back

    __hash__ = object.__hash__  # a member is one object, and Enum's own hash is slow

    @property
    def is_compute(self) -> bool:
        """True if it occupies the rank's compute."""
        return self in COMPUTE

    @property
    def is_copy(self) -> bool:
        """True for one end of a copy between device and host."""
        return self in (ActionKind.OFFLOAD, ActionKind.RELOAD)

    @property
    def is_send(self) -> bool:
        """True for the sending end of a transfer."""
        return self in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)


COMPUTE = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT,
)


class Action(NamedTuple):
    """One phase or one end of a transfer, of one stage for one microbatch; both count from 0."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


class ActionPair(NamedTuple):
    """A forward and a full backward that share one step, each hiding the other's communication."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step = Action | ActionPair


def parts(step: Step) -> tuple[Action, ...]:
    """Returns the actions of a step: itself, or the two of a pair."""
    return (step,) if isinstance(step, Action) else (step.forward, step.backward)


def actions_of(row: tuple[Step | None, ...]) -> Iterator[Action]:
    """Yields the actions of a rank in order, with pairs split and idle cells left out."""
    for step in row:
        if isinstance(step, Action):
            yield step
        elif step is not None:
            yield from step


def forward(stage: int, microbatch: int) -> Action:
    """Returns the forward `0F0`."""
    return Action(ActionKind.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """Returns the full backward `0B0`: both gradients."""
    return Action(ActionKind.BACKWARD, stage, microbatch)


def input_gradient(stage: int, microbatch: int) -> Action:
    """Returns the input gradient `0I0`."""
    return Action(ActionKind.INPUT_GRADIENT, stage, microbatch)


def weight_gradient(stage: int, microbatch: int) -> Action:
    """Returns the weight gradient `0W0`."""
    return Action(ActionKind.WEIGHT_GRADIENT, stage, microbatch)


@dataclass(frozen=True)
class Placement:
    """The rank of every stage, for the microbatches of each route.

    Microbatch i follows `routes[i % len(routes)]`, which names a rank for each stage in order.
    There are two routes if two pipelines run through the same ranks in opposite directions, else
    one.
    """

    ranks: int
    routes: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages of the model, each with its own parameters."""
        return len(self.routes[0])

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that computes a stage for a microbatch."""
        return self.routes[microbatch % len(self.routes)][stage]

    def crosses(self, stage: int, microbatch: int) -> bool:
        """Returns True if `stage` and the next stage are on different ranks."""
        route = self.routes[microbatch % len(self.routes)]
        return route[stage] != route[stage + 1]

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The stages whose parameters each rank holds, in order."""
        stages: list[set[int]] = [set() for _ in range(self.ranks)]
        for route in self.routes:
            for stage, rank in enumerate(route):
                stages[rank].add(stage)
        return tuple(tuple(sorted(own)) for own in stages)

    @property
    def chunks(self) -> int:
        """The most stages that one rank holds."""
        return max(map(len, self.held))

    @cached_property
    def form(self) -> str:
        """`loop`, `v`, `bidirectional`, or `custom`."""
        chunks, rest = divmod(self.stages, self.ranks)
        if not rest and self == loop(self.ranks, chunks):
            return "loop"
        if not rest and self == v_shape(self.ranks, chunks):
            return "v"
        return "bidirectional" if self == bidirectional(self.ranks) else "custom"


def loop(ranks: int, chunks: int = 1) -> Placement:
    """Returns the placement of stage s on rank s mod p: the first rank follows the last."""
    return Placement(ranks, (tuple(stage % ranks for stage in range(ranks * chunks)),))


def v_shape(ranks: int, chunks: int = 2) -> Placement:
    """Returns the placement down the ranks and up again, `chunks` times in all.

    With two chunks, rank 0 holds the first and the last stage.
    """
    down = tuple(range(ranks))
    turns = (down if chunk % 2 == 0 else down[::-1] for chunk in range(chunks))
    return Placement(ranks, (tuple(chain.from_iterable(turns)),))


def bidirectional(ranks: int) -> Placement:
    """Returns the placement with even microbatches down the ranks and odd ones up.

    Each rank holds the parameters of two stages.
    """
    return Placement(ranks, (tuple(range(ranks)), tuple(reversed(range(ranks)))))


Row = tuple[Step | None, ...]


@dataclass(frozen=True)
class Table:
    """One row of steps for each rank; None is an idle cell, which only shifts later steps.

    The order of a row is the schedule; times come from the simulator. With `training` every stage
    runs forward and backward for every microbatch, else forward only. Rows hold either all sends
    and receives between ranks, or none; then transfers are implied.

    If sequences are sliced, the rows number slices and `microbatches` counts slices. Each
    `sequence_slices` consecutive ones form a microbatch, the start of its sequence first.
    """

    name: str
    placement: Placement
    microbatches: int
    rows: tuple[Row, ...]
    training: bool = True
    sequence_slices: int = 1

    @property
    def sequences(self) -> int:
        """The number of whole microbatches, of `sequence_slices` slices each."""
        return self.microbatches // self.sequence_slices

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks, p."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """The number of stages of the model."""
        return self.placement.stages

    @property
    def splits(self) -> bool:
        """True if some weight gradients run separately from the input gradients."""
        kinds = {action.kind for row in self.rows for action in actions_of(row)}
        return ActionKind.WEIGHT_GRADIENT in kinds

    @cached_property
    def communicates(self) -> bool:
        """True if the rows hold the sends and receives."""
        return any(
            isinstance(step, Action) and not step.kind.is_compute and not step.kind.is_copy
            for row in self.rows
            for step in row
        )

    @cached_property
    def offloads(self) -> bool:
        """True if the rows hold copies of activations to the host and back."""
        return any(
            isinstance(step, Action) and step.kind.is_copy for row in self.rows for step in row
        )


def table_of(
    name: str,
    placement: Placement,
    microbatches: int,
    rows: Iterable[Sequence[Step | None]],
    training: bool = True,
    sequence_slices: int = 1,
) -> Table:
    """Returns a table; the rows may be any sequences."""
    held = tuple(map(tuple, rows))
    return Table(name, placement, microbatches, held, training, sequence_slices)


def drop_idle_cells(table: Table) -> Table:
    """The table without its idle cells."""
    return with_rows(table, ([step for step in row if step is not None] for row in table.rows))


def with_rows(table: Table, rows: Iterable[Sequence[Step | None]]) -> Table:
    """The table with other rows."""
    return replace(table, rows=tuple(map(tuple, rows)))
