"""The values of a loop's iterations that are known at one place of the rewritten program.

A frame is an insertion point before the loop, in its new body, or after it. It maps a value of the
old body, of a given iteration, to the value that replaces it there. Iterations are counted from the
frame's own zero: before the loop this is the first iteration, in the body the iteration of stage 0,
after the loop one past the last iteration. `OpenedLoop` is a loop whose carries and body change,
with the frame after it.

`hoist` is its simplest client: collectives that send the same in every iteration run once:

  while {
    %g = "stablehlo.all_gather"(%w)     // of an invariant carry %w
  }
==>
  %g = "stablehlo.all_gather"(%w)
  while (…, %carried = %g)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stablehlo_tools.analysis.loops import Key, LoopBody, constant_integer, wrap
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.carriers import (
    append,
    append_arguments,
    append_to_terminator,
    copy_without_regions,
    rebuild,
)
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import has_uses, key_of, producer
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import terminator


class Frame:
    """Copies a body's ops to one place.

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
        """Records the value that replaces `value` of `iteration` here."""
        self._known[value, iteration] = there

    def get(self, value: ir.Value, iteration: int) -> ir.Value:
        """Returns the value that replaces `value` of `iteration` here; computes it if it is
        indexed."""
        if not self._body.is_inside(value):
            return value
        if not self._body.is_moving(value) and self._body.is_indexed(value):
            iteration = 0
        if (value, iteration) not in self._known:
            self._known[value, iteration] = self._value_at(value, iteration)
        return self._known[value, iteration]

    def run(self, op: ir.Operation, iteration: int) -> None:
        """Copies an op for one iteration; its operands must be known here."""
        values = {value: self.get(value, iteration) for value in self._body.reads(op)}
        copy = copy_with(op, values, self._point)
        for old, new in zip(op.results, copy.results, strict=True):
            self._known[old, iteration] = new

    def _value_at(self, value: ir.Value, iteration: int) -> ir.Value:
        number = self._body.argument_number(value)
        if number is None:
            self._compute(value, iteration)
            return self._known[value, iteration]
        if number in self._kept:
            return self._kept[number]
        if number in self._counted:
            step = self._body.steps[number]
            counter = self._counted[number]
            amount = iteration * step
            if not amount:
                return counter
            location = self._body.loop.location
            builder = Builder(self._point, location)
            type_ = counter.type
            element = ir.RankedTensorType(type_).element_type
            start = constant_integer(counter)
            if start is not None:
                return builder.splat(wrap(start + amount, type_), [], element)
            name = "add" if amount > 0 else "subtract"
            return builder.same(name, counter, builder.splat(abs(amount), [], element))
        return self.get(self._body.ends[number], iteration - 1)

    def _compute(self, value: ir.Value, iteration: int) -> None:
        """Copies the indexed ops that lead to a value and were not copied yet."""
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
            pending += [
                v
                for v in body.reads(maker)
                if body.argument_number(v) is None
                and (v, iteration if body.is_moving(v) else 0) not in self._known
            ]
        for position in sorted(needed):
            op = needed[position]
            moves = any(body.is_moving(result) for result in op.results)
            self.run(op, iteration if moves else 0)


def frame_before(body: LoopBody) -> Frame:
    """Returns a frame before a loop, for values that do not depend on the iteration."""
    kept = {number: body.loop.operands[number] for number in body.invariant}
    return Frame(body, ir.InsertionPoint(body.loop), {}, kept)


def is_the_same(body: LoopBody, ops: Sequence[ir.Operation]) -> bool:
    """Returns True if ops compute the same in every iteration: all they read is invariant."""
    made = {result for op in ops for result in op.results}
    read = (value for op in ops for value in body.reads(op) if value not in made)
    return all(body.is_indexed(value) and not body.is_moving(value) for value in read)


def hoist(body: LoopBody, ops: Sequence[ir.Operation]) -> ir.Operation:
    """Runs ops, in their order, before the loop, and carries those of their results that are read.

    Returns the new loop; `body` is invalid afterwards.
    """
    frame = frame_before(body)
    for op in ops:
        frame.run(op, 0)
    moved = {key_of(op) for op in ops}
    read = {v for op in body.ops if key_of(op) not in moved for v in body.reads(op)}
    carried_on = [v for op in ops for v in op.results if v in read or body.carries_of(v)]
    carried = [frame.get(value, 0) for value in carried_on]
    types = [value.type for value in carried]
    loop = append(body.loop, carried, types)
    append_arguments(While(loop).condition, types)
    arguments = append_arguments(While(loop).body, types)
    for value, argument in zip(carried_on, arguments, strict=True):
        value.replace_all_uses_with(argument)
    append_to_terminator(While(loop).body, arguments)
    for op in reversed(ops):
        op.erase()
    return loop


class OpenedLoop:
    """A loop under construction: its carries, its body and the ops after it may change.

    First reserve carries, then `open` makes the new loop, and `close` removes the old one. `dead`
    are carries that no op will read. They are reused for new carries of the same type, or carry
    zeros.
    """

    def __init__(self, body: LoopBody, dead: Sequence[int]) -> None:
        self.body = body
        self._before = Builder(ir.InsertionPoint(body.loop), body.loop.location)
        self._starts: list[ir.Value] = list(body.loop.operands)
        self._ends = list(body.ends)
        self._free = list(dead)
        self._said: set[int] = set()
        self._rows: dict[tuple[ir.Value, tuple[int, ...]], int] = {}
        for number in dead:
            self._ends[number] = body.arguments[number]

    def carry(self, type_: ir.Type, start: float) -> int:
        """Reserves a carry that starts with `start` in all elements; returns its number."""
        value = self._constant(type_, start)
        # A dead carry of this type is reused, so that the loop gets no additional one.
        number = next((n for n in self._free if self._starts[n].type == type_), None)
        if number is None:
            self._starts.append(value)
            self._ends.append(value)  # until `hand_on` sets it
            return len(self._starts) - 1
        self._free.remove(number)
        self._starts[number] = value
        return number

    def carry_of_rows(self, value: ir.Value, rows: tuple[int, ...], type_: ir.Type) -> int:
        """Returns the carry to whose `rows` a value is written in turn; all callers share it."""
        if (value, rows) not in self._rows:
            self._rows[value, rows] = self.carry(type_, 0)
        return self._rows[value, rows]

    def create_loop(self) -> None:
        """Creates the new loop and moves the old one's regions into it."""
        old = self.body.loop
        for number in self._free:
            self._starts[number] = self._constant(self._starts[number].type, 0)
        types = [value.type for value in self._starts]
        self.new = copy_without_regions(old, self._starts, types)
        for source, target in zip(old.regions, self.new.regions, strict=True):
            block = source.blocks[0]
            block.append_to(target)
            append_arguments(block, types[len(block.arguments) :])
        end = terminator(self.body.block)
        self.inside = ir.InsertionPoint(end)
        self.point = ir.InsertionPoint(old)
        counted = {number: self.new.results[number] for number in self.body.steps}
        kept = {number: old.operands[number] for number in self.body.invariant}
        self.after = Frame(self.body, self.point, counted, kept)

    def argument(self, number: int) -> ir.Value:
        """Returns a carry's value at the beginning of an iteration."""
        return self.body.block.arguments[number]

    def result(self, number: int) -> ir.Value:
        """Returns a carry's value after the loop."""
        return self.new.results[number]

    def is_handed_on(self, number: int) -> bool:
        """Returns True if the yielded value of a carry was set by `hand_on`."""
        return number in self._said

    def hand_on(self, number: int, value: ir.Value) -> None:
        """Sets the value that an iteration yields for a carry."""
        self._ends[number] = value
        self._said.add(number)

    def close(self, removed: set[Key], results: Mapping[int, ir.Value]) -> None:
        """Erases `removed` from the body, replaces results of the old loop, and erases it.

        `results`: replacements by carry number; other results become those of the new loop.
        """
        old = self.body.loop
        rebuild(terminator(self.body.block), self._ends, [])
        for op in reversed(self.body.ops):
            # Indexed ops run wherever they are needed: those without readers go too.
            is_idle = not self.body.is_placed(op) and not any(map(has_uses, op.results))
            if key_of(op) in removed or is_idle:
                op.erase()
        for number, result in enumerate(old.results):
            result.replace_all_uses_with(results.get(number, self.new.results[number]))
        old.erase()

    def behind(self, location: ir.Location) -> Builder:
        """Returns a builder that writes after the new loop."""
        return Builder(self.point, location)

    def _constant(self, type_: ir.Type, number: float) -> ir.Value:
        """Returns a constant with `number` in all elements of a type."""
        like = ir.RankedTensorType(type_)
        return self._before.splat(number, like.shape, like.element_type)
