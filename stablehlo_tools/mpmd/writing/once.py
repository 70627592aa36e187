"""Writes what a rank does once: `prepare` before its first action, `finish_0`, … behind its last.

func.func private @prepare(<arguments>) -> (<fixed values that phases need>, <empty sums>)

A round of the finish, `finish_0` and so on, is a rank's part of what stands behind the loop over
microbatches, up to the values that are sent then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.mpmd.manifest import FINISH, PREPARE
from stablehlo_tools.mpmd.writing.finishing import Made
from stablehlo_tools.mpmd.writing.fixed import Key, identity
from stablehlo_tools.mpmd.writing.phases import barred, private_function, unconverted
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
        reducer = plan.step.loop.accumulators[self.carry].reducer
        return identity(reducer, result, plan.step.loop.op.location, point)


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


_COMBINED_BY = {"rows": "add"}


@dataclass(frozen=True)
class FinishFunction:
    """What a rank computes in a round: what it takes and gives of values that hang on the loop, and
    of fixed ones."""

    rank: int
    name: str
    nodes: tuple[Node, ...]
    totals: tuple[tuple[int, tuple[Made, ...]], ...]  # sums that are combined, by carry
    takes: tuple[Made, ...]
    fixed: tuple[Key, ...]
    gives: tuple[Made, ...]
    gives_fixed: tuple[Key, ...]

    def type_of(self, plan: Plan, made: Made) -> ir.Type:
        """The type of a value."""
        return plan.type_of(made)

    def write(self, plan: Plan, block: ir.Block) -> None:
        """Writes the function at the end of a module's block."""
        place = plan.step.loop.op.location
        taken = [plan.type_of(made) for made in self.takes]
        taken += [plan.fixed.value(key).type for key in self.fixed]
        given = [plan.type_of(made) for made in self.gives]
        given += [plan.fixed.value(key).type for key in self.gives_fixed]
        function = private_function(self.name, taken, given, block, place)
        body = function.regions[0].blocks[0]
        arguments = list(body.arguments)
        point = ir.InsertionPoint(body)
        made = {
            each: value if each.rank == self.rank or each.what == "part" else barred(value, point)
            for each, value in zip(self.takes, arguments, strict=False)
        }
        known = dict(zip(self.fixed, arguments[len(self.takes) :], strict=True))
        values = {each.number: value for each, value in made.items() if each.what == "value"}
        for carry, parts in self.totals:
            values[plan.total_of(carry)] = _combined(
                plan, carry, [made[part] for part in parts], point
            )
        for node in self.nodes:
            _copy(plan, node, values, known, point)
        returned = unconverted([values[each.number] for each in self.gives], point)
        returned += [plan.fixed.write(key, known, point) for key in self.gives_fixed]
        ir.Operation.create("func.return", operands=returned, loc=place, ip=point)


def finish_function(
    plan: Plan, number: int, rank: int, is_at_hand: Callable[[Key], bool]
) -> FinishFunction | None:
    """What a rank computes in round `number`; None where that is nothing. `is_at_hand` tells which
    fixed values it has."""
    finish = plan.finish
    nodes = finish.ops.get((number, rank), [])
    totals = [
        (carry, tuple(parts))
        for carry, parts in finish.totals.get((number, rank), [])
        if len(parts) > 1
    ]
    own = {n for node in nodes for n in node.results}
    own |= {plan.total_of(carry) for carry, _ in totals}
    takes: dict[Made, None] = dict.fromkeys(part for _, parts in totals for part in parts)
    keys: dict[Key, None] = {}
    for node in nodes:
        for source in node.inputs:
            if source in own:
                continue
            if source in finish.home:
                takes[Made("value", source, finish.home[source])] = None
            else:
                keys[plan.fixed.key_outside(source)] = None
    gives = [
        Made("value", source, rank)
        for source in sorted(own)
        if plan.is_read_later(source, number, rank)
    ]
    fixed_results = plan.fixed_results(rank) if number == 0 else []
    fixed_results = [key for key in fixed_results if not is_at_hand(key)]
    if not gives and not fixed_results:
        return None
    leaves = plan.fixed.cone([*keys, *fixed_results], is_at_hand)
    return FinishFunction(
        rank,
        f"{FINISH}_{number}",
        tuple(nodes),
        tuple(totals),
        tuple(takes),
        tuple(leaves),
        tuple(gives),
        tuple(fixed_results),
    )


def _combined(plan: Plan, carry: int, parts: list[ir.Value], point: ir.InsertionPoint) -> ir.Value:
    reducer = plan.step.loop.accumulators[carry].reducer
    build = Builder(point, plan.step.loop.op.location)
    total = parts[0]
    for part in parts[1:]:
        total = build.same(_COMBINED_BY.get(reducer, reducer), total, part)
    return total


def _copy(
    plan: Plan,
    node: Node,
    values: dict[int, ir.Value],
    known: dict[Key, ir.Value],
    point: ir.InsertionPoint,
) -> None:
    outer = plan.step.outer
    stand_ins: dict[ir.Value, ir.Value] = {}
    for source in node.inputs:
        value = values.get(source)
        if value is None:
            value = plan.fixed.write(plan.fixed.key_outside(source), known, point)
        stand_ins[outer.values[source]] = value
    copy = copy_with(node.op, stand_ins, point)
    values.update(zip(node.results, copy.results, strict=True))
