"""Writes what was chosen: each result's sharding, and reshards where users want another one."""

from __future__ import annotations

from itertools import groupby

from stablehlo_tools.analysis.shardings import SHARDING, rank_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import RESHARD
from stablehlo_tools.ir.builder import constrained
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.partition.choosing.layouts import Layout
from stablehlo_tools.transforms.parts.partition.choosing.prices import scattered_layout
from stablehlo_tools.transforms.parts.partition.choosing.problem import Link, Problem, Use


def write(problem: Problem) -> None:
    """Writes the strategies of a problem into its module."""
    stating = (node for node in problem.nodes if node.op is not None and not node.pinned)
    for op, nodes in groupby(stating, key=lambda node: node.op):
        assert op is not None, "these have one"
        # An op states how its results are divided: by its node, or by one for each carry.
        every = [problem.shardings.of(result) for result in op.results]
        before = list(every)
        for node in nodes:
            first = len(node.inputs)
            if node.carry is None:
                every = [problem.atoms.dims(node.layout(first + n)) for n in range(len(every))]
            else:
                every[node.carry] = problem.atoms.dims(node.layout(first))
        if every != before:
            op.attributes[SHARDING] = problem.shardings.per_value(every, op.context)
    for link in problem.links:
        if rank_of(link.value):
            _reshard_users(link, problem)


def _reshard_users(link: Link, problem: Problem) -> None:
    """Puts a reshard for each layout that users want in front of the first of them.

    Of what devices make by themselves, too (nothing is sent for it): the op that takes it would
    else be divided as that is.
    """
    made, partial = problem.atoms.layouts[link.stated], ()
    if link.maker is not None:
        made, partial = link.maker.layout(link.made_as), link.maker.choice.partial
    wanted: dict[Layout, list[Use]] = {}
    for use in link.uses:
        wanted.setdefault(use.node.layout(use.tensor), []).append(use)
    value = link.value
    if partial and len(wanted) > 1:
        scattered = scattered_layout(made, partial, wanted.keys())
        if scattered != made:
            value, made = _reshard(value, link.uses, scattered, problem), scattered
    for layout, uses in wanted.items():
        resharded = value if layout == made else _reshard(value, uses, layout, problem)
        for use in uses:
            if use.place.op.operands[use.place.operand] != resharded:  # a constraint's result, too
                use.place.op.operands[use.place.operand] = resharded


def _reshard(value: ir.Value, uses: list[Use], layout: Layout, problem: Problem) -> ir.Value:
    """A reshard in the block of the value, or that of a reshard before it."""
    op = producer(value)
    owner = ir.BlockArgument(value).owner.owner.operation if op is None else op.parent
    before = min(uses, key=lambda use: use.place.order).place.op
    while before.parent != owner:
        assert before.parent is not None, "uses stand in the value's block or deeper"
        before = before.parent
    attribute = problem.shardings.attribute(problem.atoms.dims(layout), value.type.context)
    return constrained(value, attribute, ir.InsertionPoint(before), before.location, RESHARD)
