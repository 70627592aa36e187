"""Chooses the divisions of arguments and results together with those of all ops.

The search is that of `proposals`, from a program that every device runs whole. Bytes at the memory
peak have a price, which rises until the program fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stablehlo_tools.analysis.shardings import Dims
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.views import Function
from stablehlo_tools.transforms.parts.partition.choosing.division_layouts import StrategyChoice
from stablehlo_tools.transforms.parts.partition.choosing.division_moves import Moves
from stablehlo_tools.transforms.parts.partition.choosing.division_prices import Machine
from stablehlo_tools.transforms.parts.partition.choosing.division_problem import (
    PartitionProblem,
    StrategyNode,
)
from stablehlo_tools.transforms.parts.partition.choosing.proposals import (
    Hiding,
    adopting,
    improve,
    search,
    set_choices,
)

_CHEAP = 0.02  # share of a device's kernels that all bytes of the whole program cost at first
_DEARER = 20.0  # the factor on the price of bytes if the program does not fit
_MOST_RISES = 5
# An input is divided instead of copied to all devices if that costs no more than this share, or ns.
_FREE, _FREE_NS = 1e-3, 5e4


@dataclass(frozen=True)
class AnotherDivision:
    """The best other division of one argument, if all ops keep theirs: the ns and the bytes of a
    device by which it is more."""

    dims: Dims
    ns: float
    bytes: float


@dataclass(frozen=True)
class BorderChoices:
    """The division of each argument and result, and the model's figures for a device.

    `ns` is the time of a run after hiding; `held` the bytes at the memory peak; `taken` the bytes
    of the arguments. `least_ns`: no division is faster, on any mesh of these devices. `others` has
    another division for each argument that has one.
    """

    arguments: tuple[Dims, ...]
    results: tuple[Dims, ...]
    ns: float
    held: float
    taken: float
    least_ns: float
    others: tuple[AnotherDivision | None, ...]

    @property
    def divisions(self) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
        """The divisions of all arguments, and of all results."""
        return self.arguments, self.results


def choose_border(
    problem: PartitionProblem, machine: Machine, memory: float, pins: Mapping[int, Dims]
) -> list[BorderChoices]:
    """Returns the divisions of the border at the least time, and, if those do not fit but others
    do, the fastest that fit.

    `memory` is in bytes of a device. `pins` are divisions of arguments that are given."""
    for number, dims in pins.items():
        node = _maker(problem, Function(problem.main).body.arguments[number])
        layout = problem.atoms.layout(dims)
        node.choice = node.form.grant_wishes([node.form.fit_layout(0, layout)])
        node.pinned = True
    undivided = Moves(problem, machine, 0.0)
    kernels = undivided.kernels() / problem.atoms.axes.mesh.size
    price = _CHEAP * kernels / max(1.0, float(problem.held().max()))
    search(undivided.at_price(price))
    # What kernels hide, and what compilers combine, is known only of a divided program.
    free = Moves(problem, machine, 0.0)
    improve(free.at_price(price), searched=True)
    found = [_border_of(free)]
    if found[0].held <= memory:
        return found
    nodes = problem.nodes
    cheap = [node.choice for node in nodes]
    search(free.at_price(price * _DEARER**_MOST_RISES))
    if problem.held().max() > memory:
        return found
    # Something fits: find the lowest price at which the search finds it.
    set_choices(nodes, cheap)
    while problem.held().max() > memory:
        price *= _DEARER
        search(free.at_price(price))
    return [*found, _border_of(free)]


def _border_of(moves: Moves) -> BorderChoices:
    """Returns the divisions of the border, after inputs are divided where that costs little.

    The moves give bytes no price."""
    problem = moves.problem
    arguments = list(Function(problem.main).body.arguments)
    cost = Hiding(moves).cost()
    for argument in arguments:
        _divide_input(moves, _maker(problem, argument), max(_FREE * cost, _FREE_NS))
    users = [node for node in problem.nodes if node.op is None and node.inputs]
    return BorderChoices(
        tuple(problem.atoms.dims(_maker(problem, each).layout(0)) for each in arguments),
        tuple(problem.atoms.dims(node.layout(0)) for node in users),
        Hiding(moves).cost(),
        float(problem.held().max()),
        sum(map(problem.made_bytes, arguments)),
        moves.least(),
        tuple(_another(moves, _maker(problem, each)) for each in arguments),
    )


def _maker(problem: PartitionProblem, argument: ir.Value) -> StrategyNode:
    maker = problem.link_of(argument).maker
    assert maker is not None, "each argument has a node"
    return maker


def _another(moves: Moves, node: StrategyNode) -> AnotherDivision | None:
    """Returns the fastest of: the whole argument on each device, and all axes on one dimension."""
    if node.pinned:
        return None
    atoms = moves.problem.atoms
    whole = node.form.choice(((),) * len(node.form.rule.sizes))
    tried = [*((whole,) if whole else ()), *_on_one_dimension(node)]
    gains = {c: moves.gain({node: c}) for c in tried if c.layouts != node.choice.layouts}
    link = node.outputs[0]
    if not gains or link is None:
        return None
    best = max(gains, key=gains.__getitem__)
    now, then = (link.size / atoms.held_parts[c.layouts[0]] for c in (node.choice, best))
    dims = atoms.dims(atoms.layouts[best.layouts[0]])
    return AnotherDivision(dims, -gains[best], then - now)


def _on_one_dimension(node: StrategyNode) -> Iterator[StrategyChoice]:
    """Yields the even choices that put all axes on one dimension: a part of a batch that several
    devices read is a copy, too."""
    every = tuple(range(len(node.form.atoms.sizes)))
    whole = ((),) * len(node.form.rule.sizes)
    for dim in range(len(whole)):
        choice = node.form.choice((*whole[:dim], every, *whole[dim + 1 :]))
        if choice is not None and choice.is_even:
            yield choice


def _divide_input(moves: Moves, node: StrategyNode, free: float) -> None:
    """Divides a dimension of an input, and its users, if that costs at most `free` ns.

    A copy on all devices costs nothing in a model of the step, but somebody has to feed it."""
    if node.inputs or node.pinned or node.outputs[0] is None or node.choice.parts > 1:
        return
    for choice in _on_one_dimension(node):
        region = {node: choice}
        for use in node.outputs[0].uses:
            if not use.node.pinned:
                region |= next(adopting(use.node, use.tensor, choice.layouts[0]))
        if moves.gain(region) >= -free:
            for changed, new in region.items():
                changed.choice = new
            return
