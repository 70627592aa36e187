"""Reads what a rank's program does from its IR alone: its calls and messages, and what they take.

A value is told by where it comes from, barriers looked through: an argument, a constant, a result
of a call, or a message. Nothing is judged here; what is not understood has an unknown origin.

The schedule says what its actions take and send. What `prepare`, the calls of the finish and their
messages take, and what a rank returns, only the one who wrote it knows; so the manifest says it, as
`wiring` reads it from the program:

    {"@finish_0": ["result 1 of 0B5", "argument 2"], "channel 9": ["result 0 of @finish_0"],
     "return": ["result 1 of @finish_1"]}
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import (
    BARRIER,
    CALL,
    CONSTANT,
    MANUAL_COMPUTATION,
    RECV,
    SEND,
)
from stablehlo_tools.ir.values import splat_of, value_text
from stablehlo_tools.ir.walk import callee_name, main_function, terminator
from stablehlo_tools.mpmd.manifest import FINISH, PREPARE, phase_of
from stablehlo_tools.schedules.table import Action

RETURN = -1
RETURN_KEY = "return"


class Source(enum.Enum):
    """What makes a value."""

    ARGUMENT = "argument"
    CONSTANT = "constant"
    CALL = "call"
    MESSAGE = "message"
    UNKNOWN = "unknown"

    __hash__ = object.__hash__


class Origin(NamedTuple):
    """Where a value comes from: `number` counts arguments, constants, or results of `event`."""

    source: Source
    number: int = 0
    event: int = -1


_UNKNOWN = Origin(Source.UNKNOWN)


class Use(NamedTuple):
    """An operand of an event that a value becomes; the event RETURN is what `main` returns."""

    event: int
    operand: int


@dataclass(frozen=True, eq=False)
class Call:
    """A call in `main`. `action` is what of the schedule it is, None for another function.

    `operands` and `results` are those of the function. The microbatch of an action that does not
    take a constant as its operand 0 is below 0.
    """

    index: int
    op: ir.Operation
    function: str
    operands: tuple[Origin, ...]
    results: tuple[Origin, ...]
    action: Action | None

    @property
    def round(self) -> int | None:
        """Which round behind the schedule it is; None for any other call."""
        name, _, number = self.function.rpartition("_")
        return int(number) if name == FINISH and number.isdecimal() else None

    @property
    def is_prepare(self) -> bool:
        """Whether it runs once before the schedule."""
        return self.function == PREPARE


@dataclass(frozen=True, eq=False)
class Message:
    """A send or a receive in `main`: one tensor. `operand` is what is sent. Between devices it is
    where it `is_host_transfer` not, and its channel is of `channel_type` 1."""

    index: int
    op: ir.Operation
    is_send: bool
    channel: int
    pairs: tuple[tuple[int, ...], ...]
    type: str
    operand: Origin | None
    is_host_transfer: bool
    channel_type: int

    @property
    def operands(self) -> tuple[Origin, ...]:
        """What is sent."""
        return () if self.operand is None else (self.operand,)

    @property
    def results(self) -> tuple[Origin, ...]:
        """What is received."""
        return () if self.is_send else (Origin(Source.MESSAGE, 0, self.index),)


type Event = Call | Message


@dataclass(frozen=True, eq=False)
class Reading:
    """What a rank does, in the order of its text.

    `block` is that of `main`, or of the manual computation in it, and `ops` are those in it;
    `constants` are the texts of the constants that origins count.
    """

    rank: int
    name: str
    module: ir.Module
    main: ir.Operation
    block: ir.Block
    ops: tuple[ir.Operation, ...]
    events: tuple[Event, ...]
    returned: tuple[Origin, ...]
    constants: tuple[str, ...]
    origins: dict[ir.Value, Origin]

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """The calls of the schedule."""
        return tuple(e for e in self.events if isinstance(e, Call) and e.action is not None)

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The sends and receives."""
        return tuple(event for event in self.events if isinstance(event, Message))

    @cached_property
    def uses(self) -> dict[Origin, list[Use]]:
        """Who takes a value."""
        uses: defaultdict[Origin, list[Use]] = defaultdict(list)
        for event in self.events:
            for number, origin in enumerate(event.operands):
                uses[origin].append(Use(event.index, number))
        for number, origin in enumerate(self.returned):
            uses[origin].append(Use(RETURN, number))
        return dict(uses)

    def described(self, origin: Origin) -> str:
        """`result 2 of 0F3`, `what channel 5 brings`, `argument 3`."""
        if origin.source is Source.CALL:
            return f"result {origin.number} of {self.titled(origin.event)}"
        if origin.source is Source.MESSAGE:
            return f"what {self.titled(origin.event)} brings"
        if origin.source is Source.CONSTANT:
            return f"the constant {self.constants[origin.number]}"
        if origin.source is Source.ARGUMENT:
            return f"argument {origin.number}"
        return "a value of unknown origin"

    def titled(self, event: int) -> str:
        """`0F3`, `finish_0`, `the send on channel 5`."""
        known = self.events[event]
        if isinstance(known, Call):
            return f"@{known.function}" if known.action is None else str(known.action)
        return f"the {'send' if known.is_send else 'receive'} on channel {known.channel}"


def read_rank(module: ir.Module, rank: int, name: str) -> Reading:
    """What the program of a rank does. Raises a located ToolError for a `main` of another form."""
    main = main_function(module)
    if main is None or not len(main.regions) or not len(main.regions[0].blocks):
        raise ToolError(f"{name} has no @main: it is not the program of a rank")
    return _Reader(rank, name, module, main).reading()


def body_of(main: ir.Operation) -> ir.Block:
    """The block that holds what `main` does: that of a manual computation, if there is one."""
    block: ir.Block = main.regions[0].blocks[0]
    for view in block.operations:
        if view.operation.name == MANUAL_COMPUTATION:
            return view.operation.regions[0].blocks[0]
    return block


@dataclass
class _Reader:
    rank: int
    name: str
    module: ir.Module
    main: ir.Operation
    events: list[Event] = field(default_factory=list[Event])
    origins: dict[ir.Value, Origin] = field(default_factory=dict[ir.Value, Origin])
    constants: dict[str, int] = field(default_factory=dict[str, int])
    numbers: list[int] = field(default_factory=list[int])  # of the constants; -1: no whole number
    pairs: dict[ir.Attribute, tuple[tuple[int, ...], ...]] = field(
        default_factory=dict[ir.Attribute, tuple[tuple[int, ...], ...]]
    )
    types: dict[ir.Type, str] = field(default_factory=dict[ir.Type, str])

    def reading(self) -> Reading:
        block = body_of(self.main)
        for number, argument in enumerate(block.arguments):
            self.origins[argument] = Origin(Source.ARGUMENT, number)
        ops = tuple([view.operation for view in block.operations])
        for op in ops:
            self._read(op)
        return Reading(
            self.rank,
            self.name,
            self.module,
            self.main,
            block,
            ops,
            tuple(self.events),
            tuple(map(self._origin, terminator(block).operands)),
            tuple(self.constants),
            self.origins,
        )

    def _origin(self, value: ir.Value) -> Origin:
        return self.origins.get(value, _UNKNOWN)

    def _read(self, op: ir.Operation) -> None:
        name, origins = op.name, self.origins
        if name == BARRIER:
            for result, operand in zip(op.results, op.operands, strict=True):
                origins[result] = origins.get(operand, _UNKNOWN)
        elif name == CONSTANT:
            self._constant(op)
        elif name == CALL:
            self._call(op)
        elif name in (SEND, RECV):
            self._message(op)

    def _constant(self, op: ir.Operation) -> None:
        result = op.results[0]
        number = self.constants.setdefault(value_text(op), len(self.constants))
        if number == len(self.numbers):
            splat = splat_of(result)
            self.numbers.append(splat if isinstance(splat, int) else -1)
        self.origins[result] = Origin(Source.CONSTANT, number)

    def _call(self, op: ir.Operation) -> None:
        function, index = callee_name(op), len(self.events)
        phase = phase_of(function)
        operands = tuple([self.origins.get(operand, _UNKNOWN) for operand in op.operands])
        action = None if phase is None else Action(*phase, self._number(operands))
        results = [Origin(Source.CALL, number, index) for number in range(len(op.results))]
        self.origins.update(zip(op.results, results, strict=True))
        self.events.append(Call(index, op, function, operands, tuple(results), action))

    def _number(self, operands: Sequence[Origin]) -> int:
        """The constant that a call takes as operand 0; -1 where it is none."""
        is_constant = bool(operands) and operands[0].source is Source.CONSTANT
        return self.numbers[operands[0].number] if is_constant else -1

    def _message(self, op: ir.Operation) -> None:
        index, is_send, attributes = len(self.events), op.name == SEND, op.attributes
        carried = op.operands[0] if is_send else op.results[0]
        channel = bindings.ChannelHandle(attributes["channel_handle"])
        host = attributes.get("is_host_transfer")
        message = Message(
            index,
            op,
            is_send,
            channel.handle,
            self._pairs(attributes.get("source_target_pairs")),
            self._text(carried.type),
            self._origin(carried) if is_send else None,
            host is not None and ir.BoolAttr(host).value,
            channel.channel_type,
        )
        self.events.append(message)
        if not is_send:
            self.origins[carried] = message.results[0]

    def _pairs(self, pairs: ir.Attribute | None) -> tuple[tuple[int, ...], ...]:
        if not isinstance(pairs, ir.DenseIntElementsAttr):
            return ()
        if pairs not in self.pairs:
            numbers = [int(number) for number in pairs]
            self.pairs[pairs] = tuple(zip(numbers[::2], numbers[1::2], strict=False))
        return self.pairs[pairs]

    def _text(self, type_: ir.Type) -> str:
        if type_ not in self.types:
            self.types[type_] = str(type_)
        return self.types[type_]


def wiring(reading: Reading, scheduled: Collection[int]) -> dict[str, tuple[str, ...]]:
    """Where the operands come from, of the calls that are no actions, of the sends on channels that
    are not `scheduled`, and of what `main` returns."""
    sources: dict[str, tuple[str, ...]] = {}
    for event in reading.events:
        if isinstance(event, Call):
            if event.action is None:
                sources[f"@{event.function}"] = tuple(map(reading.described, event.operands))
        elif event.is_send and event.channel not in scheduled:
            sources[f"channel {event.channel}"] = tuple(map(reading.described, event.operands))
    sources[RETURN_KEY] = tuple(map(reading.described, reading.returned))
    return sources
