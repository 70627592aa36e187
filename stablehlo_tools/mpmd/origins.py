"""Where the values in `main` of a rank come from, barriers looked through.

That is most of what there is to read of a rank, and only what judges the rank itself asks for it:
of several processes one reads it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
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
