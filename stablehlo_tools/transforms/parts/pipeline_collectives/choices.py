"""What becomes of each collective of a loop, and the writing of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.transforms.parts.pipeline_collectives.candidates import Move
from stablehlo_tools.transforms.parts.pipeline_collectives.stages import (
    Stages,
    assign_stages,
    broken_dependence,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.survey import LoopSurvey


@dataclass(frozen=True)
class Choice:
    """A choice of which collectives of a loop, by their number, go ahead and which end late."""

    ahead: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.ahead or self.late)


def stages_for(surveyed: LoopSurvey, choice: Choice, distance: int) -> Stages | str:
    """The stages that a choice asks for, or why the loop cannot have them."""
    ahead = _ops(surveyed, surveyed.ahead, choice.ahead)
    early = {key_of(op) for op in ahead}
    late = [
        op
        for number in sorted(choice.late)
        if early.isdisjoint(key_of(op) for op in surveyed.late[number].ops)
        for op in surveyed.late[number].ops
    ]
    stages = assign_stages(surveyed.body, ahead, late, distance)
    if surveyed.fewest <= stages.depth:
        return f"the loop runs {_times(surveyed.fewest)}, not more than {_times(stages.depth)}"
    return broken_dependence(surveyed.body, stages) or stages


def _times(count: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(count, f"{count} times")


def pass_barriers(surveyed: LoopSurvey, choice: Choice) -> bool:
    """Lets what goes ahead read past barriers; whether there were any, so that `surveyed` is old.

    A barrier between a weight and its gather in the backward pass keeps a compiler from computing
    the gather of the forward pass only once. Between loops nothing of that kind is done.
    """
    passed = False
    for op in _ops(surveyed, surveyed.ahead, choice.ahead):
        for number, operand in enumerate(op.operands):
            if operand in surveyed.body.behind_barrier:
                op.operands[number] = surveyed.body.behind_barrier[operand]
                passed = True
    return passed


def _ops(surveyed: LoopSurvey, moves: Sequence[Move], numbers: frozenset[int]) -> list[ir.Operation]:
    return [op for number in sorted(numbers) for op in moves[number].ops]
