"""Describes how a tensor is tiled, and how an op runs on tiles of its operands.

An op has a tiling if it can run once for each part: the op on part k of its tiled operands gives
part k of the result, or the results of all parts combine to the result. The relation of its
dimensions decides. All other ops have none: custom calls, random numbers, ops with side effects,
and every op whose dimensions have no relation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import dimensions_of, static_shape
from stablehlo_tools.dialect.factors import Factor, FactorRole, OpDimensions, Shape
from stablehlo_tools.dialect.names import BARRIER, CONVOLUTION, RESHAPE, SCATTER
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.reshapes import without_empty
from stablehlo_tools.dialect.traits import COLLECTIVES, Trait, ops_with
from stablehlo_tools.ir.values import is_identity_of
from stablehlo_tools.ir.views import Combining

# Ops whose work counts as multiplications. Exporters no longer write `dot`, so it is left out.
CONTRACTIONS = ops_with(Trait.CONTRACTION) - {"stablehlo.dot"}
# Ops with a relation that the batch is not followed through. Exporters write other ops for most of
# them. The region of a map may be anything, and training batch norms use statistics of all samples.
_NOT_FOLLOWED = frozenset(
    f"stablehlo.{name}"
    for name in (
        "broadcast",
        "cross-replica-sum",
        "dot",
        "dynamic_gather",
        "map",
        "batch_norm_grad",
        "batch_norm_training",
    )
)
_EACH_BY_ITSELF = COLLECTIVES | {BARRIER}  # operand i makes result i
_PLAIN = (ir.FloatType, ir.IntegerType, ir.ComplexType)


@dataclass(frozen=True, slots=True)
class DimTiling:
    """Says which elements of a tensor belong to which part of the batch.

    Dimension `dim` is read as `[outer, parts, inner]`; part k holds `[:, k, :]` of it. With `outer`
    1, the parts are consecutive pieces of the dimension. It is larger if the batch was merged into
    another dimension as the minor part, by a reshape or an all_gather of every device's share.
    """

    dim: int
    outer: int = 1

    def with_dim(self, dim: int) -> DimTiling:
        """Returns the same tiling along another dimension of the same size."""
        return DimTiling(dim, self.outer)

    def fits(self, shape: Shape, parts: int) -> bool:
        """Returns True if a tensor of this shape can be tiled so."""
        if self.dim >= len(shape):
            return False
        size = shape[self.dim]
        return size > 0 and size % (self.outer * parts) == 0


@dataclass(frozen=True, slots=True)
class OpTiling:
    """Says how an op runs once for each part.

    `operands[i]` is the tiling in which the op reads an operand, None if it reads all of it; the
    same for the results. `combine` is the op (`add`, `maximum`, …) that combines the parts'
    results. If `chained`, each part's op starts from the result of the part before, in place of
    operand 0.
    """

    operands: tuple[DimTiling | None, ...]
    results: tuple[DimTiling | None, ...]
    combine: str | None = None
    chained: bool = False


Tilings = tuple[DimTiling | None, ...]


def reshape_tiling(tiling: DimTiling, before: Shape, after: Shape, parts: int) -> DimTiling | None:
    """Returns the most likely tiling after a reshape; None if no single dimension has the parts."""
    return next(iter(reshapings(tiling, before, after, parts)), None)


def reshapings(tiling: DimTiling, before: Shape, after: Shape, parts: int) -> list[DimTiling]:
    """Returns the tilings that a reshape may give, most likely first: at most one of several parts.

    A single part fits several dimensions. The most likely one has as many elements as before, and
    the same dimensions before it, or after it.
    """
    filled = without_empty(before, after)
    if filled is None:
        return []
    before, after = filled
    inner = before[tiling.dim] // (tiling.outer * parts)
    ahead = prod(before[: tiling.dim]) * tiling.outer
    behind = inner * prod(before[tiling.dim + 1 :])
    found: list[DimTiling] = []
    for dim in range(len(after)):
        major, minor = prod(after[:dim]), prod(after[dim + 1 :])
        if after[dim] < parts or ahead % major or behind % minor:
            continue
        found.append(DimTiling(dim, ahead // major))
        if parts > 1:
            break

    def rank(each: DimTiling) -> tuple[bool, int, int]:
        changes = after[each.dim] != inner * each.outer * parts
        # The number of leading or trailing dimensions that stay.
        front, back = before[: tiling.dim + 1], before[tiling.dim :]
        same_front = len(front) if after[: each.dim + 1] == front else 0
        same_back = len(back) if after[each.dim :] == back else 0
        return changes, each.outer, -(max(same_front, same_back))

    return sorted(found, key=rank) if len(found) > 1 else found


def part_shape(shape: Shape, tiling: DimTiling | None, parts: int, count: int = 1) -> Shape:
    """Returns the shape of one part, or of `count` consecutive parts together."""
    if tiling is None:
        return shape
    size = shape[tiling.dim] // parts * count
    return (*shape[: tiling.dim], size, *shape[tiling.dim + 1 :])


def relation_of(op: ir.Operation) -> OpDimensions | None:
    """Returns the relation of an op that the batch may be followed through; None for others."""
    if op.name in _NOT_FOLLOWED or not all(map(_is_plain, (*op.operands, *op.results))):
        return None
    return dimensions_of(op)


def plain_shape(value: ir.Value) -> Shape | None:
    """Returns the static shape of a tensor of numbers without encoding; None for other values."""
    return static_shape(value.type) if _is_plain(value) else None


def _is_plain(value: ir.Value) -> bool:
    type_ = value.type
    if not isinstance(type_, ir.RankedTensorType) or type_.encoding is not None:
        return False
    return isinstance(type_.element_type, _PLAIN)


def tiling_of(
    op: ir.Operation,
    relation: OpDimensions | None,
    tilings: Tilings,
    parts: int,
    *,
    regroups: bool = False,
) -> OpTiling | None:
    """Returns how an op runs on operands, some of them tiled; None if it needs one of them whole.

    With `regroups`, slices, pads and concatenations along the batch are followed, if each part
    contributes the same share of the result.
    """
    if relation is None:
        return None
    tiling = Query(op, relation, tilings, parts, regroups).answer()
    if tiling is None or not _fit(tiling.operands, relation.operands, parts):
        return None
    return tiling if _fit(tiling.results, relation.results, parts) else None


def _fit(tilings: Tilings, shapes: Sequence[Shape], parts: int) -> bool:
    return all(
        tiling is None or tiling.fits(shape, parts)
        for tiling, shape in zip(tilings, shapes, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Query:
    """The question how an op runs on operands with these tilings."""

    op: ir.Operation
    relation: OpDimensions
    tilings: Tilings
    parts: int
    regroups: bool

    def answer(self) -> OpTiling | None:
        """Returns how the op runs; None if it needs whole operands."""
        name = self.op.name
        if not _fit(self.tilings, self.relation.operands, self.parts):
            return None
        if name in _EACH_BY_ITSELF:
            return self._each_by_itself()
        first = next((i for i, tiling in enumerate(self.tilings) if tiling is not None), None)
        tiling = None if first is None else self.tilings[first]
        if first is None or tiling is None:
            return None
        if name == RESHAPE:
            (before,), (after,) = self.relation.operands, self.relation.results
            behind = reshape_tiling(tiling, before, after, self.parts)
            return None if behind is None else OpTiling((tiling,), (behind,))
        factors = self.relation.along_operand(first, tiling.dim)
        if len(factors) != 1:
            return None
        (factor,) = factors
        if self._is_excluded(factor):
            return None
        if factor.role is FactorRole.MOVED:
            return self._tile_equal_shares(factor, tiling)
        return self._along(factor, tiling)

    def _is_excluded(self, factor: Factor) -> bool:
        """Returns True for factors that hold, but that the batch is not followed along."""
        name = self.op.name
        if name == "stablehlo.batch_norm_inference":  # features are not samples
            return len(factor.operands) > 1
        if name == SCATTER:  # scatters into several tensors are not supported
            return len(self.relation.results) > 1
        if name != CONVOLUTION or factor.role is not FactorRole.CONTRACTED:
            return False
        # A sum over groups of features; over groups of the batch only if both operands are tiled.
        roles = {each.role for each in self.relation.factors}
        by_batch = FactorRole.SPLIT in roles and None not in self.tilings
        return FactorRole.REGROUPED in roles and not by_batch

    def _along(self, factor: Factor, tiling: DimTiling) -> OpTiling | None:
        """Tiles all operands that have a factor along it; None if other operands are tiled."""
        operands: list[DimTiling | None] = [None for _ in self.tilings]
        results: list[DimTiling | None] = [None for _ in self.relation.results]
        for along in factor.operands:
            operands[along.tensor] = tiling.with_dim(along.dim)
        for along in factor.results:
            results[along.tensor] = tiling.with_dim(along.dim)
        pairs = zip(self.tilings, operands, strict=True)
        if any(given not in (None, taken) for given, taken in pairs):
            return None
        taken = tuple(operands)
        match factor.role:
            case FactorRole.KEPT:
                return OpTiling(taken, tuple(results))
            case FactorRole.CONTRACTED:
                return OpTiling(taken, (None,), "add")
            case FactorRole.REDUCED if self.op.name == SCATTER:
                is_known = reducer_kind(Combining(self.op).combiner) is not None
                return OpTiling(taken, (None,), chained=True) if is_known else None
            case FactorRole.REDUCED if len(self.relation.results) == 1:
                reducer = reducer_kind(Combining(self.op).combiner)
                if reducer is None or not is_identity_of(reducer, self.op.operands[1]):
                    return None  # the initial value would count once for each part
                return OpTiling(taken, (None,), reducer)
            case _:
                return None

    def _each_by_itself(self) -> OpTiling | None:
        """Tiles collectives, which need all operands tiled, and barriers, operand by operand."""
        if self.op.name != BARRIER and None in self.tilings:
            return None
        results: list[DimTiling | None] = []
        for i, tiling in enumerate(self.tilings):
            if tiling is None:
                results.append(None)
                continue
            (link,) = self.relation.of_operand(i, tiling.dim)
            outer = tiling.outer
            if link.role is FactorRole.EXCHANGED:
                # A gathered share holds all parts once for each device. A share that is scattered
                # must hold all parts in each of its pieces.
                pieces = link.factor.size
                before = self.relation.operands[link.operand.tensor][tiling.dim]
                after = self.relation.results[link.result.tensor][tiling.dim]
                if after <= before:
                    if outer % pieces:
                        return None
                    outer //= pieces
                if after >= before:
                    outer *= pieces
            results.append(DimTiling(tiling.dim, outer))
        return OpTiling(self.tilings, tuple(results))

    def _tile_equal_shares(self, factor: Factor, tiling: DimTiling) -> OpTiling | None:
        """Tiles slices, pads and concatenations along the batch, with equal shares of parts."""
        match self.op.name:
            case "stablehlo.slice":
                taken = factor.operands[0]
                outers = self._outers(tiling, 0, (taken.start or 0, factor.size))
                if outers is None or taken.step != 1:
                    return None
                return OpTiling((tiling,), (DimTiling(tiling.dim, outers[1]),))
            case "stablehlo.pad":
                taken, put = factor.operands[0], factor.results[0]
                low = put.start or 0
                high = self.relation.results[0][tiling.dim] - low - factor.size
                whole = taken.start == 0 and factor.size == self.relation.operands[0][tiling.dim]
                added = self._outers(tiling, 0, (low, high))
                if added is None or put.step != 1 or not whole:
                    return None
                return OpTiling((tiling, None), (DimTiling(tiling.dim, tiling.outer + sum(added)),))
            case "stablehlo.concatenate":
                sizes = [shape[tiling.dim] for shape in self.relation.operands]
                outers = self._outers(tiling, self.tilings.index(tiling), sizes)
                if outers is None or 0 in outers:
                    return None
                parts = tuple(DimTiling(tiling.dim, outer) for outer in outers)
                pairs = zip(self.tilings, parts, strict=True)
                if any(each not in (None, own) for each, own in pairs):
                    return None
                return OpTiling(parts, (DimTiling(tiling.dim, sum(outers)),))
            case _:
                return None

    def _outers(self, tiling: DimTiling, operand: int, sizes: Sequence[int]) -> list[int] | None:
        """Returns how many times each of some sizes of a dimension holds a group of all parts.

        None if a size is not a multiple of the group, or if the query does not regroup.
        """
        group = self.relation.operands[operand][tiling.dim] // tiling.outer
        if any(size % group for size in sizes) or not (self.regroups or not any(sizes)):
            return None
        return [size // group for size in sizes]
