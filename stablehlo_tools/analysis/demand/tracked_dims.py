"""Along which dimension of a value its places are told apart, and what becomes of them.

Buffers are read and written place by place; from each such op the choice spreads to whatever holds
the same places: carries, results of branches, shards, copies in other shapes. A value has at most
one such dimension, the first that reaches it; of all others every part is taken to be needed when
one is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.communication import BRANCHES, WHILE
from stablehlo_tools.analysis.dataflow import Node, carries
from stablehlo_tools.analysis.demand.program import EDGES, LEAVE, Program
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import gather_numbers, scatter_numbers
from stablehlo_tools.dialect.dimensions import dimensions_of, integers, static_shape
from stablehlo_tools.dialect.factors import FactorRole, Link
from stablehlo_tools.dialect.names import (
    ALL_REDUCE,
    BARRIER,
    COLLECTIVE_PERMUTE,
    CONCATENATE,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    PAD,
    REDUCE,
    SCATTER,
    SHARDING_CONSTRAINT,
    SLICE,
)
from stablehlo_tools.dialect.traits import ELEMENTWISE, LAYOUT
from stablehlo_tools.ir.carriers import terminator

# What the buffers of pipelines go through. Of other results every place is taken to need all.
_FOLLOWED = (
    ELEMENTWISE
    | LAYOUT
    | {
        ALL_REDUCE,
        COLLECTIVE_PERMUTE,
        CONCATENATE,
        DYNAMIC_SLICE,
        DYNAMIC_UPDATE_SLICE,
        PAD,
        REDUCE,
        SCATTER,
        SHARDING_CONSTRAINT,
        SLICE,
    }
)
_WHOLE = slice(None)
LARGEST = 4096  # places along a dimension that is told apart

_Links = dict[int, list[tuple[int, list[tuple[int, int]] | None]]]


@dataclass(frozen=True)
class DimMap:
    """A dimension of an operand beside the dimension of the result that it becomes.

    The positions `results` of the one depend on just the positions `operands` of the other, one to
    one.
    """

    operand: int
    result: int
    operands: slice = _WHOLE
    results: slice = _WHOLE

    @property
    def is_whole(self) -> bool:
        """Whether all positions are kept, in order."""
        return self.operands == _WHOLE and self.results == _WHOLE


@dataclass(frozen=True)
class Access:
    """`size` places along `dimension` of operand 0, from an index that is operand `index` on.

    `clamps`: an index too large or small is moved inside; otherwise nothing happens there.
    `overwrites`: a write that leaves nothing of what was there. `indices` are the operands that say
    where.
    """

    dimension: int
    size: int
    index: int
    indices: tuple[int, ...]
    clamps: bool
    overwrites: bool = False


class TrackedDims:
    """The dimension of each value along which its places are told apart, and how many there are."""

    def __init__(self, program: Program) -> None:
        self.dimensions = tracked_dims(program)
        self.counts = [
            1 if dimension is None else (static_shape(type_) or ())[dimension]
            for dimension, type_ in zip(self.dimensions, program.types, strict=True)
        ]

    def dim_map(self, node: Node, position: int) -> DimMap | None:
        """How the places of an operand become those of the result, where they are told apart."""
        own = self.dimensions[node.operands[position]]
        others = self.dimensions[node.results[0]]
        for dim_map in dim_maps(node.op, position):
            if (dim_map.operand, dim_map.result) == (own, others):
                return dim_map
        return None

    def access(self, node: Node) -> Access | None:
        """The read or write of a node along the dimension of its buffer."""
        own = self.dimensions[node.operands[0]] if node.operands else None
        candidates = accesses(node.op) if own is not None else []
        return next((access for access in candidates if access.dimension == own), None)

    def alike(self, one: int, other: int) -> bool:
        """Whether two values have the same places."""
        return (self.dimensions[one], self.counts[one]) == (
            self.dimensions[other],
            self.counts[other],
        )


def tracked_dims(program: Program) -> list[int | None]:
    """The dimension for each value, by number."""
    links: _Links = defaultdict(list)
    seeds: list[tuple[int, int]] = []
    outermost = program.is_global
    for node in program.root.nested():  # a loop before what stands in it
        if outermost and program.computation(node) is None:
            continue  # a global value has no places that devices could hold
        _link(node, links)
        if node.name not in EDGES:
            seeds += [(node.operands[0], access.dimension) for access in accesses(node.op)]
    for one, other in program.crossings.items():
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


def _fits(type_: ir.Type, dimension: int) -> bool:
    shape = static_shape(type_)
    return shape is not None and 1 < shape[dimension] <= LARGEST


def _tie(links: _Links, one: int, other: int) -> None:
    """Two values of one shape."""
    links[one].append((other, None))
    links[other].append((one, None))


def _link(node: Node, links: _Links) -> None:
    name = node.name
    if name == WHILE:
        for carry in carries(node):
            _tie(links, carry.operand, carry.argument)
            _tie(links, carry.argument, carry.returned)
            _tie(links, carry.argument, carry.result)
    elif name in BRANCHES:
        for region in node.bodies:
            for end, result in zip(region.returned, node.results, strict=True):
                _tie(links, end, result)
    elif name in (BARRIER, LEAVE):
        for operand, result in zip(node.operands, node.results, strict=True):
            _tie(links, operand, result)
    elif len(node.results) == 1:
        for position, operand in enumerate(node.operands):
            pairs = [(d.operand, d.result) for d in dim_maps(node.op, position)]
            if pairs:
                result = node.results[0]
                links[operand].append((result, pairs))
                links[result].append((operand, [(r, o) for o, r in pairs]))


def dim_maps(op: ir.Operation, position: int) -> list[DimMap]:
    """The maps between an operand of an op and its only result; none where nothing is known."""
    if len(op.results) != 1 or op.name not in _FOLLOWED:
        return []
    if op.name == SCATTER and position:  # of a scatter, indices and updates go to any place
        return []
    relation = dimensions_of(op)
    if relation is None:
        return []
    links = [
        link
        for dim in range(len(relation.operands[position]))
        for link in relation.of_operand(position, dim)
    ]
    maps = (_dim_map(op, link, relation.operands[position]) for link in links)
    return [dim_map for dim_map in maps if dim_map is not None]


def _dim_map(op: ir.Operation, link: Link, shape: Sequence[int]) -> DimMap | None:
    own, other, size = link.operand, link.result, link.factor.size
    if link.role is FactorRole.KEPT and op.name != PAD:
        return DimMap(own.dim, other.dim)
    if link.role is FactorRole.INDEXED and own.tensor == 0 and own.start == other.start == 0:
        return DimMap(own.dim, other.dim)  # a write leaves other elements where they are
    if link.role not in (FactorRole.KEPT, FactorRole.MOVED):
        return None
    if own.step == -1:
        return DimMap(own.dim, other.dim, slice(None, None, -1))
    if op.name == SLICE:
        taken = own.positions(size)
        assert taken is not None
        return DimMap(own.dim, other.dim, slice(taken.start, taken.stop, taken.step))
    put = other.positions(size)
    is_whole = own.start == 0 and size == shape[own.dim]
    if put is None or put.step != 1 or not is_whole:  # a pad that spreads, or cuts
        return None
    return DimMap(own.dim, other.dim, _WHOLE, slice(put.start, put.stop))


def accesses(op: ir.Operation) -> list[Access]:
    """Along each dimension of which the op touches a part; none where it is not understood.

    Of gathers and scatters only those at a single place are understood, as `x[i]` and
    `x.at[i].set(y)` become; the others may touch anything.
    """
    rule = {
        DYNAMIC_SLICE: _slice,
        DYNAMIC_UPDATE_SLICE: _update,
        GATHER: _gather,
        SCATTER: _scatter,
    }.get(op.name)
    whole = static_shape(op.operands[0].type) if rule is not None else None
    return [] if rule is None or whole is None else rule(op, whole)


def _slice(op: ir.Operation, whole: Sequence[int]) -> list[Access]:
    sizes = integers(op, "slice_sizes")
    indices = tuple(range(1, 1 + len(whole)))
    return [Access(d, sizes[d], 1 + d, indices, True) for d in _windowed(sizes, whole)]


def _update(op: ir.Operation, whole: Sequence[int]) -> list[Access]:
    sizes = static_shape(op.operands[1].type)
    if sizes is None:
        return []
    parts = _windowed(sizes, whole)
    indices = tuple(range(2, 2 + len(whole)))
    return [Access(d, sizes[d], 2 + d, indices, True, len(parts) == 1) for d in parts]


def _gather(op: ir.Operation, whole: Sequence[int]) -> list[Access]:
    numbers, sizes = gather_numbers(op), integers(op, "slice_sizes")
    mapped = numbers.index_map
    if numbers.operand_batching or not _is_single(op.operands[1], mapped):
        return []
    return [Access(d, sizes[d], 1, (1,), True) for d in _windowed(sizes, whole) if d in mapped]


def _scatter(op: ir.Operation, whole: Sequence[int]) -> list[Access]:
    numbers = scatter_numbers(op)
    mapped, inserted = numbers.index_map, numbers.inserted
    if len(op.operands) != 3 or numbers.operand_batching or mapped != inserted:
        return []
    updates = static_shape(op.operands[2].type)
    others = tuple(size for d, size in enumerate(whole) if d not in inserted)
    if updates != others or not _is_single(op.operands[1], mapped):
        return []
    body = op.regions[0].blocks[0]
    sets = terminator(body).operands[0] == body.arguments[1]
    return [Access(mapped[0], 1, 1, (1,), False, sets)]


def _windowed(window: Sequence[int], whole: Sequence[int]) -> list[int]:
    """The dimensions of which a slice or an update takes less than all."""
    return [d for d, (part, size) in enumerate(zip(window, whole, strict=True)) if part != size]


def _is_single(indices: ir.Value, mapped: Sequence[int]) -> bool:
    """Whether the indices are one number, for one dimension."""
    shape = static_shape(indices.type)
    return len(mapped) == 1 and shape is not None and all(size == 1 for size in shape)
