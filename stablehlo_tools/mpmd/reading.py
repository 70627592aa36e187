"""Reads the calls and messages of a rank's program from its IR, with their operands.

A value is identified by its origin, which barriers do not change: an argument, a constant, a result
of a call, or a message. This module checks nothing; a value that it does not understand has an
unknown origin.

The schedule implies the operands of its actions and messages. For `prepare`, the calls of the
finish, their messages and the results, only the writer of the program knows the operands. So the
manifest contains them, as `wiring` reads them from the program:

    {"@finish_0": ["result 1 of 0B5", "argument 2"], "channel 9": ["result 0 of @finish_0"],
     "return": ["result 1 of @finish_1"]}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import BARRIER, CALL, CONSTANT, MANUAL_COMPUTATION, RECV, SEND
from stablehlo_tools.ir.values import producer, splat_of
from stablehlo_tools.ir.views import Function, ManualComputation
from stablehlo_tools.ir.walk import callee_name, main_function
from stablehlo_tools.mpmd.manifest import FINISH, PREPARE, phase_of
from stablehlo_tools.mpmd.origins import EventOrigins, Origin, Source, origins_in
from stablehlo_tools.schedules.table import Action

RETURN_KEY = "return"


@dataclass(eq=False, slots=True)  # not frozen, which would triple the time to create one
class _RankEvent:
    """A call or message in `main`; `index` counts them in program order."""

    index: int
    op: ir.Operation
    reading: RankReading

    @property
    def operands(self) -> tuple[Origin, ...]:
        """The operands of the call, or the sent value."""
        return self.reading.origins.operands[self.index]

    @property
    def results(self) -> tuple[Origin, ...]:
        """The results of the call, or the received value."""
        return self.reading.origins.results[self.index]


@dataclass(eq=False, slots=True)
class RankCall(_RankEvent):
    """A call in `main`. `action` is its action in the schedule, None for another function.

    If operand 0 of an action is not a constant, its microbatch is negative.
    """

    function: str
    action: Action | None

    @property
    def round(self) -> int | None:
        """The round of the finish that it is; None for any other call."""
        name, _, number = self.function.rpartition("_")
        return int(number) if name == FINISH and number.isdecimal() else None

    @property
    def is_prepare(self) -> bool:
        """True if it is the call of `prepare`, once before the schedule."""
        return self.function == PREPARE


@dataclass(eq=False, slots=True)
class RankMessage(_RankEvent):
    """A send or a receive of one tensor in `main`.

    Between devices `is_host_transfer` is False and `channel_type` is 1.
    """

    is_send: bool
    channel: int
    pairs: tuple[tuple[int, ...], ...]
    type: str
    is_host_transfer: bool
    channel_type: int

    @property
    def operand(self) -> Origin | None:
        """The sent value; None for a receive."""
        return self.operands[0] if self.is_send else None


type Event = RankCall | RankMessage


@dataclass(frozen=True, eq=False)
class RankReading:
    """The calls and messages of a rank in program order, read on first use."""

    rank: int
    name: str
    module: ir.Module
    main: ir.Operation

    @cached_property
    def block(self) -> ir.Block:
        """The block of `main`, or of the manual computation in it."""
        return body_of(self.main)

    @cached_property
    def ops(self) -> tuple[ir.Operation, ...]:
        """The ops in the block."""
        return tuple([view.operation for view in self.block.operations])

    @cached_property
    def origins(self) -> EventOrigins:
        """The origins of the values in the block."""
        return origins_in(self.block, self.ops)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The calls and the messages."""
        return tuple(_events_of(self))

    @property
    def returned(self) -> tuple[Origin, ...]:
        """The results of `main`."""
        return self.origins.returned

    @cached_property
    def calls(self) -> tuple[RankCall, ...]:
        """The calls of the schedule."""
        return tuple(e for e in self.events if isinstance(e, RankCall) and e.action is not None)

    @cached_property
    def messages(self) -> tuple[RankMessage, ...]:
        """The sends and receives."""
        return tuple(event for event in self.events if isinstance(event, RankMessage))

    def describe_origin(self, origin: Origin) -> str:
        """Returns a name such as `result 2 of 0F3`, `what channel 5 brings`, or `argument 3`."""
        if origin.source is Source.CALL:
            return f"result {origin.number} of {self.describe_event(origin.event)}"
        if origin.source is Source.MESSAGE:
            return f"what {self.describe_event(origin.event)} brings"
        if origin.source is Source.CONSTANT:
            return f"the constant {list(self.origins.constants)[origin.number]}"
        if origin.source is Source.ARGUMENT:
            return f"argument {origin.number}"
        return "a value of unknown origin"

    def describe_event(self, event: int) -> str:
        """Returns a name such as `0F3`, `finish_0`, or `the send on channel 5`."""
        known = self.events[event]
        if isinstance(known, RankCall):
            return f"@{known.function}" if known.action is None else str(known.action)
        return f"the {'send' if known.is_send else 'receive'} on channel {known.channel}"


def read_rank(module: ir.Module, rank: int, name: str) -> RankReading:
    """Returns the reading of a rank's program. Raises a located ToolError if it has no `main`."""
    main = main_function(module)
    if main is None or not len(main.regions) or not len(main.regions[0].blocks):
        raise ToolError(f"{name} has no @main: not the program of a rank")
    return RankReading(rank, name, module, main)


def microbatch_of(call: RankCall) -> int:
    """Returns the microbatch of a call of the schedule."""
    assert call.action is not None
    return call.action.microbatch


def body_of(main: ir.Operation) -> ir.Block:
    """Returns the block of `main`, or that of a manual computation in it."""
    block = Function(main).body
    for view in block.operations:
        if view.operation.name == MANUAL_COMPUTATION:
            return ManualComputation(view.operation).body
    return block


def _events_of(reading: RankReading) -> list[Event]:
    """Returns the events. Of operands it reads only the numbers of microbatches."""
    events: list[Event] = []
    numbers: dict[ir.Value, int] = {}  # values of constants
    pairs: dict[ir.Attribute | None, tuple[tuple[int, ...], ...]] = {}
    types: dict[ir.Type, str] = {}
    for op in reading.ops:
        name = op.name
        if name == CONSTANT:
            splat = splat_of(op.results[0])
            numbers[op.results[0]] = splat if isinstance(splat, int) else -1
        elif name == CALL:
            function = callee_name(op)
            phase = phase_of(function)
            action = None if phase is None else Action(*phase, _microbatch(op, numbers))
            events.append(RankCall(len(events), op, reading, function, action))
        elif name in (SEND, RECV):
            is_send, attributes = name == SEND, op.attributes
            type_ = (op.operands[0] if is_send else op.results[0]).type
            if type_ not in types:
                types[type_] = str(type_)
            listed = attributes.get("source_target_pairs")
            if listed not in pairs:
                is_known = isinstance(listed, ir.DenseIntElementsAttr)
                devices = [int(device) for device in listed] if is_known else []
                pairs[listed] = tuple(zip(devices[::2], devices[1::2], strict=False))
            channel = bindings.ChannelHandle(attributes["channel_handle"])
            host = attributes.get("is_host_transfer")
            message = RankMessage(
                len(events),
                op,
                reading,
                is_send,
                channel.handle,
                pairs[listed],
                types[type_],
                host is not None and ir.BoolAttr(host).value,
                channel.channel_type,
            )
            events.append(message)
    return events


def _microbatch(call: ir.Operation, numbers: Mapping[ir.Value, int]) -> int:
    """Returns the constant operand 0 of a call, read through barriers; -1 if there is none."""
    value = call.operands[0] if len(call.operands) else None
    while value is not None and value not in numbers:
        op = producer(value)
        if op is None or op.name != BARRIER:
            return -1
        value = op.operands[ir.OpResult(value).result_number]
    return -1 if value is None else numbers[value]


def wiring(reading: RankReading, scheduled: Collection[int]) -> dict[str, tuple[str, ...]]:
    """Returns the origins of operands that the schedule does not imply.

    These are the operands of calls that are not actions, the values sent on channels that are not
    `scheduled`, and the results of `main`.
    """
    sources: dict[str, tuple[str, ...]] = {}
    for event in reading.events:
        if isinstance(event, RankCall):
            if event.action is None:
                sources[f"@{event.function}"] = tuple(map(reading.describe_origin, event.operands))
        elif event.is_send and event.channel not in scheduled:
            sources[f"channel {event.channel}"] = tuple(
                map(reading.describe_origin, event.operands)
            )
    sources[RETURN_KEY] = tuple(map(reading.describe_origin, reading.returned))
    return sources
