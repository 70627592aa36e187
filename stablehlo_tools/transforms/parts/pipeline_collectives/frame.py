"""The values of a loop's iterations as they are known at one place of the rewritten program.

A frame is a block with an insertion point: before the loop, in its new body, or after it. It maps
a value of the old body, of some iteration, to the value that stands for it there. Iterations are
counted from the frame's own zero: the first one before the loop, that of stage 0 in the body, one
past the last after it.
"""

from __future__ import annotations

from collections.abc import Mapping

from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.trip_counts import constant_integer, wrap
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import key_of, producer


class Frame:
    """Makes copies of a body's ops at one place.

    `counted`: the induction variables at iteration zero, by carry. `kept`: the invariant carries.
    """

    def __init__(
        self,
        body: LoopBody,
        point: ir.InsertionPoint,
        counted: Mapping[int, ir.Value],
        kept: Mapping[int, ir.Value],
    ) -> None:
        self._body = body
        self._point = point
        self._counted = counted
        self._kept = kept
        self._known: dict[tuple[ir.Value, int], ir.Value] = {}

    def bind(self, value: ir.Value, iteration: int, there: ir.Value) -> None:
        """Says what a value of the body is here."""
        self._known[value, iteration] = there

    def get(self, value: ir.Value, iteration: int) -> ir.Value:
        """What a value of the body is here, computed if it is indexed."""
        if not self._body.is_inside(value):
            return value
        if not self._body.is_moving(value) and self._body.is_indexed(value):
            iteration = 0
        if (value, iteration) not in self._known:
            self._known[value, iteration] = self._value_at(value, iteration)
        return self._known[value, iteration]

    def run(self, op: ir.Operation, iteration: int) -> None:
        """Copies an op, for one iteration; what it reads is known."""
        values = {value: self.get(value, iteration) for value in self._body.reads(op)}
        self._copy(op, values, iteration)

    def _value_at(self, value: ir.Value, iteration: int) -> ir.Value:
        number = self._body.argument_number(value)
        if number is None:
            self._compute(value, iteration)
            return self._known[value, iteration]
        if number in self._kept:
            return self._kept[number]
        if number in self._counted:
            step = self._body.steps[number]
            return self._later(self._counted[number], iteration * step)
        return self.get(self._body.ends[number], iteration - 1)

    def _compute(self, value: ir.Value, iteration: int) -> None:
        """Copies the indexed ops that lead to a value and are not here yet."""
        body = self._body
        needed: dict[int, ir.Operation] = {}
        pending = [value]
        while pending:
            maker = producer(pending.pop())
            assert maker is not None, "an argument is bound"
            assert not body.is_placed(maker), "an op of this time has run"
            position = body.position_of[key_of(maker)]
            if position in needed:
                continue
            needed[position] = maker
            pending += [v for v in body.reads(maker) if self._is_missing(v, iteration)]
        for position in sorted(needed):
            op = needed[position]
            moves = any(body.is_moving(result) for result in op.results)
            self.run(op, iteration if moves else 0)

    def _is_missing(self, value: ir.Value, iteration: int) -> bool:
        if self._body.argument_number(value) is not None:
            return False
        return (value, iteration if self._body.is_moving(value) else 0) not in self._known

    def _copy(self, op: ir.Operation, values: dict[ir.Value, ir.Value], iteration: int) -> None:
        copy = copy_with(op, values, self._point)
        for old, new in zip(op.results, copy.results, strict=True):
            self._known[old, iteration] = new

    def _later(self, counter: ir.Value, amount: int) -> ir.Value:
        """A counter so much further on."""
        if not amount:
            return counter
        location = self._body.loop.location
        builder = Builder(self._point, location)
        kind = counter.type
        element = ir.RankedTensorType(kind).element_type
        start = constant_integer(counter)
        if start is not None:
            return builder.splat(wrap(start + amount, kind), [], element)
        name = "add" if amount > 0 else "subtract"
        return builder.same(name, counter, builder.splat(abs(amount), [], element))
