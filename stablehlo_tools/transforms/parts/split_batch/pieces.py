"""Parts of whole values, and whole values of parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from stablehlo_tools.analysis.dimension_propagation.layout import Layout, part_shape
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.constants import CONSTANTS, copy_constant, is_splat
from stablehlo_tools.ir.values import producer

Values = tuple[ir.Value, ...]


class Pieces:
    """The pieces that values are in, and what has been made of them so far.

    `sizes` says how many consecutive parts each piece holds. What is made of a value stands in its
    block, in front of the first op that needs it, so that a later one, in a loop too, finds it.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._parts: dict[ir.Value, tuple[Layout, Values]] = {}
        self._whole: dict[ir.Value, ir.Value] = {}
        self._cut: dict[tuple[ir.Value, Layout], Values] = {}

    def put(self, value: ir.Value, layout: Layout, parts: Sequence[ir.Value]) -> None:
        """Records the parts that stand for a value."""
        self._parts[value] = layout, tuple(parts)

    def parts_of(self, value: ir.Value, layout: Layout, user: ir.Operation) -> Values:
        """A value in parts, for an op that needs them."""
        known = self._parts.get(value)
        if known is not None and known[0] == layout:
            return known[1]
        key = value, layout
        if key not in self._cut:
            whole = self.whole(value, user)
            build = _builder(whole, user)
            self._cut[key] = cut(build, whole, layout, self.sizes)
        return self._cut[key]

    def whole(self, value: ir.Value, user: ir.Operation) -> ir.Value:
        """All of a value, for an op that needs it."""
        known = self._parts.get(value)
        if known is None:
            return value
        if value not in self._whole:
            layout, parts = known
            self._whole[value] = joined(_builder(parts[-1], user), parts, layout)
        return self._whole[value]


def cut(build: Builder, value: ir.Value, layout: Layout, sizes: Sequence[int]) -> Values:
    """The pieces of a whole value: smaller constants and broadcasts, or slices."""
    shape, parts = tuple(shape_of(value)), sum(sizes)
    smaller: dict[int, ir.Value | None] = {}
    for size in sizes:
        if size not in smaller:
            kind = build.tensor(part_shape(shape, layout, parts, size), element_of(value))
            smaller[size] = narrowed(build, value, layout, kind)
    same = [smaller[size] for size in sizes]
    known = [piece for piece in same if piece is not None]
    if len(known) == len(same):
        return tuple(known)
    firsts = accumulate(sizes, initial=0)
    return tuple(
        _piece(build, value, layout, parts, first, size)
        for first, size in zip(firsts, sizes, strict=False)
    )


def joined(build: Builder, pieces: Sequence[ir.Value], layout: Layout) -> ir.Value:
    """The whole of all pieces."""
    dim = layout.dim
    if layout.outer == 1:
        return build.concatenate(pieces, dim)
    whole = shape_of(pieces[0])
    whole[dim] = sum(shape_of(piece)[dim] for piece in pieces)
    rows = [_apart(build, piece, layout) for piece in pieces]
    return build.reshape(build.concatenate(rows, dim + 1), whole)


def _apart(build: Builder, value: ir.Value, layout: Layout) -> ir.Value:
    """A value with what is outside of the parts as a dimension of its own."""
    shape, dim = shape_of(value), layout.dim
    rows = [*shape[:dim], layout.outer, shape[dim] // layout.outer, *shape[dim + 1 :]]
    return build.reshape(value, rows)


def _piece(
    build: Builder, value: ir.Value, layout: Layout, parts: int, first: int, count: int
) -> ir.Value:
    shape, dim = shape_of(value), layout.dim
    inner = shape[dim] // (layout.outer * parts)
    if layout.outer == 1:
        return build.slice_along(value, dim, first * inner, (first + count) * inner)
    rows = _apart(build, value, layout)
    taken = build.slice_along(rows, dim + 1, first * inner, (first + count) * inner)
    return build.reshape(taken, part_shape(tuple(shape), layout, parts, count))


def narrowed(build: Builder, value: ir.Value, layout: Layout, kind: ir.Type) -> ir.Value | None:
    """What all parts of a value are, where it is the same all along the dimension."""
    op = producer(value)
    if op is None:
        return None
    if op.name in CONSTANTS and is_splat(op):
        return copy_constant(op, kind, build.point)
    if op.name == "stablehlo.iota" and _integer(op, "iota_dimension") != layout.dim:
        return _again(build, op, kind)
    if op.name == "stablehlo.broadcast_in_dim" and not _reaches(op, layout.dim):
        return _again(build, op, kind)
    return None


def _reaches(broadcast: ir.Operation, dim: int) -> bool:
    """Whether a broadcast takes a dimension from its operand."""
    dims = list(ir.DenseI64ArrayAttr(broadcast.attributes["broadcast_dimensions"]))
    return dim in dims and shape_of(broadcast.operands[0])[dims.index(dim)] != 1


def _again(build: Builder, op: ir.Operation, kind: ir.Type) -> ir.Value:
    copy = op.clone(ip=build.point)
    copy.results[0].set_type(kind)
    return copy.results[0]


def _integer(op: ir.Operation, name: str) -> int:
    return ir.IntegerAttr(op.attributes[name]).value


def _builder(value: ir.Value, user: ir.Operation) -> Builder:
    """Builds in the block of a value, in front of an op that stands there or in an op there."""
    owner = value.owner
    block = owner if isinstance(owner, ir.Block) else owner.operation.block
    at = user
    while at.block != block:
        at = at.block.owner.operation
    maker = producer(value)
    return Builder(ir.InsertionPoint(at), (maker or user).location)
