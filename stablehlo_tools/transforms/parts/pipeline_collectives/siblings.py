"""Collectives that go ahead together, because compilers make one product of those that read them.

XLA merges dots that share an operand, the query, key and value projections of a layer: the merged
dot waits for all of their weights. To prefetch one of them alone gains nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from stablehlo_tools.analysis.loops import FORMATTING, LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.transforms.parts.pipeline_collectives.survey import LoopSurvey

_DOT = "stablehlo.dot_general"


def prefetch_groups(surveyed: LoopSurvey) -> list[frozenset[int]]:
    """The collectives that can go ahead, by their numbers, in groups, as they are first read."""
    groups: list[set[int]] = []
    group_of: dict[ir.Value, set[int]] = {}
    starts: dict[int, int] = {}
    for number, move in enumerate(surveyed.ahead):
        if not move.ops:
            continue
        own = {number}
        starts[number] = _first_reader(surveyed.body, move.collective.op)
        for shared in _shared_operands(surveyed.body, move.collective.op):
            other = group_of.get(shared, own)
            if other is not own:
                own = _joined(own, other, groups, group_of)
            group_of[shared] = own
        if own not in groups:
            groups.append(own)
    ordered = sorted(groups, key=lambda group: min(starts[number] for number in group))
    return [frozenset(group) for group in ordered]


def _joined(
    one: set[int], other: set[int], groups: list[set[int]], group_of: dict[ir.Value, set[int]]
) -> set[int]:
    other |= one
    for value, group in group_of.items():
        if group is one:
            group_of[value] = other
    groups[:] = [group for group in groups if group is not one]
    return other


def _shared_operands(body: LoopBody, op: ir.Operation) -> Iterator[ir.Value]:
    """What the dots that read a collective's result, reformatted or not, multiply it with."""
    pending: list[ir.Value] = list(op.results)
    while pending:
        value = pending.pop()
        for user in body.users.get(value, ()):
            if user.name == _DOT:
                yield from (operand for operand in user.operands if operand != value)
            elif user.name in FORMATTING:
                pending += user.results


def _first_reader(body: LoopBody, op: ir.Operation) -> int:
    """The position of the first op that reads a collective's result."""
    users = [user for result in op.results for user in body.users.get(result, ())]
    return min((body.position_of[key_of(user)] for user in users), default=len(body.ops))
