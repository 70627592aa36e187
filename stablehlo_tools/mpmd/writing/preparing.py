"""Writes `prepare`: what a rank computes once, before its first action.

func.func private @prepare(<arguments>) -> (<fixed values that phases need>, <empty sums>)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stablehlo_tools.bindings import ir
from stablehlo_tools.mpmd.names import PREPARE
from stablehlo_tools.mpmd.writing.fixed import Key, identity
from stablehlo_tools.mpmd.writing.phases import private_function
from stablehlo_tools.mpmd.writing.plan import Plan


class Start(NamedTuple):
    """Where the sum of a carry begins on a rank: `is_first` of those that add to it, with what the
    program starts it from."""

    carry: int
    is_first: bool

    def key(self, plan: Plan) -> Key:
        """What the program starts the sum from."""
        return plan.fixed.key_of(plan.step.loop.op.operands[self.carry])

    def write(self, plan: Plan, known: dict[Key, ir.Value], point: ir.InsertionPoint) -> ir.Value:
        """What the sum starts from on this rank."""
        if self.is_first:
            return plan.fixed.write(self.key(plan), known, point)
        result = plan.step.loop.op.results[self.carry]
        kind = plan.step.loop.accumulators[self.carry].reducer
        return identity(kind, result, plan.step.loop.op.location, point)


def write_prepare(
    plan: Plan,
    computed: Sequence[Key],
    starts: Sequence[Start],
    leaves: Sequence[Key],
    block: ir.Block,
) -> None:
    """The function, at the end of a module's block: takes the leaves, gives what is computed and
    what the sums start from."""
    place = plan.step.loop.op.location
    taken = [plan.fixed.value(key).type for key in leaves]
    given = [plan.fixed.value(key).type for key in computed]
    given += [plan.step.loop.op.results[start.carry].type for start in starts]
    function = private_function(PREPARE, taken, given, block, place)
    body = function.regions[0].blocks[0]
    point = ir.InsertionPoint(body)
    known = dict(zip(leaves, body.arguments, strict=True))
    returned = [plan.fixed.write(key, known, point) for key in computed]
    returned += [start.write(plan, known, point) for start in starts]
    ir.Operation.create("func.return", operands=returned, loc=place, ip=point)
