"""Decides which stacks the loops of a block read and write, and in which order each runs its
layers.

A stack has a row for each layer. The weights of layers are concatenated before the first loop that
reads them. A forward keeps residuals for its backward: results of its iterations, or carries at
their start. The loop writes a row of them in each iteration, and the backward reads the rows in
reverse order. So a loop runs in reverse if its rows, reversed, are those of an existing stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stablehlo_tools.analysis.dataflow import Dataflow
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.roll_layers.iterations import (
    IterationCarry,
    IterationResult,
    IterationRows,
    Iterations,
    NoLoopError,
    Numbers,
    Same,
    find_iterations,
)
from stablehlo_tools.transforms.parts.roll_layers.repetitions import (
    OpSequence,
    Repetition,
    repetitions,
    sequence_of,
)


@dataclass(eq=False)
class Stack:
    """Values in the order of the layers, None for rows that are never read.

    `loop` is the loop that writes the stack; None if it is concatenated from existing values.
    `source` is the result of an iteration that is written, or the carry at its start.
    """

    numbers: Numbers
    loop: RolledLoop | None = None
    source: IterationResult | IterationCarry | None = None


@dataclass(eq=False)
class RolledLoop:
    """A loop to be written: the stack that each of its rows is read from, and the stacks it
    writes."""

    iterations: Iterations
    is_reverse: bool
    reads: dict[IterationRows, Stack]
    writes: list[Stack] = field(default_factory=list[Stack])


@dataclass(frozen=True)
class RowUse:
    """A value of a loop that an op outside of the loops uses. It is row `row` of `stack`; without a
    stack, it is the final value of a carry."""

    loop: RolledLoop
    stack: Stack | None
    row: int
    made: IterationResult


@dataclass(frozen=True)
class RollPlan:
    """The loops of a block, in textual order. `uses` are the values in them that ops outside use,
    by number."""

    flow: Dataflow
    loops: list[RolledLoop]
    uses: dict[int, RowUse]


def plan_block(block: ir.Block, effects: Effects, refused: list[NoLoopError]) -> RollPlan:
    """Returns the plan for a block. Adds the reasons why repeated ops are not a loop to `refused`.

    Ops with the same result in every layer are replaced by those of the first layer. A mask that
    each layer computes is then shared by all layers, forward and backward, and no stack of masks is
    kept.
    """
    shared: set[int] = set()
    while True:
        flow = Dataflow.from_block(block, opened=())
        why: list[NoLoopError] = []
        found = find_loops(flow, sequence_of(flow, effects, shared), why)
        once = [(each, position) for each in found for position in each.invariant]
        if not once:
            refused += why
            return plan_rolling(flow, found)
        for iterations, position in once:
            first, *others = [node for row in iterations.ops if (node := row[position])]
            shared.update(node.index for node in (first, *others))
            for other in others:
                for old, new in zip(other.op.results, first.op.results, strict=True):
                    old.replace_all_uses_with(new)


def find_loops(
    flow: Dataflow, sequence: OpSequence, refused: list[NoLoopError]
) -> list[Iterations]:
    """Returns the loops of a block, in textual order. Adds the reasons why repeated ops are not a
    loop to `refused`, the longest repetition first."""
    found: list[tuple[Repetition, Iterations]] = []
    taken = np.zeros(len(sequence.nodes), dtype=bool)
    place = {node.index: at for at, node in enumerate(sequence.nodes)}
    for whole in repetitions(sequence):
        # Ops of other loops may be at its ends, not in its middle. The rest must be long enough.
        free = np.flatnonzero(~taken[whole.first : whole.limit])
        if not len(free) or free[-1] - free[0] + 1 != len(free) or len(free) < 2 * whole.period:
            continue
        first = whole.first + int(free[0])
        each = Repetition(first, first + len(free), whole.period)
        if any(each.lies_in(other) for other, _ in found):
            continue
        outcome = find_iterations(flow, sequence, each)
        if isinstance(outcome, NoLoopError):
            refused.append(outcome)
            continue
        own = [place[node.index] for node in outcome.nodes]
        if not taken[own].any():
            taken[own] = True
            found.append((each, outcome))
    found.sort(key=lambda each: each[0].first)
    loops: list[Iterations] = []
    for each, iterations in found:
        # A backward's last iteration may lack ops: it counts if there are then as many as before.
        again = find_iterations(flow, sequence, each, {loop.count for loop in loops})
        longer = again if not isinstance(again, NoLoopError) else iterations
        taken[[place[node.index] for node in iterations.nodes]] = False
        new = [place[node.index] for node in longer.nodes]
        chosen = longer if not taken[new].any() else iterations
        taken[[place[node.index] for node in chosen.nodes]] = True
        loops.append(chosen)
    return loops


def plan_rolling(flow: Dataflow, found: Sequence[Iterations]) -> RollPlan:
    """Returns the plan for loops, which are in textual order."""
    known = _KnownStacks()
    loops: list[RolledLoop] = []
    for iterations in found:
        rows = iterations.rows
        ahead = sum(known.match(each.numbers) is not None for each in rows)
        # A backward reads most of its rows in the reverse order of their stacks.
        back = sum(known.match(each.numbers[::-1]) is not None for each in rows)
        loop = RolledLoop(iterations, back > ahead, {})
        for each in rows:
            numbers = _in_layers(each.numbers, loop)
            stack = known.match(numbers) or known.add(Stack(numbers))
            loop.reads[each] = stack
            if stack.loop is not None and stack not in stack.loop.writes:
                stack.loop.writes.append(stack)
        # All stacks that the loop could write.
        for carried in iterations.carried:
            known.add(Stack(_in_layers(iterations.entries_of(carried), loop), loop, carried))
        for position, node in enumerate(iterations.template):
            for result in range(len(node.results)):
                made = IterationResult(position, result)
                known.add(Stack(_in_layers(iterations.row_of(made), loop), loop, made))
        loops.append(loop)
    # The values of loops that other ops use, each as a row of a stack of its loop.
    place = {
        number: (loop, i, IterationResult(q, r))
        for loop in loops
        for i, row in enumerate(loop.iterations.ops)
        for q, node in enumerate(row)
        for r, number in enumerate(node.results if node else ())
    }
    uses: dict[int, RowUse] = {}
    for number in sorted(_taken_outside(flow, loops) & place.keys()):
        loop, iteration, made = place[number]
        iterations = loop.iterations
        is_last = iteration == iterations.count - 1
        if is_last and any(carried.made == made for carried in iterations.carried):
            uses[number] = RowUse(loop, None, 0, made)
            continue
        written = next((stack for stack in loop.writes if number in stack.numbers), None)
        if written is None:
            written = Stack(_in_layers(iterations.row_of(made), loop), loop, made)
            loop.writes.append(written)
        uses[number] = RowUse(loop, written, written.numbers.index(number), made)
    return RollPlan(flow, loops, uses)


class _KnownStacks:
    """The stacks that exist, or that loops could write."""

    def __init__(self) -> None:
        self._with: dict[int, list[Stack]] = {}

    def add(self, stack: Stack) -> Stack:
        for number in dict.fromkeys(stack.numbers):
            if number is not None:
                self._with.setdefault(number, []).append(stack)
        return stack

    def match(self, numbers: Numbers) -> Stack | None:
        """Returns a stack with these values in this order; None in `numbers` matches any value."""
        asked = next((number for number in numbers if number is not None), None)
        for stack in () if asked is None else self._with.get(asked, ()):
            pairs = zip(numbers, stack.numbers, strict=False)
            if len(numbers) == len(stack.numbers) and all(a is None or a == b for a, b in pairs):
                return stack
        return None


def _in_layers(numbers: Numbers, loop: RolledLoop) -> Numbers:
    return numbers[::-1] if loop.is_reverse else numbers


def _taken_outside(flow: Dataflow, loops: Sequence[RolledLoop]) -> set[int]:
    rolled = {node.index for loop in loops for node in loop.iterations.nodes}
    taken = set(flow.root.returned)
    for node in flow.nodes:
        if node.index not in rolled:
            taken.update(node.inputs)
    for loop in loops:
        sources = {source for row in loop.iterations.sources for source in row}
        taken.update(source.number for source in sources if isinstance(source, Same))
        taken.update(c.start for c in loop.iterations.carried if c.start is not None)
        for stack in loop.reads.values():
            if stack.loop is None:
                taken.update(number for number in stack.numbers if number is not None)
    return taken
