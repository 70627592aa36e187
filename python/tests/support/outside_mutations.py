"""Mistakes in what stands outside of the schedule: `prepare`, the finish, what is returned."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from message_mutations import exchanged
from rank_units import Change, exchange_operands

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.mpmd.reading import RankCall, RankReading


def operands_exchanged(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """Two operands of one type, of a call that is no action."""
    for event in reading.events:
        if isinstance(event, RankCall) and event.action is None:
            yield from _exchanged(event.op, reading.describe_event(event.index), event.index)


def sends_exchanged(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """What two sends behind the schedule carry."""
    last = max(call.index for call in reading.calls)
    sends = [message for message in reading.messages if message.is_send and message.index > last]
    return exchanged(
        (one, other)
        for one, other in combinations(sends, 2)
        if one.type == other.type and one.operand != other.operand
    )


def results_exchanged(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """Two values that `main` returns."""
    yield from _exchanged(terminator(reading.block), "what is returned", -1)


def _exchanged(op: ir.Operation, title: str, event: int) -> Iterator[tuple[str, Change]]:
    values = list(op.operands)
    for (at, one), (to, other) in combinations(enumerate(values), 2):
        if one.type != other.type or one == other:
            continue

        def change(copy: RankReading, at: int = at, to: int = to) -> bool:
            there = terminator(copy.block) if event < 0 else copy.events[event].op
            return exchange_operands(there, there, at, to)

        yield f"{title}: numbers {at} and {to}", change
