"""Constants with which a program compares positions or counts: windows, capacities, strides.

    %d = subtract %i, %j;   compare LT, %d, 1024        ==>  1024, of the positions %i and %j
    %w = subtract %i, 1024; compare GT, %j, %w          ==>  -1024, of the same

A twin keeps the positions around them, so that a comparison has both outcomes there. It counts the
outcomes while it runs. A constant with only one outcome has lost its meaning at the reduced size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.argument_ranges import RangeOrigins
from stablehlo_tools.analysis.loops import comparison_direction
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integer, integers
from stablehlo_tools.dialect.names import ADD, COMPARE, CONVERT, IOTA, SHARDING_CONSTRAINT, SUBTRACT
from stablehlo_tools.dialect.traits import CARRIERS, Trait, full_names, ops_with, ops_with_any
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.values import describe_op, maker_of, producer, splat_of
from stablehlo_tools.ir.walk import FUNCTION
from stablehlo_tools.verify.exact.entered_branches import OUTCOMES
from stablehlo_tools.verify.twin.extents import TwinExtent
from stablehlo_tools.verify.twin.relations import TwinDimensions

_DECIDING = full_names("maximum minimum remainder divide")
_MOVED = ops_with(Trait.LAYOUT) | {CONVERT, SHARDING_CONSTRAINT}
_COUNTING = full_names("reduce reduce_window scatter dot_general")
_TAKING = ops_with(Trait.PIECE)
_MIXING = ops_with_any(Trait.BITWISE | Trait.SHIFT)  # their results are random bits, not positions


@dataclass(frozen=True)
class ComparedConstant:
    """An integer with which an op compares the difference of two operands.

    The difference depends on positions of `extents`. `is_open`: both outcomes are possible at full
    size."""

    number: int
    distance: float  # where the outcome changes, from 0; between two integers except for EQ and NE
    direction: str
    op: ir.Operation
    places: tuple[int, int]
    extents: tuple[TwinExtent, ...]
    is_open: bool

    def __str__(self) -> str:
        return f"{self.number} in {describe_op(self.op)}"

    @property
    def positions(self) -> Iterator[tuple[TwinExtent, int]]:
        """Positions of the extents with differences on both sides of the constant."""
        near = range(math.ceil(self.distance) - 1, math.ceil(self.distance) + 2)
        return ((e, position) for e in self.extents for position in near if position < e.size)


def compared_constants(module: ir.Module, dims: TwinDimensions) -> tuple[ComparedConstant, ...]:
    """Finds the compared constants of a module without calls.

    Comparisons with -1 to 1 are left out: they test a sign, or the order of two positions."""
    origins = RangeOrigins(module)
    found: list[ComparedConstant] = []
    for op in origins.ops:
        if op.parent is None or op.parent.name not in CARRIERS | {FUNCTION}:
            continue  # it is in a reducer
        compared: list[tuple[str, tuple[int, int]]] = []
        if op.name == COMPARE:
            compared = [(comparison_direction(op), (0, 1))]
        elif op.name in _DECIDING:
            compared = [("LT", (0, 1))]
        elif op.name == "stablehlo.clamp":
            compared = [("LT", (1, 0)), ("GT", (1, 2))]
        for direction, pair in compared:
            sides = [_without_constant(op.operands[place]) for place in pair]
            number = sides[1][1] - sides[0][1]
            if abs(number) <= 1 or not _is_number(op.operands[pair[0]]):
                continue
            shift = {"LT": -0.5, "GE": -0.5, "LE": 0.5, "GT": 0.5}.get(direction, 0.0)
            distance = abs(number + shift)
            extents, bound = _positions_in([v for v, _ in sides if v is not None], origins, dims)
            is_size = any(abs(e.size - distance) == 0.5 for e in extents)  # a check of bounds
            is_open = distance < bound and not is_size
            found.append(ComparedConstant(number, distance, direction, op, pair, extents, is_open))
    return tuple(found)


def _without_constant(value: ir.Value) -> tuple[ir.Value | None, int]:
    """Splits integers into a value and the sum of the constants added to it.

    The value is None if the integers are constant."""
    op, number = producer(value), splat_of(value)
    if isinstance(number, int):
        return None, number
    if op is None or not _is_number(value):
        return value, 0
    if op.name in _MOVED:
        return _without_constant(op.operands[0])
    if op.name in (ADD, SUBTRACT):
        (one, first), (other, second) = map(_without_constant, op.operands)
        sign = 1 if op.name == ADD else -1
        if other is None or (one is None and sign == 1):
            return one if other is None else other, first + sign * second
    return value, 0


def _positions_in(
    values: Sequence[ir.Value], origins: RangeOrigins, dims: TwinDimensions
) -> tuple[tuple[TwinExtent, ...], float]:
    """Returns the extents whose positions or sizes the integers depend on, and a bound of them.

    The bound is the largest integer, if the integers are only positions."""
    found: dict[TwinExtent, None] = {}
    pending, seen, is_counted = list(values), set(values), False
    while pending:
        value = pending.pop()
        op, sources = producer(value), origins.forwarding_sources(value)
        if sources is not None:  # an argument or a changed loop carry has no bound
            changes = op is None and any(v != value for v in list(sources)[1:])
            is_counted |= changes or origins.argument(value) is not None
        elif op is None or op.name in _MIXING:
            continue
        else:
            sources = list(op.operands)[: 1 if op.name in _TAKING else None]
            if op.name == IOTA:
                found[dims.extents_of(value)[integer(op, "iota_dimension")].root] = None
            elif op.name in _COUNTING:
                counted = dims.extents_of(op.operands[0])
                along = integers(op, "dimensions", range(len(counted)))
                found.update((counted[d].root, None) for d in along)
                is_counted |= len(op.results) == 1
        fresh = [v for v in sources if v not in seen and _is_number(v)]
        seen.update(fresh)
        pending += fresh
    largest = math.prod(extent.size for extent in found) - 1
    return tuple(found), math.inf if found and is_counted else largest


def mark_outcomes(constants: Sequence[ComparedConstant]) -> None:
    """Adds a marked copy of each comparison, whose outcomes exact arithmetic counts."""
    for number, each in enumerate(constants):
        builder = Builder(ir.InsertionPoint(each.op), each.op.location)
        one, other = (each.op.operands[place] for place in each.places)
        if shape_of(one) != shape_of(other):
            other = builder.broadcast(other, shape_of(one), [])
        compare = maker_of(builder.compare(each.direction, one, other))
        compare.attributes[OUTCOMES] = builder.integer(number)


def _is_number(value: ir.Value) -> bool:
    type_ = value.type
    element = type_.element_type if isinstance(type_, ir.RankedTensorType) else None
    return isinstance(element, ir.IntegerType) and element.width > 1
