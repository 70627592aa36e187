"""Evaluates the integers of loops in each iteration: indices, and what branches and loops decide.

`LoopIndices` has the indices of one counted loop. There, a carry is its initial value plus its step
times the iteration. `IterationValues` runs the loops around a branch or an inner loop. The loop of
a pipeline-parallel program, for example, decides by a row of a table that a rank holds, sliced at
the loop's counter. Such a decision has a series of values: one for each iteration of the loops
around it. It follows only from constants, device ids and counters, so devices with equal series
make the same decisions, even in separately compiled programs. Only loops that run equally often on
all devices are followed. `ControlValues` has all integers that steer one loop, on every device in
every iteration. `AlikeInGroups` finds values of loops that are the same on all devices of a
collective's groups, even if the values are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from stablehlo_tools.analysis.collectives import Collective, classify_communication
from stablehlo_tools.analysis.device_values import (
    COMPUTED,
    SCALAR_OPS,
    DeviceValues,
    Values,
    chosen_regions,
    evaluate_op,
    has_few_integers,
    scalar_result,
    scalar_rows,
)
from stablehlo_tools.analysis.loops import (
    Known,
    LoopBody,
    constant_integer,
    constant_step,
    count_trips,
    counter_of,
    is_integer_scalar,
    wrap,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BARRIER, DYNAMIC_UPDATE_SLICE, WHILE
from stablehlo_tools.dialect.traits import BRANCHES, COMPUTATIONS, DEVICE_IDS, Trait, ops_with
from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import terminator

# The decisions of each device, in each iteration.
Series = tuple[tuple[int, ...], ...]

_SAME_ON_GROUP = ops_with(Trait.SAME_ON_GROUP)
_MOST_TRIPS = 1 << 16  # of a loop whose iterations are evaluated
_LARGEST = 1 << 14  # elements of a tensor that is computed
_LARGEST_TABLE = 1 << 16  # elements of an operand of a loop that is controlled
_LARGEST_CONTROL = 1 << 12  # elements of a tensor that each of its iterations recomputes
_MOST_WORK = 200_000  # ops evaluated, for one outermost loop
_DEEPEST = 200  # ops in a row, so that Python's stack suffices

type _Known = dict[ir.Value, Values | None]
type _Series = dict[ir.Value | ir.Operation, list[tuple[int, ...]] | None]


class LoopIndices:
    """Evaluates the indexed integer scalars of a body for each of its `trips` iterations.

    `known` returns the integers of a scalar from outside of the loop, one for each device.
    """

    def __init__(self, body: LoopBody, trips: int, known: Known) -> None:
        self._body = body
        self._trips = trips
        self._known = known
        self._rows: dict[ir.Value, Values | None] = {}

    def values_by_iteration(self, value: ir.Value) -> list[int] | None:
        """Returns a value in each iteration; None if it is unknown or differs by device."""
        if self._trips > _MOST_TRIPS or not is_integer_scalar(value.type):
            return None
        for op in self._leading_to(value):
            self._rows.setdefault(op.results[0], self._compute_row(op))
        row = self._row_of(value)
        return None if row is None else [int(number) for number in row]

    def _leading_to(self, value: ir.Value) -> list[ir.Operation]:
        """Returns the ops of the body that compute an indexed value, in order."""
        body = self._body
        needed: dict[int, ir.Operation] = {}
        pending = [value]
        while pending:
            maker = producer(pending.pop())
            if maker is None or key_of(maker) not in body.position_of:
                continue
            position = body.position_of[key_of(maker)]
            if position not in needed and maker.results[0] not in self._rows:
                needed[position] = maker
                pending += maker.operands
        return [needed[position] for position in sorted(needed)]

    def _row_of(self, value: ir.Value) -> Values | None:
        if value not in self._rows:
            self._rows[value] = self._affine_row(value)
        return self._rows[value]

    def _affine_row(self, value: ir.Value) -> Values | None:
        """Returns a carry, or a value from outside of the loop, in each iteration."""
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
        numbers = [wrap(start + i * step, value.type) for i in range(self._trips)]
        return scalar_rows(numbers, value.type)

    def _compute_row(self, op: ir.Operation) -> Values | None:
        result = op.results[0]
        constant = constant_integer(result)
        if constant is not None:
            return scalar_rows([constant] * self._trips, result.type)
        if op.name not in SCALAR_OPS or not is_integer_scalar(result.type):
            return None
        rows = [self._row_of(operand) for operand in op.operands]
        known = [row for row in rows if row is not None]
        return scalar_result(op, known) if len(known) == len(rows) else None


def written_positions(op: ir.Operation, indices: LoopIndices) -> tuple[int, list[int]] | None:
    """Returns the dimension along which a dynamic_update_slice moves, and its starts.

    `indices` evaluates the starts, one for each iteration. None unless exactly one dimension moves
    and all starts are known.
    """
    assert op.name == DYNAMIC_UPDATE_SLICE
    moving: list[tuple[int, list[int]]] = []
    for dimension, start in enumerate(list(op.operands)[2:]):
        row = indices.values_by_iteration(start)
        if row is None:
            return None
        if any(place != row[0] for place in row):
            moving.append((dimension, row))
    return moving[0] if len(moving) == 1 else None


def is_monotonic(row: list[int]) -> bool:
    """Returns True if the numbers strictly increase or strictly decrease."""
    pairs = list(pairwise(row))
    return all(a < b for a, b in pairs) or all(a > b for a, b in pairs)


class _TooManyIterationsError(Exception):
    """The loop has too many iterations to follow."""


class IterationValues:
    """The series of the branches and loops of a program that its devices run.

    `outside` returns a small integer tensor that is computed outside of all loops, with a row for
    each device or one for all; None if it is unknown.
    """

    def __init__(self, devices: int, outside: Callable[[ir.Value], Values | None]) -> None:
        self._devices = devices
        self._outside = outside
        self._series: dict[ir.Value | ir.Operation, _Series] = {}

    def series(self, op: ir.Operation) -> Series | None:
        """Returns the decisions of a branch (the region) or an inner loop (its trips).

        None if they are unknown, or if the op is in no loop.
        """
        outermost = _outermost_loop(op)
        if outermost is None:
            return None
        key = key_of(outermost)
        if key not in self._series:
            followed = _Followed(self._devices, self._outside)
            try:
                followed.loop(outermost, {})
            except _TooManyIterationsError:
                followed.series = {}
            self._series[key] = followed.series
        rows = self._series[key].get(key_of(op))
        if rows is None:
            return None
        return tuple(zip(*rows, strict=True)) if rows else ((),) * self._devices


class _Followed:
    """Runs one outermost loop, and computes only the small integers that decisions need."""

    def __init__(self, devices: int, outside: Callable[[ir.Value], Values | None]) -> None:
        self.series: _Series = {}
        self._devices = devices
        self._outside = outside
        self._work = 0

    def loop(self, loop: ir.Operation, around: _Known) -> None:
        """Follows a loop, given the known values around it."""
        trips = self._trips(loop, around)
        body = While(loop).body
        inner = list(_decision_ops(body))
        if not inner:
            return
        if trips is None or len(set(trips)) > 1:
            self._forget(inner)
            return
        carries = [self._cached_value(value, around) for value in loop.operands]
        for op in inner:
            self.series.setdefault(key_of(op), [])
        for _ in range(trips[0]):
            known = dict(around)
            known.update(zip(body.arguments, carries, strict=True))
            for op in inner:
                self._note(op, known)
            carries = [self._cached_value(value, known) for value in terminator(body).operands]

    def _note(self, op: ir.Operation, known: _Known) -> None:
        """Notes the decision of this iteration, and follows an inner loop."""
        self._spend()
        if op.name == WHILE:
            row = self._trips(op, known)
        else:
            index = self._cached_value(op.operands[0], known)
            row = None
            if index is not None and index.ndim == 1:
                taken = np.broadcast_to(chosen_regions(op, index), (self._devices,))
                row = tuple(map(int, taken))
        rows = self.series[key_of(op)]
        if row is None:
            self.series[key_of(op)] = None
        elif rows is not None:
            rows.append(row)
        if op.name == WHILE:
            self.loop(op, known)

    def _forget(self, ops: Sequence[ir.Operation]) -> None:
        for op in ops:
            self.series[key_of(op)] = None
            if op.name == WHILE:
                self._forget(list(_decision_ops(While(op).body)))

    def _trips(self, loop: ir.Operation, known: _Known) -> tuple[int, ...] | None:
        def integers(value: ir.Value) -> tuple[int, ...] | None:
            scalar = self._cached_value(value, known)
            return None if scalar is None or scalar.ndim != 1 else tuple(int(n) for n in scalar)

        trips = count_trips(loop, integers)
        if isinstance(trips, str):
            return None
        return trips.trips * self._devices if len(trips.trips) == 1 else trips.trips

    def _cached_value(self, value: ir.Value, known: _Known, depth: int = _DEEPEST) -> Values | None:
        if value in known:
            return known[value]
        known[value] = self._compute_value(value, known, depth - 1) if depth else None
        return known[value]

    def _compute_value(self, value: ir.Value, known: _Known, depth: int) -> Values | None:
        if not has_few_integers(value.type, _LARGEST):
            return None
        op = producer(value)
        around = ir.BlockArgument(value).owner.owner.operation if op is None else op
        is_carried = op is None and around.name == WHILE
        if not is_carried and _outermost_loop(around) is None:
            return self._outside(value)
        if op is None:
            return None
        self._spend()
        if op.name == BARRIER:
            return self._cached_value(op.operands[ir.OpResult(value).result_number], known, depth)
        if op.name not in COMPUTED:
            return None
        return evaluate_op(op, [self._cached_value(v, known, depth) for v in op.operands])

    def _spend(self) -> None:
        self._work += 1
        if self._work > _MOST_WORK:
            raise _TooManyIterationsError


def _outermost_loop(op: ir.Operation) -> ir.Operation | None:
    """Returns the outermost loop whose body contains an op; None if there is none."""
    outermost: ir.Operation | None = None
    parent = op.parent
    while parent is not None:
        if parent.name == WHILE:
            outermost = parent
        parent = parent.parent
    return outermost


def _decision_ops(block: ir.Block) -> Iterator[ir.Operation]:
    """Yields the branches and loops of a block, including those in branches and computations."""
    for view in block.operations:
        op = view.operation
        if op.name == WHILE:
            yield op
        elif op.name in BRANCHES or op.name in COMPUTATIONS:
            if op.name in BRANCHES:
                yield op
            for region in op.regions:
                yield from _decision_ops(region.blocks[0])


class ControlValues:
    """The integers that steer a counted loop, on every device in every iteration.

    Tick counters, stage indices, table entries and comparisons of them follow from constants and
    from `partition_id`. They are computed here, iteration by iteration and for all devices at once.
    A value that depends on an argument of the program is not a control value.
    """

    def __init__(
        self, loop: ir.Operation, ticks: int, outside: Callable[[ir.Value], Values | None]
    ) -> None:
        self._outside = outside
        self._known: dict[ir.Value, Values | None] = {}
        body = While(loop).body
        self._arguments: list[ir.Value] = list(body.arguments)
        self._ends: list[ir.Value] = list(terminator(body).operands)
        self._inside = set[ir.Value](self._arguments)
        ops = list(_walk_into_branches(body))
        for op in ops:
            self._inside.update(op.results)
        entering = {i: self._from_outside(value) for i, value in enumerate(loop.operands)}
        known = {i for i, value in entering.items() if value is not None}
        steering, carried = self._steering(ops, known)
        self._rows: list[dict[ir.Value, Values]] = []
        for _ in range(ticks):
            row = {self._arguments[i]: v for i in carried if (v := entering[i]) is not None}
            for op in steering:
                if op.name in DEVICE_IDS:
                    result = outside(op.results[0])
                else:
                    result = evaluate_op(
                        op, (self._value_in_row(value, row) for value in op.operands)
                    )
                if result is not None:
                    row[op.results[0]] = result
            self._rows.append(row)
            entering = {i: self._value_in_row(self._ends[i], row) for i in carried}

    def value_at_tick(self, value: ir.Value, tick: int) -> Values | None:
        """Returns a value in an iteration; None if it is not a control value."""
        if value not in self._inside or tick < 0:
            return self._from_outside(value)
        return self._rows[tick].get(value)

    def constant(self, value: ir.Value) -> Values | None:
        """Returns a value that is the same in every iteration; None for any other."""
        first = self.value_at_tick(value, 0)
        if first is None or value not in self._inside:
            return first
        rows = [row.get(value) for row in self._rows]
        same = all(row is not None and np.array_equal(first, row) for row in rows)
        return first if same else None

    def _from_outside(self, value: ir.Value) -> Values | None:
        if value not in self._known:
            is_small = has_few_integers(value.type, _LARGEST_TABLE)
            self._known[value] = self._outside(value) if is_small else None
        return self._known[value]

    def _steering(
        self, ops: Sequence[ir.Operation], carried: set[int]
    ) -> tuple[list[ir.Operation], set[int]]:
        """Returns the ops and the carries that are control values.

        They are the greatest fixed point: a carry is dropped if its next value depends on an
        unknown value.
        """
        while True:
            known: set[ir.Value] = {self._arguments[i] for i in carried}
            for op in ops:
                if op.name in DEVICE_IDS or (
                    op.name in COMPUTED
                    and has_few_integers(op.results[0].type, _LARGEST_CONTROL)
                    and all(self._is_known(value, known) for value in op.operands)
                ):
                    known.add(op.results[0])
            left = {i for i in carried if self._is_known(self._ends[i], known)}
            if left == carried:
                return [op for op in ops if len(op.results) and op.results[0] in known], carried
            carried = left

    def _is_known(self, value: ir.Value, known: set[ir.Value]) -> bool:
        return value in known if value in self._inside else self._from_outside(value) is not None

    def _value_in_row(self, value: ir.Value, row: dict[ir.Value, Values]) -> Values | None:
        return row.get(value) if value in self._inside else self._from_outside(value)


def _walk_into_branches(block: ir.Block) -> Iterator[ir.Operation]:
    """Yields the ops of a block and of the branches in it, in order; not those of loops."""
    for view in block.operations:
        op = view.operation
        if op.name in BRANCHES:
            for region in op.regions:
                yield from _walk_into_branches(region.blocks[0])
        yield op


class AlikeInGroups:
    """Tells if values of loops are the same on all devices of each group of some collectives."""

    def __init__(self, values: DeviceValues) -> None:
        self._values = values

    def __call__(
        self, loop: ir.Operation, ops: Sequence[ir.Operation], values: Sequence[ir.Value]
    ) -> bool:
        """Returns True if values in a loop are the same in each group, in each iteration.

        The groups are those of the collectives among `ops`. The devices of a group must also run
        the loop equally often, so that they are in the same iteration.
        """
        counter = counter_of(loop)
        if isinstance(counter, str):
            return False
        classify = classify_communication(loop.context)
        found = [self._values.facts.groups(c) for op in ops if (c := classify(op)) is not None]
        groups = [list(group) for each in found if each is not None for group in each]
        steering = [counter.bound, loop.operands[counter.position]]
        return None not in found and self._are_alike([*steering, *values], groups)

    def picks_one(self, collective: Collective, value: ir.Value, *, by: bool) -> bool:
        """Returns True if one device of each group has only `by`, and the others never."""
        groups, known = self._values.facts.groups(collective), self._values.known_tensor(value)
        if groups is None or known is None or len(known) == 1:
            return False
        rows = known.reshape(len(known), -1) == by
        uniform = (rows.all(axis=1) == rows.any(axis=1)).all()
        return bool(uniform) and all(rows[list(group), 0].sum() == 1 for group in groups)

    def _are_alike(self, pending: list[ir.Value], groups: Sequence[list[int]]) -> bool:
        seen: set[ir.Value] = set()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            known = self._values.known_tensor(value)
            if known is not None:
                rows = known.reshape(len(known), -1)
                if len(rows) > 1 and any((rows[g] != rows[g[0]]).any() for g in groups):
                    return False
                continue
            # A value is the same on devices on which its operands are.
            maker = producer(value)
            if maker is not None:
                if maker.name in _SAME_ON_GROUP:
                    collective = classify_communication(maker.context)(maker)
                    found = None if collective is None else self._values.facts.groups(collective)
                    joined = [set(group) for group in found or ()]
                    if all(any(own.issubset(g) for g in joined) for own in map(set, groups)):
                        continue
                if maker.name not in COMPUTED:
                    return False
                pending += maker.operands
                continue
            owner = ir.BlockArgument(value).owner.owner.operation
            number = ir.BlockArgument(value).arg_number
            if owner.name != WHILE:
                return False
            body = While(owner).body
            argument, end = body.arguments[number], terminator(body).operands[number]
            if end != argument and constant_step(end, argument) is None:
                return False
            pending.append(owner.operands[number])
        return True
