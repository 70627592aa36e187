"""Analyses the body of a loop: its trip count, invariants, counters and indexed values.

A carry (see `ir.while_loop`) is invariant if every iteration yields it unchanged, and an induction
variable if each adds a constant to it. A value is *indexed* if it follows from these two by ops
that cost little, for example a slice of stacked weights at the counter. It can be computed for any
iteration at any time. All other ops are placed in their iteration. `loop_carries` classifies the
other carries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective, classify_communication
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import static_shape
from stablehlo_tools.dialect.frontend_attributes import mean_runs
from stablehlo_tools.dialect.integer_arithmetic import MIRRORED
from stablehlo_tools.dialect.names import (
    BARRIER,
    COMPARE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    SHARDING_CONSTRAINT,
)
from stablehlo_tools.dialect.reducers import integer_bounds
from stablehlo_tools.dialect.traits import Trait, ops_with, ops_with_any
from stablehlo_tools.ir.values import CONSTANTS, key_of, producer, skip_constraints
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import terminator, values_used, walk
from stablehlo_tools.ir.while_loop import WhileLoop, is_invariant

_WRAPS = "its counter would overflow before it reaches its bound"
_FOR_EVER = "its counter does not move, so the loop never ends"


Known = Callable[[ir.Value], Sequence[int] | None]


@dataclass(frozen=True)
class LoopCounter:
    """A loop's counter: carry `position` grows by `step` in each iteration.

    The loop runs while the counter is below, above, … the bound. `direction` and `bound` are those
    of the comparison in the condition, with the counter on its left.
    """

    position: int
    step: int
    direction: str
    bound: ir.Value


@dataclass(frozen=True)
class Counted:
    """A loop that runs a known number of times.

    `starts` are the counter's initial values and `trips` the trip counts, one for each device, or
    one if it is the same on all.
    """

    counter: LoopCounter
    starts: tuple[int, ...]
    trips: tuple[int, ...]


def trip_count(
    loop: ir.Operation, initial: Sequence[tuple[int, ...] | None]
) -> tuple[int, ...] | None:
    """Returns the number of iterations on each device; None if it is not understood.

    `initial[i]` are the values of carry i before the loop, one for each device, if known. Counters
    that would wrap around are not understood.
    """
    known = dict(zip(loop.operands, initial, strict=True))
    result = count_trips(loop, known.get)
    return None if isinstance(result, str) else result.trips


def count_trips(loop: ir.Operation, known: Known) -> Counted | str:
    """Returns the trip count of a loop, or why it is not understood.

    `known` returns the integers of a scalar from outside of the loop, one for each device.
    """
    counter = counter_of(loop)
    if isinstance(counter, str):
        return counter
    starts = known(loop.operands[counter.position])
    if starts is None:
        return "the start of its counter is not known before the run"
    bounds = _bounds(counter.bound, loop, known)
    if bounds is None:
        return "the bound of its counter is not known before the run"
    devices = max(len(starts), len(bounds))
    starts, bounds = (
        tuple(part) * devices if len(part) == 1 else tuple(part) for part in (starts, bounds)
    )
    type_ = loop.operands[counter.position].type
    trips = [
        _iterations(counter.direction, start, bound, counter.step, type_)
        for start, bound in zip(starts, bounds, strict=True)
    ]
    unknown = next((count for count in trips if isinstance(count, str)), None)
    if unknown is not None:
        return unknown
    return Counted(counter, starts, tuple(count for count in trips if isinstance(count, int)))


def counter_of(loop: ir.Operation) -> LoopCounter | str:
    """Returns the counter in a loop's condition, or why it is not understood."""
    condition, body = (region.blocks[0] for region in loop.regions)
    compare = producer(skip_constraints(terminator(condition).operands[0]))
    if compare is None or compare.name != COMPARE:
        return "its condition is not one comparison"
    direction = comparison_direction(compare)
    left, right = compare.operands
    # The counter may be on the right: n > i is i < n.
    for value, bound, order in ((left, right, direction), (right, left, MIRRORED[direction])):
        position = _position(value, condition)
        if position is None:
            continue
        step = constant_step(terminator(body).operands[position], body.arguments[position])
        if step is None:
            continue
        if not can_count(value.type):
            return "its counter is not an integer"
        return LoopCounter(position, step, order, bound)
    return "its condition compares no value that grows by a constant in each iteration"


def constant_integer(value: ir.Value) -> int | None:
    """Returns the integer of a constant integer scalar, also behind barriers; None for any other
    value."""
    maker = producer(skip_constraints(value))
    while maker is not None and maker.name == BARRIER:
        value = maker.operands[ir.OpResult(skip_constraints(value)).result_number]
        maker = producer(skip_constraints(value))
    if maker is None or maker.name not in CONSTANTS or not is_integer_scalar(value.type):
        return None
    return int(np.array(ir.DenseElementsAttr(maker.attributes["value"])).ravel()[0])


def known_integer(value: ir.Value) -> tuple[int, ...] | None:
    """Returns a constant integer scalar in the form that `count_trips` needs.

    It has one entry, because it is the same on all devices.
    """
    number = constant_integer(value)
    return None if number is None else (number,)


def constant_trips(loop: ir.Operation) -> int | None:
    """Returns the trip count of a loop from a constant to a constant; None for any other."""
    result = count_trips(loop, known_integer)
    return None if isinstance(result, str) else result.trips[0]


def expected_trips(loop: ir.Operation, otherwise: float) -> float:
    """Returns the trip count of a loop, else the stated mean number of its runs, else `otherwise`.

    At least 1."""
    trips = constant_trips(loop)
    if trips is None:
        trips = mean_runs(loop)
    return max(otherwise if trips is None else trips, 1)


def comparison_direction(compare: ir.Operation) -> str:
    """Returns `LT`, `LE`, `GT`, `GE`, `EQ` or `NE`."""
    return bindings.ComparisonDirectionAttr(compare.attributes["comparison_direction"]).value


def is_integer_scalar(type_: ir.Type) -> bool:
    """Returns True if a type is a rank-0 tensor of integers or booleans."""
    return (
        isinstance(type_, ir.RankedTensorType)
        and type_.rank == 0
        and isinstance(type_.element_type, ir.IntegerType)
    )


def can_count(type_: ir.Type) -> bool:
    """Returns True if a type is an integer scalar of more than one bit, so that it can count."""
    if not is_integer_scalar(type_):
        return False
    return ir.IntegerType(ir.RankedTensorType(type_).element_type).width > 1


def wrap(value: int, type_: ir.Type) -> int:
    """Returns an integer modulo 2^bits, as a scalar of the type holds it."""
    low, high = integer_range(type_)
    return (value - low) % (high - low + 1) + low


def integer_range(type_: ir.Type) -> tuple[int, int]:
    """Returns the smallest and the largest value of an integer scalar's type."""
    element = ir.IntegerType(ir.RankedTensorType(type_).element_type)
    return integer_bounds(element.width, signed=not element.is_unsigned)


def _iterations(direction: str, start: int, bound: int, step: int, type_: ir.Type) -> int | str:
    if direction == "EQ":
        return 0 if start != bound else (1 if step else _FOR_EVER)
    if direction == "NE":
        whole = step != 0 and (bound - start) % step == 0 and (bound - start) // step >= 0
        return (bound - start) // step if whole else (0 if start == bound else _WRAPS)
    if direction in ("GT", "GE"):  # count down: the mirror image of counting up
        start, bound, step = -start, -bound, -step
    if direction in ("LE", "GE"):
        bound += 1
    if start >= bound:
        return 0
    if step <= 0:
        return _FOR_EVER if step == 0 else _WRAPS
    count = -((start - bound) // step)
    low, high = integer_range(type_)
    last = start + count * step
    if direction in ("GT", "GE"):
        # Not mirrored: the type's range is not symmetric.
        last = -last
    return count if low <= last <= high else _WRAPS


def constant_step(end: ir.Value, argument: ir.Value) -> int | None:
    """Returns the constant k with `end == argument + k`; None if there is none."""
    total = 0
    while (end := skip_constraints(end)) != argument:
        op = producer(end)
        if op is None or op.name not in ("stablehlo.add", "stablehlo.subtract"):
            return None
        left, right = op.operands
        amount = constant_integer(right)
        if amount is None and op.name == "stablehlo.add":
            left, right = right, left
            amount = constant_integer(right)
        if amount is None:
            return None
        total += amount if op.name == "stablehlo.add" else -amount
        end = left
    return total


def _bounds(value: ir.Value, loop: ir.Operation, known: Known) -> Sequence[int] | None:
    """Returns the bound of a counter: one integer, or one for each device; None if unknown."""
    constant = constant_integer(value)
    if constant is not None:
        return (constant,)
    condition = While(loop).condition
    position = _position(value, condition)
    if position is None:
        maker = producer(value)
        is_outside = maker is None or maker.block != condition
        return known(value) if is_outside else None
    return known(loop.operands[position]) if is_invariant(loop, position) else None


def _position(value: ir.Value, block: ir.Block) -> int | None:
    value = skip_constraints(value)
    if not isinstance(value.owner, ir.Block) or value.owner != block:
        return None
    return ir.BlockArgument(value).arg_number


Key = ir.Value | ir.Operation

# Ops that cost next to nothing: they move elements or change their type. A gather is left out,
# because its positions are arbitrary, and an update, because it writes into the buffer of one
# iteration.
FORMATTING = ops_with_any(Trait.LAYOUT | Trait.PIECE | Trait.JOIN | Trait.RETYPE) - {
    DYNAMIC_UPDATE_SLICE,
    GATHER,
} | {SHARDING_CONSTRAINT}
COSTLY = ops_with(Trait.COSTLY)
_FEW = 1024  # elements: arithmetic on so few costs next to nothing
_COPIED_AT_WILL = ("stablehlo.", "chlo.", SHARDING_CONSTRAINT)


class LoopBody(WhileLoop):
    """The body of a `while`, as the analyses and rewrites of loops see it.

    `position_of` numbers the ops by `key_of`, in order, without the terminator. A barrier can have
    both indexed and placed operands: jax.checkpoint writes such barriers, over the weights of a
    layer and its gradient. `behind_barrier` maps its results to the indexed values that they equal.
    """

    def __init__(self, loop: ir.Operation, effects: Effects) -> None:
        super().__init__(loop)
        self.effects = effects
        self._classify = classify_communication(loop.context)
        self.ops = [view.operation for view in self.block.operations][:-1]
        self.position_of = {key_of(op): i for i, op in enumerate(self.ops)}
        self._reads = [
            [value for value in dict.fromkeys(values_used(op)) if self.is_inside(value)]
            for op in self.ops
        ]
        # The constant that each iteration adds to a carry, by the carry's number.
        steps: dict[int, int] = {}
        for number, (argument, end) in enumerate(zip(self.arguments, self.ends, strict=True)):
            if number in self.invariant or not can_count(argument.type):
                continue
            step = constant_step(end, argument)
            if step is not None:
                steps[number] = step
        self.steps = steps
        self.behind_barrier: dict[ir.Value, ir.Value] = {}
        self._indexed: set[Key] = set()
        self._moving: set[ir.Value] = {self.arguments[i] for i in self.steps}
        for op in self.ops:
            self._note_indexed(op)

    @cached_property
    def collectives(self) -> list[Collective]:
        """The collectives of the body itself, not those in regions of its ops, in order."""
        return [each for op in self.ops if (each := self._classify(op)) is not None]

    @cached_property
    def users(self) -> dict[ir.Value, list[ir.Operation]]:
        """The ops of the body that read each value, also in their regions, in order."""
        users: dict[ir.Value, list[ir.Operation]] = {}
        for op, reads in zip(self.ops, self._reads, strict=True):
            for value in reads:
                users.setdefault(value, []).append(op)
        return users

    def reads(self, op: ir.Operation) -> Sequence[ir.Value]:
        """Returns the values of the body that an op reads, also in its regions, each once."""
        return self._reads[self.position_of[key_of(op)]]

    def is_inside(self, value: ir.Value) -> bool:
        """Returns True if a value is an argument of the body or a result of one of its ops."""
        maker = producer(value)
        return value in self._number_of if maker is None else key_of(maker) in self.position_of

    def is_indexed(self, value: ir.Value) -> bool:
        """Returns True if a value can be computed for any iteration at any time, at little cost."""
        if not self.is_inside(value):
            return True
        number = self.argument_number(value)
        if number is not None:
            return number in self.invariant or number in self.steps
        maker = producer(value)
        return maker is not None and key_of(maker) in self._indexed

    def is_moving(self, value: ir.Value) -> bool:
        """Returns True if an indexed value differs between iterations."""
        return value in self._moving

    def is_placed(self, op: ir.Operation) -> bool:
        """Returns True if an op is placed in its iteration, because it is not indexed."""
        return key_of(op) not in self._indexed

    def is_costly(self, op: ir.Operation) -> bool:
        """Returns True if an op takes time that could overlap other ops, or has an effect."""
        return op.name in COSTLY or self.effects.has_effect(op)

    def communicates(self, op: ir.Operation) -> bool:
        """Returns True if an op, or one in its regions, is a collective or a transfer."""
        if not len(op.regions):
            return self._classify(op) is not None
        communicates = False

        def visit(inner: ir.Operation) -> ir.WalkResult:
            nonlocal communicates
            communicates = communicates or self._classify(inner) is not None
            return ir.WalkResult.INTERRUPT if communicates else ir.WalkResult.ADVANCE

        walk(op, visit)
        return communicates

    def needed_by(self, ops: Iterable[ir.Operation]) -> list[ir.Operation]:
        """Returns these ops and all placed ones that they depend on, in order.

        They include ops that are needed from earlier iterations. A barrier that passes on an
        indexed value is left out.
        """
        pending = [value for op in ops for value in self.reads(op)]
        reached = {key_of(op) for op in ops}
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
            if maker is not None and key_of(maker) not in reached:
                reached.add(key_of(maker))
                pending.extend(self.reads(maker))
        return self._in_order(reached)

    def depending_on(self, ops: Iterable[ir.Operation], *, later: bool) -> list[ir.Operation]:
        """Returns these ops and all that depend on them; `later`: across iterations, too."""
        pending: list[ir.Value] = [value for op in ops for value in op.results]
        reached = {key_of(op) for op in ops}
        seen: set[ir.Value] = set()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            if later:
                pending.extend(self.arguments[i] for i in self.carries_of(value))
            for user in self.users.get(value, ()):
                if key_of(user) not in reached:
                    reached.add(key_of(user))
                    pending.extend(user.results)
        return self._in_order(reached)

    def _in_order(self, keys: set[Key]) -> list[ir.Operation]:
        return [self.ops[i] for i in sorted(self.position_of[key] for key in keys)]

    def _note_indexed(self, op: ir.Operation) -> None:
        reads = self.reads(op)
        if op.name == BARRIER:
            for operand, result in zip(op.operands, op.results, strict=True):
                source = self.behind_barrier.get(operand, operand)
                if self.is_indexed(source):
                    self.behind_barrier[result] = source
        if not len(op.results) or not all(self.is_indexed(value) for value in reads):
            return
        moves = any(value in self._moving for value in reads)
        if self.is_costly(op) or not op.name.startswith(_COPIED_AT_WILL) or self.communicates(op):
            return
        if moves and op.name not in FORMATTING:  # arithmetic is cheap on few elements
            shapes = [static_shape(result.type) for result in op.results]
            is_small = all(shape is not None and math.prod(shape) <= _FEW for shape in shapes)
            if len(op.regions) or not is_small:
                return
        self._indexed.add(key_of(op))
        if moves:
            self._moving.update(op.results)
