"""All that the programs of the ranks have in common: phases, messages, channels, the finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.analysis.loop_carries import ROWS
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.constants import splat_of
from stablehlo_tools.mpmd.manifest import Transfer
from stablehlo_tools.mpmd.staging.assignment import (
    Assignment,
    Messages,
    Work,
    ends_of,
    route,
    run_as,
    staged_values,
)
from stablehlo_tools.mpmd.staging.step import TrainingStep
from stablehlo_tools.mpmd.writing.finishing import Finish, Made, Sending, plan_finish
from stablehlo_tools.mpmd.writing.fixed import Fixed, Key
from stablehlo_tools.mpmd.writing.phases import Phase, Phases
from stablehlo_tools.schedules.table import Action, Kind, Table, actions_of

_AWAY = {
    Kind.SEND_FORWARD: 1,
    Kind.SEND_BACKWARD: -1,
    Kind.RECEIVE_FORWARD: -1,
    Kind.RECEIVE_BACKWARD: 1,
}
_SENDS = {Kind.RECEIVE_FORWARD: Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD: Kind.SEND_BACKWARD}


@dataclass(frozen=True)
class Channel:
    """A tensor of a message, and the channel that it goes on."""

    number: int
    value: int


class Plan:
    """A step, cut into stages, under a schedule whose table names its transfers."""

    def __init__(self, step: TrainingStep, assignment: Assignment, table: Table) -> None:
        self.step = step
        self.assignment = assignment
        self.table = table
        self.fixed = Fixed(step)
        values = staged_values(step, assignment)
        self.phases: dict[Work, Phase] = {}
        for split in (True, False):
            works = run_as(assignment, split=split)
            self.writer = Phases(step, assignment, works, ends_of(values, works), self.fixed)
            self.phases |= self.writer.of
        routes = len(table.placement.routes)
        self._messages = [route(values, table.placement, number) for number in range(routes)]
        self.transfers: list[Transfer] = []
        self._channels = self._numbered()

    def phase_of(self, action: Action) -> Phase:
        """The phase that an action runs."""
        return self.phases[Work(action.kind, action.stage)]

    def channels(self, action: Action) -> list[Channel]:
        """The tensors of a send or a receive of the schedule, in order."""
        return self._channels.get(self._send_of(action), [])

    @cached_property
    def ranks_of(self) -> Mapping[int, tuple[int, ...]]:
        """The ranks that sum up each carry, in order."""
        holders: dict[int, set[int]] = {carry: set() for carry in self.step.loop.accumulators}
        for rank, row in enumerate(self.table.rows):
            for action in actions_of(row):
                if action.kind.is_compute:
                    for carry in self.phase_of(action).accumulators:
                        holders[carry].add(rank)
        return {carry: tuple(sorted(ranks)) for carry, ranks in holders.items()}

    def starts_on(self, carry: int) -> int | None:
        """The rank whose sum of a carry starts from what the program starts it from; None where
        nothing of that is left. Raises a located ToolError for rows of several ranks that are added
        to others."""
        accumulator = self.step.loop.accumulators[carry]
        ranks = self.ranks_of[carry]
        start = self.step.loop.op.operands[carry]
        if accumulator.reducer != ROWS or len(ranks) == 1 or splat_of(start) == 0:
            return ranks[0]
        if accumulator.replaced:
            return None
        raise ToolError(
            f"expand-mpmd: ranks {', '.join(map(str, ranks))} write rows of carry {carry}, "
            f"{start.type}, of which other rows stay as they are and are not zero, so that the "
            "ranks' parts cannot be added up (P6)",
            accumulator.links[0].op.location,
        )

    @property
    def splits(self) -> bool:
        """Whether some weight gradients are apart from the input gradients."""
        kinds = {action.kind for row in self.table.rows for action in actions_of(row)}
        return Kind.WEIGHT_GRADIENT in kinds

    def phases_on(self, rank: int) -> list[Phase]:
        """The phases that a rank runs, by stage."""
        actions = actions_of(self.table.rows[rank])
        works = {Work(a.kind, a.stage) for a in actions if a.kind.is_compute}
        return [phase for work, phase in self.phases.items() if work in works]

    @cached_property
    def finish(self) -> Finish:
        """What stands behind the loop."""
        held: dict[int, set[int]] = {}
        for rank in range(self.table.ranks):
            for phase in self.phases_on(rank):
                for key in self.fixed.cone(phase.fixed, self._is_given):
                    rows = self.fixed.given(key)
                    if rows is not None:
                        held.setdefault(rows.argument, set()).add(rank)
        ranks = {argument: sorted(ranks_of) for argument, ranks_of in sorted(held.items())}
        return plan_finish(self.step, self.ranks_of, ranks)

    @cached_property
    def finish_channels(self) -> Mapping[Sending, int]:
        """The channels of what is sent behind the schedule, which it adds to the transfers."""
        channels: dict[Sending, int] = {}
        for sending in self.finish.sendings:
            type_ = self.type_of(sending.value)
            channel = len(self.transfers) + 1
            self.transfers.append(
                Transfer(channel, "finish", 0, sending.source, sending.target, str(type_))
            )
            channels[sending] = channel
        return channels

    def type_of(self, made: Made) -> ir.Type:
        """The type of a value behind the loop."""
        if made.what == "part":
            return self.step.loop.op.results[made.number].type
        return self.step.outer.values[made.number].type

    def total_of(self, carry: int) -> int:
        """The number of what the loop gives for a carry."""
        return self.step.outer.numbers[self.step.loop.op.results[carry]]

    def carry_of(self, number: int) -> int | None:
        """The carry that a value of the block is what the loop gives for."""
        return self._carry_of.get(number)

    @cached_property
    def _carry_of(self) -> Mapping[int, int]:
        return {self.total_of(carry): carry for carry in self.step.loop.accumulators}

    def is_read_later(self, number: int, round_: int, rank: int) -> bool:
        """Whether what a rank makes in a round is read in another one, sent or returned."""
        return (round_, rank) != self._only_reader.get(number, (round_, rank)) or (
            number in self._leaving
        )

    @cached_property
    def _leaving(self) -> set[int]:
        """The values behind the loop that are sent or returned."""
        sent = {s.value.number for s in self.finish.sendings if s.value.what == "value"}
        return sent | {returned.number for returned in self.finish.returned}

    @cached_property
    def _only_reader(self) -> Mapping[int, tuple[int, int]]:
        """The round and the rank that read a value behind the loop; (-1, -1) where several do."""
        readers: dict[int, tuple[int, int]] = {}
        for place, nodes in self.finish.ops.items():
            for node in nodes:
                for number in node.inputs:
                    readers[number] = place if readers.get(number, place) == place else (-1, -1)
        return readers

    def fixed_results(self, rank: int) -> list[Key]:
        """What a rank returns that hangs on arguments alone."""
        returned = [each for each in self.finish.returned if each.rank == rank]
        return [
            self.fixed.key_outside(each.number)
            for each in returned
            if each.number not in self.finish.home
        ]

    def _is_given(self, key: Key) -> bool:
        return self.fixed.given(key) is not None

    def _send_of(self, action: Action) -> Action:
        """The send that a receive takes what it gets from; a send is its own."""
        kind, stage, microbatch = action
        if kind not in _SENDS:
            return action
        return Action(_SENDS[kind], stage + _AWAY[kind], microbatch)

    def _numbered(self) -> dict[Action, list[Channel]]:
        channels: dict[Action, list[Channel]] = {}
        for rank, row in enumerate(self.table.rows):
            for action in actions_of(row):
                if action.kind.is_send:
                    channels[action] = self._of_send(action, rank)
        return channels

    def _of_send(self, send: Action, rank: int) -> list[Channel]:
        placement = self.table.placement
        following = send.stage + _AWAY[send.kind]
        messages: Messages = self._messages[send.microbatch % len(self._messages)]
        values: Sequence[int] = messages.between(send.stage, following)
        target = placement.rank_of(following, send.microbatch)
        channels: list[Channel] = []
        for tensor, number in enumerate(values):
            channel = Channel(len(self.transfers) + 1, number)
            type_ = str(self.step.flow.values[number].type)
            self.transfers.append(Transfer(channel.number, str(send), tensor, rank, target, type_))
            channels.append(channel)
        return channels
