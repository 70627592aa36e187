"""Chooses the nodes that take a proposal, by a minimum cut.

A node keeps its choice (no) or takes the proposed one (yes). A link costs the price of its value's
layouts. If several users want the same layout, each pays its share. Most links are similar, so all
links of a program are priced at once, in arrays.

Source: Boykov, Veksler and Zabih, "Fast Approximate Energy Minimization via Graph Cuts", 2001;
Lempitsky et al., "Fusion Moves for Markov Random Field Optimization", 2010.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy.sparse import csr_array

from stablehlo_tools.analysis.minimum_cut import source_side
from stablehlo_tools.transforms.parts.partition.choosing.division_layouts import StrategyChoice
from stablehlo_tools.transforms.parts.partition.choosing.division_prices import ReshardingPrices
from stablehlo_tools.transforms.parts.partition.choosing.division_problem import (
    PartitionProblem,
    StrategyNode,
    ValueLink,
)

Proposal = Mapping[StrategyNode, StrategyChoice]

_LARGEST = 2**30  # the largest capacity of an edge, because capacities are integers of 32 bits


class Cutter:
    """Cuts proposals for one problem.

    `byte_price` is the price, in ns, of one more byte at the memory peak. `shares` are the factors
    on the collectives of values (default: 1).
    """

    def __init__(
        self,
        problem: PartitionProblem,
        prices: ReshardingPrices,
        byte_price: float,
        shares: Mapping[ValueLink, float],
    ) -> None:
        self._problem = problem
        self._prices = prices
        self._byte_price = byte_price
        self._four: dict[tuple[int, ...], tuple[float, float, float, float]] = {}
        self._links = [link for link in problem.links if link.maker is not None]
        self._maker = _integers(link.maker.number for link in self._links if link.maker)
        self._made_as = _integers(link.made_as for link in self._links)
        counted = [link.times * shares.get(link, 1.0) for link in self._links]
        self._times = np.array(counted, dtype=np.float64)
        self._extents = list(dict.fromkeys(link.extent for link in self._links))
        numbers = {extent: number for number, extent in enumerate(self._extents)}
        self._extent_of = _integers(numbers[link.extent] for link in self._links)
        sizes = [link.values * link.size for link in self._links]
        self._sizes = np.array(sizes, dtype=np.float64)
        uses = [(n, use) for n, link in enumerate(self._links) for use in link.uses]
        self._link = _integers(n for n, _ in uses)
        self._user = _integers(use.node.number for _, use in uses)
        self._tensor = _integers(use.tensor for _, use in uses)
        self._left = [n for n, link in enumerate(self._links) if link.left]
        self._at_peak = _integers(n for n, link in enumerate(self._links) if link.at_peak)
        self._totals = [n for n, link in enumerate(self._links) if link.total]
        self._unused = [n for n, link in enumerate(self._links) if not link.uses]

    def cut_proposal(
        self, proposal: Proposal, changes: Sequence[float]
    ) -> dict[StrategyNode, StrategyChoice]:
        """Returns the part of a proposal to take. `changes` are the ns by which each of its nodes
        itself becomes slower."""
        numbers = _integers(node.number for node in proposal)
        count = len(self._problem.nodes)
        member = np.zeros(count, dtype=bool)
        member[numbers] = True
        now = [node.choice for node in self._problem.nodes]
        new = now.copy()
        for node, choice in proposal.items():
            new[node.number] = choice
        made, partial, wish, before = self._layouts(now)
        made_new, partial_new, wished, after = self._layouts(new)

        maker = self._maker[self._link]
        alike = ((made == made_new) & (partial == partial_new))[self._link]
        alike &= (wish == wished) & (before == after)
        # The price of a sum over a loop also depends on the choice of its carry.
        alike[np.isin(self._link, self._totals)] = False
        at = np.flatnonzero((member[self._user] | member[maker]) & ~alike)
        every = (self._link, self._user, maker, before, after)
        link, user, maker, before, after = (each[at] for each in every)
        columns = [x[link] for x in (self._extent_of, made, partial, made_new, partial_new)]
        four = self._price_uses([*columns, wish[at], wished[at]]) * self._times[link]
        four *= self._shares(link, [*columns, wish[at], wished[at]], new)
        kept, alone, moved, both = four[0] / before, four[1] / after, four[2], four[3] / after

        cost = np.zeros(count)
        cost[numbers] = changes
        self._hold(cost, member, made, made_new)
        self._sum_unused(cost, member, (made, partial), (made_new, partial_new))
        is_moved, is_used = member[maker], member[user]
        for where, node, change in (
            (~is_moved, user, alone - kept),
            (~is_used, maker, moved / after - kept),
            (user == maker, maker, both - kept),
        ):
            cost += np.bincount(node[where], change[where], count)
        # Costs of pairs of choices. A minimum cut needs that mixed choices cost at least as much
        # as equal ones, so raise them by half of the difference.
        pair = np.flatnonzero(is_moved & is_used & (user != maker))
        kept, alone, moved, both = kept[pair], alone[pair], (moved / before)[pair], both[pair]
        lack = np.maximum(kept + both - alone - moved, 0.0) / 2
        alone, moved = alone + lack, moved + lack
        cost += np.bincount(maker[pair], moved - kept, count)
        cost += np.bincount(user[pair], both - moved, count)
        place = np.zeros(count, dtype=np.int64)
        place[numbers] = np.arange(len(numbers))
        mixed = alone + moved - kept - both
        takers = _least(cost[numbers], place[maker[pair]], place[user[pair]], mixed)
        items = list(proposal.items())
        return dict(items[n] for n in takers)

    def _layouts(self, choices: Sequence[StrategyChoice]) -> tuple[np.ndarray, ...]:
        """Returns layouts as numbers if nodes make these choices.

        For each link: the layout as made, and the atoms to sum over. For each use: the wanted
        layout, and the number of uses of the link that want it.
        """
        atoms = self._problem.atoms
        flat = np.array(atoms.tensor_layouts)
        first = _integers(choice.first_tensor for choice in choices)
        partial = _integers(choice.sum_number for choice in choices)[self._maker]
        for n in self._left:
            left = self._links[n].left
            rest = tuple(atom for atom in atoms.sums[partial[n]] if atom not in left)
            partial[n] = atoms.sum_number(rest)
        wanted = flat[first[self._user] + self._tensor]
        _, alike, counts = np.unique(
            self._link * len(atoms.layouts) + wanted, return_inverse=True, return_counts=True
        )
        return flat[first[self._maker] + self._made_as], partial, wanted, counts[alike]

    def _price_uses(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the prices of uses, of shape (4, uses).

        The rows are: old maker and old user, old maker and new user, new maker and old user, both
        new.
        """
        # Price each distinct row once: `first` has its first index, `alike` numbers the rows.
        first = alike = np.zeros(len(columns[0]), dtype=np.int64)
        for column in columns:
            alike = alike * (column.max(initial=0) + 1) + column
            _, first, alike = np.unique(alike, return_index=True, return_inverse=True)
        keys = np.stack([column[first] for column in columns], axis=1).tolist()
        prices = [self._prices_of(*key) for key in keys]
        return np.array(prices, dtype=np.float64).reshape(-1, 4).T[:, alike]

    def _prices_of(
        self, extent: int, made: int, partial: int, made_new: int, partial_new: int, *wishes: int
    ) -> tuple[float, float, float, float]:
        key = (extent, made, partial, made_new, partial_new, *wishes)
        four = self._four.get(key)
        if four is None:
            wish, wished = wishes
            price, whole = self._prices.to_one, self._extents[extent]
            sums = self._problem.atoms.sums
            four = self._four[key] = (
                price(whole, made, sums[partial], wish),
                price(whole, made, sums[partial], wished),
                price(whole, made_new, sums[partial_new], wish),
                price(whole, made_new, sums[partial_new], wished),
            )
        return four

    def _shares(
        self, link: np.ndarray, columns: Sequence[np.ndarray], new: Sequence[StrategyChoice]
    ) -> np.ndarray:
        """Returns factors of shape (4, uses): the runs in which parts of a value are summed, as a
        share of all its runs."""
        shares = np.ones((4, len(link)))
        for use in np.flatnonzero(np.isin(link, self._totals)):
            value = self._links[link[use]]
            assert value.total is not None, "only links with a total are selected"
            carry, share = value.total.carry, value.total.times / value.times
            _, made, partial, made_new, partial_new, wish, wished = (c[use] for c in columns)
            for row, (layout, number, user, choice) in enumerate(
                (
                    (made, partial, wish, carry.choice),
                    (made, partial, wished, new[carry.number]),
                    (made_new, partial_new, wish, carry.choice),
                    (made_new, partial_new, wished, new[carry.number]),
                )
            ):
                atoms = self._problem.atoms.sums[number]
                if atoms and layout == user and value.total.without(choice, atoms):
                    shares[row, use] = share
        return shares

    def _hold(
        self, cost: np.ndarray, member: np.ndarray, made: np.ndarray, made_new: np.ndarray
    ) -> None:
        """Adds the price of bytes beyond the propagated layout, for values at the memory peak."""
        links = self._at_peak[member[self._maker[self._at_peak]]]
        parts = np.array(self._problem.atoms.held_parts, dtype=np.float64)
        stated = parts[_integers(self._links[n].stated for n in links)]
        size = self._byte_price * self._sizes[links]
        more = [
            np.maximum(size / parts[layout[links]] - size / stated, 0.0)
            for layout in (made, made_new)
        ]
        cost += np.bincount(self._maker[links], more[1] - more[0], len(cost))

    def _sum_unused(
        self,
        cost: np.ndarray,
        member: np.ndarray,
        before: tuple[np.ndarray, np.ndarray],
        after: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Adds the price of the sums of unused values."""
        for n in self._unused:
            if member[self._maker[n]]:
                link = self._links[n]
                old, new = (self._sum_of(link, int(m[n]), int(p[n])) for m, p in (before, after))
                cost[self._maker[n]] += link.times * (new - old)

    def _sum_of(self, link: ValueLink, made: int, partial: int) -> float:
        atoms = self._problem.atoms.sums[partial]
        return self._prices.value(link.extent, made, atoms, frozenset()) if atoms else 0.0


def _integers(numbers: Iterable[int]) -> np.ndarray:
    return np.fromiter(numbers, dtype=np.int64)


def _least(
    change: np.ndarray, makers: np.ndarray, users: np.ndarray, mixed: np.ndarray
) -> list[int]:
    """Returns the nodes that say yes at the least cost; of equal solutions, the one with the
    fewest.

    `change` is the cost of each yes. `mixed` is paid if a maker says no and its user yes.
    """
    if change.min() >= 0:
        return []
    count = len(change)
    source, sink = count, count + 1
    # The cut pays for edges from the yes side, that of the source, to the no side.
    gains, costs = np.flatnonzero(change < 0), np.flatnonzero(change > 0)
    heads = np.concatenate([np.full(len(gains), source), costs, users])
    tails = np.concatenate([gains, np.full(len(costs), sink), makers])
    sizes = np.concatenate([-change[gains], change[costs], np.maximum(mixed, 0.0)])
    graph = csr_array((sizes, (heads, tails)), shape=(count + 2, count + 2))
    graph.sum_duplicates()
    scale = _LARGEST / max(-change[gains].sum(), 1e-9)
    graph.data = np.minimum(np.rint(graph.data * scale), _LARGEST).astype(np.int32)
    graph.eliminate_zeros()
    return sorted(source_side(graph, source, sink) - {source})
