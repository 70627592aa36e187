"""Finds the origins of the values in `main` of a rank, through barriers, and their uses.

This is most of the work of reading a rank. So it is done lazily: of several processes, only the one
that judges a rank needs it.

Most events have equal forms: each backward of a stage reads the same results of its forward as the
same operands. Events that agree share one object for the results that they read of another event.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BARRIER, CALL, CONSTANT, RECV, SEND
from stablehlo_tools.ir.values import value_text
from stablehlo_tools.ir.walk import terminator


class Source(enum.Enum):
    """The op that yields a value."""

    ARGUMENT = "argument"
    CONSTANT = "constant"
    CALL = "call"
    MESSAGE = "message"
    UNKNOWN = "unknown"

    __hash__ = object.__hash__


class Origin(NamedTuple):
    """The origin of a value: `number` counts arguments, constants, or results of `event`."""

    source: Source
    number: int = 0
    event: int = -1


_UNKNOWN = Origin(Source.UNKNOWN)
RETURN = -1


class Use(NamedTuple):
    """The operand of an event that a value is. The event RETURN is the return of `main`."""

    event: int
    operand: int


@dataclass(frozen=True, eq=False)
class Taken:
    """The results that one event reads of another, each with its operand positions.

    Events that read the same share one object, so it is compared by identity.
    """

    operands: dict[int, list[int]]


class Edge(NamedTuple):
    """An event, or RETURN, at the other end of a dependence, and the results that are read."""

    event: int
    taken: Taken


class Bundle(NamedTuple):
    """Results of an event with the same readers, which are in order, with RETURN last."""

    numbers: tuple[int, ...]
    takers: tuple[int, ...]


@dataclass
class EventOrigins:
    """The origins of the operands of a block's calls and messages, by event, and of its results.

    A message has the sent value as operand, or the received one as result. `constants` numbers the
    texts of the constants.
    """

    operands: list[tuple[Origin, ...]] = field(default_factory=list[tuple[Origin, ...]])
    results: list[tuple[Origin, ...]] = field(default_factory=list[tuple[Origin, ...]])
    constants: dict[str, int] = field(default_factory=dict[str, int])
    returned: tuple[Origin, ...] = ()

    def uses(self, made: Origin) -> list[Use]:
        """Returns the uses of a result of an event."""
        assert made.event >= 0, "readers of arguments and constants are not recorded here"
        return [
            Use(event, operand)
            for event, taken in self.takers[made.event]
            for operand in taken.operands.get(made.number, ())
        ]

    @cached_property
    def makers(self) -> Sequence[Sequence[Edge]]:
        """The events whose results each event reads. The last entry is for the return of `main`."""
        known: dict[object, list[Taken]] = {}
        makers: list[list[Edge]] = []
        for operands in chain(self.operands, [self.returned]):
            events = [origin.event for origin in operands]
            # Values without an event count as number 0, because microbatch numbers differ by call.
            numbers = [origin.number if origin.event >= 0 else 0 for origin in operands]
            distinct = list(dict.fromkeys(events))
            places = [distinct.index(event) for event in events]
            shape = (*numbers, *places)
            if shape not in known:
                known[shape] = [Taken({}) for _ in distinct]
                for operand, (number, place) in enumerate(zip(numbers, places, strict=True)):
                    known[shape][place].operands.setdefault(number, []).append(operand)
            edges = zip(distinct, known[shape], strict=True)
            makers.append([Edge(event, taken) for event, taken in edges if event >= 0])
        return makers

    @cached_property
    def takers(self) -> Sequence[Sequence[Edge]]:
        """The events that read results of each event."""
        takers: list[list[Edge]] = [[] for _ in self.operands]
        for event, makers in zip([*range(len(takers)), RETURN], self.makers, strict=True):
            for maker, taken in makers:
                takers[maker].append(Edge(event, taken))
        return takers

    @cached_property
    def bundles(self) -> Sequence[Sequence[Bundle]]:
        """The results of each event, in bundles."""
        known: dict[object, list[tuple[tuple[int, ...], list[int]]]] = {}
        bundles: list[list[Bundle]] = []
        for results, takers in zip(self.results, self.takers, strict=True):
            shape = (len(results), *[taker.taken for taker in takers])
            if shape not in known:
                together: dict[tuple[int, ...], list[int]] = {}  # results, by their readers
                for number in range(len(results)):
                    where = [at for at, each in enumerate(takers) if number in each.taken.operands]
                    together.setdefault(tuple(where), []).append(number)
                known[shape] = [(tuple(numbers), list(at)) for at, numbers in together.items()]
            events = [taker.event for taker in takers]
            bundles.append(
                [
                    Bundle(numbers, tuple([events[place] for place in places]))
                    for numbers, places in known[shape]
                ]
            )
        return bundles


def origins_in(block: ir.Block, ops: Sequence[ir.Operation]) -> EventOrigins:
    """Returns the origins in a block of these ops."""
    read = EventOrigins()
    origins: dict[ir.Value, Origin] = {}
    for number, argument in enumerate(block.arguments):
        origins[argument] = Origin(Source.ARGUMENT, number)
    for op in ops:
        name = op.name
        if name == BARRIER:
            through = [origins.get(operand, _UNKNOWN) for operand in op.operands]
            origins.update(zip(op.results, through, strict=True))
        elif name == CALL:
            event = len(read.operands)
            made = [Origin(Source.CALL, number, event) for number in range(len(op.results))]
            taken = [origins.get(operand, _UNKNOWN) for operand in op.operands]
            origins.update(zip(op.results, made, strict=True))
            read.operands.append(tuple(taken))
            read.results.append(tuple(made))
        elif name == CONSTANT:
            number = read.constants.setdefault(value_text(op), len(read.constants))
            origins[op.results[0]] = Origin(Source.CONSTANT, number)
        elif name == SEND:
            read.operands.append((origins.get(op.operands[0], _UNKNOWN),))
            read.results.append(())
        elif name == RECV:
            received = Origin(Source.MESSAGE, 0, len(read.operands))
            origins[op.results[0]] = received
            read.operands.append(())
            read.results.append((received,))
    values = terminator(block).operands
    read.returned = tuple([origins.get(value, _UNKNOWN) for value in values])
    return read
