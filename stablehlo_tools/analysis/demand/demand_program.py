"""Builds the program that the demand analysis reads: one graph with all calls inlined.

It also finds the devices that share a value, and the dimension along which its places are tracked
separately. A function that is called twice is read twice, so that each call has its own values.
Arguments of callees are the operands themselves.

If some axes of the mesh are left to the partitioner, it moves data along them at will. Then all
devices that differ only along these free axes share their needs. Outside of every manual
computation, all devices do.

Buffers are read and written place by place. From each such op, its dimension spreads to all values
that hold the same places: carries, results of branches, shards, copies in other shapes. A value has
at most one such dimension, the first that reaches it. In all other values, every part is assumed to
be needed if one is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, classify_communication
from stablehlo_tools.analysis.dataflow import Body, Dataflow, Node, carries
from stablehlo_tools.analysis.replica_groups import AxisRef, mesh_axes_groups
from stablehlo_tools.analysis.shardings import manual_axes, sharding_axes, sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import gather_numbers, scatter_numbers
from stablehlo_tools.dialect.dimensions import dimensions_of, integers, static_shape
from stablehlo_tools.dialect.factors import DimensionLink, FactorRole
from stablehlo_tools.dialect.names import (
    ALL_REDUCE,
    BARRIER,
    COLLECTIVE_PERMUTE,
    CONCATENATE,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    MANUAL_COMPUTATION,
    PAD,
    REDUCE,
    SCATTER,
    SHARDING_CONSTRAINT,
    SLICE,
    WHILE,
)
from stablehlo_tools.dialect.traits import BRANCHES, CALLS, COMPUTATIONS, ELEMENTWISE, LAYOUT
from stablehlo_tools.ir.views import Combining, Function, ManualComputation, WithBody
from stablehlo_tools.ir.walk import callee_name, functions_by_name, terminator

ENTER = "enter"  # the edge where global values become the shards of a manual computation
LEAVE = "leave"
EDGES = frozenset({ENTER, LEAVE})
_DEEPEST = 60  # nested calls and regions
# Ops that buffers of pipelines pass through. All places of other results are assumed to need all.
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
LARGEST = 4096  # places along a tracked dimension


class DemandProgram(Dataflow):
    """An entry function and all that it calls.

    The edges of a manual computation are separate nodes. A call that cannot be followed (recursive,
    only declared) remains one op.

    `types[n]` is the type of value n: the shard's type for results of the outermost manual
    computation. `around` is the manual computation that contains an op. `crossings` maps the shards
    that one computation receives unchanged from another to the global values in between. `kept`
    maps them to the shards that the other computation returned.
    """

    def __init__(self, module: ir.Module, entry: ir.Operation, facts: ModuleFacts) -> None:
        super().__init__()
        self.module = module
        self.facts = facts
        self.devices = facts.grid.size
        self._classify = classify_communication(module.context)
        self.around: dict[Node, ir.Operation] = {}
        self.functions = functions_by_name(module)
        self._computation: ir.Operation | None = None
        self._depth = -1
        self._left: dict[int, int] = {}  # results of computations: outside number to inside
        self.root = self._body(Function(entry).body)
        self.types = [value.type for value in self.values]
        for outside, inside in self._left.items():
            if self.maker[outside] not in self.around:
                self.types[outside] = self.types[inside]
        self.crossings = _crossings(self, facts)
        self.kept = {inside: self._left[outside] for inside, outside in self.crossings.items()}

    @property
    def is_global(self) -> bool:
        """True if values outside of manual computations are global, of all devices together."""
        return any(node.name == ENTER for node in self.nodes)

    @cached_property
    def users(self) -> dict[int, list[Node]]:
        """The ops that read each value; for a shard that is kept, also the next computation."""
        users = super().users
        for inside, end in self.kept.items():
            users.setdefault(end, []).append(self.maker[inside])
        return users

    def _body(self, block: ir.Block) -> Body:
        self._depth += 1
        body = super()._body(block)
        self._depth -= 1
        return body

    def _op(self, op: ir.Operation, nodes: list[Node]) -> None:
        name = op.name
        callee = self.functions.get(callee_name(op)) if name in CALLS else None
        if callee is not None and len(callee.regions[0].blocks) == 1 and self._depth < _DEEPEST:
            self._written_out(op, Function(callee).body, {}, nodes)
        elif name == MANUAL_COMPUTATION:
            self._manual(op, nodes)
        elif name in COMPUTATIONS:
            self._written_out(op, WithBody(op).body, self.numbers, nodes)
        else:
            super()._op(op, nodes)

    def _written_out(
        self, op: ir.Operation, block: ir.Block, scope: dict[ir.Value, int], nodes: list[Node]
    ) -> None:
        """Reads a block in place of an op; `scope` has the values that the block can see."""
        outside, operands = self.numbers, self._numbers(op.operands)
        scope.update(zip(block.arguments, operands, strict=True))
        self.numbers = scope
        self._depth += 1
        returned = self._read(block, nodes)
        self._depth -= 1
        self.numbers = outside
        outside.update(zip(op.results, returned, strict=True))

    def _manual(self, op: ir.Operation, nodes: list[Node]) -> None:
        """Inlines a manual computation, with nodes at its edges."""
        block, outer = ManualComputation(op).body, self._computation
        operands = self._numbers(op.operands)
        nodes.append(self._add(op, ENTER, operands, self._numbers(block.arguments)))
        self._computation = op
        self._depth += 1
        returned = self._read(block, nodes)
        self._depth -= 1
        self._computation = outer
        results = self._numbers(op.results)
        nodes.append(self._add(op, LEAVE, returned, results))
        self._left.update(zip(results, returned, strict=True))

    def _add(
        self,
        op: ir.Operation,
        name: str,
        operands: tuple[int, ...],
        results: tuple[int, ...],
        captures: tuple[int, ...] = (),
        bodies: tuple[Body, ...] = (),
    ) -> Node:
        node = super()._add(op, name, operands, results, captures, bodies)
        if self._computation is not None:
            self.around[node] = self._computation
        return node

    def computation(self, node: Node) -> ir.Operation | None:
        """Returns the manual computation that contains an op; an edge belongs to its own."""
        return node.op if node.name in EDGES else self.around.get(node)

    def communication(self, node: Node) -> Collective | None:
        """Returns the collective of a node; None if it does not communicate."""
        return None if node.name in EDGES else self._classify(node.op)

    @cached_property
    def tracked(self) -> TrackedDims:
        """The dimensions along which places are tracked separately."""
        return TrackedDims(self)

    @cached_property
    def levels(self) -> Levels:
        """The groups of devices that share values."""
        return Levels(self)

    def groups(self, node: Node) -> Groups | None:
        """Returns rows of devices that share needs around a node; None if each is independent."""
        return self.levels.groups(self.computation(node))


def walked_loops(program: DemandProgram, code: Body, *, inside: bool = False) -> set[Node]:
    """Returns the loops of a block that are worth following iteration by iteration.

    These are the outermost, and inner ones that communicate.
    """
    loops: set[Node] = set()
    for node in code.nodes:
        is_loop = node.name == WHILE
        if is_loop and (
            not inside or any(program.communication(each) for each in node.bodies[1].all_nodes())
        ):
            loops.add(node)
        for body in node.bodies:
            loops |= walked_loops(program, body, inside=inside or is_loop)
    return loops


Groups = NDArray[Any]
Need = NDArray[np.bool_]  # by device and place; one column if places are not tracked


class Levels:
    """The groups of devices that share values, for each manual computation and outside of all."""

    def __init__(self, program: DemandProgram) -> None:
        self._facts = program.facts
        self._everyone: Groups = np.arange(program.devices).reshape(1, -1)
        self._outside = self._everyone if program.is_global else None
        self._known: dict[ir.Operation, Groups | None] = {}

    def groups(self, computation: ir.Operation | None) -> Groups | None:
        """Returns rows of devices that share needs; None if each is independent."""
        if computation is None:
            return self._outside
        if computation not in self._known:
            self._known[computation] = self._groups(computation)
        return self._known[computation]

    def _groups(self, computation: ir.Operation) -> Groups | None:
        names = {*_meshes(computation, "in_shardings"), *_meshes(computation, "out_shardings")}
        mesh = self._facts.meshes.get(next(iter(names))) if len(names) == 1 else None
        manual: set[str] = set()
        around: ir.Operation | None = computation
        while around is not None:
            if around.name == MANUAL_COMPUTATION:
                manual |= manual_axes(around)
            around = around.parent
        if mesh is None or mesh.size != self._facts.grid.size:
            return self._everyone
        free = [AxisRef(name) for name, size in mesh.axes if name not in manual and size > 1]
        return np.array(mesh_axes_groups(mesh, free)) if free else None


def share_in_groups(need: Need, groups: Groups | None) -> Need:
    """Returns the need of each device after sharing: all of a group need what one of it needs."""
    if groups is None:
        return need
    spread = need.copy()
    spread[groups] = need[groups].any(axis=1, keepdims=True)
    return spread


def _crossings(program: DemandProgram, facts: ModuleFacts) -> dict[int, int]:
    """Returns the shards that one manual computation receives unchanged from another.

    Maps the value inside to the global value outside. A training step has one computation for each
    direction. The first passes residuals to the second through global values without other uses.
    """
    made: dict[int, tuple[Node, int]] = {}
    same: dict[int, int] = {}
    for node in program.nodes:
        if node.name not in EDGES or node in program.around:
            continue
        if node.name == LEAVE:
            made.update((number, (node, i)) for i, number in enumerate(node.results))
            continue
        for position, (outside, inside) in enumerate(zip(node.operands, node.results, strict=True)):
            if outside not in made:
                continue
            left, index = made[outside]
            if _form(left, "out_shardings", index, facts) == _form(
                node, "in_shardings", position, facts
            ) and (program.types[outside] == program.types[inside]):
                same[inside] = outside
    return same


def _form(node: Node, name: str, position: int, facts: ModuleFacts) -> tuple[object, ...]:
    """Returns a key for how a value is divided among the devices."""
    sharding = sharding_per_value(node.op.attributes[name])[position]
    mesh = sharding_axes(sharding)[0]
    dimensions = tuple(str(d) for d in bindings.TensorShardingAttr(sharding).dimension_shardings)
    return facts.meshes.get(mesh, mesh), dimensions, manual_axes(node.op)


def _meshes(computation: ir.Operation, name: str) -> list[str]:
    return [sharding_axes(s)[0] for s in sharding_per_value(computation.attributes[name])]


_Links = dict[int, list[tuple[int, list[tuple[int, int]] | None]]]


@dataclass(frozen=True)
class DimMap:
    """A dimension of an operand, and the dimension of the result that it becomes.

    The positions `results` of the one depend only on the positions `operands` of the other, one to
    one.
    """

    operand: int
    result: int
    operands: slice = _WHOLE
    results: slice = _WHOLE

    @property
    def is_whole(self) -> bool:
        """True if all positions are kept, in order."""
        return self.operands == _WHOLE and self.results == _WHOLE


@dataclass(frozen=True)
class ElementAccess:
    """An access of `size` places along `dimension` of operand 0, from the index in operand `index`.

    `clamps`: an index out of bounds is clamped; otherwise the access does nothing there.
    `overwrites`: a write that keeps nothing of the old values. `indices` are all index operands.
    """

    dimension: int
    size: int
    index: int
    indices: tuple[int, ...]
    clamps: bool
    overwrites: bool = False


class TrackedDims:
    """The dimension of each value along which its places are tracked, and their number."""

    def __init__(self, program: DemandProgram) -> None:
        self.dimensions = _tracked_dims(program)
        self.counts = [
            1 if dimension is None else (static_shape(type_) or ())[dimension]
            for dimension, type_ in zip(self.dimensions, program.types, strict=True)
        ]

    def dim_map(self, node: Node, position: int) -> DimMap | None:
        """Returns how places of an operand become those of the result; None if not one to one."""
        own = self.dimensions[node.operands[position]]
        others = self.dimensions[node.results[0]]
        maps = dim_maps(node.op, position)
        return next((each for each in maps if (each.operand, each.result) == (own, others)), None)

    def access(self, node: Node) -> ElementAccess | None:
        """Returns the read or write of a node along the dimension of its buffer."""
        own = self.dimensions[node.operands[0]] if node.operands else None
        candidates = accesses(node.op) if own is not None else []
        return next((access for access in candidates if access.dimension == own), None)

    def alike(self, one: int, other: int) -> bool:
        """Returns True if two values have the same places."""
        return (self.dimensions[one], self.counts[one]) == (
            self.dimensions[other],
            self.counts[other],
        )


def _tracked_dims(program: DemandProgram) -> list[int | None]:
    """Returns the dimension for each value, by number."""
    links: _Links = defaultdict(list)
    seeds: list[tuple[int, int]] = []
    outermost = program.is_global
    for node in program.root.all_nodes():  # a loop before the ops in it
        if outermost and program.computation(node) is None:
            continue  # no device holds a place of a global value
        _link(node, links)
        if node.name not in EDGES:
            seeds += [(node.operands[0], access.dimension) for access in accesses(node.op)]
    for one, other in program.crossings.items():
        _tie(links, one, other)
    chosen: list[int | None] = [None] * len(program.types)
    pending = deque(seeds)
    while pending:
        value, dimension = pending.popleft()
        shape = static_shape(program.types[value])
        is_told_apart = shape is not None and 1 < shape[dimension] <= LARGEST
        if chosen[value] is not None or not is_told_apart:
            continue
        chosen[value] = dimension
        for other, pairs in links[value]:
            if pairs is None:
                pending.append((other, dimension))
            else:
                pending.extend((other, d) for own, d in pairs if own == dimension)
    return chosen


def _tie(links: _Links, one: int, other: int) -> None:
    """Links two values of one shape."""
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
    """Returns the maps between an operand of an op and its only result; none if unknown."""
    if len(op.results) != 1 or op.name not in _FOLLOWED:
        return []
    if op.name == SCATTER and position:  # indices and updates may affect any place
        return []
    relation = dimensions_of(op)
    if relation is None:
        return []
    maps = (
        _dim_map(op, link, relation.operands[position])
        for dim in range(len(relation.operands[position]))
        for link in relation.of_operand(position, dim)
    )
    return [dim_map for dim_map in maps if dim_map is not None]


def _dim_map(op: ir.Operation, link: DimensionLink, shape: Sequence[int]) -> DimMap | None:
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


def accesses(op: ir.Operation) -> list[ElementAccess]:
    """Returns an access along each dimension that the op touches a part of; none if unknown.

    Gathers and scatters are understood only at a single place, as jax exports `x[i]` and
    `x.at[i].set(y)`. Others may touch anything.
    """
    is_known = op.name in (DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, GATHER, SCATTER)
    whole = static_shape(op.operands[0].type) if is_known else None
    if whole is None:
        return []
    if op.name in (GATHER, SCATTER):
        return _gather(op, whole) if op.name == GATHER else _scatter(op, whole)
    reads = op.name == DYNAMIC_SLICE
    sizes = integers(op, "slice_sizes") if reads else static_shape(op.operands[1].type)
    if sizes is None:
        return []
    first, parts = 1 if reads else 2, _partial_dims(sizes, whole)
    indices, overwrites = tuple(range(first, first + len(whole))), not reads and len(parts) == 1
    return [ElementAccess(d, sizes[d], first + d, indices, True, overwrites) for d in parts]


def _gather(op: ir.Operation, whole: Sequence[int]) -> list[ElementAccess]:
    numbers, sizes = gather_numbers(op), integers(op, "slice_sizes")
    mapped = numbers.index_map
    if numbers.operand_batching or not _is_single(op.operands[1], mapped):
        return []
    return [
        ElementAccess(d, sizes[d], 1, (1,), True)
        for d in _partial_dims(sizes, whole)
        if d in mapped
    ]


def _scatter(op: ir.Operation, whole: Sequence[int]) -> list[ElementAccess]:
    numbers = scatter_numbers(op)
    mapped, inserted = numbers.index_map, numbers.omitted
    if len(op.operands) != 3 or numbers.operand_batching or mapped != inserted:
        return []
    updates = static_shape(op.operands[2].type)
    others = tuple(size for d, size in enumerate(whole) if d not in inserted)
    if updates != others or not _is_single(op.operands[1], mapped):
        return []
    body = Combining(op).combiner
    sets = terminator(body).operands[0] == body.arguments[1]
    return [ElementAccess(mapped[0], 1, 1, (1,), False, sets)]


def _partial_dims(window: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Returns the dimensions along which a slice or an update does not cover all."""
    return [d for d, (part, size) in enumerate(zip(window, whole, strict=True)) if part != size]


def _is_single(indices: ir.Value, mapped: Sequence[int]) -> bool:
    """Returns True if the indices are one number, for one dimension."""
    shape = static_shape(indices.type)
    return len(mapped) == 1 and shape is not None and all(size == 1 for size in shape)
