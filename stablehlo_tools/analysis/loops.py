"""What a loop's body knows of its other iterations: what stays, what counts, what hangs on what.

A *carry* is a position of the loop's operands. It is invariant if every iteration hands it on as
it came, an induction variable if each adds a constant to it. A value is *indexed* if it follows
from these two by ops that cost little: then it can be computed for any iteration at any time, a
slice of stacked weights at the counter for one. All other ops have a place in their iteration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from stablehlo_tools.analysis.collectives import Collective, classify_communication
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.trip_counts import can_count, constant_step
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CONCATENATE, GATHER, PAD, SHARDING_CONSTRAINT
from stablehlo_tools.dialect.traits import LAYOUT, Trait, ops_with, ops_with_any
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.ir.walk import walk

Key = ir.Value | ir.Operation

_CONSTRAINT = "sdy.sharding_constraint"
FORMATTING = (
    LAYOUT | ops_with_any(Trait.PIECE | Trait.RETYPE) | {CONCATENATE, PAD, SHARDING_CONSTRAINT}
) - {GATHER}
COSTLY = ops_with(Trait.COSTLY)
_BARRIER = "stablehlo.optimization_barrier"
_FEW = 1024  # elements: arithmetic on so many costs next to nothing


class LoopBody:
    """The body of a `while`, as the analyses and rewrites of loops see it.

    `position_of` numbers the ops by `key_of`, in order, the terminator left out. `behind_barrier`
    gives the indexed value that a result of an optimization_barrier with placed operands is:
    jax.checkpoint writes such barriers, over the weights of a layer and its gradient.
    """

    def __init__(self, loop: ir.Operation, effects: Effects) -> None:
        self.loop = loop
        self.effects = effects
        self._classify = classify_communication(loop.context)
        self.block: ir.Block = loop.regions[1].blocks[0]
        self.arguments: list[ir.Value] = list(self.block.arguments)
        self.ends: list[ir.Value] = list(terminator(self.block).operands)
        self.ops = [view.operation for view in self.block.operations][:-1]
        self.position_of = {key_of(op): i for i, op in enumerate(self.ops)}
        self._number_of = {argument: i for i, argument in enumerate(self.arguments)}
        self._reads = [list(self._used(op)) for op in self.ops]
        self.invariant = {i for i, end in enumerate(self.ends) if end == self.arguments[i]}
        self.steps = self._induction_steps()
        self.behind_barrier: dict[ir.Value, ir.Value] = {}
        self._indexed: set[Key] = set()
        self._moving: set[ir.Value] = {self.arguments[i] for i in self.steps}
        for op in self.ops:
            self._note_indexed(op)

    @cached_property
    def collectives(self) -> list[Collective]:
        """The collectives of the body itself, not of ops in it, in order."""
        found = [self._classify(op) for op in self.ops]
        return [collective for collective in found if collective is not None]

    @cached_property
    def users(self) -> dict[ir.Value, list[ir.Operation]]:
        """The ops of the body that read a value, in their regions too, in order."""
        found: dict[ir.Value, list[ir.Operation]] = {}
        for op, reads in zip(self.ops, self._reads, strict=True):
            for value in reads:
                found.setdefault(value, []).append(op)
        return found

    def reads(self, op: ir.Operation) -> Sequence[ir.Value]:
        """The values of the body that an op reads, in its regions too, each once."""
        return self._reads[self.position_of[key_of(op)]]

    def argument_number(self, value: ir.Value) -> int | None:
        """The carry that a value is; None for anything but an argument of the body."""
        return self._number_of.get(value)

    def is_inside(self, value: ir.Value) -> bool:
        """Whether a value is an argument of the body or made by one of its ops."""
        maker = producer(value)
        return value in self._number_of if maker is None else key_of(maker) in self.position_of

    def is_indexed(self, value: ir.Value) -> bool:
        """Whether a value can be computed for any iteration at any time, at little cost."""
        if not self.is_inside(value):
            return True
        number = self.argument_number(value)
        if number is not None:
            return number in self.invariant or number in self.steps
        maker = producer(value)
        return maker is not None and key_of(maker) in self._indexed

    def is_moving(self, value: ir.Value) -> bool:
        """Whether an indexed value differs from iteration to iteration."""
        return value in self._moving

    def is_placed(self, op: ir.Operation) -> bool:
        """Whether an op has a place in its iteration, because it is not indexed."""
        return key_of(op) not in self._indexed

    def is_costly(self, op: ir.Operation) -> bool:
        """Whether an op takes time that other ops could hide behind, or has an effect."""
        return op.name in COSTLY or self.effects.has_effect(op)

    def communicates(self, op: ir.Operation) -> bool:
        """Whether an op, or one in its regions, is a collective or a transfer."""
        if not len(op.regions):
            return self._classify(op) is not None
        found = False

        def visit(inner: ir.Operation) -> ir.WalkResult:
            nonlocal found
            found = found or self._classify(inner) is not None
            return ir.WalkResult.INTERRUPT if found else ir.WalkResult.ADVANCE

        walk(op, visit)
        return found

    def needed_by(self, ops: Iterable[ir.Operation]) -> list[ir.Operation]:
        """These ops and all placed ones that they hang on, in earlier iterations too, in order.

        A barrier between them and an indexed value is none of them.
        """
        pending = [value for op in ops for value in self.reads(op)]
        found = {key_of(op) for op in ops}
        seen: set[ir.Value] = set()
        while pending:
            value = pending.pop()
            if value in seen or value in self.behind_barrier or self.is_indexed(value):
                continue
            seen.add(value)
            number = self.argument_number(value)
            if number is not None:
                pending.append(self.ends[number])
                continue
            maker = producer(value)
            if maker is not None and key_of(maker) not in found:
                found.add(key_of(maker))
                pending.extend(self.reads(maker))
        return self._in_order(found)

    def hanging_on(self, ops: Iterable[ir.Operation], *, later: bool) -> list[ir.Operation]:
        """These ops and all that hang on them, in order; `later`: in later iterations too."""
        pending: list[ir.Value] = [value for op in ops for value in op.results]
        found = {key_of(op) for op in ops}
        seen: set[ir.Value] = set()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            if later:
                pending.extend(self.arguments[i] for i in self.carries_of(value))
            for user in self.users.get(value, ()):
                if key_of(user) not in found:
                    found.add(key_of(user))
                    pending.extend(user.results)
        return self._in_order(found)

    def carries_of(self, value: ir.Value) -> list[int]:
        """The carries that a value is at the end of the iteration."""
        return self._carried.get(value, [])

    @cached_property
    def _carried(self) -> dict[ir.Value, list[int]]:
        found: dict[ir.Value, list[int]] = {}
        for number, end in enumerate(self.ends):
            found.setdefault(end, []).append(number)
        return found

    def _in_order(self, keys: set[Key]) -> list[ir.Operation]:
        return [self.ops[i] for i in sorted(self.position_of[key] for key in keys)]

    def _induction_steps(self) -> dict[int, int]:
        """What each iteration adds to a carry, by its number."""
        found: dict[int, int] = {}
        for number, (argument, end) in enumerate(zip(self.arguments, self.ends, strict=True)):
            if number in self.invariant or not can_count(argument.type):
                continue
            step = constant_step(end, argument)
            if step is not None:
                found[number] = step
        return found

    def _note_indexed(self, op: ir.Operation) -> None:
        reads = self.reads(op)
        if op.name == _BARRIER:
            for operand, result in zip(op.operands, op.results, strict=True):
                source = self.behind_barrier.get(operand, operand)
                if self.is_indexed(source):
                    self.behind_barrier[result] = source
        if not len(op.results) or not all(self.is_indexed(value) for value in reads):
            return
        moves = any(value in self._moving for value in reads)
        if not self._is_plain(op) or (moves and not _is_cheap(op)):
            return
        self._indexed.add(key_of(op))
        if moves:
            self._moving.update(op.results)

    def _is_plain(self, op: ir.Operation) -> bool:
        """Whether an op can be copied at will: no effect, no collective, no random numbers."""
        if self.effects.has_effect(op) or op.name in COSTLY:
            return False
        return op.name.startswith(("stablehlo.", "chlo.", _CONSTRAINT)) and not self.communicates(
            op
        )

    def _used(self, op: ir.Operation) -> Iterator[ir.Value]:
        seen: set[ir.Value] = set()
        for value in values_used(op):
            if value not in seen and self.is_inside(value):
                seen.add(value)
                yield value


def values_used(op: ir.Operation) -> list[ir.Value]:
    """The operands of an op and of all ops in its regions, in order."""
    if not len(op.regions):
        return list(op.operands)
    found: list[ir.Value] = []

    def visit(inner: ir.Operation) -> ir.WalkResult:
        found.extend(inner.operands)
        return ir.WalkResult.ADVANCE

    walk(op, visit)
    return found


def _is_cheap(op: ir.Operation) -> bool:
    """Formatting of any size, or arithmetic on few elements."""
    if op.name in FORMATTING:
        return True
    return not len(op.regions) and all(_is_small(result.type) for result in op.results)


def _is_small(kind: ir.Type) -> bool:
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        return False
    return math.prod(kind.shape) <= _FEW
