"""Moves between ways to divide a program: one proposal at a time, taken where it pays.

A *proposal* gives many nodes a new strategy at once ("this axis goes to the batch dimension,
wherever there is one"). Which of them take it is a minimum cut: a node keeps its strategy or takes
the proposed one, a link costs what its value's layouts then cost. What the cut chooses falls into
connected regions, and each region is taken if its exact cost falls.

Source: Boykov, Veksler and Zabih, "Fast Approximate Energy Minimization via Graph Cuts", 2001;
Lempitsky et al., "Fusion Moves for Markov Random Field Optimization", 2010.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.transforms.parts.partition.choosing.layouts import AtomList, Choice
from stablehlo_tools.transforms.parts.partition.choosing.prices import Prices, Step
from stablehlo_tools.transforms.parts.partition.choosing.problem import (
    Link,
    Node,
    Problem,
    compute_ns,
)
from stablehlo_tools.transforms.parts.partition.op_rules import MOVING, fitting, halo_bytes

Proposal = Mapping[Node, Choice]

_LARGEST = 2**30  # of a cut's capacities, which are integers of 32 bits
# What all bytes cost that are kept where the program holds most, in times of all its kernels.
_HOLDING = 0.5
_CARRYING = 20.0  # times as much where a loop carries more than propagation said
_LARGE = 5e7  # ns of kernels, from which on a program stands for itself
# Images of a convolution that a TPU keeps side by side, also where there are fewer.
_TILE = 8
_TOO_FAR = 4.0  # times what it costs to gather an operand
_LEAST_GAIN = 1e-6  # of what a region costs; less is rounding


class Moves:
    """Takes proposals for one problem; the nodes' choices change in place.

    Where `is_model`, the hardware stands for any, and the program may be a small one that stands
    for a large one: latencies count as they would in that, where its kernels took `_LARGE` ns.
    """

    def __init__(self, problem: Problem, hardware: Hardware, *, is_model: bool) -> None:
        self.problem = problem
        self.hardware = hardware
        self._compute: dict[tuple[Node, Choice], float] = {}
        self._four: dict[tuple[object, ...], tuple[float, float, float, float]] = {}
        kernels = sum(compute_ns(node, node.choice, hardware) for node in problem.nodes)
        is_tpu = hardware.networks[0].kind == "torus"
        self._tile = _TILE if is_model or is_tpu else 1
        share = min(1.0, kernels / _LARGE) if is_model else 1.0
        self.prices = Prices(problem.atoms, hardware, share)
        held = float(problem.held().max())
        self._byte_price = _HOLDING * kernels / held if held else 0.0

    def cost(self) -> float:
        """ns of all that the choices decide."""
        nodes = sum(self.compute(node, node.choice) for node in self.problem.nodes)
        return nodes + sum(self.link(link, {}) for link in self.problem.links)

    def compute(self, node: Node, choice: Choice) -> float:
        """ns of a node itself."""
        key = (node, choice)
        if key not in self._compute:
            price = compute_ns(node, choice, self.hardware, self._tile)
            if node.carried is not None:
                price += _CARRYING * self._more_held(node.carried, choice.layouts[0])
            if node.op is not None and node.op.name in MOVING:
                price += node.times * self._halo(node.op, node, choice)
            self._compute[key] = price
        return self._compute[key]

    def _halo(self, op: ir.Operation, node: Node, choice: Choice) -> float:
        """ns of the borders that an op needs of its neighbours' parts; where they are more than all
        parts, more than to gather these."""
        atoms = self.problem.atoms
        layout = atoms.layouts[choice.layouts[0]]
        divided = tuple(atom for each in layout for atom in each)
        if not divided:
            return 0.0
        over = {f: atoms.axes_of(each) for f, each in enumerate(choice.strategy) if each}
        if fitting(op, node.form.rule, over, atoms.axes)[1]:
            size = sum(link.size for link in node.inputs if link is not None)
            return _TOO_FAR * self.prices.step(Step("all_gather", divided, size))
        sent = halo_bytes(op, atoms.dims(layout), atoms.axes)
        return self.prices.step(Step("collective_permute", divided, sent)) if sent else 0.0

    def link(self, link: Link, changed: Proposal) -> float:
        """ns to give a value to its users, with some nodes' choices changed."""
        maker = link.maker
        if maker is None:
            return 0.0
        choice = changed.get(maker, maker.choice)
        made = choice.layouts[link.made_as]
        wanted = frozenset(
            changed.get(use.node, use.node.choice).layouts[use.tensor] for use in link.uses
        )
        kept = self._more_held(link, made) if link.at_peak else 0.0
        copies, partial = wanted - {made}, _to_be_summed(link, choice)
        if not partial and not copies:
            return kept
        for layout in copies:
            uses = [
                use
                for use in link.uses
                if changed.get(use.node, use.node.choice).layouts[use.tensor] == layout
            ]
            if min(u.place.order for u in uses) <= self.problem.peak <= max(u.until for u in uses):
                kept += self._held(link, layout)
        return kept + link.times * self.prices.value(link.size, made, partial, wanted)

    def _held(self, link: Link, layout: int) -> float:
        """ns that it is worth not to hold a value where the program holds most."""
        return self._byte_price * link.size / self.problem.atoms.held_parts[layout]

    def _more_held(self, link: Link, layout: int) -> float:
        """ns that it is worth to hold no more of a value than propagation said."""
        return max(0.0, self._held(link, layout) - self._held(link, link.stated))

    def steps(self, link: Link) -> list[Step]:
        """The collectives that give a value to its users."""
        maker, layouts = link.maker, self.problem.atoms.layouts
        if maker is None:
            return []
        partial = _to_be_summed(link, maker.choice)
        wanted = {use.node.layout(use.tensor) for use in link.uses}
        made = layouts[maker.choice.layouts[link.made_as]]
        return self.prices.steps_to(link.size, made, partial, wanted)

    def take(self, proposal: Proposal) -> float:
        """Takes what pays of a proposal; the ns gained."""
        proposal = {
            node: choice
            for node, choice in proposal.items()
            if choice is not node.choice and not node.pinned
        }
        if not proposal:
            return 0.0
        gained = 0.0
        regions = [proposal] if len(proposal) == 1 else _regions(self._cut(proposal))
        for region in regions:
            gain = self.gain(region)
            if gain > 0:
                gained += gain
                for node, choice in region.items():
                    node.choice = choice
        return gained

    def gain(self, region: Proposal) -> float:
        """ns that less is paid where nodes make these choices; below 0, more."""
        links = _links_of(region)
        before = sum(self.link(link, {}) for link in links)
        after = sum(self.link(link, region) for link in links)
        for node, choice in region.items():
            before += self.compute(node, node.choice)
            after += self.compute(node, choice)
        return before - after if abs(before - after) > _LEAST_GAIN * before else 0.0

    def _cut(self, proposal: Proposal) -> Proposal:
        """The nodes that take the proposal, where each link is shared out among its users."""
        nodes = list(proposal)
        number = {node: n for n, node in enumerate(nodes)}
        cut = _Cut(len(nodes))
        for node, choice in proposal.items():
            change = self.compute(node, choice) - self.compute(node, node.choice)
            cut.alone(number[node], change)
        for link in _links_of(proposal):
            self._add_link(cut, number, link, proposal)
        return {nodes[n]: proposal[nodes[n]] for n in cut.taken()}

    def _add_link(
        self, cut: _Cut, number: Mapping[Node, int], link: Link, proposal: Proposal
    ) -> None:
        maker = link.maker
        if maker is None:
            return
        one, other = maker.choice, proposal.get(maker)
        new = one if other is None else other
        made, made_new = one.layouts[link.made_as], new.layouts[link.made_as]
        partial, partial_new = _to_be_summed(link, one), _to_be_summed(link, new)
        if link.at_peak and made != made_new:
            change = self._more_held(link, made_new) - self._more_held(link, made)
            cut.alone(number[maker], change)
        if not link.uses and (partial or partial_new):
            none = frozenset[int]()
            change = self.prices.value(link.size, made_new, partial_new, none)
            change -= self.prices.value(link.size, made, partial, none)
            cut.alone(number[maker], link.times * change)
        for node, wish, wished, before, after in _wishes(link, proposal):
            key = (link.size, made, partial, made_new, partial_new, wish, wished)
            four = self._four.get(key)
            if four is None:
                four = self._four[key] = self._prices_of(*key)
            if not any(four):
                continue
            kept, moved = four[0] * link.times / before, four[2] * link.times
            alone, both = four[1] * link.times / after, four[3] * link.times / after
            if other is None:
                if node in proposal:
                    cut.alone(number[node], alone - kept)
            elif node not in proposal:
                cut.alone(number[maker], moved / after - kept)
            elif node is maker:
                cut.alone(number[maker], both - kept)
            else:
                cut.pair(number[maker], number[node], kept, alone, moved / before, both)

    def _prices_of(
        self,
        size: float,
        made: int,
        partial: AtomList,
        made_new: int,
        partial_new: AtomList,
        wish: int,
        wished: int,
    ) -> tuple[float, float, float, float]:
        """What a value costs that is made as before or anew: each for a user as before and anew."""
        price = self.prices.to_one
        return (
            price(size, made, partial, wish),
            price(size, made, partial, wished),
            price(size, made_new, partial_new, wish),
            price(size, made_new, partial_new, wished),
        )


def _wishes(link: Link, proposal: Proposal) -> Iterator[tuple[Node, int, int, int, int]]:
    """For each use the node, the layout that it wants and the one proposed, and how many want
    these: what is resharded once for several users is paid by each in part."""
    uses: list[tuple[Node, int, int]] = []
    for use in link.uses:
        wish = use.node.choice.layouts[use.tensor]
        new = proposal.get(use.node)
        uses.append((use.node, wish, wish if new is None else new.layouts[use.tensor]))
    if len(uses) == 1:
        yield *uses[0], 1, 1
        return
    before, after = Counter(wish for _, wish, _ in uses), Counter(new for _, _, new in uses)
    for node, wish, wished in uses:
        yield node, wish, wished, before[wish], after[wished]


class _Cut:
    """A sum of costs of yes-or-no choices, to be made least."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._alone = [0.0] * count
        self._pairs: dict[tuple[int, int], float] = {}

    def alone(self, one: int, change: float) -> None:
        """What it costs more that `one` says yes."""
        self._alone[one] += change

    def pair(
        self, one: int, other: int, both_no: float, no_yes: float, yes_no: float, both_yes: float
    ) -> None:
        """What two choices cost together; a mixture costs no less than the mean of the others."""
        lack = both_no + both_yes - no_yes - yes_no
        if lack > 0:
            no_yes += lack / 2
            yes_no += lack / 2
        self._alone[one] += yes_no - both_no
        self._alone[other] += both_yes - yes_no
        mixed = no_yes + yes_no - both_no - both_yes
        if mixed > 0:
            key = (one, other)
            self._pairs[key] = self._pairs.get(key, 0.0) + mixed

    def taken(self) -> list[int]:
        """Who says yes; of equals as few as can be."""
        if min(self._alone) >= 0:
            return []
        source, sink = self._count, self._count + 1
        edges: list[tuple[int, int, float]] = []
        for one, change in enumerate(self._alone):
            # An edge that is cut: from the yes side (the source's) to the no side.
            if change < 0:
                edges.append((source, one, -change))
            elif change > 0:
                edges.append((one, sink, change))
        for (one, other), mixed in self._pairs.items():
            # `mixed` is paid where `one` says no and `other` yes.
            edges.append((other, one, mixed))
        total = sum(-change for change in self._alone if change < 0)
        scale = _LARGEST / max(total, 1e-9)
        heads, tails, sizes = zip(*edges, strict=True)
        capacities = np.minimum(np.rint(np.array(sizes) * scale), _LARGEST).astype(np.int32)
        shape = (self._count + 2, self._count + 2)
        graph = csr_array((capacities, (heads, tails)), shape=shape)
        graph.eliminate_zeros()
        flow = maximum_flow(graph, source, sink).flow
        residual = csr_array(graph - flow)
        residual.data[residual.data < 0] = 0
        residual.eliminate_zeros()
        # As few as can be: those that reach the sink say no.
        back = csr_array(residual.T)
        no = set(breadth_first_order(back, sink, return_predecessors=False).tolist())
        reached = set(breadth_first_order(residual, source, return_predecessors=False).tolist())
        return sorted(n for n in range(self._count) if n in reached and n not in no)


def _to_be_summed(link: Link, choice: Choice) -> AtomList:
    """The atoms along which parts of a sum have to be joined, where a node makes a value so."""
    if not link.left or not choice.partial:
        return choice.partial
    return tuple(atom for atom in choice.partial if atom not in link.left)


def _links_of(nodes: Iterable[Node]) -> list[Link]:
    return list(dict.fromkeys(link for node in nodes for link in node.links))


def _regions(taken: Proposal) -> list[dict[Node, Choice]]:
    """The parts of what was taken that no link joins."""
    regions: list[dict[Node, Choice]] = []
    left = dict(taken)
    while left:
        first = next(iter(left))
        region = {first: left.pop(first)}
        waiting = [first]
        while waiting:
            for link in waiting.pop().links:
                ends = [use.node for use in link.uses]
                for node in ends if link.maker is None else [link.maker, *ends]:
                    if node in left:
                        region[node] = left.pop(node)
                        waiting.append(node)
        regions.append(region)
    return regions
