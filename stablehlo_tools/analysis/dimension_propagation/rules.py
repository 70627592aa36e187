"""How each op runs on parts of the batch, by the relation of its dimensions.

A step says where, for operands that are tiled, the op on part k gives part k of the result, or
where the results of the parts combine to the result. Everything else has none: custom calls, random
numbers, ops with side effects, and every op whose dimensions have no relation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.dimension_propagation.layout import Layout, Step, reshaped
from stablehlo_tools.analysis.reducers import is_identity_of, reducer_kind
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import dimensions_of, static_shape
from stablehlo_tools.dialect.factors import Factor, FactorRole, Link, OpDimensions, Shape
from stablehlo_tools.dialect.names import BARRIER, CONVOLUTION, RESHAPE, SCATTER
from stablehlo_tools.dialect.traits import COLLECTIVES, Trait, ops_with

# What counts as multiplications. No exporter writes a `dot` any more, and it is not followed.
CONTRACTIONS = ops_with(Trait.CONTRACTION) - {"stablehlo.dot"}
# Ops with a relation that the batch is not followed through: exporters write other ops for most of
# them, a map's region may be anything, and batch norms of training take statistics of all samples.
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

Layouts = tuple[Layout | None, ...]


def relation_of(op: ir.Operation) -> OpDimensions | None:
    """The dimensions of an op that the batch may be followed through."""
    if op.name in _NOT_FOLLOWED or not all(map(_is_plain, (*op.operands, *op.results))):
        return None
    return dimensions_of(op)


def shapes_of(values: Iterable[ir.Value]) -> tuple[Shape, ...] | None:
    """The shapes of tensors of plain elements; None where one is something else, or not static."""
    shapes: list[Shape] = []
    for value in values:
        shape = static_shape(value.type) if _is_plain(value) else None
        if shape is None:
            return None
        shapes.append(shape)
    return tuple(shapes)


def _is_plain(value: ir.Value) -> bool:
    type_ = value.type
    if not isinstance(type_, ir.RankedTensorType) or type_.encoding is not None:
        return False
    return isinstance(type_.element_type, _PLAIN)


def step_of(
    op: ir.Operation,
    relation: OpDimensions | None,
    layouts: Layouts,
    parts: int,
    *,
    regroups: bool = False,
) -> Step | None:
    """How an op runs on operands of which some are tiled; None where it needs them whole.

    With `regroups`, slices, padding and concatenation along the batch are followed, where each part
    has as much of the outcome.
    """
    if relation is None:
        return None
    step = _Asked(op, relation, layouts, parts, regroups).step()
    if step is None or not _fit(step.operands, relation.operands, parts):
        return None
    return step if _fit(step.results, relation.results, parts) else None


def _fit(layouts: Layouts, shapes: Sequence[Shape], parts: int) -> bool:
    return all(
        layout is None or layout.fits(shape, parts)
        for layout, shape in zip(layouts, shapes, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """An op, and the tilings that its operands come in."""

    op: ir.Operation
    relation: OpDimensions
    layouts: Layouts
    parts: int
    regroups: bool

    def step(self) -> Step | None:
        """How the op runs on them."""
        name = self.op.name
        if not _fit(self.layouts, self.relation.operands, self.parts):
            return None
        if name in _EACH_BY_ITSELF:
            return self._each_by_itself()
        first = next((i for i, layout in enumerate(self.layouts) if layout is not None), None)
        layout = None if first is None else self.layouts[first]
        if first is None or layout is None:
            return None
        if name == RESHAPE:
            return self._reshaped(layout)
        factors = self.relation.along_operand(first, layout.dim)
        if len(factors) != 1:
            return None
        (factor,) = factors
        if self._is_excluded(factor):
            return None
        if factor.role is FactorRole.MOVED:
            return self._regrouped(factor, layout)
        return self._along(factor, layout)

    def _is_excluded(self, factor: Factor) -> bool:
        """Where the relation holds, and the batch is not followed."""
        name = self.op.name
        if name == "stablehlo.batch_norm_inference":  # features are no samples
            return len(factor.operands) > 1
        if name == SCATTER:  # nobody has asked for one into several tensors
            return len(self.relation.results) > 1
        if name != CONVOLUTION or factor.role is not FactorRole.CONTRACTED:
            return False
        # A sum over features in groups; in groups of batches only where both operands come tiled.
        roles = {each.role for each in self.relation.factors}
        by_batch = FactorRole.SPLIT in roles and None not in self.layouts
        return FactorRole.REGROUPED in roles and not by_batch

    def _along(self, factor: Factor, layout: Layout) -> Step | None:
        """All operands that have a factor are tiled along it, and no others may be."""
        operands: list[Layout | None] = [None for _ in self.layouts]
        results: list[Layout | None] = [None for _ in self.relation.results]
        for along in factor.operands:
            operands[along.tensor] = layout.at(along.dim)
        for along in factor.results:
            results[along.tensor] = layout.at(along.dim)
        pairs = zip(self.layouts, operands, strict=True)
        if any(given not in (None, taken) for given, taken in pairs):
            return None
        taken = tuple(operands)
        match factor.role:
            case FactorRole.KEPT:
                return Step(taken, tuple(results))
            case FactorRole.CONTRACTED:
                return Step(taken, (None,), "add")
            case FactorRole.REDUCED if self.op.name == SCATTER:
                is_known = reducer_kind(self.op.regions[0].blocks[0]) is not None
                return Step(taken, (None,), chained=True) if is_known else None
            case FactorRole.REDUCED:
                reducer = self._combining()
                return None if reducer is None else Step(taken, (None,), reducer)
            case _:
                return None

    def _combining(self) -> str | None:
        """What makes a reduce's result of those of the parts; its initial value counts for each."""
        reducer = reducer_kind(self.op.regions[0].blocks[0])
        single = len(self.relation.results) == 1
        if not single or reducer is None or not is_identity_of(reducer, self.op.operands[1]):
            return None
        return reducer

    def _reshaped(self, layout: Layout) -> Step | None:
        (before,), (after,) = self.relation.operands, self.relation.results
        if 0 in before:
            return None
        behind = reshaped(layout, before, after, self.parts)
        return None if behind is None else Step((layout,), (behind,))

    def _each_by_itself(self) -> Step | None:
        """Collectives, of whose operands none may be whole, and barriers."""
        if self.op.name != BARRIER and None in self.layouts:
            return None
        results: list[Layout | None] = []
        for i, layout in enumerate(self.layouts):
            link = None if layout is None else self._link(i, layout.dim)
            if layout is None or link is None:
                results.append(None)
                continue
            if link.role is not FactorRole.EXCHANGED:
                results.append(layout)
                continue
            exchanged = self._exchanged(link, layout)
            if exchanged is None:
                return None
            results.append(exchanged)
        return Step(self.layouts, tuple(results))

    def _link(self, operand: int, dim: int) -> Link:
        (link,) = self.relation.of_operand(operand, dim)
        return link

    def _exchanged(self, link: Link, layout: Layout) -> Layout | None:
        """Where the device's share holds all parts several times, as it does of what it gathers
        from several devices; what it hands out in pieces, each piece has to hold all parts of."""
        operand, result, pieces = link.operand.tensor, link.result.tensor, link.factor.size
        before = self.relation.operands[operand][layout.dim]
        after = self.relation.results[result][layout.dim]
        outer = layout.outer
        if after <= before:
            if outer % pieces:
                return None
            outer //= pieces
        if after >= before:
            outer *= pieces
        return Layout(layout.dim, outer)

    def _regrouped(self, factor: Factor, layout: Layout) -> Step | None:
        """Slices, pads and concatenates along the batch, which take or add as much of each part."""
        match self.op.name:
            case "stablehlo.slice":
                return self._sliced(factor, layout)
            case "stablehlo.pad":
                return self._padded(factor, layout)
            case "stablehlo.concatenate":
                return self._joined(layout)
            case _:
                return None

    def _sliced(self, factor: Factor, layout: Layout) -> Step | None:
        taken = factor.operands[0]
        outers = self._outers(layout, 0, (taken.start or 0, factor.size))
        if outers is None or taken.step != 1:
            return None
        return Step((layout,), (Layout(layout.dim, outers[1]),))

    def _padded(self, factor: Factor, layout: Layout) -> Step | None:
        taken, put = factor.operands[0], factor.results[0]
        low = put.start or 0
        high = self.relation.results[0][layout.dim] - low - factor.size
        whole = taken.start == 0 and factor.size == self.relation.operands[0][layout.dim]
        added = self._outers(layout, 0, (low, high))
        if added is None or put.step != 1 or not whole:
            return None
        return Step((layout, None), (Layout(layout.dim, layout.outer + sum(added)),))

    def _joined(self, layout: Layout) -> Step | None:
        sizes = [shape[layout.dim] for shape in self.relation.operands]
        outers = self._outers(layout, self.layouts.index(layout), sizes)
        if outers is None or 0 in outers:
            return None
        taken = tuple(Layout(layout.dim, outer) for outer in outers)
        if any(each not in (None, own) for each, own in zip(self.layouts, taken, strict=True)):
            return None
        return Step(taken, (Layout(layout.dim, sum(outers)),))

    def _outers(self, layout: Layout, operand: int, sizes: Sequence[int]) -> list[int] | None:
        """How many times each of some sizes holds all parts once, as they alternate in a dimension;
        None where one does not hold them whole, and where this is not asked for."""
        group = self.relation.operands[operand][layout.dim] // layout.outer
        if any(size % group for size in sizes) or not (self.regroups or not any(sizes)):
            return None
        return [size // group for size in sizes]
