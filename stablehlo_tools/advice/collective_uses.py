"""Follows the values of collectives: to sums of loops and converts, and back to arguments."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from math import prod

from stablehlo_tools.analysis.loop_carries import is_accumulated
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    ADD,
    BARRIER,
    BROADCAST,
    CONVERT,
    DYNAMIC_UPDATE_SLICE,
    MANUAL_COMPUTATION,
    REDUCE,
    RESHAPE,
    SHARDING_CONSTRAINT,
    TRANSPOSE,
    WHILE,
)
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.traits import ELEMENTWISE, Trait, ops_with_any
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import producer, splat_of
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.ir.walk import FUNCTION, terminator
from stablehlo_tools.ir.while_loop import is_invariant

_REDUCING = frozenset({"stablehlo.all_reduce", "stablehlo.reduce_scatter"})
_SCALED = frozenset({"stablehlo.multiply", "stablehlo.divide"})
_MOVES = frozenset({RESHAPE, TRANSPOSE, "stablehlo.slice", BARRIER})
_SAME_VALUES = ops_with_any(Trait.LAYOUT | Trait.PIECE | Trait.RETYPE) | {
    BARRIER,
    SHARDING_CONSTRAINT,
    "stablehlo.all_gather",
}
_MOST_FOLLOWED = 12  # ops between a collective and the sum or the convert that reads it
_EXACT = frozenset({"maximum", "minimum"})  # reducers with equal results in any order
_SMALL = 64  # least ratio of operand to result elements for a result that is cheap to combine

type Number = ir.FloatType | ir.IntegerType


class AddedUp(enum.Enum):
    """The way in which a loop accumulates the results of a reduction."""

    DIRECTLY = "directly"  # in the loop of the reduction, at most after a convert
    FURTHER_OFF = "further off"  # after scaling, or stacked by an inner loop


def added_up(op: ir.Operation) -> AddedUp | None:
    """Returns how a loop accumulates a reduction's result; None if it has other uses or no sum."""
    if op.name not in _REDUCING:
        return None
    value, how = op.results[0], AddedUp.DIRECTLY
    for _ in range(_MOST_FOLLOWED):
        uses = list(value.uses)
        if len(uses) != 1:
            return None
        user, number = uses[0].owner.operation, uses[0].operand_number
        if user.name == ADD:
            other = user.operands[1 - number]
            body = other.owner
            if not isinstance(body, ir.Block) or body.owner.name != WHILE:
                return None
            end = terminator(body).operands[ir.BlockArgument(other).arg_number]
            return how if is_accumulated(end, other) else None
        stacked = user.name == DYNAMIC_UPDATE_SLICE and number == 1
        returned = user.name == "stablehlo.return" and user.parent.name == WHILE
        if user.name not in _MOVES | _SCALED | {CONVERT} and not stacked and not returned:
            return None
        if stacked or returned or user.name in _SCALED:
            how = AddedUp.FURTHER_OFF
        value = user.parent.operation.results[number] if returned else user.results[0]
    return None


def narrower_before(op: ir.Operation) -> ir.FloatType | None:
    """Returns the narrower float type that all operands were converted from, or None."""
    return _narrower([_converted_from(value) for value in op.operands], op)


def narrower_after(op: ir.Operation) -> ir.FloatType | None:
    """Returns the narrower float type that all uses of the results convert to, or None."""
    return _narrower([t for value in op.results for t in _converted_to(value, 0)], op)


def narrower_after_ops(op: ir.Operation) -> Number | None:
    """Returns the narrower type that all results are converted to after elementwise ops, or None.

    Max and min reductions of the results do not count, as devices can combine partial ones.
    """
    if op.name in _REDUCING:
        return None
    return _narrower([t for value in op.results for t in _converted_later(value, op, 0)], op)


def float_of(value: ir.Value) -> ir.FloatType | None:
    """Returns the element type of a tensor of real floats; None for other values."""
    element = element_of(value) if isinstance(value.type, ir.RankedTensorType) else None
    return element if isinstance(element, ir.FloatType) else None


def _narrower[T: Number](types: list[T | None], op: ir.Operation) -> T | None:
    """Returns the common type of `types`, if it is narrower than the collective's; else None."""
    wide = float_of(op.operands[0]) if len(op.operands) else None
    narrow = types[0] if len(set(types)) == 1 else None
    return narrow if narrow and wide and narrow.width < wide.width else None


def _converted_from(value: ir.Value) -> ir.FloatType | None:
    """Returns the float type before the convert that makes a value, looking through moves."""
    for _ in range(_MOST_FOLLOWED):
        op = producer(value)
        if op is None:
            return None
        if op.name == CONVERT:
            return float_of(op.operands[0])
        if op.name not in _MOVES or len(op.operands) != 1:
            return None
        value = op.operands[0]
    return None


def _converted_to(value: ir.Value, depth: int) -> Iterator[ir.FloatType | None]:
    """Yields the types that the uses of a value convert it to; None for any other use."""
    for use in value.uses:
        user = use.owner.operation
        if user.name == CONVERT:
            yield float_of(user.results[0])
        elif user.name in _MOVES and len(user.results) == 1 and depth < _MOST_FOLLOWED:
            yield from _converted_to(user.results[0], depth + 1)
        else:
            yield None


def _converted_later(
    value: ir.Value, collective: ir.Operation, depth: int
) -> Iterator[Number | None]:
    """Yields the narrower type of each convert after elementwise ops; None for other uses."""
    wide = float_of(collective.operands[0])
    for use in value.uses:
        user = use.owner.operation
        if user.name == REDUCE and len(user.results) == 1:
            before, after = (prod(shape_of(v)) for v in (user.operands[0], user.results[0]))
            if reducer_kind(Combining(user).combiner) not in _EXACT or _SMALL * after > before:
                yield None
            continue
        element = element_of(user.results[0]) if len(user.results) == 1 else None
        is_number = isinstance(element, ir.FloatType | ir.IntegerType)
        if user.name == CONVERT and is_number and wide and element.width < wide.width:
            yield element
        elif depth < _MOST_FOLLOWED and _is_on_each(user, use.operand_number):
            yield from _converted_later(user.results[0], collective, depth + 1)
        else:
            yield None


def _is_on_each(op: ir.Operation, operand: int) -> bool:
    """Returns True if an op computes each element from that of one operand and from scalars."""
    if op.name in _MOVES:
        return len(op.results) == 1
    others = [value for number, value in enumerate(op.operands) if number != operand]
    return op.name in ELEMENTWISE and all(
        not shape_of(maker.operands[0] if maker and maker.name == BROADCAST else value)
        or splat_of(value) is not None
        for value, maker in zip(others, map(producer, others), strict=True)
    )


def argument_behind(value: ir.Value) -> ir.Value | None:
    """Returns the argument of `main` that a value is a piece or a gather of; None without one.

    Looks through invariant loop carries and manual computations.
    """
    while True:
        op = producer(value)
        if op is not None:
            if op.name not in _SAME_VALUES or not op.operands:
                return None
            value = op.operands[0]
            continue
        argument = ir.BlockArgument(value)
        owner, number = argument.owner.owner.operation, argument.arg_number
        if owner.name == MANUAL_COMPUTATION or (
            owner.name == WHILE and is_invariant(owner, number)
        ):
            value = owner.operands[number]
        else:
            return value if owner.name == FUNCTION else None
