"""Decides what to keep and what to recompute at a given price of memory, by a minimum cut.

A required value is either kept, at a price, or its producer is repeated. Repeating costs the op's
time and requires its operands. For a linear price of memory the best choice is a closure, and so a
minimum cut (Picard, "Maximal closure of a graph", 1976). PyTorch's partitioner of joint graphs uses
a similar cut, by bytes alone.

    source --endless--> value that is required
    value ---keeping---> op that makes it           cut: kept
    op ----repeating---> sink                       cut: repeated
    op ----endless-----> values that it reads       repeated ops need them

The plans for all prices are the corners of a convex curve of time against memory. They are found by
bisection: the cut at the price at which two plans are equally good is the best plan between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np
from scipy.sparse import csr_array

from stablehlo_tools.analysis.minimum_cut import source_side

_ENDLESS = (1 << 31) - 1  # infinite: the largest capacity in SciPy
_LARGEST = 1 << 29  # the largest finite capacity
_APART = 0.02  # relative spread of the price of memory, so that equal values change separately
_FAR = 0.02  # of the fastest plan's bytes: corners further apart get intermediate plans
_LITTLE = 0.002  # of the fastest plan's bytes: smaller differences need no separate plan
_MOST_LEFT_OUT = 12


@dataclass(frozen=True, slots=True)
class CutValue:
    """A value that may be required, the cost to keep it, and the op that produces it.

    `keep_ns`: the traffic of keeping it, infinite if it cannot be kept. `keep_bytes`: the memory.
    `maker`: None if no op can recompute it.
    """

    keep_ns: float
    keep_bytes: float
    maker: int | None


@dataclass(frozen=True, slots=True)
class Repeatable:
    """An op that can be repeated: its ns, and the values that it reads."""

    ns: float
    reads: tuple[int, ...]


@dataclass(frozen=True)
class RecomputationPlan:
    """The values that are kept and the ops that are repeated, with their total time and bytes.

    It is the best plan if a byte costs `price` ns and the values `without` may not be kept.
    """

    price: float
    without: frozenset[int]
    kept: frozenset[int]
    repeated: frozenset[int]
    ns: float
    bytes: float
    weight: float  # the bytes as the cut weighs them (`_APART`)


@dataclass(frozen=True, slots=True)
class _CutGraph:
    """Edges from `tails` to `heads`.

    First those to required values, then the `priced` ones of values and of ops, then those to the
    operands of ops. The last two nodes are the source and the sink.
    """

    tails: np.ndarray
    heads: np.ndarray
    priced: slice
    keep_ns: np.ndarray
    weights: np.ndarray
    repeat_ns: np.ndarray


@dataclass
class KeepOrRepeat:
    """The choice for a forward and a backward; `required` are the values that the backward
    reads."""

    values: list[CutValue] = field(default_factory=list[CutValue])
    ops: list[Repeatable] = field(default_factory=list[Repeatable])
    required: list[int] = field(default_factory=list[int])
    _known: dict[tuple[float, frozenset[int]], RecomputationPlan] = field(
        default_factory=dict[tuple[float, frozenset[int]], RecomputationPlan], repr=False
    )

    def cheapest(
        self, ns_per_byte: float, without: frozenset[int] = frozenset()
    ) -> RecomputationPlan:
        """Returns the plan with the lowest time if each kept byte costs `ns_per_byte`.

        Prices vary slightly by position, so that equal layers do not all change at once.
        """
        known = self._known.get((ns_per_byte, without))
        if known is not None:
            return known
        count, graph = len(self.values), self._graph
        keeping = graph.keep_ns + ns_per_byte * graph.weights
        # Infinite prices keep the endless capacity, so no cut passes there.
        keeping[list(without)] = inf
        prices = np.concatenate([keeping, graph.repeat_ns])
        finite = prices < inf
        unit = np.max(prices[finite], initial=1.0) / _LARGEST
        rooms = np.full(len(graph.tails), _ENDLESS, dtype=np.int32)
        rooms[graph.priced][finite] = (prices[finite] / unit).astype(np.int32) + 1
        source, sink = count + len(self.ops), count + len(self.ops) + 1
        edges = csr_array((rooms, (graph.tails, graph.heads)), shape=(sink + 1, sink + 1))
        reached = source_side(edges, source, sink)
        repeated = frozenset(n for n in range(len(self.ops)) if count + n in reached)
        needed = [n for n in range(count) if n in reached]
        kept = frozenset(n for n in needed if self.values[n].maker not in repeated)
        ns = sum(self.values[n].keep_ns for n in kept) + sum(self.ops[n].ns for n in repeated)
        size = sum(self.values[n].keep_bytes for n in kept)
        weight = sum(map(self._weight, kept))
        plan = RecomputationPlan(ns_per_byte, without, kept, repeated, ns, size, weight)
        self._known[ns_per_byte, without] = plan
        return plan

    @cached_property
    def _graph(self) -> _CutGraph:
        count, source = len(self.values), len(self.values) + len(self.ops)
        required = sorted(set(self.required))
        makers = [source + 1 if v.maker is None else count + v.maker for v in self.values]
        ends = [*makers, *[source + 1] * len(self.ops)]
        reads = [(count + n, read) for n, op in enumerate(self.ops) for read in {*op.reads}]
        return _CutGraph(
            np.array([*[source] * len(required), *range(source), *(op for op, _ in reads)]),
            np.array([*required, *ends, *(read for _, read in reads)]),
            slice(len(required), len(required) + source),
            np.array([v.keep_ns for v in self.values]),
            np.array([self._weight(n) for n in range(count)]),
            np.array([op.ns for op in self.ops]),
        )

    def _weight(self, number: int) -> float:
        """Returns the bytes of a kept value, slightly less for the first values, more for the
        last."""
        part = number / len(self.values) - 0.5
        return self.values[number].keep_bytes * (1.0 + _APART * part)

    def curve(self, most: int = 64) -> list[RecomputationPlan]:
        """Returns plans from the fastest to the smallest: the corners of the curve, at most `most`.

        Between two corners that are far apart, adds plans that keep part of the values in which
        they differ.
        """
        corners = self._corners(most)
        plans = list(corners)
        for fast, small in pairwise(corners):
            if fast.bytes - small.bytes > _FAR * corners[0].bytes:
                more = sorted(fast.kept - small.kept, key=lambda n: (-self.values[n].keep_bytes, n))
                plans += [
                    self.cheapest(fast.price, frozenset({value})) for value in more[:_MOST_LEFT_OUT]
                ]
        # Plans are dropped if another one is both faster and smaller.
        left: list[RecomputationPlan] = []
        for plan in sorted(plans, key=lambda plan: (plan.bytes, plan.ns)):
            if not left or plan.ns < left[-1].ns:
                left.append(plan)
        return left[::-1]

    def _corners(self, most: int) -> list[RecomputationPlan]:
        fastest = self.cheapest(0.0)
        smallest = self.cheapest(1e6 * max(1.0, fastest.ns) / max(1.0, fastest.bytes))
        plans = {fastest.bytes: fastest, smallest.bytes: smallest}
        pending = [(fastest, smallest)]
        while pending and len(plans) < most:
            fast, small = pending.pop(0)
            saved, lost = fast.bytes - small.bytes, small.ns - fast.ns
            if saved <= _LITTLE * fastest.bytes or lost <= 0:
                continue
            price = lost / max(fast.weight - small.weight, _LITTLE * saved)
            middle = self.cheapest(price)
            known = plans.get(middle.bytes)
            if known is not None and known.ns <= middle.ns:
                continue
            plans[middle.bytes] = middle
            pending += [(fast, middle), (middle, small)]
        return [plans[size] for size in sorted(plans, reverse=True)]
