"""The integers that steer a loop, on every device in every iteration.

Tick counters, indices of stages, entries of tables and comparisons of them follow from constants
and from `partition_id`: they are computed here, iteration by iteration and for all devices at once.
What depends on an argument of the program is no control.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from stablehlo_tools.analysis.device_arithmetic import COMPUTED, Values, apply, element_dtype
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import terminator

_LARGEST = 1 << 16  # elements
_LARGEST_VARYING = 1 << 12  # elements, of what every iteration computes anew
_IDS = frozenset({"stablehlo.partition_id", "stablehlo.replica_id"})

Outside = Callable[[ir.Value], Values | None]


class Control:
    """The control of a counted loop. Arrays have a leading dimension for the devices, of size 1
    where all hold the same."""

    def __init__(self, loop: ir.Operation, ticks: int, outside: Outside) -> None:
        self._outside = outside
        self._known: dict[ir.Value, Values | None] = {}
        body = loop.regions[1].blocks[0]
        self._arguments: list[ir.Value] = list(body.arguments)
        self._ends: list[ir.Value] = list(terminator(body).operands)
        self._inside = set[ir.Value](self._arguments)
        self._ops = list(_nested(body))
        for op in self._ops:
            self._inside.update(op.results)
        self._entering = [self._from_outside(value) for value in loop.operands]
        self._carried = self._steering()
        self._rows: list[dict[ir.Value, Values]] = []
        self._run(ticks)

    def of(self, value: ir.Value, tick: int) -> Values | None:
        """A value in an iteration; None where it is no control."""
        if value not in self._inside or tick < 0:
            return self._from_outside(value)
        return self._rows[tick].get(value)

    def constant(self, value: ir.Value) -> Values | None:
        """A value that is the same in every iteration; None for any other."""
        first = self.of(value, 0)
        if first is None or value not in self._inside:
            return first
        return first if all(_same(first, row.get(value)) for row in self._rows) else None

    def _from_outside(self, value: ir.Value) -> Values | None:
        if value not in self._known:
            self._known[value] = self._outside(value) if _size(value) <= _LARGEST else None
        return self._known[value]

    def _steering(self) -> set[int]:
        """The carries that are control: the most that can be so together."""
        carried = {i for i, known in enumerate(self._entering) if known is not None}
        while True:
            known: set[ir.Value] = {self._arguments[i] for i in carried}
            for op in self._ops:
                if self._is_computed(op, known):
                    known.add(op.results[0])
            left = {i for i in carried if self._is_known(self._ends[i], known)}
            if left == carried:
                self._steered = [
                    op for op in self._ops if len(op.results) and op.results[0] in known
                ]
                return carried
            carried = left

    def _is_known(self, value: ir.Value, known: set[ir.Value]) -> bool:
        if value in self._inside:
            return value in known
        return self._from_outside(value) is not None

    def _is_computed(self, op: ir.Operation, known: set[ir.Value]) -> bool:
        if op.name in _IDS:
            return True
        if op.name not in COMPUTED or element_dtype(op.results[0].type) is None:
            return False
        if _size(op.results[0]) > _LARGEST_VARYING:
            return False
        return all(self._is_known(value, known) for value in op.operands)

    def _run(self, ticks: int) -> None:
        entering = {i: self._entering[i] for i in self._carried}
        for _ in range(ticks):
            row = {self._arguments[i]: v for i, v in entering.items() if v is not None}
            for op in self._steered:
                result = self._computed(op, row)
                if result is not None:
                    row[op.results[0]] = result
            self._rows.append(row)
            entering = {i: self._at(self._ends[i], row) for i in self._carried}

    def _at(self, value: ir.Value, row: dict[ir.Value, Values]) -> Values | None:
        return row.get(value) if value in self._inside else self._from_outside(value)

    def _computed(self, op: ir.Operation, row: dict[ir.Value, Values]) -> Values | None:
        if op.name in _IDS:
            return self._outside(op.results[0])
        operands = [self._at(value, row) for value in op.operands]
        known = [operand for operand in operands if operand is not None]
        result = apply(op, known) if len(known) == len(operands) else None
        kind = element_dtype(op.results[0].type)
        return result.astype(kind) if result is not None and kind is not None else None


def _same(one: Values, other: Values | None) -> bool:
    return other is not None and one.shape == other.shape and bool((one == other).all())


def _nested(block: ir.Block) -> Iterator[ir.Operation]:
    """The ops of a block and of the branches in it, in order; not those of loops."""
    for view in block.operations:
        op = view.operation
        if op.name in ("stablehlo.if", "stablehlo.case"):
            for region in op.regions:
                yield from _nested(region.blocks[0])
        yield op


def _size(value: ir.Value) -> int:
    kind = value.type
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        return _LARGEST + 1
    return prod(kind.shape)
