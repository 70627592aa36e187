"""What to try: each mesh axis on each dimension of the program, wherever it has that dimension.

Dimensions that ops hand on are one *dimension of the program*: the batch, the positions, the heads
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
from stablehlo_tools.transforms.parts.partition.choosing.layouts import (
    AtomList,
    Choice,
    Form,
    Strategy,
)
from stablehlo_tools.transforms.parts.partition.choosing.moves import Moves
from stablehlo_tools.transforms.parts.partition.choosing.prices import Step
from stablehlo_tools.transforms.parts.partition.choosing.problem import Link, Node, Problem

_MOST_SWEEPS = 4
_RANKS = 64  # more than a value has dimensions
_MOST_ALIKE = 4  # nodes that want a value alike and are tried one by one
_HOPED = 0.9  # of the cost: what hides is known to a tenth; what counts on more has to gain that
_WORTH_ANOTHER = 1e-4  # of the cost, that the last proposals have to gain, as many as a sweep has
_BESIDE = 0.65  # of all kernels, those that collectives run beside
_HIDDEN = 0.85  # of the collectives that can be hidden, those that are
_ROOM = 2.0  # times what it takes to gather a value, which kernels beside it have to take
_PRODUCTS = (DOT_GENERAL, CONVOLUTION)


def improve(moves: Moves) -> None:
    """Gives every node of a problem the choice that was found best. Deterministic.

    Of three, the one that costs least once compilers hide what they can: what was propagated, what
    costs least as it stands, and what does if little of what kernels can hide counts. The last
    takes longer where compilers hide less than is hoped, and so has to gain something; of a small
    program that stands for a large one nobody knows what it hides.
    """
    nodes = moves.problem.nodes
    hiding = Hiding(moves)
    propagated = (hiding.cost(), [node.choice for node in nodes])
    shares = hiding.shares() if moves.stands_for_itself else {}

    def found(searching: Moves) -> tuple[float, list[Choice]]:
        _choose(nodes, propagated[1])
        _search(searching)
        return hiding.cost(), [node.choice for node in nodes]

    cost, kept = min(found(moves), propagated, key=lambda each: each[0])
    if shares:
        hoped, choices = found(moves.counting(shares))
        kept = choices if hoped < _HOPED * cost else kept
    _choose(nodes, kept)


def _choose(nodes: Sequence[Node], choices: Sequence[Choice]) -> None:
    for node, choice in zip(nodes, choices, strict=True):
        node.choice = choice


def _search(moves: Moves) -> None:
    dimensions = _Dimensions(moves.problem)
    recent = deque[float](maxlen=dimensions.most_proposals + 1)  # what a sweep up to now gained
    for _ in range(_MOST_SWEEPS):
        enough = _WORTH_ANOTHER * moves.cost()
        for gained in _sweep(moves, dimensions):
            recent.append(gained)
            if len(recent) == recent.maxlen and sum(recent) <= enough:
                return


def _sweep(moves: Moves, dimensions: _Dimensions) -> Iterator[float]:
    """Tries everything once; the ns gained by each."""
    for atoms in moves.problem.atoms.movable:
        yield from map(moves.take, dimensions.proposals(atoms))
    yield sum(_settle(moves, link) for link in moves.problem.links)


def _settle(moves: Moves, link: Link) -> float:
    """Lets the nodes at the ends of a value that is resharded divide it as others of them do."""
    maker = link.maker
    if maker is None or not link.uses:
        return 0.0
    ends: dict[int, list[tuple[Node, int]]] = {maker.choice.layouts[link.made_as]: []}
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


def adopting(node: Node, tensor: int, layout: int) -> Iterator[dict[Node, Choice]]:
    """A node with a tensor divided so, and the rest as it is, or free."""
    form = node.form
    wish = form.fitted(tensor, form.atoms.layouts[layout])
    own = {factor: atoms for factor, atoms in enumerate(node.choice.strategy) if atoms}
    yield {node: form.agreed([wish, own])}
    yield {node: form.agreed([wish])}


class _Dimensions:
    """The dimensions of a program, in colours: those of a colour never meet in an op."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        places = [self._places(node) for node in problem.nodes]
        # A label for each of `count` numbers; those that are listed together share it.
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
        self._of_node: dict[Node, list[int]] = {}
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
        for number in sorted(meets, key=lambda n: (-weights[n], n)):
            taken = {colours[other] for other in meets[number] if other != number}
            colours[number] = next(c for c in itertools.count() if c not in taken)
        self._placed: list[list[tuple[Node, tuple[int, ...]]]] = []
        for colour in range(max(colours, default=-1) + 1):
            placed: list[tuple[Node, tuple[int, ...]]] = []
            for node, listed in self._of_node.items():
                factors = tuple(f for f, n in enumerate(listed) if n >= 0 and colours[n] == colour)
                if factors and not node.pinned:
                    placed.append((node, factors))
            self._placed.append(placed)

    @staticmethod
    def _places(node: Node) -> list[list[int]]:
        """For each factor the dimensions of values that it is the first of, as numbers."""
        tensors = (*node.inputs, *node.outputs)
        return [
            [link.number * _RANKS + dim for t, dim in each if (link := tensors[t]) is not None]
            for each in node.form.first_dims
        ]

    @property
    def most_proposals(self) -> int:
        """Of a sweep."""
        return 3 * len(self._placed) * len(self._problem.atoms.movable)

    def proposals(self, atoms: AtomList) -> Iterator[dict[Node, Choice]]:
        """The atoms onto the dimensions of each colour; from them; where an op has several of
        them, onto the first or the last."""
        for placed in self._placed:
            three: list[dict[Node, Choice]] = [{}, {}, {}]
            known: dict[tuple[Choice, tuple[int, ...]], list[Choice | None]] = {}
            for node, factors in placed:
                key = (node.choice, factors)
                choices = known.get(key)
                if choices is None:
                    choices = known[key] = _moved(node.form, node.choice.strategy, atoms, factors)
                for proposal, choice in zip(three, choices, strict=True):
                    if choice is not None:
                        proposal[node] = choice
            first, last, off = three
            yield first
            yield last if last != first else {}
            yield off


def _moved(
    form: Form, strategy: Strategy, atoms: AtomList, factors: Sequence[int]
) -> list[Choice | None]:
    """The choices with the atoms on the first of some factors, on the last, and on none."""
    off = None
    if any(atom in strategy[f] for f in factors for atom in atoms):
        cleared = (
            tuple(a for a in each if f not in factors or a not in atoms)
            for f, each in enumerate(strategy)
        )
        off = form.choice(tuple(cleared))
    return [form.moved(strategy, atoms, factors[n]) for n in (0, -1)] + [off]


class Hiding:
    """What of a problem's collectives its kernels can hide.

    A collective is hidden by kernels that neither give it its operand nor wait for its result: a
    gather of weights by the layers before their own, but no sum of activations on their way.
    """

    def __init__(self, moves: Moves) -> None:
        problem = moves.problem
        self._moves = moves
        self._first = _earliest(problem.links)
        # The last place in the text at which the collectives of a value can run.
        end = problem.end + 1
        last: dict[Link, int] = {}
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
        """ns of all that the choices decide, less what runs beside kernels."""
        done = self._done()
        hidden = sum(self._moves.collectives(link) for link in self._hideable(done))
        return self._moves.cost() - _HIDDEN * min(hidden, _BESIDE * float(done[-1]))

    def shares(self) -> dict[Link, float]:
        """How much of the collectives of values counts that kernels hide, however these are
        divided."""
        return dict.fromkeys(self._hideable(self._done()), 1 - _HIDDEN)

    def _done(self) -> np.ndarray:
        """ns of kernels up to each place in the text."""
        moves, problem = self._moves, self._moves.problem
        kernels = np.zeros(problem.end + 3)
        for node in problem.nodes:
            if node.op is not None and node.carry is None and node.outputs and node.outputs[0]:
                kernels[node.outputs[0].born + 1] += moves.compute(node, node.choice)
        return np.cumsum(kernels)

    def _hideable(self, done: np.ndarray) -> Iterator[Link]:
        """The values whose collectives have room beside kernels."""
        moves = self._moves
        everywhere = tuple(range(len(moves.problem.atoms.sizes)))
        for link, first in self._first.items():
            whole = link.times * moves.prices.step(Step("all_gather", everywhere, link.size))
            beside = done[max(first, self._last[link])] - done[first]
            if beside > _ROOM * max(moves.collectives(link), whole):
                yield link


def _earliest(links: list[Link]) -> dict[Link, int]:
    """From where in the text the collectives of a value can run; without those that no argument
    goes into."""
    first: dict[Link, int] = {}
    for link in links:
        maker = link.maker
        if maker is None:
            continue
        inputs = [value for value in maker.inputs if value is not None]
        if not maker.inputs and maker.pinned:
            first[link] = link.born
        elif _is_waited_for(maker) or maker.op is None or maker.pinned:
            first[link] = link.born + 1
        elif known := [first[value] for value in inputs if value in first]:
            first[link] = max(link.around, *known)
    return first


def _is_waited_for(node: Node) -> bool:
    """Whether a node is a product, or what a loop or branch carries."""
    return node.carry is not None or (node.op is not None and node.op.name in _PRODUCTS)
