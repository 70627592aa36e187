"""A passage as a choice: what each value takes to be kept, and each op to run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.rematerialize.cheapest_cut import (
    KeepOrRepeat,
    Plan,
    Repeatable,
    Value,
)
from stablehlo_tools.transforms.parts.rematerialize.passages import (
    BlockPassage,
    LoopPassage,
    Passage,
)
from stablehlo_tools.transforms.parts.rematerialize.prices import Prices


@dataclass(frozen=True)
class Problem:
    """A passage, and the choice that it is: `numbers` are those of the choice's values, `ops` what
    it can repeat."""

    passage: Passage
    choice: KeepOrRepeat
    numbers: Sequence[int]
    ops: Sequence[ir.Operation]

    def kept(self, plan: Plan) -> list[int]:
        """The numbers of the values that a plan keeps."""
        return [self.numbers[position] for position in sorted(plan.kept)]


def problem_of(passage: Passage, prices: Prices, stride: int = 1) -> Problem:
    """What can be kept for the backward, or repeated in it, with its prices.

    Of a block, what crosses every so many waists of the forward is not repeated: or else all that
    comes behind would be made again at once.
    """
    fixed: frozenset[int] = frozenset()
    if isinstance(passage, BlockPassage):
        fixed = fixed.union(*passage.waists[::-1][stride - 1 :: stride])
    choice, numbers, ops = KeepOrRepeat(), list[int](), list[ir.Operation]()
    positions: dict[int, int] = {}
    makers: dict[ir.Value, int] = {}

    def position_of(number: int) -> int:
        if number not in positions:
            positions[number] = len(numbers)
            numbers.append(number)
            pending.append(number)
            size = prices.bytes(passage.values[number])
            if passage.same.root(number) == number and size < inf:
                ns = _keep_ns(passage, number, prices.traffic_ns(size), prices)
                choice.values.append(Value(ns, size * passage.trips, None))
            else:
                choice.values.append(Value(inf, 0.0, None))
        return positions[number]

    pending: list[int] = []
    choice.required = [position_of(number) for number in sorted(passage.required)]
    while pending:
        number = pending.pop()
        op = passage.makers.get(number)
        if op is None or number in fixed or not passage.can_repeat(op):
            continue
        if op.results[0] not in makers:
            makers[op.results[0]] = len(choice.ops)
            ops.append(op)
            read = [n for n in passage.numbers_read(op) if n in passage.values]
            reads = tuple(position_of(n) for n in read if n not in passage.given)
            choice.ops.append(Repeatable(prices.ns(op) * passage.trips, reads))
        value = choice.values[positions[number]]
        choice.values[positions[number]] = Value(
            value.keep_ns, value.keep_bytes, makers[op.results[0]]
        )
    return Problem(passage, choice, numbers, ops)


def _keep_ns(passage: Passage, number: int, traffic_ns: float, prices: Prices) -> float:
    """The time of keeping a value: of a row in every iteration, its traffic. In a block, what a
    kernel of its own makes is in memory anyway, and so is an argument; only what could be fused is
    written for it."""
    if isinstance(passage, LoopPassage):
        return traffic_ns * passage.trips
    op = passage.makers.get(number)
    return traffic_ns / 2 if op is not None and prices.is_fusible(op) else 0.0
