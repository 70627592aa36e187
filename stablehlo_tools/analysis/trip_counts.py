"""How often a `while` runs, where a counter with known start, step and end says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.integer_arithmetic import MIRRORED
from stablehlo_tools.dialect.names import COMPARE, CONSTANT
from stablehlo_tools.dialect.reducers import integer_bounds
from stablehlo_tools.ir.values import producer, unconstrained
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.ir.while_loop import is_invariant

_WRAPS = "its counter would wrap around before it meets its bound"
_FOR_EVER = "its counter does not move, so that it runs for ever"


Known = Callable[[ir.Value], Sequence[int] | None]


@dataclass(frozen=True)
class Counter:
    """Carry `position` grows by `step` in each iteration; the loop runs while it is below, above,
    … the bound.

    `direction` and `bound` are those of the comparison in the condition, the counter on its left.
    """

    position: int
    step: int
    direction: str
    bound: ir.Value


@dataclass(frozen=True)
class Counted:
    """A loop that runs a known number of times: where its counter starts, and how often it runs,
    on each device, or once where that is the same on all.
    """

    counter: Counter
    starts: tuple[int, ...]
    trips: tuple[int, ...]


def trip_count(
    loop: ir.Operation, initial: Sequence[tuple[int, ...] | None]
) -> tuple[int, ...] | None:
    """How often the body runs, on each device; None where that is not understood.

    `initial[i]` are the values of carry i before the loop, one for each device, if known. Counters
    that would wrap around are not understood.
    """
    known = dict(zip(loop.operands, initial, strict=True))
    result = counted(loop, known.get)
    return None if isinstance(result, str) else result.trips


def counted(loop: ir.Operation, known: Known) -> Counted | str:
    """How often a loop runs, or why that is not understood.

    `known` tells the integers that a scalar from outside of the loop is, one for each device.
    """
    counter = counter_of(loop)
    if isinstance(counter, str):
        return counter
    starts = known(loop.operands[counter.position])
    if starts is None:
        return "where its counter starts is not known before the run"
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


def counter_of(loop: ir.Operation) -> Counter | str:
    """What a loop's condition counts, or why that is not understood."""
    condition, body = (region.blocks[0] for region in loop.regions)
    compare = producer(unconstrained(terminator(condition).operands[0]))
    if compare is None or compare.name != COMPARE:
        return "its condition is not one comparison"
    direction = comparison_direction(compare)
    left, right = compare.operands
    counting = _counting_carry(left, condition, body)
    if counting is None:
        left, right, direction = right, left, MIRRORED[direction]
        counting = _counting_carry(left, condition, body)
    if counting is None:
        return "its condition compares no value that grows by a constant in each iteration"
    if not can_count(left.type):
        return "its counter is not an integer"
    return Counter(*counting, direction, right)


def constant_integer(value: ir.Value) -> int | None:
    """The integer that a constant of one element holds."""
    maker = producer(unconstrained(value))
    if maker is None or maker.name != CONSTANT or not is_integer_scalar(value.type):
        return None
    return int(np.array(ir.DenseElementsAttr(maker.attributes["value"])).ravel()[0])


def known_integer(value: ir.Value) -> tuple[int, ...] | None:
    """A constant integer scalar as what `counted` asks for: once, for it is the same on all
    devices."""
    number = constant_integer(value)
    return None if number is None else (number,)


def constant_trips(loop: ir.Operation) -> int | None:
    """How often a loop runs that counts from a constant to a constant; None for any other."""
    result = counted(loop, known_integer)
    return None if isinstance(result, str) else result.trips[0]


def comparison_direction(compare: ir.Operation) -> str:
    """`LT`, `LE`, `GT`, `GE`, `EQ` or `NE`."""
    return bindings.ComparisonDirectionAttr(compare.attributes["comparison_direction"]).value


def is_integer_scalar(type_: ir.Type) -> bool:
    """Whether a type is a rank-0 tensor of integers or booleans."""
    return (
        isinstance(type_, ir.RankedTensorType)
        and type_.rank == 0
        and isinstance(type_.element_type, ir.IntegerType)
    )


def can_count(type_: ir.Type) -> bool:
    """Whether a type is that of an integer scalar which adding one makes larger: no boolean."""
    if not is_integer_scalar(type_):
        return False
    return ir.IntegerType(ir.RankedTensorType(type_).element_type).width > 1


def wrap(value: int, type_: ir.Type) -> int:
    """An integer as a scalar of the type holds it."""
    low, high = integer_range(type_)
    return (value - low) % (high - low + 1) + low


def integer_range(type_: ir.Type) -> tuple[int, int]:
    """The least and the greatest value of an integer scalar's type."""
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
        last = -last
    return count if low <= last <= high else _WRAPS


def _counting_carry(value: ir.Value, condition: ir.Block, body: ir.Block) -> tuple[int, int] | None:
    """The carry that a value of the condition is, and what each iteration adds to it."""
    position = _position(value, condition)
    if position is None:
        return None
    step = constant_step(terminator(body).operands[position], body.arguments[position])
    return None if step is None else (position, step)


def constant_step(end: ir.Value, argument: ir.Value) -> int | None:
    """The constant k with `end == argument + k`."""
    total = 0
    while (end := unconstrained(end)) != argument:
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
    """What a counter is compared with: one integer, or one for each device."""
    constant = constant_integer(value)
    if constant is not None:
        return (constant,)
    condition = loop.regions[0].blocks[0]
    position = _position(value, condition)
    if position is None:
        maker = producer(value)
        is_outside = maker is None or maker.block != condition
        return known(value) if is_outside else None
    return known(loop.operands[position]) if is_invariant(loop, position) else None


def _position(value: ir.Value, block: ir.Block) -> int | None:
    value = unconstrained(value)
    if not isinstance(value.owner, ir.Block) or value.owner != block:
        return None
    return ir.BlockArgument(value).arg_number
