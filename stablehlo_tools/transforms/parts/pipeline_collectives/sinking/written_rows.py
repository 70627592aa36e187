"""Writes buffers of what a loop's iterations send, and the collectives of all rows behind it."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.opened import (
    OpenedLoop,
    build_at,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.stacked_ops import (
    captured_by,
    run_stacked,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.stacking import (
    UPDATE,
    Stacked,
    Store,
)


class RowsWriter:
    """Stacks what the ops read, in rows as those that they wrote, and runs them on the stack."""

    def __init__(self, body: LoopBody, plan: Stacked) -> None:
        self._body = body
        self._plan = plan
        self.dead = [store.carry for store in plan.stores]
        self.removed = [*plan.ops, *(store.op for store in plan.stores)]
        self._numbers: list[int] = []

    def take_carries(self, opened: OpenedLoop) -> None:
        """A buffer for each value that is stacked, the old ones first."""
        for value in self._plan.read:
            shape = [self._plan.trips, *_row(value)[1:]]
            kind = ir.RankedTensorType.get(shape, element_of(value), loc=self._body.loop.location)
            number = opened.carry_of_rows(value, self._plan.stores[0].rows, kind)
            self._numbers.append(number)

    def write(self, opened: OpenedLoop) -> tuple[dict[int, ir.Value], list[ir.Operation]]:
        """Writes rows in the body, and all else behind the loop."""
        trips = self._plan.trips
        known: dict[ir.Value, ir.Value] = {}
        for number, value in zip(self._numbers, self._plan.read, strict=True):
            if not opened.is_handed_on(number):
                opened.hand_on(number, self._with_row(opened, number, value))
            builder = build_at(opened, opened.new.location)
            whole = [trips, *shape_of(value)]
            known[value] = _reshaped(builder, opened.result(number), whole)
        collectives: list[ir.Operation] = []
        for op in self._plan.ops:
            known.update(zip(op.results, self._run(opened, op, known), strict=True))
            if self._body.communicates(op):
                collectives.append(maker_of(known[op.results[0]]))
        results: dict[int, ir.Value] = {}
        for store in self._plan.stores:
            builder = build_at(opened, store.op.location)
            results[store.carry] = self._stored(builder, store, known[store.op.operands[1]])
        return results, collectives

    def _stored(self, builder: Builder, store: Store, rows: ir.Value) -> ir.Value:
        """What a store's buffer is behind the loop, with all the rows that it wrote."""
        whole = shape_of(store.op.results[0])
        written = _reshaped(builder, rows, [self._plan.trips, *whole[1:]])
        if whole[0] == self._plan.trips:
            return written
        index = element_of(store.op.operands[2])
        starts = [builder.splat(n, [], index) for n in (store.first, *[0] * (len(whole) - 1))]
        before = self._body.loop.operands[store.carry]
        name = UPDATE.removeprefix("stablehlo.")
        return builder.op(name, [before, written, *starts], before.type)

    def _with_row(self, opened: OpenedLoop, number: int, value: ir.Value) -> ir.Value:
        """A buffer with the value of this iteration in its place."""
        store = self._plan.stores[0]
        builder = Builder(opened.inside, store.op.location)
        row = _reshaped(builder, value, _row(value))
        first = store.op.operands[2]
        if store.first:
            lowest = builder.splat(store.first, [], element_of(first))
            first = builder.op("subtract", [first, lowest], first.type)
        rest = len(_row(value)) - 1
        starts = [first] + [builder.splat(0, [], element_of(first))] * rest
        buffer = opened.argument(number)
        name = UPDATE.removeprefix("stablehlo.")
        return builder.op(name, [buffer, row, *starts], buffer.type)

    def _run(
        self, opened: OpenedLoop, op: ir.Operation, known: dict[ir.Value, ir.Value]
    ) -> list[ir.Value]:
        """Runs an op on stacked rows."""
        operands = list(op.operands)
        read = [
            (known[value], True) if value in known else (opened.after.get(value, 0), False)
            for value in operands
        ]
        inner = captured_by(self._body, op)
        captured = {value: opened.after.get(value, 0) for value in inner}
        return run_stacked(op, self._plan.trips, read, captured, opened.point)


def _row(value: ir.Value) -> Sequence[int]:
    """The shape of a value as one row: with a first dimension of size 1."""
    shape = shape_of(value)
    return shape if shape[:1] == [1] else [1, *shape]


def _reshaped(builder: Builder, value: ir.Value, shape: Sequence[int]) -> ir.Value:
    return value if shape_of(value) == list(shape) else builder.reshape(value, shape)
