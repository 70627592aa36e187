"""What a program costs where compilers hide what can be hidden.

A collective is hidden by kernels that neither give it its operand nor wait for its result: a
gather of weights by the layers before their own, but no sum of activations on their way.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stablehlo_tools.dialect.names import CONVOLUTION, DOT_GENERAL
from stablehlo_tools.transforms.parts.partition.choosing.moves import Moves
from stablehlo_tools.transforms.parts.partition.choosing.prices import Step
from stablehlo_tools.transforms.parts.partition.choosing.problem import Link, Node

_BESIDE = 0.65  # of all kernels, those that collectives run beside
_HIDDEN = 0.85  # of the collectives that can be hidden, those that are
_ROOM = 2.0  # times what it takes to gather a value, which kernels beside it have to take
_PRODUCTS = (DOT_GENERAL, CONVOLUTION)


class Hiding:
    """What of a problem's collectives its kernels can hide."""

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
