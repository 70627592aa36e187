"""The state of values in a manual computation across the devices of one of its axes.

    value        on the devices of the axis              without the axis
    shard        each has its part along a dimension     the whole
    term         each has a term of a sum                the sum
    (no entry)   all have the same                       the same

A value that is the same on all devices can be a term. The sum is then that value times the number
of devices. Without the axis, a collective over it that turns one state into another does nothing:
an all_reduce of terms, an all_gather of shards, a reduce_scatter of terms, an all_to_all of shards.
An all_reduce of a value that is the same on all devices becomes a product. `DimTiling` follows a
shard, as one part of a batch. `PartialSums` follows terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

import numpy as np

from stablehlo_tools.analysis.collectives import ModuleFacts, collectives_in
from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.device_values import Values
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, Graph, Propagation
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, OpTiling, reshapings
from stablehlo_tools.analysis.partial_sums import PartialSums
from stablehlo_tools.analysis.replica_groups import (
    AxisRef,
    DeviceMesh,
    GroupMode,
    ProcessGroups,
    mesh_axes_groups,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integer
from stablehlo_tools.dialect.factors import Shape
from stablehlo_tools.dialect.names import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    DYNAMIC_UPDATE_SLICE,
    REDUCE_SCATTER,
    RESHAPE,
    SCATTER,
)
from stablehlo_tools.dialect.reducers import IDEMPOTENT, reducer_kind
from stablehlo_tools.dialect.traits import DEVICE_IDS
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.ir.walk import ops_named

# The attribute with the dimension along which a collective's operand, or its result, is in shards.
_TAKES = {ALL_GATHER: "all_gather_dim", ALL_TO_ALL: "concat_dimension"}
_GIVES = {REDUCE_SCATTER: "scatter_dimension", ALL_TO_ALL: "split_dimension"}
_UNDONE = frozenset({ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL})
_INDEXED = frozenset({DYNAMIC_UPDATE_SLICE, SCATTER})
_ONE_SHARD = 1  # a device has one part of the whole


class CrossingError(Exception):
    """The op that cannot be written without the axis, and the reason."""

    def __init__(self, op: ir.Operation, why: str) -> None:
        super().__init__(why)
        self.op = op


class MeshAxis:
    """An axis of a mesh, and the position of each device along it."""

    def __init__(self, name: str, mesh: DeviceMesh) -> None:
        self.name = name
        self.size = dict(mesh.axes)[name]
        groups = mesh_axes_groups(mesh, [AxisRef(name)])
        # A group has the devices that differ only along the axis; its first one identifies it.
        self._place = {device: n for group in groups for n, device in enumerate(group)}
        self._others = {device: group[0] for group in groups for device in group}

    def is_same(self, values: Values | None) -> bool:
        """Returns True if devices along the axis have the same values. `values` has one row per
        device, or one row for all. None counts as unknown: False."""
        if values is None:
            return False
        return len(values) == 1 or all(
            np.array_equal(values[device], values[first]) for device, first in self._others.items()
        )

    def is_crossed(self, groups: ProcessGroups) -> bool:
        """Returns True if a group has devices at different places along the axis. If the axis has
        one device, returns True if each group has one device."""
        if self.size == 1:
            return all(len(group) == 1 for group in groups)
        return any(len({self._place[device] for device in group}) > 1 for group in groups)

    def is_all_of(self, groups: ProcessGroups) -> bool:
        """Returns True if each group consists of all devices along the axis, in order."""
        return all(
            [self._place[device] for device in group] == list(range(self.size))
            and len({self._others[device] for device in group}) == 1
            for group in groups
        )

    def apart(self, groups: ProcessGroups) -> ProcessGroups | None:
        """Splits each group by place along the axis. Returns None if the subgroups of a group
        differ in their positions along the other axes."""
        divided: list[tuple[int, ...]] = []
        for group in groups:
            places = [[d for d in group if self._place[d] == n] for n in range(self.size)]
            if len({tuple(self._others[d] for d in place) for place in places}) > 1:
                return None
            divided += map(tuple, places)
        return tuple(divided)


@dataclass(frozen=True)
class AxisCrossing:
    """A collective over an axis. `others` are its groups without the axis, or None if it is dropped
    with the axis."""

    op: ir.Operation
    others: ProcessGroups | None

    @cached_property
    def reducer(self) -> str | None:
        """The kind of its reducer, such as `add`; None if it has none or another one."""
        return reducer_kind(Combining(self.op).combiner) if len(self.op.regions) else None

    def result(self) -> DimTiling | None:
        """Returns the dimension along which devices have shards of its result; None if they have
        none."""
        name = _GIVES.get(self.op.name)
        return None if name is None else DimTiling(integer(self.op, name))

    def takes(self) -> DimTiling | None:
        """Returns the dimension along which devices have shards of its operand; None if they have
        none."""
        name = _TAKES.get(self.op.name)
        return None if name is None else DimTiling(integer(self.op, name))


Crossings = Mapping[ir.Operation, AxisCrossing]


def crossings_of(computation: ir.Operation, axis: MeshAxis, facts: ModuleFacts) -> Crossings:
    """Returns the collectives of a manual computation over an axis.

    Raises CrossingError for a collective that moves values along the axis.
    """
    found: dict[ir.Operation, AxisCrossing] = {}
    for collective in collectives_in(computation):
        op = collective.op
        groups = facts.groups(collective)
        if groups is None:
            raise CrossingError(op, "its replica groups are unknown")
        if not axis.is_crossed(groups):
            continue
        # These only turn one state into another; without the axis they do nothing.
        is_undone = op.name in _UNDONE and axis.is_all_of(groups)
        # An all_reduce over several axes stays, over the others.
        others = axis.apart(groups) if op.name == ALL_REDUCE and not is_undone else None
        # An async pair is two ops, and only its start is found: it is refused, too.
        if not (is_undone or others) or collective.op != collective.inner:
            raise CrossingError(op, f'it moves values along "{axis.name}"')
        # `AxisRemoval` writes groups of device ids, which other modes would count differently.
        if others is not None and collective.group_mode != GroupMode.FLATTENED_IDS:
            raise CrossingError(op, "its replica groups are not flattened device ids")
        found[op] = AxisCrossing(op, others)
    return found


Reshaping = tuple[DimTiling, Shape, Shape]


class Reshapings:
    """Chooses the dimension of shards after a reshape, if only their use can tell.

    Examples: heads or features, if a device has one element of several; microbatches or the samples
    in each, if a reshape splits a device's part of a batch. `taken` maps a reshape to the number of
    its choice; the default 0 is the likeliest.
    """

    def __init__(self, taken: Mapping[Reshaping, int]) -> None:
        self._taken = taken
        self._counts: dict[Reshaping, int] = {}

    def reshape_tiling(self, tiling: DimTiling, before: Shape, after: Shape) -> DimTiling | None:
        """Returns the tiling after a reshape; None if there is none."""
        found, asked = _all_reshapings(tiling, before, after), (tiling, before, after)
        if len(found) > 1:
            self._counts[asked] = len(found)
        return found[self._taken.get(asked, 0)] if found else None

    def others(self) -> Iterator[dict[Reshaping, int]]:
        """Yields the current choices plus a less likely one, for each reshape with several
        choices."""
        for asked, count in self._counts.items():
            if asked not in self._taken:
                for number in range(1, count):
                    yield {**self._taken, asked: number}


@cache
def _all_reshapings(tiling: DimTiling, before: Shape, after: Shape) -> Sequence[DimTiling]:
    """Returns the tilings that a reshape can give.

    Those for which it has to move the parts come last: dimensions whose strides overlap the strides
    of the divided dimension.
    """
    found = reshapings(tiling, before, after, _ONE_SHARD)
    low, high = _strides(before, tiling.dim)
    for dim in range(len(after)):
        own = _strides(after, dim)
        if max(low, own[0]) < min(high, own[1]) and DimTiling(dim) not in found:
            found.append(DimTiling(dim))
    return found


def _strides(shape: Shape, dim: int) -> tuple[int, int]:
    """Returns the stride of a dimension, and the number of elements that it spans."""
    minor = prod(shape[dim + 1 :])
    return minor, minor * shape[dim]


def is_moved(tiling: DimTiling, given: DimTiling, before: Shape, after: Shape) -> bool:
    """Returns True if a reshape that gives a tiling has to move the parts."""
    return given not in reshapings(tiling, before, after, _ONE_SHARD)


class AcrossAxis:
    """The state of each value of a block across an axis, from the block's arguments on.

    `is_same` returns True for integers that are known to be the same on all devices of the axis.
    Raises CrossingError for a collective in an op that the graph does not open.
    """

    def __init__(
        self,
        graph: Graph,
        crossings: Crossings,
        shards: Mapping[int, DimTiling],
        is_same: Callable[[ir.Value], bool],
        reshapings: Reshapings,
    ) -> None:
        # The graph opens control flow only; it has no nodes for ops in other regions.
        followed = {node.op for node in graph.nodes}
        nested = next((op for op in crossings if op not in followed), None)
        if nested is not None:
            raise CrossingError(nested, "it is inside an op that is not control flow")
        self.dims: BatchDims = _AxisShards(graph, crossings, reshapings).run(shards)
        self.sums = Terms(self.dims, crossings, is_same)
        self.sums.visit(graph.root.nodes)

    def shard(self, number: int) -> DimTiling | None:
        """Returns the tiling of a value that devices have shards of; None if all have the same
        value.

        Raises CrossingError for any other value.
        """
        stopper = self.sums.blocked.get(number)
        if stopper is not None:
            why = "it reads a term of a sum over devices before an all_reduce adds up the terms"
            if _is_of_place(stopper):
                why = "its value depends on the position of the device"
            elif any(read in self.dims.tilings for read in stopper.inputs):
                why = "it has no known rule for an operand that the axis divides"
            raise CrossingError(stopper.op, why)
        if number in self.sums.terms:
            raise CrossingError(
                self.dims.graph.maker[number].op,
                "each device holds a term of a sum that no all_reduce completes",
            )
        return self.dims.tilings.get(number)


class _AxisShards(Propagation):
    """Follows shards through collectives over the axis."""

    def __init__(self, graph: Graph, crossings: Crossings, reshapings: Reshapings) -> None:
        super().__init__(graph, _ONE_SHARD)
        self._crossings = crossings
        self._reshapings = reshapings

    def visit(self, node: Node) -> None:
        """Follows shards through one op."""
        crossing = self._crossings.get(node.op)
        if crossing is not None:
            for result in node.results:
                self._put(result, crossing.result(), None)
            return
        super().visit(node)
        step = self.op_tilings.get(node)
        if node.name != RESHAPE or step is None:
            return
        (taken,), (result,), relation = step.operands, node.results, self.graph.relation(node)
        if taken is not None and relation is not None:
            (before,), (after,) = relation.operands, relation.results
            given = self._reshapings.reshape_tiling(taken, before, after)
            self.op_tilings[node] = OpTiling((taken,), (given,))
            self._put(result, given, None)


class Terms(PartialSums):
    """Follows terms through collectives over the axis.

    `repeated` are sums of values that are the same on all devices. `among` has, for each op on
    terms, the operands that are the same on all devices.
    """

    def __init__(
        self, dims: BatchDims, crossings: Crossings, is_same: Callable[[ir.Value], bool]
    ) -> None:
        super().__init__(dims)
        self._crossings = crossings
        self._is_same = is_same
        self.repeated: set[int] = set()
        self.among: dict[Node, set[int]] = {}
        self._visited: list[Node] = []

    def is_term(self, number: int, reducer: str) -> bool:
        """Returns True if a value can be a term, also because it is the same on all devices."""
        if super().is_term(number, reducer):
            return True
        if not self.is_multiple(number, reducer):
            return False
        node = self._visited[-1]
        if node.name in _INDEXED and node.operands.count(number) > 1:
            return False  # the multiple would also replace it as an index
        self.among[node].add(number)
        return True

    def is_multiple(self, number: int, reducer: str | None) -> bool:
        """Returns True if a value is the same on all devices and may be a term of its multiple."""
        element = element_of(self.dims.graph.values[number])
        counts = isinstance(element, ir.FloatType | ir.IntegerType)
        whole = counts and number not in self.terms and number not in self.dims.tilings
        is_other = reducer != "add" or number in self.blocked or self._is_identity(number, "add")
        return whole and not is_other

    def _visit(self, node: Node) -> None:
        crossing = self._crossings.get(node.op)
        if crossing is None:
            self.among[node] = set()
            self._visited.append(node)
            super()._visit(node)
            self._visited.pop()
            # Device ids differ along the axis, unless the op uses only their part along other axes.
            if _is_of_place(node):
                self.blocked.update(dict.fromkeys(node.results, node))
            for result in node.results:
                of_place = result in self.blocked and _is_of_place(self.blocked[result])
                if of_place and self._is_same(self.dims.graph.values[result]):
                    del self.blocked[result]
            return
        for operand, result in zip(node.operands, node.results, strict=True):
            # Bodies of loops are visited until nothing changes: drop the state of the last visit.
            for state in (self.terms, self.blocked):
                state.pop(result, None)
            self.repeated.discard(result)
            if operand in self.blocked:
                self.blocked[result] = self.blocked[operand]
            elif not self._joins(crossing, operand, result):
                self.blocked[result] = node

    def _joins(self, crossing: AxisCrossing, operand: int, result: int) -> bool:
        """Returns True if the result of a collective is, without the axis, the operand or its
        multiple."""
        shard, term = self.dims.tilings.get(operand), self.terms.get(operand)
        if shard != crossing.takes():
            return False
        if crossing.reducer is None:
            return term is None and shard != crossing.result()
        if term is not None:
            return term == crossing.reducer
        if crossing.op.name not in {ALL_REDUCE, REDUCE_SCATTER}:
            return False
        if crossing.reducer != "add":
            return crossing.reducer in IDEMPOTENT
        self.repeated.add(result)
        element = element_of(self.dims.graph.values[operand])
        return isinstance(element, ir.FloatType | ir.IntegerType)


def _is_of_place(node: Node) -> bool:
    """Returns True if an op returns the id of the device, or uses it in a region that is not
    followed."""
    if node.name in DEVICE_IDS:
        return True
    opened = not len(node.op.regions) or bool(node.bodies)
    return not opened and bool(ops_named(node.op, DEVICE_IDS))
