"""Links elements of one operand to elements of the result, for ops that compute.

`push` returns the elements of the result that surely depend on elements of the operand. `pull`
returns the elements of the operand that elements of the result surely need. Both hold for all
elements of the returned box. `link_of` returns the link of an operand of an elementwise op, a
reduction or a matrix product. `reach_of` describes how the windows of a convolution or a
reduce_window cover an operand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stablehlo_tools.analysis.elements.boxes import (
    Box,
    Shape,
    canonical,
    meet,
    moved_range,
    reshape_box,
    shape_of,
    whole_box,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import dot_numbers
from stablehlo_tools.dialect.dimensions import dimensions_of, integers
from stablehlo_tools.dialect.factors import FactorRole
from stablehlo_tools.dialect.names import BITCAST_CONVERT, SELECT
from stablehlo_tools.dialect.traits import ELEMENTWISE, STABLEHLO, Trait, ops_with, ops_with_any


@dataclass(frozen=True)
class ElementPiece:
    """Elements `source` of the operand become `target` of the result.

    `along` pairs dimensions of both, which have equally many elements in the piece: the n-th
    becomes the n-th. Along other dimensions, every element of the source goes into all of the
    target.
    """

    source: Box
    target: Box
    along: tuple[tuple[int, int], ...]

    def push(self, box: Box) -> Box | None:
        """Returns elements of the result that depend on all that the operand's box depends on."""
        return _map_box(box, self.source, self.target, self.along)

    def pull(self, box: Box) -> Box | None:
        """Returns elements of the operand that a box of the result needs."""
        along = tuple((r, o) for o, r in self.along)
        return _map_box(box, self.target, self.source, along)


@dataclass(frozen=True)
class ElementReshape:
    """A link between the same elements in the same order."""

    before: Shape
    after: Shape

    def push(self, box: Box) -> Box | None:
        """Returns elements of the result that depend on all that the operand's box depends on."""
        return reshape_box(box, self.before, self.after)

    def pull(self, box: Box) -> Box | None:
        """Returns elements of the operand that a box of the result needs."""
        return reshape_box(box, self.after, self.before)


Link = ElementPiece | ElementReshape


def identity(shape: Shape) -> ElementPiece:
    """Returns the link from each element to the one at its place."""
    box = whole_box(shape)
    return ElementPiece(box, box, tuple((d, d) for d in range(len(shape))))


def link_by_relation(
    op: ir.Operation, position: int, shape: Shape, result: Shape
) -> ElementPiece | None:
    """Returns the link of an operand by the relation of the op's dimensions.

    Only for ops that move elements to known places. None if no element is left. The parts of
    complex numbers, which are not dimensions of the op, stay together.
    """
    relation = dimensions_of(op)
    assert relation is not None, "of every op of static shapes that asks"
    source, target = list(whole_box(shape)), list(whole_box(result))
    along: list[tuple[int, int]] = []
    for factor in relation.factors:
        one, other = factor.in_operand(position), factor.in_result()
        if one is None or other is None or factor.role is FactorRole.REPEATED:
            continue
        taken, put = one.positions(factor.size), other.positions(factor.size)
        assert taken is not None, "of these ops places are known"
        assert put is not None, "of these ops places are known"
        source[one.dim] = canonical(taken) if taken.step > 0 else taken
        target[other.dim] = canonical(put) if put.step > 0 else put
        along.append((one.dim, other.dim))
    if len(shape) > len(relation.operands[position]):
        along.append((len(shape) - 1, len(result) - 1))
    return ElementPiece(tuple(source), tuple(target), tuple(along)) if all(source) else None


def _map_box(box: Box, source: Box, target: Box, along: tuple[tuple[int, int], ...]) -> Box | None:
    part = meet(box, tuple(_ascending(numbers) for numbers in source))
    if part is None:
        return None
    carried = [_ascending(numbers) for numbers in target]
    for one, other in along:
        carried[other] = moved_range(part[one], source[one], target[other])
    return tuple(carried)


def _ascending(numbers: range) -> range:
    return numbers if numbers.step > 0 else numbers[::-1]


# Ops on complex numbers that do not mix the two parts.
_PARTWISE = ops_with_any(Trait.LINEAR_IN_ALL) & ELEMENTWISE - ops_with(Trait.COMPLEX_PART) | {
    SELECT,
    "stablehlo.negate",
}


# CHLO functions without a rule of dependence.
UNFOLLOWED = frozenset({"chlo.bessel_i1e", "chlo.conj"})
_IN_PLACE = (
    (STABLEHLO & ELEMENTWISE | ops_with(Trait.UNARY) | {BITCAST_CONVERT})
    - ops_with(Trait.COMPLEX_PART)
    - (ops_with(Trait.PREDICATE) - STABLEHLO)
    - UNFOLLOWED
)


def link_of(op: ir.Operation, position: int) -> Link | None:
    """Returns the link of an operand if its elements influence those that they link to."""
    if len(op.results) != 1:
        return None
    shape, result = shape_of(op.operands[position].type), shape_of(op.results[0].type)
    if shape is None or result is None or 0 in shape:
        return None
    if op.name == "stablehlo.reduce":
        is_single = len(op.operands) == 2
        return link_by_relation(op, 0, shape, result) if is_single and position == 0 else None
    if op.name == "stablehlo.dot_general":
        # Uses only the dimension numbers, because the relation needs the other operand's sizes,
        # too.
        numbers = dot_numbers(op)
        ranks = [ir.RankedTensorType(value.type).rank for value in op.operands]
        if len(shape) != ranks[position]:  # complex
            return None
        batches = (numbers.lhs_batching, numbers.rhs_batching)[position]
        free = (numbers.lhs_free(ranks[0]), numbers.rhs_free(ranks[1]))
        first = len(batches) + (len(free[0]) if position else 0)
        along = [(d, r) for r, d in enumerate(batches)]
        along += [(d, first + i) for i, d in enumerate(free[position])]
        return ElementPiece(whole_box(shape), whole_box(result), tuple(along))
    if op.name not in _IN_PLACE or shape != result:
        return None
    is_complex = isinstance(ir.ShapedType(op.results[0].type).element_type, ir.ComplexType)
    return None if is_complex and op.name not in _PARTWISE else identity(shape)


_MOST_PAIRS = 1 << 20  # pairs of a window and a place in it


@dataclass(frozen=True)
class Reach:
    """Says how windows cover an operand.

    `every_window` holds an element of the operand. `every_element` is in some window. `every_place`
    of the window holds an element at least once.
    """

    every_window: bool = False
    every_element: bool = False
    every_place: bool = False


Names = tuple[str, str, str]
OF_REDUCE_WINDOW: Names = ("window_strides", "base_dilations", "window_dilations")
OF_CONVOLUTION: Names = ("window_strides", "lhs_dilation", "rhs_dilation")


def reach_of(op: ir.Operation, sizes: list[int], windows: list[int], names: Names) -> Reach:
    """Returns how the windows of an op cover an operand of these sizes."""
    rank = len(sizes)
    strides, base, spread = (integers(op, name, [1] * rank) for name in names)
    edges = integers(op, "padding", [0] * 2 * rank)
    reaches = [
        _along(size, window, stride, dilation, gap, low, high)
        for size, window, stride, dilation, gap, low, high in zip(
            sizes, windows, strides, base, spread, edges[::2], edges[1::2], strict=True
        )
    ]
    return Reach(
        all(reach.every_window for reach in reaches),
        all(reach.every_element for reach in reaches),
        all(reach.every_place for reach in reaches),
    )


def _along(
    size: int, window: int, stride: int, dilation: int, gap: int, low: int, high: int
) -> Reach:
    """Returns the reach along one dimension, which is independent of the others."""
    dilated = (size - 1) * dilation + 1
    reach = (window - 1) * gap + 1
    count = (low + dilated + high - reach) // stride + 1
    if size < 1 or window < 1 or count < 1 or count * window > _MOST_PAIRS:
        return Reach()
    places = np.arange(count)[:, None] * stride + np.arange(window) * gap - low
    is_element = (places >= 0) & (places < dilated) & (places % dilation == 0)
    return Reach(
        bool(is_element.any(axis=1).all()),
        len(np.unique(places[is_element])) == size,
        bool(is_element.any(axis=0).all()),
    )
