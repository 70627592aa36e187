"""Where the values in `main` of a rank come from, barriers looked through, and who takes them.

That is most of what there is to read of a rank, and only what judges the rank itself asks for it:
of several processes one reads it.

Most events are alike: each backward of a stage takes the same results of its forward as the same
operands. What one event takes of another one is told once for all that agree in it.
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
RETURN = -1


class Use(NamedTuple):
    """An operand of an event that a value becomes; the event RETURN is what `main` returns."""

    event: int
    operand: int


@dataclass(frozen=True, eq=False)
class Taken:
    """The results that are taken of an event, with the operands that each of them becomes.

    One object stands for all who take the same, and so is compared by identity.
    """

    operands: dict[int, list[int]]


class Edge(NamedTuple):
    """What an event, or RETURN, takes of another one: the other end, seen from one of the two."""

    event: int
    taken: Taken


class Bundle(NamedTuple):
    """Results of an event that the same events take, in their order and RETURN behind them."""

    numbers: tuple[int, ...]
    takers: tuple[int, ...]


@dataclass
class Origins:
    """The origins of what the calls and messages of a block take, by event, and of what it returns.

    Operands and results are those of functions, and of messages what is sent and received.
    `constants` numbers the texts of the constants.
    """

    operands: list[tuple[Origin, ...]] = field(default_factory=list[tuple[Origin, ...]])
    results: list[tuple[Origin, ...]] = field(default_factory=list[tuple[Origin, ...]])
    constants: dict[str, int] = field(default_factory=dict[str, int])
    returned: tuple[Origin, ...] = ()

    def uses(self, made: Origin) -> list[Use]:
        """Who takes a result of an event."""
        assert made.event >= 0, "who takes an argument or a constant is not known here"
        return [
            Use(event, operand)
            for event, taken in self.takers[made.event]
            for operand in taken.operands.get(made.number, ())
        ]

    @cached_property
    def makers(self) -> Sequence[Sequence[Edge]]:
        """Of which events each event takes something, and behind them, `main` as it returns."""
        known: dict[object, list[Taken]] = {}
        makers: list[list[Edge]] = []
        for operands in chain(self.operands, [self.returned]):
            events = [origin.event for origin in operands]
            # What no event makes has no number here: that of a microbatch is one for each call.
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
        """Which events take something of each event."""
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
                together: dict[tuple[int, ...], list[int]] = {}  # results, by who takes them
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


def origins_in(block: ir.Block, ops: Sequence[ir.Operation]) -> Origins:
    """The origins in a block of these ops."""
    read = Origins()
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
