"""How branches and loops inside of loops are decided, iteration by iteration, on each device.

A pipeline's loop decides by the row of a table that a rank holds, cut out at the loop's counter.
Such a decision has no one value, but a series: its value in each iteration of the loops around it.
It follows from constants, device ids and counters alone, so that devices with equal series decide
alike whoever compiled their programs. Loops are followed that run equally often on all devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stablehlo_tools.analysis.device_arithmetic import COMPUTED, Values, apply, element_dtype
from stablehlo_tools.analysis.trip_counts import counted
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import BRANCHES, COMPUTATIONS
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.values import key_of, producer

# What is decided, for each device, in each iteration.
Series = tuple[tuple[int, ...], ...]

_BARRIER = "stablehlo.optimization_barrier"
_LARGEST = 1 << 14  # elements of a tensor that is computed
_MOST_WORK = 200_000  # ops evaluated, for one outermost loop
_DEEPEST = 200  # ops in a row, so that Python's stack suffices

type _Known = dict[ir.Value, Values | None]
type _Found = dict[ir.Value | ir.Operation, list[tuple[int, ...]] | None]


class _TooMuchWorkError(Exception):
    """The loop has too many iterations to follow."""


class IterationValues:
    """The series of the branches and loops of a program that its devices run.

    `outside` tells a small integer tensor that is made outside of all loops, with a row for each
    device or one for all; None where it is not known.
    """

    def __init__(self, devices: int, outside: Callable[[ir.Value], Values | None]) -> None:
        self._devices = devices
        self._outside = outside
        self._found: dict[ir.Value | ir.Operation, _Found] = {}

    def series(self, op: ir.Operation) -> Series | None:
        """What decides a branch (the region taken) or a loop (its trips) that stands in a loop."""
        outermost = _outermost_loop(op)
        if outermost is None:
            return None
        key = key_of(outermost)
        if key not in self._found:
            followed = _Followed(self._devices, self._outside)
            try:
                followed.loop(outermost, {})
            except _TooMuchWorkError:
                followed.found = {}
            self._found[key] = followed.found
        rows = self._found[key].get(key_of(op))
        if rows is None:
            return None
        return tuple(zip(*rows, strict=True)) if rows else ((),) * self._devices


class _Followed:
    """Runs one outermost loop, of all that it computes only the small integers that are asked."""

    def __init__(self, devices: int, outside: Callable[[ir.Value], Values | None]) -> None:
        self.found: _Found = {}
        self._devices = devices
        self._outside = outside
        self._work = 0

    def loop(self, loop: ir.Operation, around: _Known) -> None:
        """Follows a loop, given what is known around it."""
        trips = self._trips(loop, around)
        body = loop.regions[1].blocks[0]
        inner = list(_decided(body))
        if not inner:
            return
        if trips is None or len(set(trips)) > 1:
            self._forget(inner)
            return
        carries = [self._of(value, around) for value in loop.operands]
        for op in inner:
            self.found.setdefault(key_of(op), [])
        for _ in range(trips[0]):
            known = dict(around)
            known.update(zip(body.arguments, carries, strict=True))
            for op in inner:
                self._note(op, known)
            carries = [self._of(value, known) for value in terminator(body).operands]

    def _note(self, op: ir.Operation, known: _Known) -> None:
        """Notes what is decided in this iteration, and follows an inner loop."""
        self._spend()
        row = self._trips(op, known) if op.name == WHILE else self._chosen(op, known)
        rows = self.found[key_of(op)]
        if row is None:
            self.found[key_of(op)] = None
        elif rows is not None:
            rows.append(row)
        if op.name == WHILE:
            self.loop(op, known)

    def _forget(self, ops: Sequence[ir.Operation]) -> None:
        for op in ops:
            self.found[key_of(op)] = None
            if op.name == WHILE:
                self._forget(list(_decided(op.regions[1].blocks[0])))

    def _trips(self, loop: ir.Operation, known: _Known) -> tuple[int, ...] | None:
        def integers(value: ir.Value) -> tuple[int, ...] | None:
            found = self._of(value, known)
            return None if found is None or found.ndim != 1 else tuple(int(n) for n in found)

        found = counted(loop, integers)
        if isinstance(found, str):
            return None
        return found.trips * self._devices if len(found.trips) == 1 else found.trips

    def _chosen(self, branch: ir.Operation, known: _Known) -> tuple[int, ...] | None:
        found = self._of(branch.operands[0], known)
        if found is None or found.ndim != 1:
            return None
        if branch.name == "stablehlo.if":
            taken = np.where(found, 0, 1)
        else:
            last = len(branch.regions) - 1
            taken = np.where((found < 0) | (found > last), last, found)
        return tuple(int(n) for n in np.broadcast_to(taken, (self._devices,)))

    def _of(self, value: ir.Value, known: _Known, depth: int = _DEEPEST) -> Values | None:
        if value in known:
            return known[value]
        known[value] = self._computed(value, known, depth - 1) if depth else None
        return known[value]

    def _computed(self, value: ir.Value, known: _Known, depth: int) -> Values | None:
        dtype = element_dtype(value.type)
        if dtype is None or math.prod(ir.RankedTensorType(value.type).shape) > _LARGEST:
            return None
        op = producer(value)
        if op is None or _outermost_loop(op) is None:
            return self._outside(value) if op is not None or not _is_carried(value) else None
        self._spend()
        if op.name == _BARRIER:
            return self._of(op.operands[ir.OpResult(value).result_number], known, depth)
        if op.name not in COMPUTED:
            return None
        operands = [self._of(operand, known, depth) for operand in op.operands]
        arrays = [operand for operand in operands if operand is not None]
        if len(arrays) != len(operands):
            return None
        result = apply(op, arrays)
        return None if result is None else result.astype(dtype, copy=False)

    def _spend(self) -> None:
        self._work += 1
        if self._work > _MOST_WORK:
            raise _TooMuchWorkError


def _outermost_loop(op: ir.Operation) -> ir.Operation | None:
    """The outermost loop whose body an op stands in; None for one that stands in none."""
    found: ir.Operation | None = None
    parent = op.parent
    while parent is not None:
        if parent.name == WHILE:
            found = parent
        parent = parent.parent
    return found


def _is_carried(value: ir.Value) -> bool:
    """Whether an argument of a block is one of a loop, or stands in one."""
    owner = ir.BlockArgument(value).owner.owner.operation
    return owner.name == WHILE or _outermost_loop(owner) is not None


def _decided(block: ir.Block) -> Iterator[ir.Operation]:
    """The branches and loops of a block, those in branches and computations too, in order."""
    for view in block.operations:
        op = view.operation
        if op.name == WHILE:
            yield op
        elif op.name in BRANCHES or op.name in COMPUTATIONS:
            if op.name in BRANCHES:
                yield op
            for region in op.regions:
                yield from _decided(region.blocks[0])
