"""A stage for each op of a loop's body: how many iterations late it runs.

At time t the pipelined loop runs the ops of stage s for iteration t - s. With `depth` the highest
stage, the first `depth` times run before the loop, with the stages that have begun, and the last
`depth` after it, with those that have not ended: no iteration runs too often, none out of range.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stablehlo_tools.analysis.loops import Key, LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import key_of, producer


@dataclass(frozen=True)
class Stages:
    """The stages of a body's placed ops; indexed ones run wherever they are needed."""

    of_op: dict[Key, int]
    ahead: frozenset[Key]  # those before all others
    of_carry: dict[int, int]  # of the carries that are neither invariant nor induction variables

    @property
    def depth(self) -> int:
        """The highest stage: how many iterations are in flight at a time, less one."""
        return max(self.of_op.values(), default=0)

    def at(self, op: ir.Operation) -> int:
        """The stage of a placed op."""
        return self.of_op[key_of(op)]


def assign_stages(
    body: LoopBody, ahead: Iterable[ir.Operation], late: Iterable[ir.Operation], distance: int
) -> Stages:
    """The ops `ahead` run `distance` iterations before the others, those `late` as many after.

    `ahead` holds all that it needs, `late` all of the iteration that hangs on it.
    """
    early, last = {key_of(op) for op in ahead}, {key_of(op) for op in late}
    middle = distance if early else 0
    stages: dict[Key, int] = {}
    for op in body.ops:
        if body.is_placed(op):
            key = key_of(op)
            stages[key] = 0 if key in early else middle + (distance if key in last else 0)
    carries = {
        number: _carry_stage(body, number, stages)
        for number in range(len(body.arguments))
        if not body.is_indexed(body.arguments[number])
    }
    return Stages(stages, frozenset(early), carries)


def broken_dependence(body: LoopBody, stages: Stages) -> str | None:
    """A dependence that the stages do not keep; None where they keep all.

    Barriers that can be read past do not count.
    """
    for op in body.ops:
        if not body.is_placed(op):
            continue
        for value in body.reads(op):
            if body.is_indexed(value) or value in body.behind_barrier:
                continue
            number = body.argument_number(value)
            if number is not None and stages.at(op) < stages.of_carry[number] - 1:
                return f"{op.name} reads carry {number} before it is there"
            maker = producer(value)
            if maker is not None and stages.at(op) < stages.at(maker):
                return f"{op.name} reads {maker.name} before it is there"
    return None


def _carry_stage(body: LoopBody, number: int, stages: dict[Key, int]) -> int:
    """The stage of the op that makes a carry; 0 where it is handed on in a ring or indexed."""
    seen: set[int] = set()
    while number not in seen:
        seen.add(number)
        end = body.ends[number]
        following = body.argument_number(end)
        if following is None:
            maker = producer(end)
            return stages.get(key_of(maker), 0) if maker is not None else 0
        number = following
    return 0
