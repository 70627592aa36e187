"""Writes a merged collective, and the ops that convert its operands and results.

The members and the place are known by then; `merge` shows the form. An operand is reshaped to
[parts in, *piece], and a result from [parts out, *piece]:

| kind | parts in | parts out | piece |
|---|---|---|---|
| all_gather along d | none | members | the operand |
| reduce_scatter along d | members | none | the result |
| all_to_all from d to e | members | members | the operand, its dimension d divided by the members |
| all_reduce, collective_permute | none | none | the operand, a scalar as a vector |

So pieces can be concatenated whatever dimensions their collectives run along. Reshapes that only
add or merge dimensions copy nothing. A transpose copies, unless a compiler chooses a layout that
avoids it.

Elements of several types are bitcast to unsigned integers of the narrowest type's width:

    tensor<4x3xf32>, tensor<5xbf16>  ==>  tensor<4x6xui16>, tensor<5xui16>

A bitcast keeps every bit, also of a NaN. Exchanging mixed floats does not: XLA:CPU and XLA:GPU
convert the narrower ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.shardings import SHARDING, sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integer
from stablehlo_tools.dialect.frontend_attributes import (
    FRONTEND_ATTRIBUTES,
    LAYOUTS,
    shared_attributes,
)
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import in_block_order, maker_of


def encoded_shape(shape: Sequence[int], own: ir.Type, element: ir.Type) -> list[int]:
    """Returns the shape of a tensor of element type `own` after `encode_value` as `element`."""
    count = 1 if own == element else _width(own) // _width(element)
    return [*shape[:-1], shape[-1] * count] if count > 1 else list(shape)


def encode_value(builder: Builder, value: ir.Value, element: ir.Type) -> ir.Value:
    """Bitcasts a value to another element type; the last dimension grows by the ratio of widths."""
    own, shape = element_of(value), shape_of(value)
    if own == element:
        return value
    count = _width(own) // _width(element)
    split = [*shape, count] if count > 1 else shape
    bits = builder.op("bitcast_convert", [value], builder.tensor(split, element))
    return reshape_if_needed(builder, bits, encoded_shape(shape, own, element))


def decode_value(builder: Builder, value: ir.Value, element: ir.Type) -> ir.Value:
    """Reverts `encode_value`; `element` is the original element type."""
    own, shape = element_of(value), shape_of(value)
    if own == element:
        return value
    count = _width(element) // _width(own)
    narrow = [*shape[:-1], shape[-1] // count] if count > 1 else shape
    bits = reshape_if_needed(builder, value, [*narrow, count] if count > 1 else shape)
    return builder.op("bitcast_convert", [bits], builder.tensor(narrow, element))


def _width(element: ir.Type) -> int:
    assert isinstance(element, ir.IntegerType | ir.FloatType), "elements of whole bytes"
    return element.width


_CUT = {"reduce_scatter": "scatter_dimension", "all_to_all": "split_dimension"}
_JOINED = {"all_gather": "all_gather_dim", "all_to_all": "concat_dimension"}

_LANES = 128  # the last dimension of a TPU's tiles


@dataclass(frozen=True)
class BucketExchange:
    """A kind of collective among `members` devices.

    `cut`: the operand's dimension that it splits into their parts. `joined`: the result's dimension
    along which it concatenates them.
    """

    members: int
    cut: int | None
    joined: int | None

    @staticmethod
    def from_collective(collective: Collective, members: int) -> BucketExchange:
        """Returns the exchange of a collective in groups of `members`."""
        cut, joined = (
            integer(collective.op, names[collective.kind]) if collective.kind in names else None
            for names in (_CUT, _JOINED)
        )
        return BucketExchange(members, cut, joined)

    @property
    def parts_in(self) -> list[int]:
        """The leading dimension of the operand, if any."""
        return [] if self.cut is None else [self.members]

    @property
    def parts_out(self) -> list[int]:
        """The leading dimension of the result, if any."""
        return [] if self.joined is None else [self.members]

    def piece(self, shape: Sequence[int]) -> list[int]:
        """Returns the shape of one device's part of an operand."""
        return [
            size // self.members if dimension == self.cut else size
            for dimension, size in enumerate(shape)
        ]

    def take_apart(self, builder: Builder, operand: ir.Value) -> ir.Value:
        """Reshapes an operand to [parts in, *piece]."""
        shape = shape_of(operand)
        if self.cut is None:
            return reshape_if_needed(builder, operand, shape or [1])
        piece = self.piece(shape)
        split = [*piece[: self.cut], self.members, *piece[self.cut :]]
        rest = [dimension for dimension in range(len(split)) if dimension != self.cut]
        return transpose_or_reshape(
            builder, reshape_if_needed(builder, operand, split), [self.cut, *rest]
        )

    def put_together(self, builder: Builder, parts: ir.Value, shape: Sequence[int]) -> ir.Value:
        """Reshapes [parts out, *piece] to a result of the given shape."""
        if self.joined is None:
            return reshape_if_needed(builder, parts, shape)
        order = list(range(1, len(shape) + 1))
        order.insert(self.joined, 0)
        return reshape_if_needed(builder, transpose_or_reshape(builder, parts, order), shape)


def reshape_if_needed(builder: Builder, value: ir.Value, shape: Sequence[int]) -> ir.Value:
    """Reshapes a value; writes no op if it has the shape already."""
    return value if shape_of(value) == list(shape) else builder.reshape(value, shape)


def transpose_or_reshape(builder: Builder, value: ir.Value, order: Sequence[int]) -> ir.Value:
    """Transposes a value; writes a reshape if only dimensions of size 1 move."""
    shape = shape_of(value)
    target = [shape[dimension] for dimension in order]
    moving = [dimension for dimension in order if shape[dimension] != 1]
    if moving == sorted(moving):
        return reshape_if_needed(builder, value, target)
    return builder.transpose(value, order)


@dataclass(frozen=True)
class Joint:
    """Shapes that agree in all dimensions but one, along which they are concatenated."""

    shapes: tuple[tuple[int, ...], ...]
    dimension: int

    @staticmethod
    def from_pieces(pieces: Sequence[Sequence[int]]) -> Joint:
        """Returns the joint that needs the fewest reshapes; pieces have at least one dimension.

        Pieces that differ only in one dimension keep their shapes. Of others, only the last
        dimensions that all share are kept. Vectors get a last dimension of 128 if possible. XLA:TPU
        turns a reduce_scatter of a vector into an all-reduce, and lays data out in such rows
        anyway.
        """
        dimension = only_uneven(pieces, ())
        if dimension is not None and len(pieces[0]) > 1:
            return Joint(tuple(map(tuple, pieces)), dimension)
        shared = 0
        while all(len(piece) > shared + 1 for piece in pieces) and (
            len({piece[-1 - shared] for piece in pieces}) == 1
        ):
            shared += 1
        kept = pieces[0][len(pieces[0]) - shared :]
        leads = [math.prod(piece[: len(piece) - shared]) for piece in pieces]
        if not kept and all(lead % _LANES == 0 for lead in leads):
            kept, leads = [_LANES], [lead // _LANES for lead in leads]
        return Joint(tuple((lead, *kept) for lead in leads), 0)


def only_uneven(shapes: Sequence[Sequence[int]], taken: Sequence[int | None]) -> int | None:
    """Returns the one dimension in which shapes differ, or the first one if they are equal.

    None if this is one of `taken`, or if they differ in several.
    """
    if len({len(shape) for shape in shapes}) > 1:
        return None
    uneven = [d for d, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]
    if len(uneven) > 1:
        return None
    free = uneven or range(len(shapes[0]))
    return next((dimension for dimension in free if dimension not in taken), None)


SEVERAL_OPERANDS = frozenset({"all_reduce", "all_gather"})
_OF_ONE = frozenset({SHARDING, FRONTEND_ATTRIBUTES, *LAYOUTS})  # not copied to the merged op
_DIMENSIONS = ("all_gather_dim", "scatter_dimension", "split_dimension", "concat_dimension")


@dataclass(frozen=True)
class _BucketPart:
    """One operand of a merged collective, its result, and a builder for their conversions."""

    exchange: BucketExchange
    operand: ir.Value
    result: ir.Value
    sharding: ir.Attribute | None
    builder: Builder


def write_merged(
    members: Sequence[Collective], group: int, point: ir.InsertionPoint, *, several: bool
) -> tuple[ir.Operation, ir.Operation]:
    """Writes one collective for several and replaces their results; the first loses its region.

    `group`: how many devices exchange data with each other. `several`: the op may have several
    operands. Returns the op and the last op that was written.
    """
    parts = [part for member in members for part in _parts(member, group, point)]
    writer = _BucketWriter(members, point)
    elements = [element_of(part.operand) for part in parts]
    element = elements[0]
    if any(each != element for each in elements):  # an unsigned integer that divides them all
        element = ir.IntegerType.get_unsigned(min(map(_width, elements)), element.context)
    dimension = _common_dimension(parts, element)
    if several:
        merged, outs = _several(writer, parts, element)
    elif dimension is not None:
        merged, outs = _side_by_side(writer, parts, element, dimension)
    else:
        merged, outs = _behind_parts(writer, parts, element)
    for part, out in zip(parts, outs, strict=True):
        part.result.replace_all_uses_with(out)
    _keep_shardings(merged, parts, outs)
    return merged, in_block_order([maker_of(out) for out in outs])[-1]


def _parts(member: Collective, group: int, point: ir.InsertionPoint) -> list[_BucketPart]:
    op = member.op
    sharding = op.attributes.get(SHARDING)
    shardings = [None] * len(op.results) if sharding is None else sharding_per_value(sharding)
    builder = Builder(point, op.location)
    return [
        _BucketPart(BucketExchange.from_collective(member, group), operand, result, own, builder)
        for operand, result, own in zip(op.operands, op.results, shardings, strict=True)
    ]


class _BucketWriter:
    """Writes collectives with the attributes and the region of the first member."""

    def __init__(self, members: Sequence[Collective], point: ir.InsertionPoint) -> None:
        locations = list(dict.fromkeys(member.op.location for member in members))
        self.like = members[0].op
        self.frontend = shared_attributes([member.op for member in members])
        self.reduces = len(self.like.regions) > 0  # then its region may promote the element type
        self.point = point
        self.builder = Builder(point, ir.Location.fused(locations, context=self.like.context))

    def collective(
        self,
        operands: Sequence[ir.Value],
        types: Sequence[ir.Type],
        changed: Mapping[str, ir.Attribute],
    ) -> ir.Operation:
        """Writes the collective with changed attributes; moves the first member's region into
        it."""
        # Shardings and layouts describe one operand, not the concatenation.
        kept = {name: a for name, a in self.like.attributes.items() if name not in _OF_ONE}
        attributes = {**kept, **self.frontend, **changed}
        count = len(self.like.regions)
        new = self.builder.create(self.like.name, operands, types, attributes, regions=count)
        for source, target in zip(self.like.regions, new.regions, strict=True):
            source.blocks[0].append_to(target)
        return new

    def along_first(
        self, operands: Sequence[ir.Value], exchange: BucketExchange, element: ir.Type
    ) -> ir.Operation:
        """Writes the collective along dimension 0, into which the operands' parts are merged."""
        grown = math.prod(exchange.parts_out), math.prod(exchange.parts_in)
        shapes = [shape_of(operand) for operand in operands]
        types = [
            self.builder.tensor([shape[0] * grown[0] // grown[1], *shape[1:]], element)
            for shape in shapes
        ]
        zero = self.builder.integer(0)
        dimensions = {name: zero for name in _DIMENSIONS if name in self.like.attributes}
        return self.collective(operands, types, dimensions)


def _common_dimension(parts: Sequence[_BucketPart], element: ir.Type) -> int | None:
    """Returns a dimension along which operands can be concatenated without reshapes; None if there
    is none.

    They must exchange along the same dimensions, and differ in no other one.
    """
    first = parts[0].exchange
    if any(part.exchange != first for part in parts):
        return None
    shapes = [shape_of(part.operand) for part in parts]
    mixed = any(element_of(part.operand) != element for part in parts)
    if not shapes[0] or (mixed and len(shapes[0]) - 1 in (first.cut, first.joined)):
        return None
    wide = [
        encoded_shape(shape, element_of(part.operand), element) if shape else shape
        for part, shape in zip(parts, shapes, strict=True)
    ]
    return only_uneven(wide, (first.cut, first.joined))


def _several(
    writer: _BucketWriter, parts: Sequence[_BucketPart], element: ir.Type
) -> tuple[ir.Operation, list[ir.Value]]:
    """Writes one collective of several operands; returns it and the results."""
    exchange = parts[0].exchange
    mixed = any(element_of(part.operand) != element for part in parts)
    if not mixed and all(part.exchange == exchange for part in parts):
        operands, types = [p.operand for p in parts], [p.result.type for p in parts]
        merged = writer.collective(operands, types, {})
        return merged, list(merged.results)
    pieces = _pieces(parts, element)
    merged = writer.along_first(pieces, exchange, element)
    outs = [
        reshape_if_needed(part.builder, out, [*exchange.parts_out, *shape_of(piece)])
        for part, out, piece in zip(parts, merged.results, pieces, strict=True)
    ]
    return merged, _results(parts, outs)


def _side_by_side(
    writer: _BucketWriter, parts: Sequence[_BucketPart], element: ir.Type, dimension: int
) -> tuple[ir.Operation, list[ir.Value]]:
    """Writes one collective of the operands, concatenated along a dimension; returns it and the
    results."""
    laid = [encode_value(part.builder, part.operand, element) for part in parts]
    joined = writer.builder.concatenate(laid, dimension)
    first = parts[0].result
    element_out = element_of(first) if writer.reduces else element
    shape = encoded_shape(shape_of(first), element_of(first), element_out)
    shape[dimension] = shape_of(joined)[dimension]
    merged = writer.collective([joined], [writer.builder.tensor(shape, element_out)], {})
    sizes = [shape_of(value)[dimension] for value in laid]
    return merged, [
        decode_value(part.builder, out, element_of(part.result))
        for part, out in zip(
            parts, _slices(parts, merged.results[0], dimension, sizes), strict=True
        )
    ]


def _behind_parts(
    writer: _BucketWriter, parts: Sequence[_BucketPart], element: ir.Type
) -> tuple[ir.Operation, list[ir.Value]]:
    """Writes one collective of the pieces, concatenated after their parts dimension.

    Returns it and the results.
    """
    exchange = parts[0].exchange
    parts_in, parts_out = exchange.parts_in, exchange.parts_out
    pieces = _pieces(parts, element)
    shapes = [shape_of(piece)[len(parts_in) :] for piece in pieces]
    joint = Joint.from_pieces(shapes)
    laid = [
        reshape_if_needed(part.builder, piece, [*parts_in, *shape])
        for part, piece, shape in zip(parts, pieces, joint.shapes, strict=True)
    ]
    joined = writer.builder.concatenate(laid, len(parts_in) + joint.dimension)
    whole = shape_of(joined)[len(parts_in) :]
    element_out = element_of(parts[0].result) if writer.reduces else element
    # The parts are merged into the collective's dimension, because XLA:TPU turns a reduce_scatter
    # that leaves a dimension of size 1 into an all-reduce.
    operand = reshape_if_needed(
        writer.builder, joined, [math.prod(parts_in) * whole[0], *whole[1:]]
    )
    merged = writer.along_first([operand], exchange, element_out)
    result = reshape_if_needed(writer.builder, merged.results[0], [*parts_out, *whole])
    sizes = [shape[joint.dimension] for shape in joint.shapes]
    slices = _slices(parts, result, len(parts_out) + joint.dimension, sizes)
    outs = [
        reshape_if_needed(part.builder, out, [*parts_out, *shape])
        for part, out, shape in zip(parts, slices, shapes, strict=True)
    ]
    return merged, _results(parts, outs)


def _pieces(parts: Sequence[_BucketPart], element: ir.Type) -> list[ir.Value]:
    """Returns the operands as [parts in, *piece], of one element type."""
    return [
        encode_value(part.builder, part.exchange.take_apart(part.builder, part.operand), element)
        for part in parts
    ]


def _results(parts: Sequence[_BucketPart], outs: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the results for values of [parts out, *piece]."""
    return [
        part.exchange.put_together(
            part.builder,
            decode_value(part.builder, out, element_of(part.result)),
            shape_of(part.result),
        )
        for part, out in zip(parts, outs, strict=True)
    ]


def _slices(
    parts: Sequence[_BucketPart], value: ir.Value, dimension: int, sizes: Sequence[int]
) -> list[ir.Value]:
    """Slices the concatenated values apart along a dimension."""
    bounds = pairwise(accumulate(sizes, initial=0))
    return [
        part.builder.slice_along(value, dimension, *bound)
        for part, bound in zip(parts, bounds, strict=True)
    ]


def _keep_shardings(
    merged: ir.Operation, parts: Sequence[_BucketPart], outs: Sequence[ir.Value]
) -> None:
    """Copies the shardings of the original results."""
    known = [(part.sharding, out) for part, out in zip(parts, outs, strict=True) if part.sharding]
    if not known:
        return
    if outs[0].owner != merged:
        for sharding, out in known:
            maker_of(out).attributes[SHARDING] = _per_value([sharding])
    # One attribute holds the shardings of all results: without one of them it is left out.
    elif len(known) == len(parts):
        merged.attributes[SHARDING] = _per_value([sharding for sharding, _ in known])


def _per_value(shardings: Sequence[ir.Attribute]) -> ir.Attribute:
    return bindings.TensorShardingPerValueAttr.get(list(shardings), shardings[0].context)
