"""Collectives on the sums that a loop makes in the rows of a buffer, on all rows behind the loop.

A pipeline's ranks add a chunk's gradients to the chunk's row, where what they have done was none of
their work (`%valid`) to nothing:

    %old = stablehlo.dynamic_slice %sums, %row            // in the loop
    %g = "stablehlo.all_reduce"(%x)
    %new = stablehlo.add %old, %g
    %put = stablehlo.select %valid, %new, %old
    %next = stablehlo.dynamic_update_slice %sums, %put, %row
  ==>
    %old = stablehlo.dynamic_slice %local, %row           // in the loop, from zero
    %new = stablehlo.add %old, %x
    %put = stablehlo.select %valid, %new, %old
    %next = stablehlo.dynamic_update_slice %local, %put, %row

    %g = "stablehlo.all_reduce"(%local_at_the_end)        // behind it, all rows at once
    %total = stablehlo.add %sums_at_the_start, %g

What leads from the collective to the sum is linear, as for sums of whole carries (`sums`, which has
the bound of the rounding), and is run on stacked rows (`rows`). Rows may come in any order, several
times or never, and the loop may run any number of times. But `%row` and `%valid` must be the same
on all devices of a group: what one of them leaves out, the others would miss. They are traced to
constants, counters of loops and what is known of each device before the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.loop_carries import AddedRow, added_row
from stablehlo_tools.analysis.loop_values import AlikeInGroups
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ADD, CONVERT
from stablehlo_tools.dialect.reducers import identity_of
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import maker_of, named
from stablehlo_tools.transforms.parts.pipeline_collectives.moves import is_static_tensor
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.opened import (
    OpenedLoop,
    build_at,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.rows import (
    has_rule,
    reshaped,
    run_stacked,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.sums import (
    ChainOp,
    chain_from,
    takes_number,
    why_not_linear,
)


@dataclass(frozen=True, eq=False)
class RowSum:
    """A collective, and the ops behind it, whose result is added to a row of a carry."""

    steps: Sequence[ChainOp]
    row: AddedRow
    buffer: ir.Value

    @property
    def local(self) -> ir.Value:
        """What is added up in the loop instead."""
        first = self.steps[0]
        return first.op.operands[first.through]

    @property
    def rows(self) -> list[int]:
        """The sizes of the dimensions that a row is one of."""
        return [shape_of(self.buffer)[dim] for dim in self.row.dims]


def row_sum(body: LoopBody, collective: Collective, alike: AlikeInGroups) -> RowSum | str:
    """How a collective can run on the sums of all rows, or why it cannot."""
    chain = chain_from(body, collective, lambda op: op.name == ADD)
    if isinstance(chain, str):
        return chain
    steps, op, value = chain
    row = added_row(body, op, value)
    if isinstance(row, str):
        return row
    buffer = body.arguments[row.carry]
    if not is_static_tensor(buffer.type):
        return f"carry {row.carry} has no static shape"
    reason = why_not_linear(body, steps, "add", element_of(buffer))
    if reason:
        return reason
    unknown = next((step.op for step in steps if not has_rule(step.op)), None)
    if unknown is not None:
        return f"the {named(unknown)} does not run on stacked values"
    valid = [] if row.valid is None else [row.valid]
    if not alike(body.loop, [step.op for step in steps], [*row.starts, *valid]):
        return "it is not shown that all devices of a group add to the same row"
    return RowSum(steps, row, buffer)


class RowSumWriter:
    """Adds up what the first collective sends, and runs the chain on all rows of that."""

    def __init__(self, body: LoopBody, plan: RowSum) -> None:
        self._body = body
        self._plan = plan
        self._element = element_of(plan.buffer)
        self.dead = [plan.row.carry]
        self.removed = [*(step.op for step in plan.steps), *plan.row.ops]
        self._where = plan.row.ops[-1].location
        self._number = -1

    def take_carries(self, opened: OpenedLoop) -> None:
        """A row for each of the sums."""
        identity = identity_of("add", self._element)
        assert identity is not None, "of an accumulation that was planned"
        shape = [*self._plan.rows, *shape_of(self._plan.local)]
        location = self._body.loop.location
        type_ = ir.RankedTensorType.get(shape, self._element, loc=location)
        self._number = opened.carry(type_, identity)

    def write(self, opened: OpenedLoop) -> tuple[dict[int, ir.Value], list[ir.Operation]]:
        """Writes the sums in the body, and the chain and the totals behind the loop."""
        plan, number = self._plan, self._number
        # The sums with what this iteration adds to a row.
        row, local = self._plan.row, self._plan.local
        builder = Builder(opened.inside, self._where)
        sums = opened.argument(self._number)
        index = element_of(row.ops[0].operands[1])
        starts = [*row.starts, *[builder.splat(0, [], index)] * len(shape_of(local))]
        sizes = [*[1] * len(row.dims), *shape_of(local)]
        old = builder.dynamic_slice(sums, starts, sizes)
        term = reshaped(builder, builder.convert(local, self._element), sizes)
        new = builder.same("add", old, term)
        if row.valid is not None:
            new = builder.op("select", [row.valid, new, old], new.type)
        opened.hand_on(number, builder.update(sums, new, starts))
        count = prod(plan.rows)
        shape = [count, *shape_of(plan.local)]
        value = reshaped(build_at(opened, self._where), opened.result(number), shape)
        collectives: list[ir.Operation] = []
        for step in plan.steps:
            if step.op.name == CONVERT:
                continue
            value = self._run(opened, step, value, count)
            if self._body.communicates(step.op):
                collectives.append(maker_of(value))
        builder = build_at(opened, self._where)
        start = self._body.loop.operands[plan.row.carry]
        total = builder.same("add", start, reshaped(builder, value, shape_of(start)))
        return {plan.row.carry: total}, collectives

    def _run(self, opened: OpenedLoop, step: ChainOp, value: ir.Value, count: int) -> ir.Value:
        """Runs an op of the chain on all rows, in the type of the sums."""
        builder = build_at(opened, step.op.location)
        given: list[tuple[ir.Value, bool]] = []
        for place, operand in enumerate(step.op.operands):
            is_row = place == step.through
            there = value if is_row else opened.after.get(operand, 0)
            if not is_row and takes_number(step.op):
                there = builder.convert(there, self._element)
            given.append((there, is_row))
        return run_stacked(step.op, count, given, {}, opened.point, self._element)[0]
