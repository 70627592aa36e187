"""Writes the ops of a block again for another number of samples.

    %y = stablehlo.dot_general %x, %w : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  ==>                                                                      // for 6 samples
    %y = stablehlo.dot_general %h, %w : (tensor<6x4xf32>, tensor<4x4xf32>) -> tensor<6x4xf32>

The samples are followed as a batch that is divided into one part a sample; ops must take each part
by itself. Constants and broadcasts that a sample shares with others are written for more of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stablehlo_tools.analysis.dataflow import Body, Node
from stablehlo_tools.analysis.dimension_propagation.propagation import (
    BatchDims,
    Graph,
    Origins,
    propagate,
)
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, OpTiling, reshaped
from stablehlo_tools.analysis.partial_sums import PartialSums
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import dimensions_of
from stablehlo_tools.dialect.factors import FactorRole
from stablehlo_tools.dialect.names import (
    CONCATENATE,
    IOTA,
    RESHAPE,
    SHARDING_CONSTRAINT,
    SLICE,
    WHILE,
)
from stablehlo_tools.dialect.traits import ELEMENTWISE, LAYOUT
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.clone import Resize, emptied_clone, reshaped_clone
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import CONSTANTS, copy_constant, is_splat, producer
from stablehlo_tools.ir.walk import terminator

# What is written again where a value that is the same for all samples is needed for more of them:
# ops that exporters make such values by. A reverse has never been among them.
_FOLLOWED_BACK = (
    ELEMENTWISE | LAYOUT - {"stablehlo.reverse"} | {CONCATENATE, IOTA, SHARDING_CONSTRAINT, SLICE}
)

Tilings = dict[int, DimTiling]


class NotScaledError(Exception):
    """The op that cannot be written for another number of samples."""

    def __init__(self, op: ir.Operation) -> None:
        super().__init__(op.name)
        self.op = op


def follow_batch(
    graph: Graph, seeds: Tilings, parts: int, *, sums: Collection[int] = ()
) -> BatchDims:
    """The batch from some arguments of a block on, and from all others that then carry it too.

    `seeds` are by number of the argument. Results of the numbers `sums` are to be sums over the
    batch, as gradients are. Raises NotScaledError where samples are mixed otherwise.
    """
    while True:
        dims = _propagated(graph, seeds, parts)
        if not sums:
            _refuse_mixing(dims)
        added = _added(dims, seeds) if wanted(dims) else None
        if added is None:
            break
        seeds = added
    if sums:
        _refuse_but_sums(dims, sums)
    return dims


def _refuse_mixing(dims: BatchDims) -> None:
    """Raises NotScaledError for an op that makes one result of several samples: a sum over the
    batch would be another number for a larger one."""
    untiled = _untiled(dims)
    for node in dims.graph.nodes:
        op_tiling = dims.op_tilings.get(node)
        mixes = op_tiling is not None and (op_tiling.combine is not None or op_tiling.chained)
        if mixes or node in untiled:
            raise NotScaledError(node.op)
    if dims.meetings:
        raise NotScaledError(dims.meetings[0].used.op)


def _refuse_but_sums(dims: BatchDims, sums: Collection[int]) -> None:
    """Raises NotScaledError where a result that is to be a sum over the batch is none, or where
    another one, or samples, depend on one."""
    if dims.meetings:
        raise NotScaledError(dims.meetings[0].used.op)
    partial, root = PartialSums(dims), dims.graph.root
    partial.visit(root.nodes)
    for place, number in enumerate(root.returned):
        is_sum = partial.terms.get(number) == "add" and number not in dims.tilings
        is_mixed = number in partial.terms or number in partial.blocked
        if (not is_sum) if place in sums else is_mixed:
            raise NotScaledError(_owner(dims.graph.values[number]))


def _untiled(dims: BatchDims) -> set[Node]:
    """The ops that take samples and cannot take them in parts."""
    return {
        node
        for node in dims.graph.nodes
        if dims.op_tilings.get(node) is None
        and not node.bodies
        and any(number in dims.tilings for number in node.inputs)
    }


def wanted(dims: BatchDims) -> list[tuple[int, DimTiling]]:
    """The operands that should carry the batch and do not, in the tilings that they should have: of
    ops, and of loops whose iterations hand on samples."""
    needed = [
        (number, tiling)
        for node, op_tiling in dims.op_tilings.items()
        for number, tiling in zip(node.operands, op_tiling.operands, strict=True)
    ]
    needed += [
        (number, dims.tilings.get(result))
        for node in dims.graph.nodes
        if node.name == WHILE
        for number, result in zip(node.operands, node.results, strict=True)
    ]
    return [
        (number, tiling)
        for number, tiling in needed
        if tiling is not None and number not in dims.tilings
    ]


def _added(dims: BatchDims, seeds: Tilings) -> Tilings | None:
    """The seeds and more, with which more operands carry the batch: what travels with the
    activations, such as the positions of tokens, meets them in some op. First those that operands
    ask for as they are, all in turn; where there are none, one other."""
    graph = dims.graph
    places = {number: argument for argument, number in enumerate(graph.root.arguments)}
    more = seeds
    origins = Origins(graph, dims.parts).of(wanted(dims))
    for number, tiling in origins.items():
        then = _with_one(dims, more, places.get(number), tiling)
        if then is not None:
            dims, more = then, {**more, places[number]: tiling}
    if len(more) > len(seeds):
        return more
    for number, argument in places.items():
        for dim in range(len(graph.shape(number) or ())):
            if _with_one(dims, seeds, argument, DimTiling(dim)) is not None:
                return {**seeds, argument: DimTiling(dim)}
    # All that the operands are made of: two that only meet each other must both carry it.
    together = {places[n]: tiling for n, tiling in origins.items() if n in places} | seeds
    if together.keys() == seeds.keys() or _propagated(graph, together, dims.parts).meetings:
        return None
    return together


def _with_one(
    dims: BatchDims, seeds: Tilings, argument: int | None, tiling: DimTiling
) -> BatchDims | None:
    """The batch from one more argument on; None where no more operands carry it then."""
    graph, parts = dims.graph, dims.parts
    if argument is None or argument in seeds:
        return None
    shape = graph.shape(graph.root.arguments[argument]) or ()
    if not tiling.fits(shape, parts) or shape[tiling.dim] == 1 != parts:
        return None
    then = _propagated(graph, {**seeds, argument: tiling}, parts)
    if then.meetings or len(wanted(then)) >= len(wanted(dims)):
        return None
    # One along features ends where these meet samples.
    return then if _untiled(then) <= _untiled(dims) else None


def _propagated(graph: Graph, seeds: Tilings, parts: int) -> BatchDims:
    return propagate(graph, {graph.root.arguments[i]: s for i, s in seeds.items()}, parts)


class Scaling:
    """Copies of the ops of a block, with `samples` where there were as many as the parts."""

    def __init__(self, dims: BatchDims, samples: int) -> None:
        self._dims = dims
        self._samples = samples
        self._values: dict[ir.Value, ir.Value] = {}

    def write(
        self, body: Body, arguments: Sequence[ir.Value], point: ir.InsertionPoint
    ) -> list[ir.Value]:
        """Writes the ops for new arguments; returns what stands for the results.

        Raises NotScaledError.
        """
        self._bind(body, arguments)
        for node in body.nodes:
            self._node(node, point)
        numbers = self._dims.graph.values
        return [self._values[numbers[number]] for number in body.returned]

    def type_of(self, value: ir.Value) -> ir.Type:
        """The type of what stands for a value."""
        return self._type(value, self._dims.tiling_of(value))

    def _type(self, value: ir.Value, tiling: DimTiling | None) -> ir.Type:
        if tiling is None:
            return value.type
        shape = shape_of(value)
        shape[tiling.dim] = self._size(shape[tiling.dim])
        return ir.RankedTensorType.get(shape, element_of(value), loc=ir.Location.unknown())

    def _size(self, size: int) -> int:
        return size // self._dims.parts * self._samples

    def _bind(self, body: Body, arguments: Sequence[ir.Value]) -> None:
        self._values.update(zip(body.block.arguments, arguments, strict=True))

    def _node(self, node: Node, point: ir.InsertionPoint) -> None:
        op_tiling = self._dims.op_tilings.get(node)
        if node.bodies:
            self._control_flow(node, point)
        elif op_tiling is None:
            copy = copy_with(node.op, self._values, point)
            self._values.update(zip(node.op.results, copy.results, strict=True))
        else:
            self._scaled(node.op, op_tiling, point)

    def _scaled(self, op: ir.Operation, op_tiling: OpTiling, point: ir.InsertionPoint) -> None:
        operands = [
            self._taken(value, tiling, point, op)
            for value, tiling in zip(op.operands, op_tiling.operands, strict=True)
        ]
        types = [
            self._type(r, tiling) for r, tiling in zip(op.results, op_tiling.results, strict=True)
        ]
        resize = self._resize(op_tiling.operands[0])
        copy = reshaped_clone(op, operands, types, point, resize, self._values)
        self._values.update(zip(op.results, copy.results, strict=True))

    def _taken(
        self,
        value: ir.Value,
        tiling: DimTiling | None,
        point: ir.InsertionPoint,
        user: ir.Operation,
    ) -> ir.Value:
        """What stands for an operand that an op takes in a tiling."""
        known = self._dims.tilings.get(self._dims.graph.number(value))
        if known == tiling:
            return self._values[value]
        if tiling is None or known is not None:
            raise NotScaledError(user)
        return self._repeated(value, tiling, point, user)

    def _repeated(
        self, value: ir.Value, tiling: DimTiling, point: ir.InsertionPoint, user: ir.Operation
    ) -> ir.Value:
        """A value that is the same for all samples, for more or fewer of them; `user` takes it."""
        op, type_ = producer(_entering(value)), self._type(value, tiling)
        if op is None:
            raise NotScaledError(user)
        if op.name in CONSTANTS and is_splat(op):
            return copy_constant(op, type_, point)
        tilings = _operand_tilings(op, tiling, self._dims.parts)
        if tilings is None:
            raise NotScaledError(op)
        operands = [
            self._values[value] if inner is None else self._repeated(value, inner, point, op)
            for value, inner in zip(op.operands, tilings, strict=True)
        ]
        return reshaped_clone(op, operands, [type_], point, self._resize(tiling)).results[0]

    def _resize(self, tiling: DimTiling | None) -> Resize | None:
        return None if tiling is None else Resize(tiling.dim, self._dims.parts, self._samples)

    def _control_flow(self, node: Node, point: ir.InsertionPoint) -> None:
        op, is_loop = node.op, node.name == WHILE
        operands = list(op.operands)
        if is_loop:
            taken = [
                self._handed_on(value, result, point, op)
                for value, result in zip(operands, node.results, strict=True)
            ]
        else:
            taken = [self._values[value] for value in operands]
        types = [self.type_of(result) for result in op.results]
        new = emptied_clone(op, taken, types, point)
        for number, (body, region) in enumerate(zip(node.bodies, new.regions, strict=True)):
            inner = self._opened(body, region, types)
            end = terminator(body.block)
            if is_loop and number == 0:  # the condition returns no results
                returned = [self._taken(value, None, inner, end) for value in end.operands]
            else:
                returned = [
                    self._handed_on(value, result, inner, end)
                    for value, result in zip(end.operands, node.results, strict=True)
                ]
            ir.Operation.create(end.name, operands=returned, loc=end.location, ip=inner)
        self._values.update(zip(op.results, new.results, strict=True))

    def _handed_on(
        self, value: ir.Value, result: int, point: ir.InsertionPoint, user: ir.Operation
    ) -> ir.Value:
        """What stands for a value that control flow hands on to a result of its own."""
        return self._taken(value, self._dims.tilings.get(result), point, user)

    def _opened(self, body: Body, region: ir.Region, types: Sequence[ir.Type]) -> ir.InsertionPoint:
        """Writes the ops of a body; returns where its terminator goes."""
        types = types if len(body.block.arguments) else []
        locations = [argument.location for argument in body.block.arguments]
        block = region.blocks.append(*types, arg_locs=locations)
        self._bind(body, list(block.arguments))
        point = ir.InsertionPoint(block)
        for node in body.nodes:
            self._node(node, point)
        return point


def _entering(value: ir.Value) -> ir.Value:
    """What a value is outside of the loops that only hand it on."""
    while producer(value) is None:
        argument = ir.BlockArgument(value)
        loop = argument.owner.owner.operation
        is_body = loop.name == WHILE and argument.owner == loop.regions[1].blocks[0]
        if not is_body or terminator(argument.owner).operands[argument.arg_number] != value:
            break
        value = loop.operands[argument.arg_number]
    return value


def _owner(value: ir.Value) -> ir.Operation:
    """The op that makes a value, or that has it as an argument of its block."""
    owner = value.owner
    return owner.owner.operation if isinstance(owner, ir.Block) else owner.operation


def _operand_tilings(
    op: ir.Operation, tiling: DimTiling, parts: int
) -> Sequence[DimTiling | None] | None:
    """The tilings of the operands of an op whose result, the same for all samples, is to have one:
    its dimensions followed backwards, up to where it repeats elements.

    None for ops of which that is not known.
    """
    relation = dimensions_of(op) if op.name in _FOLLOWED_BACK else None
    if relation is None:
        return None
    if op.name == RESHAPE:
        before = reshaped(tiling, relation.results[0], relation.operands[0], parts)
        return None if before is None else [before]
    tilings: list[DimTiling | None] = [None for _ in op.operands]
    for factor in relation.along_result(0, tiling.dim):
        if factor.role is FactorRole.REPEATED:
            continue
        if factor.role is not FactorRole.KEPT:
            return None
        for along in factor.operands:
            tilings[along.tensor] = tiling.at(along.dim)
    return tilings
