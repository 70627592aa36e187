"""Software pipelining: assigns a stage to each op of a loop's body, and writes the staged loop.

A stage is the number of iterations by which an op runs late. At time t the pipelined loop runs the
ops of stage s for iteration t - s. Let `depth` be the highest stage. The first `depth` times run
before the loop (the prologue), with only the stages that have begun. The last `depth` times run
after it (the epilogue), with only the stages that have not ended. So every op runs exactly once for
each iteration of the old loop.

A value that one stage computes and a later stage reads travels in additional carries: one for each
iteration that it waits. The condition does not change, because the loop counter belongs to stage 0.
Its start value moves instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.loops import Key, LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import copy_without_regions
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.transforms.parts.pipeline_collectives.frame import Frame
from stablehlo_tools.transforms.parts.pipeline_collectives.movable_collectives import (
    LoopSurvey,
    Move,
)


@dataclass(frozen=True)
class Stages:
    """The stages of a body's placed ops; indexed ones run wherever they are needed."""

    of_op: dict[Key, int]
    ahead: frozenset[Key]  # the ops that run before all others
    of_carry: dict[int, int]  # by carry, without invariant carries and induction variables

    @property
    def depth(self) -> int:
        """The highest stage: how many iterations are in flight at a time, less one."""
        return max(self.of_op.values(), default=0)

    def stage_of(self, op: ir.Operation) -> int:
        """The stage of a placed op."""
        return self.of_op[key_of(op)]


def broken_dependence(body: LoopBody, stages: Stages) -> str | None:
    """Describes a dependence that the stages break; None if they keep all.

    Reads through a barrier that may be bypassed (`body.behind_barrier`) do not count.
    """
    for op in body.ops:
        if not body.is_placed(op):
            continue
        for value in body.reads(op):
            if body.is_indexed(value) or value in body.behind_barrier:
                continue
            number = body.argument_number(value)
            if number is not None and stages.stage_of(op) < stages.of_carry[number] - 1:
                return f"{op.name} reads carry {number} before it is computed"
            maker = producer(value)
            if maker is not None and stages.stage_of(op) < stages.stage_of(maker):
                return f"{op.name} reads {maker.name} before it has run"
    return None


def _carry_stage(body: LoopBody, number: int, stages: dict[Key, int]) -> int:
    """Returns the stage of the op that computes a carry.

    Follows carries that are passed on from other carries. Returns 0 for an indexed value, and for a
    ring of carries that no op computes.
    """
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


@dataclass(frozen=True)
class StageChoice:
    """The collectives of a loop, by number, that go ahead and those that end late."""

    ahead: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.ahead or self.late)


def stages_for(surveyed: LoopSurvey, choice: StageChoice, distance: int) -> Stages | str:
    """Returns the stages for a choice, or the reason why the loop cannot have them."""
    ahead = _ops(surveyed, surveyed.ahead, choice.ahead)
    early = {key_of(op) for op in ahead}
    late = [
        op
        for number in sorted(choice.late)
        if early.isdisjoint(key_of(op) for op in surveyed.late[number].ops)
        for op in surveyed.late[number].ops
    ]
    # The ops that go ahead, with all their operands' producers, run `distance` iterations before
    # the others. The late ones, with their dependents in the iteration, run as many after.
    body, last = surveyed.body, {key_of(op) for op in late}
    middle = distance if early else 0
    of_op: dict[Key, int] = {}
    for op in body.ops:
        if body.is_placed(op):
            key = key_of(op)
            of_op[key] = 0 if key in early else middle + (distance if key in last else 0)
    carries = {
        number: _carry_stage(body, number, of_op)
        for number in range(len(body.arguments))
        if not body.is_indexed(body.arguments[number])
    }
    stages = Stages(of_op, frozenset(early), carries)
    if surveyed.fewest <= stages.depth:
        return (
            f"the loop runs {_times(surveyed.fewest)}, but must run more than "
            f"{_times(stages.depth)}"
        )
    return broken_dependence(body, stages) or stages


def _times(count: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(count, f"{count} times")


def pass_barriers(surveyed: LoopSurvey, choice: StageChoice) -> bool:
    """Lets the ops that go ahead read the operands of barriers instead of their results.

    Returns True if there were any; then `surveyed` is out of date. A barrier between a weight and
    its gather in the backward pass keeps a compiler from reusing the gather of the forward pass.
    XLA does not merge ops across loops, so a pipelined loop does not need the barrier.
    """
    passed = False
    for op in _ops(surveyed, surveyed.ahead, choice.ahead):
        for number, operand in enumerate(op.operands):
            if operand in surveyed.body.behind_barrier:
                op.operands[number] = surveyed.body.behind_barrier[operand]
                passed = True
    return passed


def _ops(
    surveyed: LoopSurvey, moves: Sequence[Move], numbers: frozenset[int]
) -> list[ir.Operation]:
    return [op for number in sorted(numbers) for op in moves[number].ops]


@dataclass(frozen=True)
class DelayedValue:
    """A value of the body, `age` iterations after it was computed."""

    value: ir.Value
    age: int


def waiting_values(body: LoopBody, stages: Stages) -> list[DelayedValue]:
    """Returns the values that the pipelined loop carries in addition to the old carries, in
    order."""
    oldest: dict[ir.Value, int] = {}
    for op in body.ops:
        if not body.is_placed(op):
            continue
        for value in body.reads(op):
            if not body.is_indexed(value):
                age = stages.stage_of(op) - _made_at(body, stages, value)
                oldest[value] = max(age, oldest.get(value, 0))
    return [
        DelayedValue(value, age) for value, most in oldest.items() for age in range(1, most + 1)
    ]


def _made_at(body: LoopBody, stages: Stages, value: ir.Value) -> int:
    """Returns the stage of the op or the carry that a value comes from."""
    maker = producer(value)
    if maker is not None:
        return stages.stage_of(maker)
    number = body.argument_number(value)
    assert number is not None, "a value of the body"
    return stages.of_carry[number]


class StagedLoop:
    """Rewrites one loop, which must run more than `stages.depth` times.

    The stages must keep all dependences (`broken_dependence` returns None).
    """

    def __init__(self, body: LoopBody, stages: Stages) -> None:
        self._body = body
        self._stages = stages
        self._waiting = waiting_values(body, stages)
        # Ops that go ahead wait for no other op, so they are first. Later stages precede earlier
        # ones, which may read a carry that a later stage computes at the same time.
        self._order: list[ir.Operation] = sorted(
            (op for op in body.ops if body.is_placed(op)),
            key=lambda op: (key_of(op) not in stages.ahead, -stages.stage_of(op)),
        )

    def write(self) -> tuple[ir.Operation, list[ir.Value]]:
        """Replaces the loop; returns the new loop and the values that replace the old results.

        The body, and all handles into it, are invalid afterwards.
        """
        body, depth = self._body, self._stages.depth
        old = body.loop
        # The prologue. Its frame counts iterations from the first one.
        operands = list(old.operands)
        before = self._frame(ir.InsertionPoint(old), operands)
        for number in self._stages.of_carry:
            before.bind(body.arguments[number], 0, operands[number])
        for time in range(depth):
            for op in self._order:
                if self._stages.stage_of(op) <= time:
                    before.run(op, time - self._stages.stage_of(op))
        starts = [before.get(value, depth - self._waits(value)) for value in body.arguments]
        starts += [before.get(w.value, depth - self._waits(w.value) - w.age) for w in self._waiting]
        new = copy_without_regions(old, starts, [value.type for value in starts])
        block = While(old).condition
        block.append_to(new.regions[0])
        for waiting in self._waiting:
            # The condition gets the new carries too, and reads none of them.
            block.add_argument(waiting.value.type, old.location)
        self._write_body(new)
        after = self._epilogue(new)
        ends = [
            new.results[number] if number in body.invariant else after.get(value, 0)
            for number, value in enumerate(body.arguments)
        ]
        replace(old, ends)
        return new, ends

    def _write_body(self, new: ir.Operation) -> None:
        body = self._body
        types = [operand.type for operand in new.operands]
        block = new.regions[1].blocks.append(*types, arg_locs=[new.location] * len(types))
        frame = self._frame(ir.InsertionPoint(block), list(block.arguments))
        self._bind_state(frame, list(block.arguments))
        for op in self._order:
            frame.run(op, -self._stages.stage_of(op))
        ends = [
            frame.get(end, 0 if body.is_indexed(value) else -self._waits(value))
            for value, end in zip(body.arguments, body.ends, strict=True)
        ]
        ends += [frame.get(w.value, 1 - self._waits(w.value) - w.age) for w in self._waiting]
        last = terminator(body.block)
        ir.Operation.create(
            last.name, operands=ends, loc=last.location, ip=ir.InsertionPoint(block)
        )

    def _epilogue(self, new: ir.Operation) -> Frame:
        """Writes the last times after the loop; its frame's zero is one past the last iteration."""
        results = list(new.results)
        frame = self._frame(ir.InsertionPoint(self._body.loop), results)
        self._bind_state(frame, results)
        for time in range(self._stages.depth):
            for op in self._order:
                if self._stages.stage_of(op) > time:
                    frame.run(op, time - self._stages.stage_of(op))
        return frame

    def _frame(self, point: ir.InsertionPoint, state: Sequence[ir.Value]) -> Frame:
        counted = {number: state[number] for number in self._body.steps}
        kept = {number: state[number] for number in self._body.invariant}
        return Frame(self._body, point, counted, kept)

    def _bind_state(self, frame: Frame, state: Sequence[ir.Value]) -> None:
        for number, stage in self._stages.of_carry.items():
            frame.bind(self._body.arguments[number], -stage, state[number])
        for waiting, value in zip(self._waiting, state[len(self._body.arguments) :], strict=True):
            frame.bind(waiting.value, -self._waits(waiting.value) - waiting.age, value)

    def _waits(self, value: ir.Value) -> int:
        """Returns the stage of a value; 0 for an indexed one."""
        return 0 if self._body.is_indexed(value) else _made_at(self._body, self._stages, value)
