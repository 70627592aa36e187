"""Proposes strategies: each mesh axis on each dimension of the program, wherever it has that
dimension.

Dimensions that ops pass on form one *dimension of the program*: the batch, the positions, the heads
of a layer. Those that never meet in an op are tried at once.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from stablehlo_tools.dialect.names import CONVOLUTION, DOT_GENERAL
from stablehlo_tools.transforms.parts.partition.choosing.division_layouts import (
    AtomList,
    RuleForm,
    Strategy,
    StrategyChoice,
)
from stablehlo_tools.transforms.parts.partition.choosing.division_moves import Moves
from stablehlo_tools.transforms.parts.partition.choosing.division_prices import ReshardingStep
from stablehlo_tools.transforms.parts.partition.choosing.division_problem import (
    PartitionProblem,
    StrategyNode,
    ValueLink,
)
from stablehlo_tools.transforms.parts.partition.choosing.equal_nodes import join_equal

_MOST_SWEEPS = 4
_RANKS = 64  # more than the rank of any value
_MOST_ALIKE = 4  # up to so many nodes that want a value in the same layout are tried one by one
_HOPED = 0.9  # share of the cost: hiding is known to a tenth, so relying on it has to gain a tenth
_WORTH_ANOTHER = 1e-4  # share of the cost that the last proposals, a sweep of them, have to gain
_BESIDE = 0.65  # share of all kernels that collectives overlap with
_HIDDEN = 0.85  # share of the hideable collectives that are hidden
_ROOM = 2.0  # the time of kernels needed to hide a collective, as a multiple of an all_gather's
_PRODUCTS = (DOT_GENERAL, CONVOLUTION)


def improve(moves: Moves, *, searched: bool = False) -> None:
    """Gives every node of a problem the best choice found. Deterministic.

    There are three candidates: the propagated choices, those of least cost, and those of least cost
    if hideable collectives hardly count. The one of least cost after hiding is kept. The third is
    slower if compilers hide less than expected, so it has to gain `1 - _HOPED`. It is left out for
    a small program that represents a large one, because what that one hides is unknown. If the
    choices are `searched` already, they count as those of least cost.
    """
    nodes = moves.problem.nodes
    hiding = Hiding(moves)
    propagated = (hiding.cost(), [node.choice for node in nodes])
    shares = hiding.shares() if moves.stands_for_itself else {}

    def found(searching: Moves) -> tuple[float, list[StrategyChoice]]:
        set_choices(nodes, propagated[1])
        search(searching)
        return hiding.cost(), [node.choice for node in nodes]

    cost, kept = propagated
    if not searched:
        cost, kept = min(found(moves), propagated, key=lambda each: each[0])
    if shares:
        hoped, choices = found(moves.counting(shares))
        kept = choices if hoped < _HOPED * cost else kept
    set_choices(nodes, kept)


def set_choices(nodes: Sequence[StrategyNode], choices: Sequence[StrategyChoice]) -> None:
    """Gives each node its choice."""
    for node, choice in zip(nodes, choices, strict=True):
        node.choice = choice


def search(moves: Moves) -> None:
    """Takes proposals until a sweep of them gains little. Equal nodes of a long program decide
    once."""
    joined = join_equal(moves.problem)
    if joined is None:
        _search(moves)
        return
    _search(moves.of_joined(joined))
    joined.decide()


def _search(moves: Moves) -> None:
    dimensions = _DimensionColours(moves.problem)
    recent = deque[float](maxlen=dimensions.most_proposals + 1)  # gains of the last proposals
    for _ in range(_MOST_SWEEPS):
        enough = _WORTH_ANOTHER * moves.cost()
        for gained in _sweep(moves, dimensions):
            recent.append(gained)
            if len(recent) == recent.maxlen and sum(recent) <= enough:
                return


def _sweep(moves: Moves, dimensions: _DimensionColours) -> Iterator[float]:
    """Tries all proposals once. Yields the ns gained by each."""
    for atoms in moves.problem.atoms.movable:
        yield from map(moves.take, dimensions.proposals(atoms))
    yield sum(_settle(moves, link) for link in moves.problem.links)


def _settle(moves: Moves, link: ValueLink) -> float:
    """Tries, for a value that is resharded, the layout of each of its nodes on the others. Returns
    the ns gained."""
    maker = link.maker
    if maker is None or not link.uses or link.is_remade:
        return 0.0
    ends: dict[int, list[tuple[StrategyNode, int]]] = {maker.choice.layouts[link.made_as]: []}
    for use in link.uses:
        ends.setdefault(use.node.choice.layouts[use.tensor], []).append((use.node, use.tensor))
    if len(ends) == 1:
        return 0.0
    ends[maker.choice.layouts[link.made_as]].append((maker, link.made_as))
    gained = 0.0
    for now, nodes in ends.items():
        if len(nodes) > _MOST_ALIKE:
            continue
        for node, tensor in nodes:
            for other in ends:
                if other != now and not node.pinned:
                    gained += sum(map(moves.take, adopting(node, tensor, other)))
    return gained


def adopting(
    node: StrategyNode, tensor: int, layout: int
) -> Iterator[dict[StrategyNode, StrategyChoice]]:
    """Yields choices of a node with a tensor in this layout: one keeps the rest of its strategy,
    one drops it."""
    form = node.form
    wish = form.fit_layout(tensor, form.atoms.layouts[layout])
    own = {factor: atoms for factor, atoms in enumerate(node.choice.strategy) if atoms}
    yield {node: form.grant_wishes([wish, own])}
    yield {node: form.grant_wishes([wish])}


class _DimensionColours:
    """The dimensions of a program, in colours. Dimensions of one colour never meet in an op."""

    def __init__(self, problem: PartitionProblem) -> None:
        self._problem = problem
        places = [self._places(node) for node in problem.nodes]
        # Label all (link, dimension) numbers; those that share a factor get the same label.
        count = len(problem.links) * _RANKS
        pairs = [
            (one, other)
            for listed in places
            for each in listed
            for one, other in itertools.pairwise(each)
        ]
        heads, tails = zip(*pairs, strict=True) if pairs else ((), ())
        graph = csr_array((np.ones(len(pairs)), (heads, tails)), shape=(count, count))
        labels = connected_components(graph, directed=False)[1].tolist()
        weights = [0.0] * (max(labels, default=-1) + 1)
        self._of_node: dict[StrategyNode, list[int]] = {}
        for node, listed in zip(problem.nodes, places, strict=True):
            self._of_node[node] = [labels[each[0]] if each else -1 for each in listed]
            for each in listed:
                if each:
                    size = problem.links[each[0] // _RANKS].size
                    weights[labels[each[0]]] += size * node.times
        meets: dict[int, set[int]] = {}
        for listed in self._of_node.values():
            here = {n for n in listed if n >= 0}
            for number in here:
                meets.setdefault(number, set()).update(here)
        colours = [-1] * len(weights)
        # Greedy colouring, the dimensions with the most bytes first.
        for number in sorted(meets, key=lambda n: (-weights[n], n)):
            taken = {colours[other] for other in meets[number] if other != number}
            colours[number] = next(c for c in itertools.count() if c not in taken)
        self._placed: list[list[tuple[StrategyNode, tuple[int, ...]]]] = []
        for colour in range(max(colours, default=-1) + 1):
            placed: list[tuple[StrategyNode, tuple[int, ...]]] = []
            for node, listed in self._of_node.items():
                factors = tuple(f for f, n in enumerate(listed) if n >= 0 and colours[n] == colour)
                if factors and not node.pinned:
                    placed.append((node, factors))
            self._placed.append(placed)

    @staticmethod
    def _places(node: StrategyNode) -> list[list[int]]:
        """Returns, for each factor, the dimensions of values in which it is the major factor, as
        numbers."""
        links: dict[int, list[ValueLink]] = {}
        for tensor, link in node.tensors:
            links.setdefault(tensor, []).append(link)
        return [
            [link.number * _RANKS + dim for t, dim in each for link in links.get(t, ())]
            for each in node.form.first_dims
        ]

    @property
    def most_proposals(self) -> int:
        """The largest number of proposals in a sweep."""
        kinds = 4 if self._problem.is_border_free else 3
        return kinds * len(self._placed) * len(self._problem.atoms.movable)

    def proposals(self, atoms: AtomList) -> Iterator[dict[StrategyNode, StrategyChoice]]:
        """Yields proposals for each colour: the atoms on its dimensions, on the last of them if an
        op has several, and on none; if the border is free, also on its dimensions alone."""
        for placed in self._placed:
            three: list[dict[StrategyNode, StrategyChoice]] = [{}, {}, {}]
            known: dict[tuple[StrategyChoice, tuple[int, ...]], list[StrategyChoice | None]] = {}
            for node, factors in placed:
                key = (node.choice, factors)
                choices = known.get(key)
                if choices is None:
                    choices = known[key] = _atom_placements(
                        node.form, node.choice.strategy, atoms, factors
                    )
                for proposal, choice in zip(three, choices, strict=True):
                    if choice is not None:
                        proposal[node] = choice
            first, last, off = three
            yield first
            yield last if last != first else {}
            yield off
            if self._problem.is_border_free:
                yield self._cleared_elsewhere(placed, atoms) | first

    def _cleared_elsewhere(
        self, placed: Sequence[tuple[StrategyNode, tuple[int, ...]]], atoms: AtomList
    ) -> dict[StrategyNode, StrategyChoice]:
        """Returns choices without the atoms for all nodes that are not in `placed`: if the batch is
        divided, weights that were divided by the same atoms become whole."""
        here = {node for node, _ in placed}
        cleared: dict[StrategyNode, StrategyChoice] = {}
        for node in self._of_node:
            strategy = node.choice.strategy
            if node not in here and any(atom in each for each in strategy for atom in atoms):
                without = (tuple(a for a in each if a not in atoms) for each in strategy)
                choice = node.form.choice(tuple(without))
                if choice is not None:
                    cleared[node] = choice
        return cleared


def _atom_placements(
    form: RuleForm, strategy: Strategy, atoms: AtomList, factors: Sequence[int]
) -> list[StrategyChoice | None]:
    """Returns the choices with the atoms on the first of some factors, on the last, and on none."""
    off = None
    if any(atom in strategy[f] for f in factors for atom in atoms):
        cleared = (
            tuple(a for a in each if f not in factors or a not in atoms)
            for f, each in enumerate(strategy)
        )
        off = form.choice(tuple(cleared))
    return [form.move_atoms(strategy, atoms, factors[n]) for n in (0, -1)] + [off]


class Hiding:
    """Estimates which of a problem's collectives its kernels can hide.

    Kernels can hide a collective if they neither make its operand nor wait for its result. The
    gather of weights is hidden by earlier layers. The sum of activations on the critical path is
    not.
    """

    def __init__(self, moves: Moves) -> None:
        problem = moves.problem
        self._moves = moves
        self._first = _earliest(problem.links)
        # Find the last place in the text at which the collectives of a value can run.
        end = problem.end + 1
        last: dict[ValueLink, int] = {}
        for link in reversed(problem.links):
            ends: list[int] = [end]
            for use in link.uses:
                made = [last[value] for value in use.node.outputs if value in last]
                if _is_waited_for(use.node) or (use.node.outputs and not made):
                    made = [use.place.order]
                ends += made
            last[link] = min(ends)
        self._last = last

    def cost(self) -> float:
        """Returns the ns that depend on the choices, minus the collectives that kernels hide."""
        done = self._done()
        hidden = sum(self._moves.collectives(link) for link in self._hideable(done))
        return self._moves.cost() - _HIDDEN * min(hidden, _BESIDE * float(done[-1]))

    def shares(self) -> dict[ValueLink, float]:
        """Returns the factor on the collectives of each value that kernels can hide, in any
        layout."""
        return dict.fromkeys(self._hideable(self._done()), 1 - _HIDDEN)

    def _done(self) -> np.ndarray:
        """Returns the ns of kernels up to each place in the text."""
        moves, problem = self._moves, self._moves.problem
        kernels = np.zeros(problem.end + 3)
        for node in problem.nodes:
            if node.op is not None and node.carry is None and node.outputs and node.outputs[0]:
                kernels[node.outputs[0].born + 1] += moves.compute(node, node.choice)
        return np.cumsum(kernels)

    def _hideable(self, done: np.ndarray) -> Iterator[ValueLink]:
        """Yields the values whose collectives have enough kernels to overlap with."""
        moves = self._moves
        everywhere = tuple(range(len(moves.problem.atoms.sizes)))
        for link, first in self._first.items():
            gather = ReshardingStep("all_gather", everywhere, link.size)
            whole = link.times * moves.prices.step(gather)
            beside = done[max(first, self._last[link])] - done[first]
            if beside > _ROOM * max(moves.collectives(link), whole):
                yield link


def _earliest(links: list[ValueLink]) -> dict[ValueLink, int]:
    """Returns the first place in the text at which the collectives of each value can run. Values
    that depend on no argument are left out."""
    first: dict[ValueLink, int] = {}
    for link in links:
        maker = link.maker
        if maker is None:
            continue
        if not maker.inputs and maker.pinned:
            first[link] = link.born
        elif _is_waited_for(maker) or maker.op is None or maker.pinned:
            first[link] = link.born + 1
        elif known := [first[value] for value in maker.inputs if value in first]:
            first[link] = max(link.around, *known)
    return first


def _is_waited_for(node: StrategyNode) -> bool:
    """Returns True if a node is a product, or the carry of a loop or branch."""
    return node.carry is not None or (node.op is not None and node.op.name in _PRODUCTS)
