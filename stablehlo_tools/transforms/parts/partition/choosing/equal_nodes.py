"""Joins equal nodes of a long program, such as those of equal layers, so that they decide once.

Two nodes are equal if their surroundings have the same ops and values. The surroundings grow step
by step, until too many nodes would differ. So the first and last layers of a chain differ from the
others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from stablehlo_tools.transforms.parts.partition.choosing.division_problem import (
    PartitionProblem,
    StrategyNode,
    Total,
    ValueLink,
)

_MOST = 2_000  # joined nodes
_FEWEST_STEPS = 8  # each from a node to a value, or from a value to a node
_WORTH_IT = 0.5  # joined nodes, as a share of all


class JoinedProblem:
    """A problem with one node for each class of equal ones, and the same for values.

    `links` has the joined link of each link.
    """

    def __init__(self, whole: PartitionProblem, nodes: Sequence[int], links: Sequence[int]) -> None:
        self._nodes = _join(whole.nodes, nodes)
        self.links = _join(whole.links, links)
        self.problem = copy(whole)
        self.problem.nodes = list(dict.fromkeys(self._nodes.values()))
        self.problem.links = list(dict.fromkeys(self.links.values()))
        self._join_nodes()
        self._join_links()

    def _join_nodes(self) -> None:
        for number, node in enumerate(self.problem.nodes):
            node.number, node.times = number, 0
            node.inputs = [each and self.links[each] for each in node.inputs]
            node.outputs = [each and self.links[each] for each in node.outputs]
            node.carried = node.carried and self.links[node.carried]
        own = {node: dict.fromkeys(node.tensors) for node in self.problem.nodes}
        every = {node: dict(own[node]) for node in self.problem.nodes}
        added = {node: dict[ValueLink, None]() for node in self.problem.nodes}
        for node, joined in self._nodes.items():
            joined.times += node.times
            every[joined].update(((t, self.links[link]), None) for t, link in node.tensors)
            added[joined].update((self.links[link], None) for link in node.added)
        for node in self.problem.nodes:
            node.added = list(added[node])
            node.others = [place for place in every[node] if place not in own[node]]

    def _join_links(self) -> None:
        for number, link in enumerate(self.problem.links):
            link.number = number
            link.maker = link.maker and self._nodes[link.maker]
            link.beside = [self.links[each] for each in link.beside if self.links[each] is not link]
            link.total = link.total and Total(self._nodes[link.total.carry], 0)
            uses = {(self._nodes[use.node], use.tensor): use for use in reversed(link.uses)}
            link.uses = [replace(use, node=node) for (node, _), use in uses.items()]
            link.times = link.values = 0
        at_peak = dict.fromkeys(self.problem.links, 0)
        for link, joined in self.links.items():
            joined.times += link.times
            joined.values += link.values
            at_peak[joined] += link.values if link.at_peak else 0
            if link.total and joined.total:
                joined.total = replace(joined.total, times=joined.total.times + link.total.times)
        for link in self.problem.links:
            link.at_peak = at_peak[link] > 0
            link.values = at_peak[link] or link.values

    def decide(self) -> None:
        """Gives all nodes the choices of the joined ones."""
        for node, joined in self._nodes.items():
            node.choice = joined.choice


def join_equal(problem: PartitionProblem) -> JoinedProblem | None:
    """Joins the equal nodes of a problem; None if that leaves too many of them."""
    if len(problem.nodes) <= _MOST:
        return None
    nodes, links = _classes(problem)
    if len(np.unique(nodes)) > _WORTH_IT * len(nodes):
        return None
    return JoinedProblem(problem, nodes.tolist(), links.tolist())


def _classes(problem: PartitionProblem) -> tuple[np.ndarray, np.ndarray]:
    """Returns a label for each node and for each link; equal ones have equal labels."""
    nodes = _labels(_node_key(each) for each in problem.nodes)
    links = _labels(_link_key(each) for each in problem.links)
    # (node, link, tensor) numbers of all values that nodes read or make.
    places = [(u.node.number, each.number, u.tensor) for each in problem.links for u in each.uses]
    places += [(e.maker.number, e.number, e.made_as) for e in problem.links if e.maker]
    node_at, link_at, tensor = np.array(places).T
    tensor = tensor.astype(np.uint64)
    read, places = _mix_bits(tensor), (node_at, link_at)
    count, steps = 0, 0
    while True:
        # Links are compared one step farther than nodes: then equal ones have equal users.
        links = _add_surroundings(links, nodes, places[::-1], read)
        farther = _add_surroundings(nodes, links, places, read)
        before, count, steps = count, len(np.unique(farther)), steps + 2
        if count == before or (count > _MOST and steps > _FEWEST_STEPS):
            return nodes, links
        nodes = farther


def _add_surroundings(
    labels: np.ndarray, others: np.ndarray, places: tuple[np.ndarray, ...], at: np.ndarray
) -> np.ndarray:
    """Returns labels that also depend on those of the others around each item."""
    around = np.zeros_like(labels)
    np.add.at(around, places[0], _mix_bits(others[places[1]] + at))
    return _mix_bits(labels + around)


def _join[T: (StrategyNode, ValueLink)](items: Sequence[T], classes: Sequence[int]) -> dict[T, T]:
    """Returns, for each item, the copy of the first item of its class."""
    first: dict[int, T] = {}
    for item, number in zip(items, classes, strict=True):
        if number not in first:
            first[number] = replace(item)
    return {item: first[number] for item, number in zip(items, classes, strict=True)}


def _node_key(node: StrategyNode) -> Hashable:
    attributes = str(node.op.attributes) if node.op is not None and node.is_moving else ""
    return (
        id(node.form),
        node.op and node.op.name,
        attributes,
        id(node.time),
        id(node.choice),
        node.times,
        node.pinned,
        node.carry is None,
        node.carried is None,
    )


def _link_key(link: ValueLink) -> Hashable:
    return (
        link.extent,
        link.size,
        link.stated,
        link.times,
        link.left,
        link.is_fused,
        link.is_remade,
        link.total and link.total.times,
    )


def _labels(keys: Iterable[Hashable]) -> np.ndarray:
    """Returns a number for each key; equal keys have equal numbers."""
    numbers: dict[Hashable, int] = {}
    labels = [numbers.setdefault(key, len(numbers)) for key in keys]
    return _mix_bits(np.array(labels, dtype=np.uint64))


def _mix_bits(numbers: np.ndarray) -> np.ndarray:
    """Returns numbers of 64 bits whose sums tell lists of numbers apart.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
