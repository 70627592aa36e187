"""Sinks collectives whose results the loop never reads: only the last iteration's result matters.

    %norm = "stablehlo.all_reduce"(%x)        // in the loop, the next value of a carry
  ==>                                         // that nothing in the loop reads
    %norm = "stablehlo.all_reduce"(%x_of_the_last_iteration)    // after it

Values are bitwise the same as before: the same ops read the same operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import describe_op, maker_of
from stablehlo_tools.transforms.parts.pipeline_collectives.frame import OpenedLoop
from stablehlo_tools.transforms.parts.pipeline_collectives.movable_collectives import (
    is_static_tensor,
)


@dataclass(frozen=True, eq=False)
class LastValue:
    """`ops` that run once after the loop.

    `read`: the operands that the loop carries to them. `carries`: the carries that they compute.
    """

    ops: Sequence[ir.Operation]
    read: Sequence[ir.Value]
    carries: Sequence[int]


def last_value(body: LoopBody, ops: Sequence[ir.Operation], trips: int | None) -> LastValue | str:
    """Plans to run collectives, with all their dependents, on the last iteration's operands.

    Returns the reason if they cannot.
    """
    if trips is None:
        return "the loop is not known to run at all"
    if not trips:
        return "the loop never runs"
    for op in ops:
        if body.is_costly(op):
            return f"the {describe_op(op)} needs its result"
    carries = [n for op in ops for value in op.results for n in body.carries_of(value)]
    if not carries:
        return "the loop does not carry its result"
    reason = next(filter(None, (why_read(body, carry) for carry in carries)), None)
    if reason:
        return reason
    # The values that ops read from others in the iteration, each once, in order.
    made = {value for op in ops for value in op.results}
    read = (value for op in ops for value in body.reads(op))
    read = [v for v in dict.fromkeys(read) if v not in made and not body.is_indexed(v)]
    stranger = next((value for value in read if not is_static_tensor(value.type)), None)
    if stranger is not None:
        return f"it reads a {stranger.type} of the last iteration, which is not a static tensor"
    return LastValue(ops, read, carries)


def why_read(body: LoopBody, carry: int) -> str | None:
    """Says which op in the loop reads a carry of the previous iteration; None if none does."""
    argument = body.arguments[carry]
    users = body.users.get(argument, [])
    if users:
        return f"the next iteration reads its result, carry {carry}, in the {describe_op(users[0])}"
    if body.carries_of(argument):
        return f"carry {carry} passes its result on to carry {body.carries_of(argument)[0]}"
    if body.is_read_by_condition(carry):
        return f"the condition reads its result, carry {carry}"
    return None


_LAST = -1  # the frame after the loop counts from one past the last iteration


class LastWriter:
    """Carries the operands of the ops out of the loop, and runs the ops there."""

    def __init__(self, body: LoopBody, plan: LastValue) -> None:
        self._body = body
        self._plan = plan
        self.dead = list(dict.fromkeys(plan.carries))
        self.removed = plan.ops
        self._numbers: list[int] = []

    def take_carries(self, opened: OpenedLoop) -> None:
        """Reserves a carry for each operand that the loop does not carry anyway."""
        for value in self._plan.read:
            carried = self._body.carries_of(value)
            self._numbers.append(carried[0] if carried else opened.carry(value.type, 0))

    def write(self, opened: OpenedLoop) -> tuple[dict[int, ir.Value], list[ir.Operation]]:
        """Runs the ops once, for the last iteration."""
        frame = opened.after
        for number, value in zip(self._numbers, self._plan.read, strict=True):
            opened.hand_on(number, value)
            frame.bind(value, _LAST, opened.result(number))
        collectives: list[ir.Operation] = []
        for op in self._plan.ops:
            frame.run(op, _LAST)
            if self._body.communicates(op):
                collectives.append(maker_of(frame.get(op.results[0], _LAST)))
        ends = {number: self._body.ends[number] for number in self.dead}
        return {number: frame.get(end, _LAST) for number, end in ends.items()}, collectives
