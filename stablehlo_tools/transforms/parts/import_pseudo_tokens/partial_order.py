"""The order that pseudo-tokens made, kept as it is: forks stay forks, joins are by after_all."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.token_chain import create_join, tie_operands, tie_results
from stablehlo_tools.transforms.parts.import_pseudo_tokens.planning import (
    ImportPlan,
    not_in_one_block,
    sources,
)

PartialOrder = list[list[int]]  # by member: those it comes directly after


def partial_order(plan: ImportPlan) -> PartialOrder:
    """The members that each member's token comes from. Raises where they share no block."""
    first = plan.members[0]
    for member in plan.members:
        if member.block != first.block:
            raise not_in_one_block(member)
    number = {member.results[0]: i for i, member in enumerate(plan.members)}
    return [[number[source.results[0]] for source in taken] for taken in sources(plan)]


def thread_partial_order(members: Sequence[ir.Operation], order: PartialOrder) -> None:
    """Ties each member after those it has to come after; a token leaves where one is awaited."""
    first = members[0]
    root = create_join([], ir.InsertionPoint(first), first.location)
    awaited = {source for sources_of_one in order for source in sources_of_one}
    tokens: dict[int, ir.Value] = {}
    for i, member in enumerate(members):
        before = [tokens[source] for source in order[i]] or [root]
        ip = ir.InsertionPoint(member)
        token = before[0] if len(before) == 1 else create_join(before, ip, member.location)
        token = tie_operands(member, token)
        if i in awaited:
            tokens[i] = tie_results(member, token)
