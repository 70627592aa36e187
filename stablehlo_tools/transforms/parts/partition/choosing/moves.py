"""Moves between ways to divide a program: one proposal at a time, taken where it pays.

A *proposal* gives many nodes a new strategy at once ("this axis goes to the batch dimension,
wherever there is one"). Which of them take it is a minimum cut: a node keeps its strategy or takes
the proposed one, a link costs what its value's layouts then cost. What the cut chooses falls into
connected regions, and each region is taken if its exact cost falls.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.partition.choosing.cutting import Cutter, Proposal
from stablehlo_tools.transforms.parts.partition.choosing.layouts import AtomList, Choice
from stablehlo_tools.transforms.parts.partition.choosing.prices import Machine, Prices, Step
from stablehlo_tools.transforms.parts.partition.choosing.problem import Link, Node, Problem
from stablehlo_tools.transforms.parts.partition.op_rules import MOVING, fitting, halo_bytes

# What all bytes cost that are kept where the program holds most, in times of all its kernels.
_HOLDING = 0.5
_CARRYING = 20.0  # times as much where a loop carries more than propagation said
_LARGE = 5e6  # ns of kernels, from which on a program stands for itself
_TOO_FAR = 4.0  # times what it costs to gather an operand
_LEAST_GAIN = 1e-6  # of what a region costs; less is rounding


class Moves:
    """Takes proposals for one problem; the nodes' choices change in place.

    Where the machine stands for any, the program may be a small one that stands for a large one:
    latencies count as they would in that, where its kernels took `_LARGE` ns.
    """

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self.problem = problem
        self._shares: Mapping[Link, float] = {}  # of values' collectives, where not all count
        self._machine = machine
        self._compute: dict[tuple[Node, Choice], float] = {}
        kernels = sum(self._kernels(node, node.choice) for node in problem.nodes)
        share = min(1.0, kernels / _LARGE) if machine.is_any else 1.0
        self.stands_for_itself = share == 1.0
        self.prices = Prices(problem.atoms, machine.hardware, share)
        held = float(problem.held().max())
        self._byte_price = _HOLDING * kernels / held if held else 0.0
        self._cutter = Cutter(problem, self.prices, self._byte_price, self._shares)

    def counting(self, shares: Mapping[Link, float]) -> Moves:
        """Moves of the same problem that count only these shares of values' collectives."""
        other = copy(self)
        other._shares = shares
        other._cutter = Cutter(self.problem, self.prices, self._byte_price, shares)
        return other

    def cost(self) -> float:
        """ns of all that the choices decide."""
        nodes = sum(self.compute(node, node.choice) for node in self.problem.nodes)
        return nodes + sum(self.link(link, {}) for link in self.problem.links)

    def compute(self, node: Node, choice: Choice) -> float:
        """ns of a node itself."""
        key = (node, choice)
        price = self._compute.get(key)
        if price is None:
            price = self._kernels(node, choice)
            if node.carried is not None:
                price += _CARRYING * self._more_held(node.carried, choice.layouts[0])
            if node.op is not None and node.op.name in MOVING:
                price += node.times * self._halo(node.op, node, choice)
            self._compute[key] = price
        return price

    def _kernels(self, node: Node, choice: Choice) -> float:
        """ns of all runs of a node's kernels."""
        if node.time is None:
            return 0.0
        return node.times * node.time.ns(choice, self.problem.atoms, self._machine)

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
        if link.maker is None:
            return 0.0
        made, partial, wanted, times = _sent(link, link.maker, changed)
        kept = self._more_held(link, made) if link.at_peak else 0.0
        copies = wanted - {made}
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
        counted = times * self._shares.get(link, 1.0)
        return kept + counted * self.prices.value(link.size, made, partial, wanted)

    def collectives(self, link: Link) -> float:
        """ns of a value's collectives in a run."""
        if link.maker is None:
            return 0.0
        made, partial, wanted, times = _sent(link, link.maker, {})
        if not partial and wanted <= {made}:
            return 0.0
        return times * self.prices.value(link.size, made, partial, wanted)

    def _held(self, link: Link, layout: int) -> float:
        """ns that it is worth not to hold a value where the program holds most."""
        return self._byte_price * link.size / self.problem.atoms.held_parts[layout]

    def _more_held(self, link: Link, layout: int) -> float:
        """ns that it is worth to hold no more of a value than propagation said."""
        return max(0.0, self._held(link, layout) - self._held(link, link.stated))

    def steps(self, link: Link) -> tuple[list[Step], int]:
        """The collectives that give a value to its users, and how often they run."""
        if link.maker is None:
            return [], 0
        made, partial, wanted, times = _sent(link, link.maker, {})
        layouts = self.problem.atoms.layouts
        wishes = {layouts[number] for number in wanted}
        return self.prices.steps_to(link.size, layouts[made], partial, wishes), times

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
        regions = [proposal]
        if len(proposal) > 1:
            regions = _regions(self._cutter.taken(proposal, self._changes(proposal)))
        for region in regions:
            gain = self.gain(region)
            if gain > 0:
                gained += gain
                for node, choice in region.items():
                    node.choice = choice
        return gained

    def _changes(self, proposal: Proposal) -> list[float]:
        """ns that each node of a proposal then takes longer itself."""
        known, changes = self._compute, list[float]()
        for node, choice in proposal.items():
            new, now = known.get((node, choice)), known.get((node, node.choice))
            new = self.compute(node, choice) if new is None else new
            changes.append(new - (self.compute(node, node.choice) if now is None else now))
        return changes

    def gain(self, region: Proposal) -> float:
        """ns that less is paid where nodes make these choices; below 0, more."""
        links = list(dict.fromkeys(link for node in region for link in node.links))
        before = sum(self.link(link, {}) for link in links)
        after = sum(self.link(link, region) for link in links)
        for node, choice in region.items():
            before += self.compute(node, node.choice)
            after += self.compute(node, choice)
        return before - after if abs(before - after) > _LEAST_GAIN * before else 0.0


def _sent(link: Link, maker: Node, changed: Proposal) -> tuple[int, AtomList, frozenset[int], int]:
    """How a value is made and the layouts it is wanted in, by their numbers, with the atoms along
    which parts of it are summed in between; and how often: a sum that a loop only adds up, once
    behind it."""
    choice = changed.get(maker, maker.choice)
    made, partial = choice.layouts[link.made_as], choice.partial
    if link.left and partial:
        partial = tuple(atom for atom in partial if atom not in link.left)
    wanted = frozenset(
        changed.get(use.node, use.node.choice).layouts[use.tensor] for use in link.uses
    )
    times = link.times
    if link.total is not None and partial and wanted <= {made}:
        carry = link.total.carry
        if link.total.without(changed.get(carry, carry.choice), partial):
            times = link.total.times
    return made, partial, wanted, times


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
