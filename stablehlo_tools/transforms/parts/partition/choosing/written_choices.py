"""Writes the choices into the module, warns of lost divisions, and explains the cost of reshards.

Each result gets its sharding. A value gets a reshard if users want another layout. A note names the
constraint that would remove the reshard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from stablehlo_tools.analysis.shardings import SHARDING, axes_text, rank_of, rule_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, duration, note, size, to_place
from stablehlo_tools.dialect.names import RESHARD
from stablehlo_tools.ir.builder import constrain_sharding
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.partition.choosing.division_layouts import Atoms, Layout
from stablehlo_tools.transforms.parts.partition.choosing.division_moves import Moves
from stablehlo_tools.transforms.parts.partition.choosing.division_prices import ReshardingStep
from stablehlo_tools.transforms.parts.partition.choosing.division_problem import (
    NodeUse,
    PartitionProblem,
    ValueLink,
)
from stablehlo_tools.transforms.parts.partition.choosing.proposals import adopting
from stablehlo_tools.transforms.parts.partition.dividing import warn_of_undivided, warn_of_whole
from stablehlo_tools.transforms.parts.partition.sharding_rules import is_whole_op


def write_choices(moves: Moves) -> None:
    """Writes the strategies of a problem into its module."""
    problem = moves.problem
    stating = (node for node in problem.nodes if node.op is not None and not node.pinned)
    for op, nodes in groupby(stating, key=lambda node: node.op):
        assert op is not None, "only nodes with an op are listed"
        # One node divides all results of an op, or one node for each of its carries.
        every = [problem.shardings.axes_by_dim(result) for result in op.results]
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
            _reshard_users(link, moves)


def _reshard_users(link: ValueLink, moves: Moves) -> None:
    """Writes a reshard for each layout that users want, before the first of these users.

    This includes values that every device makes by itself, although nothing is sent for them:
    without the reshard, their sharding would decide how the user is divided.
    """
    problem = moves.problem
    made, partial = problem.atoms.layouts[link.stated], ()
    if link.maker is not None:
        made, partial = link.maker.layout(link.made_as), link.maker.choice.partial
    wanted: dict[Layout, list[NodeUse]] = {}
    for use in link.uses:
        wanted.setdefault(use.node.layout(use.tensor), []).append(use)
    value = link.value
    if partial and len(wanted) > 1:
        _, scattered = moves.prices.steps_to(link.extent, made, partial, wanted.keys())
        if scattered != made:
            value, made = _reshard(value, link.uses, scattered, problem), scattered
    for layout, uses in wanted.items():
        resharded = value if layout == made else _reshard(value, uses, layout, problem)
        for use in uses:
            # The operand may be the result of a constraint, even if the value needs no reshard.
            if use.place.op.operands[use.place.operand] != resharded:
                use.place.op.operands[use.place.operand] = resharded


def _reshard(
    value: ir.Value, uses: list[NodeUse], layout: Layout, problem: PartitionProblem
) -> ir.Value:
    """Writes a reshard in the block of the value, before the first of its uses."""
    op = producer(value)
    owner = ir.BlockArgument(value).owner.owner.operation if op is None else op.parent
    before = min(uses, key=lambda use: use.place.order).place.op
    while before.parent != owner:
        assert before.parent is not None, "uses are in the value's block or deeper"
        before = before.parent
    attribute = problem.shardings.attribute(problem.atoms.dims(layout), value.type.context)
    return constrain_sharding(value, attribute, ir.InsertionPoint(before), before.location, RESHARD)


def warn_of_lost(problem: PartitionProblem, diagnostics: Diagnostics) -> None:
    """Warns of ops that run on whole dimensions although propagation divided them."""
    for node in problem.nodes:
        op, rule = node.op, node.form.rule
        if op is None or not node.lost or not any(link.size for link in node.links):
            continue
        if rule_of(op) is None or is_whole_op(op):
            divided = problem.shardings.axes_by_dim
            read = [link.value for link in node.links[: len(op.operands)]]
            gathered = [value for value in read if any(divided(value))]
            warn_of_whole(op, gathered, diagnostics)
            continue
        for factor, atoms in sorted(node.lost.items()):
            moved = any(atom in atoms for each in node.choice.strategy for atom in each)
            if moved and factor in rule.whole:
                continue  # Shardy's rule says so, too, so users expect an all_to_all
            axes = problem.atoms.axes_of(atoms)
            warn_of_undivided(op, rule, factor, axes, moved, diagnostics)


@dataclass(frozen=True)
class _Remedy:
    """A layout to which a value could be constrained, and the ns that this saves in total."""

    link: ValueLink
    layout: Layout
    saves: float


def explain_moves(moves: Moves) -> list[Diagnostic]:
    """Returns a note for each value that is resharded or summed, and for each op that reads rows
    of its neighbours, the most expensive first."""
    dear: list[tuple[float, int, Diagnostic]] = []
    for link in moves.problem.links:
        steps, times = moves.steps(link)
        price = times * sum(map(moves.prices.step, steps))
        if steps:
            dear.append((-price, len(dear), _reshard_note(moves, link, steps, times, price)))
    resharded = len(dear)
    for node in moves.problem.nodes:
        steps = moves.halos(node, node.choice)
        if steps and node.op is not None:
            price = node.times * sum(map(moves.prices.step, steps))
            text = f"partition: {_text_of_steps(steps, node.times, price, moves.problem.atoms)}; "
            text += f"{node.op.name} reads elements of neighbouring parts"
            dear.append((-price, len(dear), note(text, node.op.location)))
    total = sum(-price for price, *_ in dear)
    count = f"{resharded} value{'s' if resharded != 1 else ''} resharded or summed"
    if len(dear) > resharded:
        count += f" and {len(dear) - resharded} exchanges of borders"
    notes = [each for *_, each in sorted(dear, key=itemgetter(0, 1))]
    text = f"partition: {count}, in {duration(total)} of collectives"
    return [note(text), *notes]


def _text_of_steps(steps: list[ReshardingStep], runs: int, price: float, atoms: Atoms) -> str:
    """Returns `all_gather over {"data"} of 4 MiB, 8 times: 1.2 ms`."""
    listed = ", ".join(
        f"{step.kind} over {axes_text(atoms.axes_of(step.atoms))} of {size(step.size)}"
        for step in steps
    )
    return f"{listed}{f', {runs} times' if runs > 1 else ''}: {duration(price)}"


def _reshard_note(
    moves: Moves, link: ValueLink, steps: list[ReshardingStep], runs: int, price: float
) -> Diagnostic:
    atoms, maker = moves.problem.atoms, link.maker
    assert maker is not None, "values that every device can make are not resharded"
    made = maker.layout(link.made_as)
    wanted = dict.fromkeys(use.node.layout(use.tensor) for use in link.uses)
    as_wanted = " and ".join(spec(atoms, layout) for layout in wanted if layout != made)
    text = f"partition: {_text_of_steps(steps, runs, price, atoms)}; {link.value.type} is made as "
    text += spec(atoms, made)
    if as_wanted:
        text += f" and wanted as {as_wanted}"
    remedy = max(_remedies(moves, link), key=lambda each: each.saves, default=None)
    return note(text + _told(remedy, atoms), link.value.location)


def _remedies(moves: Moves, link: ValueLink) -> Iterator[_Remedy]:
    """Yields constraints that remove a reshard: the value in the layout of a user, or a user's
    result so that the user reads the value as made."""
    maker = link.maker
    assert maker is not None
    made = maker.choice.layouts[link.made_as]
    wanted = dict.fromkeys(use.node.choice.layouts[use.tensor] for use in link.uses)
    layouts = moves.problem.atoms.layouts
    for layout in wanted:
        if layout != made:
            for proposal in adopting(maker, link.made_as, layout):
                if proposal[maker].layouts[link.made_as] == layout:
                    yield _Remedy(link, layouts[layout], moves.gain(proposal))
    for use in link.uses:
        node, result = use.node, next(iter(use.node.outputs), None)
        if node.choice.layouts[use.tensor] == made or result is None:
            continue
        for proposal in adopting(node, use.tensor, made):
            choice = proposal[node]
            if choice.layouts[use.tensor] == made:
                layout = layouts[choice.layouts[len(node.inputs)]]
                yield _Remedy(result, layout, moves.gain(proposal))


def _told(remedy: _Remedy | None, atoms: Atoms) -> str:
    if remedy is None:
        return "; no constraint on one value removes it"
    place = to_place(remedy.link.value.location)
    where = f" at {place.file}:{place.line}" if place.file else ""
    op = producer(remedy.link.value)
    is_argument = op is None and isinstance(remedy.link.value, ir.BlockArgument)
    what = (
        f"dividing the argument as {spec(atoms, remedy.layout)}"
        if is_argument
        else f"`with_sharding_constraint(…, {spec(atoms, remedy.layout)})`{where}"
    )
    if remedy.saves > 0:
        return f"; {what} saves {duration(remedy.saves)}"
    if round(remedy.saves) == 0:
        return f"; {what} removes it at no cost"
    return f"; {what} removes it, and costs {duration(-remedy.saves)} more elsewhere"


def spec(atoms: Atoms, layout: Layout) -> str:
    """Returns a layout in jax's form, `P('data', None)`; parts of an axis are in Shardy's form."""
    dims: list[str] = []
    for each in layout:
        axes = atoms.axes_of(each)
        names = [repr(a.name) if a.size is None else axes_text([a])[1:-1] for a in axes]
        dims.append(f"({', '.join(names)})" if len(names) > 1 else names[0] if names else "None")
    while dims and dims[-1] == "None":
        dims.pop()
    return f"P({', '.join(dims)})"
