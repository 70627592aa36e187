"""Puts the ops of a block into an order, and fences between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import key_of, maker_of
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.transforms.parts.schedule_overlap.fences import (
    Anchor,
    BlockPlan,
    Fence,
    place_of,
)
from stablehlo_tools.transforms.parts.schedule_overlap.scheduled_block import ScheduledBlock

_BARRIER = "stablehlo.optimization_barrier"

type _Takes = Callable[[ir.Operation], bool]


def write_block(block: ScheduledBlock) -> None:
    """Puts a block into the order of its schedule, with the fences that hold it."""
    write_order(block.plan)
    write_fences(block.plan, block.fences, block.anchors)


def write_order(plan: BlockPlan) -> None:
    """Moves the ops of a block into the order of its plan."""
    end = terminator(plan.block)
    for op in plan.order:
        op.move_before(end)


def write_fences(plan: BlockPlan, fences: Sequence[Fence], anchors: Sequence[Anchor]) -> int:
    """Writes the fences of a block that is in the order of its plan; how many barriers it took."""
    writer = _BlockWriter(plan, anchors)
    return sum(writer.write(fence) for fence in fences)


class _BlockWriter:
    """Writes barriers into one block; places are those of the plan."""

    def __init__(self, plan: BlockPlan, anchors: Sequence[Anchor]) -> None:
        self._places = {key_of(op): place for place, op in enumerate(plan.order)}
        self._now: dict[ir.Value, ir.Value] = {}  # what stands for values that went through
        self._before = {key_of(a.op): a.place for a in anchors if a.operands}

    def write(self, fence: Fence) -> bool:
        """Writes a barrier where it holds anything."""
        anchor = fence.anchor
        through = [
            (value, takes)
            for value, takes in self._through(fence)
            if any(takes(use.owner.operation) for use in value.uses)
        ]
        values = list(dict.fromkeys(value for value, _ in through))
        if len(values) < 2:
            return False
        behind = not anchor.operands
        point = ir.InsertionPoint.after(anchor.op) if behind else ir.InsertionPoint(anchor.op)
        barrier = ir.Operation.create(
            _BARRIER,
            results=[value.type for value in values],
            operands=values,
            loc=anchor.op.location,
            ip=point,
        )
        for value, result in zip(values, barrier.results, strict=True):
            self._now[value] = result
            self._hand_over(value, result, [takes for other, takes in through if other == value])
        last = barrier
        for op in fence.begins:
            op.move_after(last)
            self._places[key_of(op)] = anchor.served_from
            last = op
        return True

    def _through(self, fence: Fence) -> list[tuple[ir.Value, _Takes]]:
        """What goes through a barrier, and who takes it from there."""
        anchor = fence.anchor
        begun = {key_of(op) for op in fence.begins}
        through: list[tuple[ir.Value, _Takes]] = []
        if not anchor.operands:
            through.append((anchor.op.results[0], lambda op: True))
        taken = self._anchored_from(anchor)
        through += [(anchor.op.operands[number], taken) for number in anchor.operands]
        for op in fence.begins:
            through += [(operand, lambda op: key_of(op) in begun) for operand in op.operands]
        through += [
            (self._current(value), self._from(anchor.served_from)) for value in fence.awaits
        ]
        return through

    def _current(self, value: ir.Value) -> ir.Value:
        while value in self._now:
            value = self._now[value]
        return value

    def _anchored_from(self, anchor: Anchor) -> _Takes:
        """The op of an anchor, and those of later anchors."""
        before, place, own = self._before, anchor.place, key_of(anchor.op)
        return lambda op: before.get(key_of(op), -1) >= place or key_of(op) == own

    def _from(self, place: int) -> _Takes:
        def takes(op: ir.Operation) -> bool:
            at = place_of(op, self._places)
            return at is None or at >= place  # none: the last op

        return takes

    def _hand_over(self, value: ir.Value, result: ir.Value, takers: Sequence[_Takes]) -> None:
        barrier = key_of(maker_of(result))
        uses = [(use.owner.operation, use.operand_number) for use in value.uses]
        for op, number in uses:
            if key_of(op) != barrier and any(takes(op) for takes in takers):
                self._set_operand(op, number, result)

    def _set_operand(self, op: ir.Operation, number: int, value: ir.Value) -> None:
        """An op without results stands for itself, and with other operands for another one."""
        place = None if len(op.results) else self._places.pop(op, None)
        op.operands[number] = value
        if place is not None:
            self._places[op] = place
