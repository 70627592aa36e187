"""Rewrites the program of a single rank as a loop over microbatches.

    %a0 = call @forward(0, %w)                 %sum = while %i < 8 (%s = %zero) {
    %s0 = call @backward(0, %a0, %zero)          %a = call @forward(%i, %w)
    %a1 = call @forward(1, %w)          ==>      call @backward(%i, %a, %s)
    %s1 = call @backward(1, %a1, %s0)          }
    ...

XLA inlines every call of a function. For eight microbatches it compiles eight copies of each
kernel. This takes eight times as long to compile, and the result is slower than a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BARRIER
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.ir.while_loop import CountedLoop
from stablehlo_tools.mpmd.origins import Origin, Source
from stablehlo_tools.mpmd.reading import RankCall, body_of, microbatch_of, read_rank

_LEAST = 2  # microbatches


@dataclass(frozen=True)
class _CallResult:
    """Result `number` of call `place` of a microbatch: its own, or the one before."""

    place: int
    number: int
    is_own: bool


# An operand: a result of a call, the number of the microbatch (None), or one value for all.
_Taken = _CallResult | Origin | None
_Row = Sequence[RankCall]  # the calls of a microbatch


def in_a_loop(module: ir.Module) -> ir.Module | None:
    """Returns a copy of a program with one rank in which its calls are in a loop.

    Returns None unless all microbatches call the same functions, one microbatch after the other,
    with the same operands relative to their microbatch.
    """
    copied = copy_module(module)
    block = body_of(entry_function(copied))
    for view in list(block.operations):
        op = view.operation
        if op.name == BARRIER:
            replace(op, op.operands)
    reading = read_rank(copied, 0, "")
    rows = [list(row) for _, row in groupby(reading.calls, microbatch_of)]
    if reading.messages or len(rows) < _LEAST:
        return None
    if [microbatch_of(row[0]) for row in rows] != list(range(len(rows))):
        return None
    if any([c.function for c in row] != [c.function for c in rows[0]] for row in rows):
        return None
    taken = _call_operands(rows)
    starts = _starts(rows[0], taken)
    if starts is None or any(row != taken[1] for row in taken[2:]) or not _ends(rows, starts):
        return None
    _write(rows, taken[1], starts)
    return copied


def _call_operands(rows: Sequence[_Row]) -> list[list[list[_Taken]]]:
    """Returns the operands of the calls of each microbatch."""
    places = {
        call.index: (m, place) for m, row in enumerate(rows) for place, call in enumerate(row)
    }

    def relative_operand(origin: Origin, microbatch: int) -> _Taken:
        if origin.source is not Source.CALL or origin.event not in places:
            return origin
        maker, place = places[origin.event]
        if microbatch - maker > 1:
            return origin
        return _CallResult(place, origin.number, maker == microbatch)

    return [
        [[None, *(relative_operand(origin, m) for origin in call.operands[1:])] for call in row]
        for m, row in enumerate(rows)
    ]


def _starts(
    first: _Row, taken: Sequence[Sequence[Sequence[_Taken]]]
) -> dict[_CallResult, ir.Value] | None:
    """Returns the initial values of the loop's carries; None if there is no such loop.

    If an operand is a result of the microbatch before, its value in the first microbatch is an
    initial value. All other operands must be the same in the first microbatch as in the others.
    """
    starts: dict[_CallResult, ir.Value] = {}
    for call, own, usual in zip(first, taken[0], taken[1], strict=True):
        for value, one, other in zip(call.op.operands, own, usual, strict=True):
            if not isinstance(other, _CallResult) or other.is_own:
                if one != other or one == Origin(Source.UNKNOWN):
                    return None
            elif isinstance(one, _CallResult) or starts.setdefault(other, value) != value:
                return None
    made = all(
        start.type == first[m.place].op.results[m.number].type for m, start in starts.items()
    )
    return starts if made else None


def _ends(rows: Sequence[_Row], starts: dict[_CallResult, ir.Value]) -> bool:
    """Returns True if only the loop reads its calls' results, except final carries."""
    calls = {call.op for row in rows for call in row}
    handed = {(made.place, made.number) for made in starts}
    return all(
        (row is rows[-1] and (place, number) in handed)
        or all(use.owner.operation in calls for use in result.uses)
        for row in rows
        for place, call in enumerate(row)
        for number, result in enumerate(call.op.results)
    )


def _write(
    rows: Sequence[_Row], taken: Sequence[Sequence[_Taken]], starts: dict[_CallResult, ir.Value]
) -> None:
    """Replaces the calls by the loop."""
    last = rows[-1]
    build = Builder(ir.InsertionPoint(last[-1].op), last[-1].op.location)
    loop = CountedLoop(build, build.i32(len(rows)), list(starts.values()))
    states_of = dict(zip(starts, loop.arguments, strict=True))
    made: list[ir.Operation] = []
    # The second row is the pattern of the body: the first one reads initial values.
    for call, operands in zip(rows[1], taken, strict=True):
        copy = call.op.clone(ip=loop.inside.point)
        for position, operand in enumerate(operands):
            if operand is None:
                copy.operands[position] = loop.counter
            elif isinstance(operand, _CallResult):
                own = operand.is_own
                value = made[operand.place].results[operand.number] if own else states_of[operand]
                copy.operands[position] = value
        made.append(copy)
    results = loop.close([made[state.place].results[state.number] for state in starts])
    for state, result in zip(starts, results, strict=True):
        last[state.place].op.results[state.number].replace_all_uses_with(result)
    for row in reversed(rows):
        for call in reversed(row):
            call.op.erase()
