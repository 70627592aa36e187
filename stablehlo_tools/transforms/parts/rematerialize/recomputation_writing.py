"""Writes a plan: stacks for kept values, and copies of ops in the backward for recomputed ones.

  while (%i, %x, %rows) {                        // the forward
    %a = stablehlo.dot_general %x, %w[%i]
    %y = stablehlo.tanh %a
    %rows' = rows of %y                          // what the backward reads
  }
  while (%j, %d) { … %rows[31 - %j] … }
==>
  while (%i, %x, %rows) {
    %rows' = rows of %a                          // what is kept instead
  }
  while (%j, %d) {
    %a = %rows[31 - %j]
    %y = stablehlo.tanh %a                       // again
  }
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from heapq import heappop, heappush

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, barrier, element_of, shape_of
from stablehlo_tools.ir.carriers import append, append_arguments, append_to_terminator
from stablehlo_tools.ir.inline import copy_with, rename
from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import terminator, values_used_outside
from stablehlo_tools.ir.while_loop import iteration_of, room_for_rows
from stablehlo_tools.transforms.parts.rematerialize.passages import (
    BlockPassage,
    LoopPassage,
    ResidualPassage,
    StackedResidual,
)

_FAR = 400  # the most ops that are searched for a gradient


class _RecomputationWriter(ABC):
    """Copies ops of the forward into the backward."""

    def __init__(self, passage: ResidualPassage) -> None:
        self._passage = passage
        self._there: dict[int, ir.Value] = {}  # by number: the value in the backward

    def value(self, number: int, user: ir.Operation) -> ir.Value:
        """Returns the backward's copy of a forward value; computes it before `user` if needed."""
        passage = self._passage
        pending = [number]
        while pending:
            if pending[-1] in self._there:
                pending.pop()
                continue
            op = passage.makers[pending[-1]]
            read = {value: passage.same[value] for value in values_used_outside(op)}
            missing = [n for v, n in read.items() if n not in self._there and self._is_made(v)]
            if missing:
                pending += missing
                continue
            there = {value: self._source(value, n, user) for value, n in read.items()}
            copy = copy_with(op, there, ir.InsertionPoint(user))
            for old, new in zip(op.results, copy.results, strict=True):
                self._there.setdefault(passage.same[old], self._add_constraint(old, new, user))
        return self._there[number]

    def _add_constraint(self, old: ir.Value, new: ir.Value, user: ir.Operation) -> ir.Value:
        """Adds the sharding constraint that a value has in the forward."""
        constraint = self._passage.constraints.get(self._passage.same[old])
        if constraint is None:
            return new
        values = {constraint.operands[0]: new}
        return copy_with(constraint, values, ir.InsertionPoint(user)).results[0]

    @abstractmethod
    def _is_made(self, value: ir.Value) -> bool:
        """Returns True if an op of the forward computes a value."""

    @abstractmethod
    def _source(self, value: ir.Value, number: int, user: ir.Operation) -> ir.Value:
        """Returns the operand that a copied op reads in place of a value of the forward."""


class BlockWriter(_RecomputationWriter):
    """Makes the backward of a block read kept values and recomputed ones.

    Recomputed ops read their first operands through a barrier. So no compiler merges them with the
    originals, or runs them before the gradient that they are needed with.
    """

    def __init__(self, passage: BlockPassage, kept: Collection[int]) -> None:
        super().__init__(passage)
        self._block = passage
        self._kept = kept
        self._made = {result for op in passage.forward for result in op.results}
        self._ops = passage.backward
        self._position = {key_of(op): number for number, op in enumerate(self._ops)}

    def run(self) -> None:
        """Rewrites all reads of the backward."""
        for op, read in self._block.reads:
            numbers = dict.fromkeys(self._block.same[value] for value in read)
            again = [n for n in numbers if n not in self._kept and n not in self._there]
            leaves = self._leading_to(again)
            if leaves:
                # The barrier before the user ties the leaves to a gradient that is computed late.
                late = self._met_by(op, set(read))
                values = [*leaves, *([late[1]] if late else [])]
                tied = barrier(values, ir.InsertionPoint(op), op.location)
                for value, result in zip(leaves, tied.results, strict=False):
                    self._there[self._block.same[value]] = result
                if late:
                    rename(late[0], {late[1]: tied.results[len(leaves)]})
            there = {
                n: self._block.values[n] if n in self._kept else self.value(n, op) for n in numbers
            }
            rename(op, {value: there[self._block.same[value]] for value in read})

    def _leading_to(self, numbers: Sequence[int]) -> list[ir.Value]:
        """Returns the leaves that values are recomputed from and that have no barrier yet."""
        same, seen = self._block.same, set(numbers)
        leaves: dict[int, ir.Value] = {}
        pending = list(numbers)
        while pending:
            op = self._block.makers[pending.pop()]
            for value in values_used_outside(op):
                number = same[value]
                if number in seen or number in self._there or number in self._block.given:
                    continue
                seen.add(number)
                if self._is_made(value):
                    pending.append(number)
                elif _is_tensor(value):
                    leaves[number] = self._block.values.get(number, value)
        return list(leaves.values())

    def _met_by(
        self, user: ir.Operation, read: set[ir.Value]
    ) -> tuple[ir.Operation, ir.Value] | None:
        """Finds a gradient to delay the recomputation of a user's operands.

        Returns the first op that reads both a result of `user` and a tensor that the backward
        computes before `user`, with that tensor. Results are followed transitively. None if no op
        does, or `user` has no results.
        """
        if not len(user.results):
            return None
        begin = self._position[key_of(user)]
        pending, seen = [begin], {begin}
        while pending and len(seen) < _FAR:
            op = self._ops[heappop(pending)]
            for value in op.operands:
                maker = producer(value)
                known = None if maker is None else self._position.get(key_of(maker))
                if known is not None and known < begin and value not in read and _is_tensor(value):
                    return op, value
            for result in op.results:
                for use in result.uses:
                    after = self._position.get(key_of(use.owner.operation))
                    if after is not None and after not in seen:
                        seen.add(after)
                        heappush(pending, after)
        return None

    def _is_made(self, value: ir.Value) -> bool:
        return value in self._made and self._block.same[value] not in self._kept

    def _source(self, value: ir.Value, number: int, user: ir.Operation) -> ir.Value:
        return self._there.get(number, value)


class LoopWriter(_RecomputationWriter):
    """Keeps values of the forward, by number, in stacks, and recomputes the others from them.

    The passage is invalid afterwards.
    """

    def __init__(self, passage: LoopPassage, kept: Sequence[int]) -> None:
        super().__init__(passage)
        self._loops = passage
        self._kept = sorted(kept)
        self._operands = list(passage.forward.loop.operands)
        self._location = passage.backward.loop.location
        for carry in sorted(passage.backward.invariant):
            argument = passage.backward.arguments[carry]
            self._there[passage.same[argument]] = argument

    def run(self) -> None:
        """Rewrites both loops."""
        loops = self._loops
        # Values that have a stack already are read from that one.
        new = [number for number in self._kept if number not in loops.stacked]
        stacks = dict(zip(new, self._stack([loops.values[number] for number in new]), strict=True))
        first = loops.backward.block.operations[0].operation
        build = Builder(ir.InsertionPoint(first), self._location)
        for number in self._kept:
            value = loops.values[number]
            build.location = value.location
            shape = shape_of(value)
            if number in stacks:
                stack, row = stacks[number], self._iteration(build, loops.backward.arguments, 1)
            else:
                stacked = loops.stacked[number]
                stack, row = loops.backward.arguments[stacked.carry], self._old_row(build, stacked)
            zero = build.splat(0, [], element_of(row))
            starts = [row, *[zero] * (len(shape_of(stack)) - 1)]
            read = build.dynamic_slice(stack, starts, [1, *shape_of(stack)[1:]])
            self._there[number] = self._add_constraint(value, build.reshape(read, shape), first)
        for op, read in loops.reads:
            rename(op, {value: self.value(loops.same[value], op) for value in read})

    def _stack(self, values: Sequence[ir.Value]) -> list[ir.Value]:
        """Writes rows of newly kept values in the forward; returns the stacks after it."""
        if not values:
            return []
        body = self._loops.forward
        before = Builder(ir.InsertionPoint(body.loop), body.loop.location)
        rooms = [room_for_rows(before, value, self._loops.trips) for value in values]
        types = [room.type for room in rooms]
        loop = append(body.loop, rooms, types)
        block = While(loop).body
        append_arguments(While(loop).condition, types)
        arguments = append_arguments(block, types)
        build = Builder(ir.InsertionPoint(terminator(block)), loop.location)
        stacks: list[ir.Value] = []
        for value, argument in zip(values, arguments, strict=True):
            build.location = value.location
            row = build.reshape(value, [1, *shape_of(value)])
            iteration = self._iteration(build, list(block.arguments), 0)
            zero = build.splat(0, [], element_of(iteration))
            stacks.append(build.update(argument, row, [iteration, *[zero] * len(shape_of(value))]))
        append_to_terminator(block, stacks)
        results: list[ir.Value] = list(loop.results)
        return results[-len(values) :]

    def _iteration(self, build: Builder, arguments: Sequence[ir.Value], which: int) -> ir.Value:
        """Returns the forward iteration for the current iteration of a loop.

        `which`: 0 for the forward loop, 1 for the backward.
        """
        counted = self._loops.counts[which]
        counter = counted.counter
        index = iteration_of(build, arguments[counter.position], counted.starts[0], counter.step)
        if not which or not self._loops.is_mirrored:
            return index
        last = build.splat(self._loops.trips - 1, [], element_of(index))
        return build.same("subtract", last, index)

    def _old_row(self, build: Builder, stacked: StackedResidual) -> ir.Value:
        """Returns the row in an existing stack for the current iteration of the backward."""
        rows, row = stacked.written, self._iteration(build, self._loops.backward.arguments, 1)
        element = element_of(row)
        if rows.is_reverse:
            last = build.splat(self._loops.trips - 1, [], element)
            row = build.same("subtract", last, row)
        if rows.span != 1:
            row = build.same("multiply", row, build.splat(rows.span, [], element))
        first = rows.first + stacked.offset
        return build.same("add", row, build.splat(first, [], element)) if first else row

    def _is_made(self, value: ir.Value) -> bool:
        body = self._loops.forward
        return body.is_inside(value) and body.argument_number(value) is None

    def _source(self, value: ir.Value, number: int, user: ir.Operation) -> ir.Value:
        body = self._loops.forward
        if number in self._there:
            return self._there[number]
        carry = body.argument_number(value)
        if carry is None:
            return value  # from outside of both
        if carry in body.invariant:
            return self._operands[carry]
        assert carry in body.steps, "an activation is kept"
        # The forward's counter in the iteration that the backward is at.
        build = Builder(ir.InsertionPoint(user), self._location)
        iteration = self._iteration(build, self._loops.backward.arguments, 1)
        element = element_of(body.arguments[carry])
        step = build.splat(body.steps[carry], [], element)
        moved = build.same("multiply", build.convert(iteration, element), step)
        self._there[number] = build.same("add", self._operands[carry], moved)
        return self._there[number]


def _is_tensor(value: ir.Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType)
