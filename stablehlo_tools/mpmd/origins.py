"""Where the values in `main` of a rank come from, barriers looked through.

That is most of what there is to read of a rank, and only what judges the rank itself asks for it.
So it is read when it is first asked for: of several processes by the one that judges the rank.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
class _Known:
    """What has been read; operands and results are those of each event."""

    operands: list[tuple[Origin, ...]] = field(default_factory=list[tuple[Origin, ...]])
    results: list[tuple[Origin, ...]] = field(default_factory=list[tuple[Origin, ...]])
    constants: dict[str, int] = field(default_factory=dict[str, int])
    returned: tuple[Origin, ...] = ()


@dataclass(frozen=True, eq=False)
class Origins:
    """The origins of the values in a block of these ops. Events are its calls and messages.

    `operands` and `results` are those of functions, and of messages what is sent and received.
    """

    block: ir.Block
    ops: Sequence[ir.Operation]

    @property
    def operands(self) -> Sequence[tuple[Origin, ...]]:
        """What each event takes."""
        return self._known.operands

    @property
    def results(self) -> Sequence[tuple[Origin, ...]]:
        """What each event makes."""
        return self._known.results

    @cached_property
    def constants(self) -> tuple[str, ...]:
        """The texts of the constants that origins count."""
        return tuple(self._known.constants)

    @property
    def returned(self) -> tuple[Origin, ...]:
        """What the block returns."""
        return self._known.returned

    @cached_property
    def _known(self) -> _Known:
        known = _Known()
        origins: dict[ir.Value, Origin] = {}
        for number, argument in enumerate(self.block.arguments):
            origins[argument] = Origin(Source.ARGUMENT, number)
        for op in self.ops:
            name = op.name
            if name == BARRIER:
                through = [origins.get(operand, _UNKNOWN) for operand in op.operands]
                origins.update(zip(op.results, through, strict=True))
            elif name == CALL:
                event = len(known.operands)
                taken = [origins.get(operand, _UNKNOWN) for operand in op.operands]
                made = [Origin(Source.CALL, number, event) for number in range(len(op.results))]
                origins.update(zip(op.results, made, strict=True))
                known.operands.append(tuple(taken))
                known.results.append(tuple(made))
            elif name == CONSTANT:
                number = known.constants.setdefault(value_text(op), len(known.constants))
                origins[op.results[0]] = Origin(Source.CONSTANT, number)
            elif name == SEND:
                known.operands.append((origins.get(op.operands[0], _UNKNOWN),))
                known.results.append(())
            elif name == RECV:
                received = Origin(Source.MESSAGE, 0, len(known.operands))
                origins[op.results[0]] = received
                known.operands.append(())
                known.results.append((received,))
        values = terminator(self.block).operands
        known.returned = tuple([origins.get(value, _UNKNOWN) for value in values])
        return known
