"""Says which reshards are written, what each costs, and which constraint would remove it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stablehlo_tools.analysis.shardings import axes_text
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, duration, note, size, to_place
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.partition.choosing.layouts import Atoms, Layout
from stablehlo_tools.transforms.parts.partition.choosing.moves import Moves
from stablehlo_tools.transforms.parts.partition.choosing.prices import Step
from stablehlo_tools.transforms.parts.partition.choosing.problem import Link
from stablehlo_tools.transforms.parts.partition.choosing.proposals import adopting


@dataclass(frozen=True)
class _Remedy:
    """A layout that a value could be held to, and the ns that it saves in all."""

    link: Link
    layout: Layout
    saves: float


def explained(moves: Moves) -> list[Diagnostic]:
    """A note for each value that is resharded or summed, the dearest first."""
    dear: list[tuple[float, int, list[Step], int]] = []
    for link in moves.problem.links:
        steps, times = moves.steps(link)
        price = times * sum(map(moves.prices.step, steps))
        if steps:
            dear.append((-price, link.number, steps, times))
    links = moves.problem.links
    notes = [
        _explained(moves, links[n], steps, times, -price) for price, n, steps, times in sorted(dear)
    ]
    total = sum(-price for price, *_ in dear)
    count = f"{len(dear)} value{'s' if len(dear) != 1 else ''}"
    return [
        note(f"partition: {count} resharded or summed, in {duration(total)} of collectives"),
        *notes,
    ]


def _explained(moves: Moves, link: Link, steps: list[Step], runs: int, price: float) -> Diagnostic:
    atoms, maker = moves.problem.atoms, link.maker
    assert maker is not None, "what every device can make is not resharded"
    listed = ", ".join(
        f"{step.kind} over {axes_text(atoms.axes_of(step.atoms))} of {size(step.size)}"
        for step in steps
    )
    times = f", {runs} times" if runs > 1 else ""
    made = maker.layout(link.made_as)
    wanted = dict.fromkeys(use.node.layout(use.tensor) for use in link.uses)
    as_wanted = " and ".join(spec(atoms, layout) for layout in wanted if layout != made)
    text = f"partition: {listed}{times}: {duration(price)}; {link.value.type} is made as "
    text += spec(atoms, made)
    if as_wanted:
        text += f" and wanted as {as_wanted}"
    remedy = max(_remedies(moves, link), key=lambda each: each.saves, default=None)
    return note(text + _told(remedy, atoms), link.value.location)


def _remedies(moves: Moves, link: Link) -> Iterator[_Remedy]:
    """What removes a reshard: the value as a user wants it, or a user as the value is made; what
    the program itself says of a value included."""
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
    """A layout as jax writes it, `P('data', None)`; parts of an axis as Shardy writes them."""
    dims: list[str] = []
    for each in layout:
        axes = atoms.axes_of(each)
        names = [repr(a.name) if a.size is None else axes_text([a])[1:-1] for a in axes]
        dims.append(f"({', '.join(names)})" if len(names) > 1 else names[0] if names else "None")
    while dims and dims[-1] == "None":
        dims.pop()
    return f"P({', '.join(dims)})"
