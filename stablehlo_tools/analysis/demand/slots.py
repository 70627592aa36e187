"""Along which dimension of a value its parts are told apart.

Buffers are read and written place by place; from each such op the choice spreads to whatever holds
the same places: carries, results of branches, shards, copies in other shapes. A value has at most
one such dimension, the first that reaches it; of all others every part is taken to be needed when
one is.
"""

from __future__ import annotations

from collections import defaultdict, deque

from stablehlo_tools.analysis.demand.dimensions import Lane, lanes, static_shape
from stablehlo_tools.analysis.demand.indexing import Access, accesses
from stablehlo_tools.analysis.demand.program import ENTER, LEAVE, Program, Step
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import BRANCHES

BARRIER = "stablehlo.optimization_barrier"
LARGEST = 4096  # places along a dimension that is told apart

_Links = dict[int, list[tuple[int, list[tuple[int, int]] | None]]]


class Slots:
    """The dimension of each value along which its places are told apart, and how many there are."""

    def __init__(self, program: Program, same: dict[int, int]) -> None:
        self.dimensions = slot_dimensions(program, same)
        self.counts = [
            1 if dimension is None else (static_shape(kind) or ())[dimension]
            for dimension, kind in zip(self.dimensions, program.types, strict=True)
        ]

    def lane(self, step: Step, position: int) -> Lane | None:
        """How the places of an operand become those of the result, where they are told apart."""
        own = self.dimensions[step.operands[position]]
        others = self.dimensions[step.results[0]]
        for lane in lanes(step.op, position):
            if (lane.operand, lane.result) == (own, others):
                return lane
        return None

    def access(self, step: Step) -> Access | None:
        """The read or write of a step along the dimension of its buffer."""
        own = self.dimensions[step.operands[0]] if step.operands else None
        found = accesses(step.op) if own is not None else []
        return next((access for access in found if access.dimension == own), None)

    def alike(self, one: int, other: int) -> bool:
        """Whether two values have the same places."""
        return (self.dimensions[one], self.counts[one]) == (
            self.dimensions[other],
            self.counts[other],
        )


def slot_dimensions(program: Program, same: dict[int, int]) -> list[int | None]:
    """The dimension for each value, by number. `same[n]` is the value that n is in all but name."""
    links: _Links = defaultdict(list)
    seeds: list[tuple[int, int]] = []
    outermost = program.is_global
    for step in program.steps:
        if outermost and step.computation is None:
            continue  # a global value has no places that devices could hold
        _link(step, links)
        if step.name not in (ENTER, LEAVE):
            seeds += [(step.operands[0], access.dimension) for access in accesses(step.op)]
    for one, other in same.items():
        _tie(links, one, other)
    return _spread(program, links, seeds)


def _spread(program: Program, links: _Links, seeds: list[tuple[int, int]]) -> list[int | None]:
    chosen: list[int | None] = [None] * len(program.types)
    pending = deque(seeds)
    while pending:
        value, dimension = pending.popleft()
        if chosen[value] is not None or not _fits(program.types[value], dimension):
            continue
        chosen[value] = dimension
        for other, pairs in links[value]:
            if pairs is None:
                pending.append((other, dimension))
            else:
                pending.extend((other, d) for own, d in pairs if own == dimension)
    return chosen


def _fits(kind: ir.Type, dimension: int) -> bool:
    shape = static_shape(kind)
    return shape is not None and 1 < shape[dimension] <= LARGEST


def _tie(links: _Links, one: int, other: int) -> None:
    """Two values of one shape."""
    links[one].append((other, None))
    links[other].append((one, None))


def _link(step: Step, links: _Links) -> None:
    name = step.name
    if name == WHILE:
        body = step.regions[1]
        rows = zip(step.operands, body.arguments, body.ends, step.results, strict=True)
        for first, argument, end, result in rows:
            _tie(links, first, argument)
            _tie(links, argument, end)
            _tie(links, argument, result)
    elif name in BRANCHES:
        for region in step.regions:
            for end, result in zip(region.ends, step.results, strict=True):
                _tie(links, end, result)
    elif name in (BARRIER, LEAVE):
        for operand, result in zip(step.operands, step.results, strict=True):
            _tie(links, operand, result)
    elif len(step.results) == 1:
        for position, operand in enumerate(step.operands):
            pairs = [(lane.operand, lane.result) for lane in lanes(step.op, position)]
            if pairs:
                result = step.results[0]
                links[operand].append((result, pairs))
                links[result].append((operand, [(r, o) for o, r in pairs]))
