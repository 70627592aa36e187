"""The integers that an index takes over the iterations of a counted loop."""

from __future__ import annotations

from itertools import pairwise

from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.scalars import scalar_function
from stablehlo_tools.analysis.trip_counts import (
    Known,
    constant_integer,
    is_integer_scalar,
    wrap,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import key_of, producer

_MOST = 1 << 16  # iterations that are gone through


class LoopIndices:
    """Evaluates the indexed integer scalars of a body for each of its `trips` iterations.

    `known` tells the integers that a scalar from outside of the loop is, one for each device.
    """

    def __init__(self, body: LoopBody, trips: int, known: Known) -> None:
        self._body = body
        self._trips = trips
        self._known = known
        self._found: dict[ir.Value, list[int] | None] = {}

    def of(self, value: ir.Value) -> list[int] | None:
        """A value in each iteration; None where that is not known or differs by device."""
        if self._trips > _MOST or not is_integer_scalar(value.type):
            return None
        for op in self._leading_to(value):
            self._found.setdefault(op.results[0], self._computed(op))
        return self._at(value)

    def _leading_to(self, value: ir.Value) -> list[ir.Operation]:
        """The ops of the body that an indexed value is computed by, in order."""
        body = self._body
        needed: dict[int, ir.Operation] = {}
        pending = [value]
        while pending:
            maker = producer(pending.pop())
            if maker is None or key_of(maker) not in body.position_of:
                continue
            position = body.position_of[key_of(maker)]
            if position not in needed and maker.results[0] not in self._found:
                needed[position] = maker
                pending += maker.operands
        return [needed[position] for position in sorted(needed)]

    def _at(self, value: ir.Value) -> list[int] | None:
        if value not in self._found:
            self._found[value] = self._given(value)
        return self._found[value]

    def _given(self, value: ir.Value) -> list[int] | None:
        """A carry, or a value from outside of the loop."""
        number = self._body.argument_number(value)
        outside = value if number is None else self._body.loop.operands[number]
        if number is not None and not self._body.is_indexed(value):
            return None
        start = constant_integer(outside)
        if start is None:
            starts = set(self._known(outside) or ())
            start = starts.pop() if len(starts) == 1 else None
        if start is None:
            return None
        step = self._body.steps.get(number, 0) if number is not None else 0
        return [wrap(start + i * step, value.type) for i in range(self._trips)]

    def _computed(self, op: ir.Operation) -> list[int] | None:
        result = op.results[0]
        constant = constant_integer(result)
        if constant is not None:
            return [constant] * self._trips
        compute = scalar_function(op)
        if compute is None or not is_integer_scalar(result.type):
            return None
        rows = [self._at(operand) for operand in op.operands]
        known = [row for row in rows if row is not None]
        if len(known) < len(rows):
            return None
        return [wrap(int(compute(*row)), result.type) for row in zip(*known, strict=True)]


def written_positions(op: ir.Operation, indices: LoopIndices) -> tuple[int, list[int]] | None:
    """The dimension along which a dynamic_update_slice moves, and where it starts each time.

    None where more than one dimension moves, or none, or it is not known how.
    """
    assert op.name == "stablehlo.dynamic_update_slice"
    moving: list[tuple[int, list[int]]] = []
    for dimension, start in enumerate(list(op.operands)[2:]):
        row = indices.of(start)
        if row is None:
            return None
        if any(place != row[0] for place in row):
            moving.append((dimension, row))
    return moving[0] if len(moving) == 1 else None


def is_monotonic(row: list[int]) -> bool:
    """Whether each number is above, or each below, the one before."""
    pairs = list(pairwise(row))
    return all(a < b for a, b in pairs) or all(a > b for a, b in pairs)
