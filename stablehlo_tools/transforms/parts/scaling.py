"""Writes the ops of a block again for another number of samples.

    %y = stablehlo.dot_general %x, %w : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  ==>                                                                      // for 6 samples
    %y = stablehlo.dot_general %h, %w : (tensor<6x4xf32>, tensor<4x4xf32>) -> tensor<6x4xf32>

The samples are propagated as a batch that is divided into one part a sample; ops must compute each
part independently. Constants and broadcasts that all samples share are written for more of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.dimension_propagation.propagation import (
    BatchDims,
    Graph,
    TilingOrigins,
    missing_pieces,
    propagate,
)
from stablehlo_tools.analysis.dimension_propagation.seeds import Seeds
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, reshape_tiling
from stablehlo_tools.analysis.partial_sums import PartialSums
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import dimensions_of
from stablehlo_tools.dialect.factors import FactorRole
from stablehlo_tools.dialect.names import (
    CONCATENATE,
    IOTA,
    MANUAL_COMPUTATION,
    RESHAPE,
    SHARDING_CONSTRAINT,
    SLICE,
    WHILE,
)
from stablehlo_tools.dialect.traits import ELEMENTWISE, LAYOUT
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.clone import Resize, reshaped_clone
from stablehlo_tools.ir.values import CONSTANTS, copy_constant, is_splat, producer
from stablehlo_tools.ir.while_loop import before_loops
from stablehlo_tools.transforms.parts.block_rewriter import BlockRewriter, part_type

# Ops to copy if a value that is the same for all samples is needed for more of them: those by which
# exporters make such values. A reverse has never been among them.
_FOLLOWED_BACK = (
    ELEMENTWISE | LAYOUT - {"stablehlo.reverse"} | {CONCATENATE, IOTA, SHARDING_CONSTRAINT, SLICE}
)


class NotScaledError(Exception):
    """The op that cannot be written for another number of samples."""

    def __init__(self, op: ir.Operation) -> None:
        super().__init__(op.name)
        self.op = op


def follow_batch(
    graph: Graph, seeds: Seeds, parts: int, *, sums: Collection[int] = ()
) -> BatchDims:
    """Returns the batch propagated from some arguments of a block, and from all others that then
    also carry it.

    Results with the numbers `sums` are to be sums over the batch, as gradients are. Raises
    NotScaledError if samples are mixed in any other way.
    """
    while True:
        dims = propagate(graph, seeds, parts)
        if not sums:
            _refuse_mixing(dims)
        # The loop ends: every round adds at least one argument to the seeds.
        added = _add_seeds(dims, seeds) if untiled_operands(dims) else None
        if added is None:
            break
        seeds = added
    if sums:
        _refuse_but_sums(dims, sums)
    return dims


def _refuse_mixing(dims: BatchDims) -> None:
    """Raises NotScaledError for an op that reduces several samples to one result: a larger batch
    would change its value."""
    untiled = untiled_ops(dims)
    for node in dims.graph.nodes:
        op_tiling = dims.op_tilings.get(node)
        mixes = op_tiling is not None and (op_tiling.combine is not None or op_tiling.chained)
        if op_tiling is not None and node.name == MANUAL_COMPUTATION:
            _refuse_mixing(dims.inside(node))
        if mixes or node in untiled:
            raise NotScaledError(node.op)
    if dims.meetings:
        raise NotScaledError(dims.meetings[0].used.op)


def _refuse_but_sums(dims: BatchDims, sums: Collection[int]) -> None:
    """Raises NotScaledError if a result in `sums` is not a sum over the batch. Also raises it if
    another result, or a value of samples, depends on such a sum."""
    if dims.meetings:
        raise NotScaledError(dims.meetings[0].used.op)
    partial, root = PartialSums(dims), dims.graph.root
    partial.visit(root.nodes)
    for place, number in enumerate(root.returned):
        is_sum = partial.terms.get(number) == "add" and number not in dims.tilings
        is_mixed = number in partial.terms or number in partial.blocked
        if (not is_sum) if place in sums else is_mixed:
            # The op that makes the value, or has it as an argument of its block.
            owner = dims.graph.values[number].owner
            op = owner.owner if isinstance(owner, ir.Block) else owner
            raise NotScaledError(op.operation)


def untiled_ops(dims: BatchDims) -> set[Node]:
    """Returns the ops that use samples and cannot compute them in parts."""
    return {
        node
        for node in dims.graph.nodes
        if dims.op_tilings.get(node) is None
        and not node.bodies
        and any(number in dims.tilings for number in node.inputs)
    }


def untiled_operands(dims: BatchDims) -> list[tuple[int, DimTiling]]:
    """Returns the operands that should carry the batch and do not, with their tilings: operands of
    ops, and of loops that carry samples."""
    tilings = dims.tilings
    return missing_pieces(dims) + [
        (number, tilings[result])
        for node in dims.graph.nodes
        if node.name == WHILE
        for number, result in zip(node.operands, node.results, strict=True)
        if result in tilings and number not in tilings
    ]


def _add_seeds(dims: BatchDims, seeds: Seeds) -> Seeds | None:
    """Returns the seeds with more arguments, so that more operands carry the batch; None if there
    are none. Values such as the positions of tokens meet the activations in some op. Arguments that
    operands need directly are all added; without any, one other argument is."""
    graph, more, arguments = dims.graph, seeds, dims.graph.root.arguments
    origins = TilingOrigins(graph, dims.parts).find_origins(untiled_operands(dims))
    asked = {number: tiling for number, tiling in origins.items() if number in arguments}
    for number, tiling in asked.items():
        then = _with_one(dims, more, number, tiling)
        if then is not None:
            dims, more = then, {**more, number: tiling}
    if len(more) > len(seeds):
        return more
    for number in arguments:
        for dim in range(len(graph.shape(number) or ())):
            if _with_one(dims, seeds, number, DimTiling(dim)) is not None:
                return {**seeds, number: DimTiling(dim)}
    # All arguments that the operands depend on: two that only meet each other must both carry the
    # batch.
    together = asked | seeds
    if together.keys() == seeds.keys() or propagate(graph, together, dims.parts).meetings:
        return None
    return together


def _with_one(dims: BatchDims, seeds: Seeds, number: int, tiling: DimTiling) -> BatchDims | None:
    """Returns the batch with one more argument; None unless more operands carry it then."""
    graph, parts, shape = dims.graph, dims.parts, dims.graph.shape(number) or ()
    if number in seeds or not tiling.fits(shape, parts) or shape[tiling.dim] == 1 != parts:
        return None
    then = propagate(graph, {**seeds, number: tiling}, parts)
    if then.meetings or len(untiled_operands(then)) >= len(untiled_operands(dims)):
        return None
    # A cut along features ends at ops that combine them with samples.
    return then if untiled_ops(then) <= untiled_ops(dims) else None


class Scaling(BlockRewriter):
    """Copies the ops of a block, with `count` samples in place of as many as there are parts."""

    def write_all(self, arguments: Sequence[ir.Value], point: ir.InsertionPoint) -> list[ir.Value]:
        """Writes the block on new arguments; returns the copies of its results.

        Raises NotScaledError.
        """
        root = self.dims.graph.root
        self.values.update(zip(root.arguments, arguments, strict=True))
        self.write(root.nodes, point)
        return [self.values[number] for number in root.returned]

    def operand(
        self, number: int, tiling: DimTiling | None, build: Builder, user: ir.Operation
    ) -> ir.Value:
        """Returns the copy of a value; a value shared by all samples is resized to more or fewer of
        them. Raises NotScaledError."""
        known = self.dims.tilings.get(number)
        if known == tiling:
            return self.values[number]
        if tiling is None or known is not None:
            raise NotScaledError(user)
        return self.resize_shared(number, tiling, build, user)

    def resize_shared(
        self, number: int, tiling: DimTiling, build: Builder, user: ir.Operation
    ) -> ir.Value:
        """Returns a value that all samples share, resized to `count` samples. Raises
        NotScaledError."""
        graph, parts = self.dims.graph, self.dims.parts
        value = graph.values[number]
        op, type_ = producer(before_loops(value)), part_type(value, tiling, parts, self.count)
        if op is None:
            raise NotScaledError(user)
        if op.name in CONSTANTS and is_splat(op):
            return copy_constant(op, type_, build.point)
        tilings = _operand_tilings(op, tiling, parts)
        if tilings is None:
            raise NotScaledError(op)
        inner = Builder(build.point, op.location)
        operands = [
            self.values[number] if tiling is None else self.resize_shared(number, tiling, inner, op)
            for number, tiling in zip(map(graph.number, op.operands), tilings, strict=True)
        ]
        resize = Resize(tiling.dim, parts, self.count)
        return reshaped_clone(op, operands, [type_], build.point, resize).results[0]


def _operand_tilings(
    op: ir.Operation, tiling: DimTiling, parts: int
) -> Sequence[DimTiling | None] | None:
    """Returns the tilings of an op's operands, given the tiling of its result, which all samples
    share. They are the result's dimension propagated backwards, up to a broadcast along it.

    Returns None for ops without a known relation of dimensions.
    """
    relation = dimensions_of(op) if op.name in _FOLLOWED_BACK else None
    if relation is None:
        return None
    if op.name == RESHAPE:
        before = reshape_tiling(tiling, relation.results[0], relation.operands[0], parts)
        return None if before is None else [before]
    tilings: list[DimTiling | None] = [None for _ in op.operands]
    for factor in relation.along_result(0, tiling.dim):
        if factor.role is FactorRole.REPEATED:
            continue
        if factor.role is not FactorRole.KEPT:
            return None
        for along in factor.operands:
            tilings[along.tensor] = tiling.with_dim(along.dim)
    return tilings
