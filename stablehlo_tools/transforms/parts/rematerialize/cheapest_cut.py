"""What to keep and what to compute again, at a price of memory: a minimum cut.

A value that is needed is kept, at a price, or the op that makes it is repeated, at the time that
this takes, and then needs its operands. For a linear price of memory the best choice is a closure,
and so a minimum cut (Picard, "Maximal closure of a graph", 1976); PyTorch's partitioner of joint
graphs cuts likewise, by bytes alone.

    source --endless--> value that is required
    value ---keeping---> op that makes it           cut: kept
    op ----repeating---> sink                       cut: repeated
    op ----endless-----> values that it reads       repeated ops need them

The plans for all prices are the corners of a convex curve of time against memory, found by halving:
between two of them, the price at which both are equally good shows the best one in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np
from scipy.sparse import csr_array

from stablehlo_tools.analysis.minimum_cut import source_side

_ENDLESS = (1 << 31) - 1  # the most that SciPy's capacities hold
_LARGEST = 1 << 29  # of a finite one
_APART = 0.02  # of the price of memory: between values that would change together
_FAR = 0.02  # of the bytes of the fastest plan: between corners so far apart others are looked for
_LITTLE = 0.002  # of the bytes of the fastest plan: not worth a plan of its own
_MOST_LEFT_OUT = 12


@dataclass(frozen=True, slots=True)
class Value:
    """Something that may be needed again: what it takes to keep it, and the op that makes it.

    `keep_ns` is the traffic of keeping, endless of what cannot be kept, `keep_bytes` what stays in
    memory; `maker` is None of what no op can make again.
    """

    keep_ns: float
    keep_bytes: float
    maker: int | None


@dataclass(frozen=True, slots=True)
class Repeatable:
    """An op that can be run again: ns that this takes, and the values that it reads."""

    ns: float
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Which values are kept and which ops run again, with the time and the bytes of it: the best
    if a byte costs `price` ns and the values `without` may not be kept."""

    price: float
    without: frozenset[int]
    kept: frozenset[int]
    repeated: frozenset[int]
    ns: float
    bytes: float
    weight: float  # the bytes as they count, where equal values shall not change together


@dataclass(frozen=True, slots=True)
class _CutGraph:
    """Edges from `tails` to `heads`: those to values that are required, the `priced` ones of values
    and then of ops, and those to what ops read. The last two nodes are the source and the sink."""

    tails: np.ndarray
    heads: np.ndarray
    priced: slice
    keep_ns: np.ndarray
    weights: np.ndarray
    repeat_ns: np.ndarray


@dataclass
class KeepOrRepeat:
    """The choice for a forward and a backward: `required` are values that the backward reads."""

    values: list[Value] = field(default_factory=list[Value])
    ops: list[Repeatable] = field(default_factory=list[Repeatable])
    required: list[int] = field(default_factory=list[int])
    _known: dict[tuple[float, frozenset[int]], Plan] = field(
        default_factory=dict[tuple[float, frozenset[int]], Plan], repr=False
    )

    def cheapest(self, ns_per_byte: float, without: frozenset[int] = frozenset()) -> Plan:
        """The plan of least time if each byte that is kept costs so much, give or take a little, so
        that equal layers, or halves of one, do not change all at once."""
        known = self._known.get((ns_per_byte, without))
        if known is not None:
            return known
        count, graph = len(self.values), self._graph
        keeping = graph.keep_ns + ns_per_byte * graph.weights
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
        plan = Plan(ns_per_byte, without, kept, repeated, ns, size, weight)
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
        """The bytes of keeping a value, somewhat less for the first ones, more for the last."""
        part = number / len(self.values) - 0.5
        return self.values[number].keep_bytes * (1.0 + _APART * part)

    def curve(self, most: int = 64) -> list[Plan]:
        """Plans from the fastest to the smallest, at most so many: the corners of the curve, and
        between two that are far apart some that keep part of what the one keeps and the other does
        not."""
        corners = self._corners(most)
        plans = list(corners)
        for fast, small in pairwise(corners):
            if fast.bytes - small.bytes > _FAR * corners[0].bytes:
                more = sorted(fast.kept - small.kept, key=lambda n: (-self.values[n].keep_bytes, n))
                plans += [
                    self.cheapest(fast.price, frozenset({value})) for value in more[:_MOST_LEFT_OUT]
                ]
        # Plans are dropped if another one is both faster and smaller.
        left: list[Plan] = []
        for plan in sorted(plans, key=lambda plan: (plan.bytes, plan.ns)):
            if not left or plan.ns < left[-1].ns:
                left.append(plan)
        return left[::-1]

    def _corners(self, most: int) -> list[Plan]:
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
