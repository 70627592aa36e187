"""Mistakes in what stands outside of the schedule: `prepare`, the finish, what is returned."""

from __future__ import annotations

from collections.abc import Iterator

from rank_units import Change

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.mpmd.reading import Call, Event, Reading


def operands_exchanged(reading: Reading) -> Iterator[tuple[str, Change]]:
    """Two operands of one type, of a call that is no action."""
    for event in reading.events:
        if isinstance(event, Call) and event.action is None:
            yield from _exchanged(event.op, reading.titled(event.index), event.index)


def sends_exchanged(reading: Reading) -> Iterator[tuple[str, Change]]:
    """What two sends behind the schedule carry."""
    sends = [event for event in _behind(reading) if not isinstance(event, Call) and event.is_send]
    for at, one in enumerate(sends):
        for other in sends[at + 1 :]:
            if one.type != other.type or one.operand == other.operand:
                continue

            def change(copy: Reading, one: int = one.index, other: int = other.index) -> bool:
                first, second = copy.events[one].op, copy.events[other].op
                value, later = first.operands[0], second.operands[0]
                first.operands[0], second.operands[0] = later, value
                return True

            yield f"channels {one.channel} and {other.channel}", change


def results_exchanged(reading: Reading) -> Iterator[tuple[str, Change]]:
    """Two values that `main` returns."""
    yield from _exchanged(terminator(reading.block), "what is returned", -1)


def _behind(reading: Reading) -> list[Event]:
    last = max(call.index for call in reading.calls)
    return [event for event in reading.events if event.index > last]


def _exchanged(op: ir.Operation, title: str, event: int) -> Iterator[tuple[str, Change]]:
    values = list(op.operands)
    for at, one in enumerate(values):
        for to in range(at + 1, len(values)):
            if one.type != values[to].type or one == values[to]:
                continue

            def change(copy: Reading, at: int = at, to: int = to) -> bool:
                there = terminator(copy.block) if event < 0 else copy.events[event].op
                value, other = there.operands[at], there.operands[to]
                there.operands[at], there.operands[to] = other, value
                return True

            yield f"{title}: numbers {at} and {to}", change
