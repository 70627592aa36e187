"""How often a `while` runs, where a counter with known start, step and end says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.values import producer

_CONSTANT = "stablehlo.constant"
_COMPARE = "stablehlo.compare"
MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}


@dataclass(frozen=True)
class _Counter:
    """Carry `position` grows by `step` in each iteration."""

    position: int
    step: int


def trip_count(
    loop: ir.Operation, initial: Sequence[tuple[int, ...] | None]
) -> tuple[int, ...] | None:
    """How often the body runs, on each device; None where that is not understood.

    `initial[i]` are the values of carry i before the loop, one for each device, if known. Counters
    that would wrap around are not understood.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    compare = producer(terminator(condition).operands[0])
    if compare is None or compare.name != _COMPARE:
        return None
    direction = comparison_direction(compare)
    left, right = compare.operands
    counter = _counter(left, condition, body)
    if counter is None:
        left, right, direction = right, left, MIRRORED[direction]
        counter = _counter(left, condition, body)
    if counter is None or not is_integer_scalar(left.type):
        return None
    starts = initial[counter.position]
    bounds = _bounds(right, condition, body, initial)
    if starts is None or bounds is None:
        return None
    if len(bounds) == 1:
        bounds = bounds * len(starts)
    counts = [
        _iterations(direction, start, bound, counter.step, left.type)
        for start, bound in zip(starts, bounds, strict=True)
    ]
    known = [count for count in counts if count is not None]
    return tuple(known) if len(known) == len(counts) else None


def constant_integer(value: ir.Value) -> int | None:
    """The integer that a constant of one element holds."""
    maker = producer(value)
    if maker is None or maker.name != _CONSTANT or not is_integer_scalar(value.type):
        return None
    return int(np.array(ir.DenseElementsAttr(maker.attributes["value"])).ravel()[0])


def comparison_direction(compare: ir.Operation) -> str:
    """`LT`, `LE`, `GT`, `GE`, `EQ` or `NE`."""
    found = re.search(
        r"comparison_direction (\w+)", str(compare.attributes["comparison_direction"])
    )
    assert found is not None
    return found.group(1)


def is_integer_scalar(kind: ir.Type) -> bool:
    """Whether a type is a rank-0 tensor of integers or booleans."""
    return (
        isinstance(kind, ir.RankedTensorType)
        and kind.rank == 0
        and isinstance(kind.element_type, ir.IntegerType)
    )


def wrap(value: int, kind: ir.Type) -> int:
    """An integer as a scalar of the type holds it."""
    low, high = integer_range(kind)
    return (value - low) % (high - low + 1) + low


def integer_range(kind: ir.Type) -> tuple[int, int]:
    """The least and the greatest value of an integer scalar's type."""
    element = ir.IntegerType(ir.RankedTensorType(kind).element_type)
    if element.width == 1 or element.is_unsigned:
        return 0, (1 << element.width) - 1
    return -(1 << element.width - 1), (1 << element.width - 1) - 1


def _iterations(direction: str, start: int, bound: int, step: int, kind: ir.Type) -> int | None:
    if direction == "EQ":
        return 0 if start != bound else (1 if step else None)
    if direction == "NE":
        whole = step != 0 and (bound - start) % step == 0 and (bound - start) // step >= 0
        return (bound - start) // step if whole else (0 if start == bound else None)
    if direction in ("GT", "GE"):  # count down: the mirror image of counting up
        start, bound, step = -start, -bound, -step
    if direction in ("LE", "GE"):
        bound += 1
    if start >= bound:
        return 0
    if step <= 0:
        return None
    count = -((start - bound) // step)
    low, high = integer_range(kind)
    last = start + count * step
    if direction in ("GT", "GE"):
        last = -last
    return count if low <= last <= high else None


def _counter(value: ir.Value, condition: ir.Block, body: ir.Block) -> _Counter | None:
    """The carry that a value of the condition is, if each iteration adds a constant to it."""
    position = _position(value, condition)
    if position is None:
        return None
    end = terminator(body).operands[position]
    step = _step(end, body.arguments[position])
    return None if step is None else _Counter(position, step)


def _step(end: ir.Value, argument: ir.Value) -> int | None:
    """The constant k with `end == argument + k`."""
    total = 0
    while end != argument:
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


def _bounds(
    value: ir.Value,
    condition: ir.Block,
    body: ir.Block,
    initial: Sequence[tuple[int, ...] | None],
) -> tuple[int, ...] | None:
    """What a counter is compared with: one integer, or one for each device."""
    constant = constant_integer(value)
    if constant is not None:
        return (constant,)
    position = _position(value, condition)
    if position is None or terminator(body).operands[position] != body.arguments[position]:
        return None
    return initial[position]


def _position(value: ir.Value, block: ir.Block) -> int | None:
    if not isinstance(value.owner, ir.Block) or value.owner != block:
        return None
    return ir.BlockArgument(value).arg_number
