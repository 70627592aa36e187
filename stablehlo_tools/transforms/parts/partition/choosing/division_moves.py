"""Moves between divisions of a program: tries one proposal at a time, and applies what pays.

A *proposal* gives many nodes a new strategy at once ("this axis goes to the batch dimension,
wherever there is one"). A minimum cut decides which of them take it: a node keeps its strategy or
takes the proposed one, and a link costs the price of its value's layouts. The chosen nodes form
connected regions. Each region is applied if its exact cost falls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from functools import cache

from stablehlo_tools.transforms.parts.partition.choosing.division_layouts import (
    AtomList,
    StrategyChoice,
)
from stablehlo_tools.transforms.parts.partition.choosing.division_prices import (
    SMALL,
    Machine,
    ReshardingPrices,
    ReshardingStep,
)
from stablehlo_tools.transforms.parts.partition.choosing.division_problem import (
    PartitionProblem,
    StrategyNode,
    ValueLink,
)
from stablehlo_tools.transforms.parts.partition.choosing.equal_nodes import JoinedProblem
from stablehlo_tools.transforms.parts.partition.choosing.proposal_cut import Cutter, Proposal
from stablehlo_tools.transforms.parts.partition.sharding_rules import (
    BorderExchanges,
    fitting,
    is_seen_through,
)

# The price of all bytes that are live at the memory peak, as a multiple of the time of all kernels.
_HOLDING = 0.5
_CARRYING = 20.0  # the factor on bytes that a loop carries beyond the propagated layout
_LARGE = 5e6  # ns of kernels above which a program represents only itself
_TOO_FAR = 4.0  # the factor on an operand's all_gather, if halo exchanges would send even more
_LEAST_GAIN = 1e-6  # share of a region's cost; a smaller gain is rounding


class Moves:
    """Applies proposals for one problem; the nodes' choices change in place.

    If the hardware was not stated, a small program may represent a large one. Latencies then count
    as in a program whose kernels run for `_LARGE` ns.
    """

    def __init__(
        self, problem: PartitionProblem, machine: Machine, byte_price: float | None = None
    ) -> None:
        self.problem = problem
        # The shares of values' collectives that count; default: 1.
        self._shares: Mapping[ValueLink, float] = {
            link: 0.0 for link in problem.links if link.is_remade
        }
        self._machine = machine
        self._exchanges = BorderExchanges(problem.atoms.axes)
        self.halos = cache(self._halos)
        self._compute: dict[tuple[StrategyNode, StrategyChoice], float] = {}
        self._of_times: dict[tuple[int, StrategyChoice], float] = {}  # ns of one run
        kernels = self.kernels()
        share = min(1.0, kernels / _LARGE) if machine.is_any else 1.0
        self.stands_for_itself = share == 1.0
        small = (link for link in problem.links if link.size <= SMALL)
        divisions = (_division(link, link.maker, {}) for link in small if link.maker is not None)
        combined = sum(bool(partial or wanted - {made}) for made, partial, wanted in divisions)
        self.prices = ReshardingPrices(problem.atoms, machine.hardware, share, combined)
        held = float(problem.held().max())
        usual = _HOLDING * kernels / held if held else 0.0
        self._byte_price = usual if byte_price is None else byte_price
        self._cutter = Cutter(problem, self.prices, self._byte_price, self._shares)

    def counting(self, shares: Mapping[ValueLink, float]) -> Moves:
        """Returns moves of the same problem that count only these shares of values' collectives."""
        return self._copy_with(self.problem, {**self._shares, **shares}, self._byte_price)

    def at_price(self, byte_price: float) -> Moves:
        """Returns moves of the same problem at another price of bytes, in ns."""
        other = self._copy_with(self.problem, self._shares, byte_price)
        if any(node.carried is not None for node in self.problem.nodes):
            other._compute = {}
        return other

    def of_joined(self, joined: JoinedProblem) -> Moves:
        """Returns moves of the problem in which equal nodes decide once."""
        shares = dict.fromkeys(joined.problem.links, 0.0)
        for link, one in joined.links.items():
            shares[one] += link.times * self._shares.get(link, 1.0) / one.times
        return self._copy_with(joined.problem, shares, self._byte_price)

    def _copy_with(
        self, problem: PartitionProblem, shares: Mapping[ValueLink, float], byte_price: float
    ) -> Moves:
        other = copy(self)
        other.problem, other._shares, other._byte_price = problem, shares, byte_price
        other._cutter = Cutter(problem, self.prices, byte_price, shares)
        return other

    def cost(self) -> float:
        """Returns the ns of everything that depends on the choices."""
        nodes = sum(self.compute(node, node.choice) for node in self.problem.nodes)
        return nodes + sum(self.link(link, {}) for link in self.problem.links)

    def compute(self, node: StrategyNode, choice: StrategyChoice) -> float:
        """Returns the ns of a node itself, in all its runs."""
        key = (node, choice)
        price = self._compute.get(key)
        if price is None:
            price = self._kernels(node, choice)
            if node.carried is not None:
                price += _CARRYING * self._more_held(node.carried, choice.layouts[0])
            for step in self.halos(node, choice) if node.is_moving else ():
                # If a device needs more than all parts have, this is worse than any gather.
                far = _TOO_FAR if step.kind == "all_gather" else 1.0
                price += node.times * far * self.prices.step(step)
            self._compute[key] = price
        return price

    def kernels(self) -> float:
        """Returns the ns of all kernels of a device."""
        return sum(self._kernels(node, node.choice) for node in self.problem.nodes)

    def least(self) -> float:
        """Returns a lower bound of the cost of any choices, in ns: each kernel on the smallest
        parts that its dimensions allow, and no collective."""
        devices, least = self.problem.atoms.axes.mesh.size, 0.0
        for node in self.problem.nodes:
            if node.time is not None:
                rule, fixed = node.form.rule, node.form.fixed
                free = (size for n, size in enumerate(rule.sizes) if n not in fixed)
                parts = min(devices, math.prod(free))
                least += node.times * node.time.least_ns(parts, self._machine)
        return least

    def _kernels(self, node: StrategyNode, choice: StrategyChoice) -> float:
        """Returns the ns of all runs of a node's kernels."""
        if node.time is None:
            return 0.0
        key = (id(node.time), choice)  # the problem has one object for equal times
        once = self._of_times.get(key)
        if once is None:
            once = node.time.ns(choice, self.problem.atoms, self._machine)
            self._of_times[key] = once
        return node.times * once

    def _halos(
        self, node: StrategyNode, choice: StrategyChoice, *, resharded: bool = False
    ) -> list[ReshardingStep]:
        """Returns the permutes of border elements that an op needs from its neighbours' parts; an
        all_gather if these are more than all parts together.

        If other such ops read the sources of an op instead of its result, it needs nothing, unless
        the result is `resharded`.
        """
        op = node.op
        if op is None or not node.is_moving or is_seen_through(op) != resharded:
            return []
        atoms = self.problem.atoms
        layout = atoms.layouts[choice.layouts[0]]
        divided = tuple(atom for each in layout for atom in each)
        if not divided:
            return []
        over = {f: atoms.axes_of(each) for f, each in enumerate(choice.strategy) if each}
        if fitting(op, node.form.rule, over, atoms.axes)[1]:
            size = sum(link.size for link in node.inputs if link is not None)
            return [ReshardingStep("all_gather", divided, size)]
        sent = self._exchanges.sent(op, atoms.dims(layout))
        return [ReshardingStep("collective_permute", layout[dim], size) for dim, size in sent]

    def link(self, link: ValueLink, changed: Proposal) -> float:
        """Returns the ns to give a value to its users, after the changes in `changed`."""
        if link.maker is None:
            return 0.0
        made, partial, wanted, times = _sent(link, link.maker, changed)
        kept = self._more_held(link, made) if link.at_peak else 0.0
        copies = wanted - {made}
        if not partial and not copies:
            return kept
        for layout in copies:
            # A copy in another layout is live from its first user to its last.
            uses = [
                use
                for use in link.uses
                if changed.get(use.node, use.node.choice).layouts[use.tensor] == layout
            ]
            if min(u.place.order for u in uses) <= self.problem.peak <= max(u.until for u in uses):
                kept += self._held(link, layout)
        counted = times * self._shares.get(link, 1.0)
        choice = changed.get(link.maker, link.maker.choice)
        moving = copies and link.maker.is_moving
        halos = self.halos(link.maker, choice, resharded=True) if moving else []
        sent = self.prices.value(link.extent, made, partial, wanted)
        return kept + counted * (sent + sum(map(self.prices.step, halos)))

    def collectives(self, link: ValueLink) -> float:
        """Returns the ns of a value's collectives in a run."""
        if link.maker is None:
            return 0.0
        made, partial, wanted, times = _sent(link, link.maker, {})
        if link.is_remade or (not partial and wanted <= {made}):
            return 0.0
        return times * self.prices.value(link.extent, made, partial, wanted)

    def _held(self, link: ValueLink, layout: int) -> float:
        """Returns the price, in ns, of a value in a layout at the memory peak."""
        size = link.values * link.size
        return self._byte_price * size / self.problem.atoms.held_parts[layout]

    def _more_held(self, link: ValueLink, layout: int) -> float:
        """Returns the price, in ns, of the bytes of a value beyond those of the propagated
        layout."""
        return max(0.0, self._held(link, layout) - self._held(link, link.stated))

    def steps(self, link: ValueLink) -> tuple[list[ReshardingStep], int]:
        """Returns the collectives that give a value to its users, and how often they run."""
        if link.maker is None or link.is_remade:
            return [], 0
        made, partial, wanted, times = _sent(link, link.maker, {})
        if not times:
            return [], 0
        layouts = self.problem.atoms.layouts
        wishes = {layouts[number] for number in wanted}
        steps, _ = self.prices.steps_to(link.extent, layouts[made], partial, wishes)
        if wanted - {made}:
            steps += self.halos(link.maker, link.maker.choice, resharded=True)
        return steps, times

    def take(self, proposal: Proposal) -> float:
        """Applies the parts of a proposal that pay. Returns the ns gained."""
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
            # The ns by which each node becomes slower itself.
            known, changes = self._compute, list[float]()
            for node, choice in proposal.items():
                new, now = known.get((node, choice)), known.get((node, node.choice))
                new = self.compute(node, choice) if new is None else new
                changes.append(new - (self.compute(node, node.choice) if now is None else now))
            regions = _regions(self._cutter.cut_proposal(proposal, changes))
        for region in regions:
            gain = self.gain(region)
            if gain > 0:
                gained += gain
                for node, choice in region.items():
                    node.choice = choice
        return gained

    def gain(self, region: Proposal) -> float:
        """Returns the ns gained if nodes make these choices; below 0 for a loss."""
        links = list(dict.fromkeys(link for node in region for link in node.links))
        before = sum(self.link(link, {}) for link in links)
        after = sum(self.link(link, region) for link in links)
        for node, choice in region.items():
            before += self.compute(node, node.choice)
            after += self.compute(node, choice)
        return before - after if abs(before - after) > _LEAST_GAIN * before else 0.0


def _sent(
    link: ValueLink, maker: StrategyNode, changed: Proposal
) -> tuple[int, AtomList, frozenset[int], int]:
    """Returns how a value is sent: (layout as made, atoms to sum over, wanted layouts, number of
    runs).

    Layouts are numbers. A value that a loop only adds up is summed once, after the loop; one that
    is added to another one before the sum is not sent.
    """
    made, partial, wanted = _division(link, maker, changed)
    times = link.times
    if link.total is not None and partial and wanted <= {made}:
        carry = link.total.carry
        if link.total.without(changed.get(carry, carry.choice), partial):
            times = link.total.times
    for other in link.beside if partial else ():
        if other.maker is not None:
            layout, atoms, wishes = _division(other, other.maker, changed)
            if (layout, set(atoms), wishes) == (made, set(partial), wanted):
                times = 0
                break
    return made, partial, wanted, times


def _division(
    link: ValueLink, maker: StrategyNode, changed: Proposal
) -> tuple[int, AtomList, frozenset[int]]:
    """Returns (layout as made, atoms to sum over, wanted layouts)."""
    choice = changed.get(maker, maker.choice)
    partial = choice.partial
    if link.left and partial:
        partial = tuple(atom for atom in partial if atom not in link.left)
    wanted = (changed.get(use.node, use.node.choice).layouts[use.tensor] for use in link.uses)
    return choice.layouts[link.made_as], partial, frozenset(wanted)


def _regions(taken: Proposal) -> list[dict[StrategyNode, StrategyChoice]]:
    """Returns the parts of a proposal that no link joins."""
    regions: list[dict[StrategyNode, StrategyChoice]] = []
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
