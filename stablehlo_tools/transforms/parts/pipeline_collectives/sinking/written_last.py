"""Writes what a loop's last iteration leaves to be sent behind the loop."""

from __future__ import annotations

from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.last_values import LastValue
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.opened import OpenedLoop

_LAST = -1  # the frame behind the loop counts from one past the last iteration


class LastWriter:
    """Carries what the ops read out of the loop, and runs them there."""

    def __init__(self, body: LoopBody, plan: LastValue) -> None:
        self._body = body
        self._plan = plan
        self.dead = list(dict.fromkeys(plan.carries))
        self.removed = plan.ops
        self._numbers: list[int] = []

    def take_carries(self, opened: OpenedLoop) -> None:
        """What is read and no carry of the loop anyway gets a carry of its own."""
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
