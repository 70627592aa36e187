"""Sums that go on from one device's carry: the carry stays local, one all_reduce follows the loop.

    %own = stablehlo.select %first, %sum, %zeros     // %first: on one device of each group
    %next = "stablehlo.all_reduce"(stablehlo.scatter(%own, %indices, %updates))   // adds
  ==>
    %start = stablehlo.select %first, %sum_at_the_start, %zeros    // before the loop
    %next = stablehlo.scatter(%local, %indices, %updates)          // in the loop
    %total = "stablehlo.all_reduce"(%local_at_the_end)             // after it

A partitioner writes `sum.at[indices].add(updates)` of divided updates so. The terms are those of
before, added in another order: the bound of `sums` holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.loop_carries import is_sum, only_user
from stablehlo_tools.analysis.loop_values import AlikeInGroups
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ALL_REDUCE, SELECT
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import is_identity_of
from stablehlo_tools.transforms.parts.pipeline_collectives.frame import Frame
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.opened import OpenedLoop


@dataclass(frozen=True, eq=False)
class MaskedSum:
    """An all_reduce whose result is a carry, which the next iteration reads in a select alone."""

    op: ir.Operation
    select: ir.Operation
    carry: int


def masked_sum(
    body: LoopBody, collective: Collective, trips: int | None, alike: AlikeInGroups
) -> MaskedSum | None:
    """How a collective can run on local sums; None if it cannot."""
    op = collective.op
    carries = body.carries_of(op.results[0])
    if op.name != ALL_REDUCE or not trips or len(carries) != 1 or body.users.get(op.results[0]):
        return None
    argument = body.arguments[carries[0]]
    select = only_user(body, argument)
    if isinstance(select, str) or select.name != SELECT or select.operands[0] == argument:
        return None
    first, *either = select.operands
    zeros = either[either[0] == argument]
    fits = (
        reducer_kind(op.regions[0].blocks[0]) == "add"
        and is_identity_of("add", zeros)
        and not body.is_read_by_condition(carries[0])
        and all(body.is_indexed(value) and not body.is_moving(value) for value in (first, zeros))
        and is_sum(op.operands[0], select.results[0])
        and alike.picks_one(collective, first, by=either[0] == argument)
    )
    return MaskedSum(op, select, carries[0]) if fits else None


class MaskedSumWriter:
    """Lets a loop carry local sums; the first device's begins with what the carry began with."""

    def __init__(self, body: LoopBody, plan: MaskedSum) -> None:
        self._plan = plan
        self.dead: list[int] = []
        self.removed = [plan.select, plan.op]
        point = ir.InsertionPoint(body.loop)
        before = Frame(body, point, {}, {n: body.loop.operands[n] for n in body.invariant})
        before.bind(body.arguments[plan.carry], 0, body.loop.operands[plan.carry])
        before.run(plan.select, 0)
        body.loop.operands[plan.carry] = before.get(plan.select.results[0], 0)

    def take_carries(self, opened: OpenedLoop) -> None:
        """Needs none."""

    def write(self, opened: OpenedLoop) -> tuple[dict[int, ir.Value], list[ir.Operation]]:
        """Ends iterations in the local sums, and reduces the last ones after the loop."""
        op, carry = self._plan.op, self._plan.carry
        opened.hand_on(carry, op.operands[0])
        self._plan.select.results[0].replace_all_uses_with(opened.argument(carry))
        total = copy_with(op, {op.operands[0]: opened.result(carry)}, opened.point)
        return {carry: total.results[0]}, [total]
