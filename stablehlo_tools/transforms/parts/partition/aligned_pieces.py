"""Computes the pieces of a divided value at the rows where they belong.

A stencil with ends of its own, or on the interior alone, computes on slices. The rows of a slice
move before they become rows of the result. So devices exchange rows before the stencil and after
it. The same ops on whole values, moved by a few rows, need one exchange before it:

    %m = subtract (slice %x [2:64]), (slice %x [0:62])       // x of 64 rows
    %y = concatenate %first, %m, %last
    ==>
    %next = pad %x, low = [-1], high = [1]                   // row r is row r + 1 of x
    %before = pad %x, low = [1], high = [-1]
    %m = subtract %next, %before
    %y = select (row < 1), %first, (select (row < 63), %m, %last)

Rows outside of a piece are undefined until the select. Compilers fuse all of this into one kernel.
A reduce of such a piece, as of a residual, then runs on all rows, too, with its initial value in
those outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from stablehlo_tools.analysis.device_values import fold_value
from stablehlo_tools.analysis.shardings import RULE, SHARDING, Axes, ValueShardings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integer, integers
from stablehlo_tools.dialect.names import (
    BROADCAST,
    CONCATENATE,
    DYNAMIC_UPDATE_SLICE,
    PAD,
    REDUCE,
    SLICE,
)
from stablehlo_tools.dialect.traits import ELEMENTWISE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.cleanup import erase_unused
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.values import CONSTANTS, copy_constant, is_splat, key_of, producer
from stablehlo_tools.ir.walk import ops_named

_MOST_OPS = 200  # of one value
_ENDS = 16  # ends are computed on all rows, so all are at least so many times theirs

Ints = tuple[int, ...]


class _NotAlignedError(Exception):
    """A value is not made of whole values by slices and elementwise ops."""


@dataclass(frozen=True)
class _PlacedPieces:
    """A value of several pieces, with their offsets; `base` has all rows of no other piece."""

    base: tuple[ir.Value, Ints]
    others: list[tuple[ir.Value, Ints]]
    main: ir.Value  # the piece with most rows


def align_pieces(module: ir.Module, shardings: ValueShardings) -> bool:
    """Aligns the pieces of concatenates, updates and pads along divided dimensions, in place.

    Returns True if there were any."""
    aligned: dict[ir.Block, _AlignedValues] = {}
    for op in ops_named(module.operation, {CONCATENATE, DYNAMIC_UPDATE_SLICE, PAD}):
        shape, over = tuple(shape_of(op.results[0])), shardings.axes_by_dim(op.results[0])
        pieces = _pieces_of(op) if any(over) else None
        if pieces is None or not _saves_exchange(op, pieces, shape, over):
            continue
        values = aligned.setdefault(op.block, _AlignedValues(shardings))
        values.build = Builder(ir.InsertionPoint(op), op.location)
        values.left = _MOST_OPS
        try:
            result = values.assemble(pieces, (0,) * len(shape), shape, over)
        except _NotAlignedError:
            continue
        replace(op, [result])
    for block, values in aligned.items():
        values.reduce_aligned(block)
        erase_unused(block)
    return bool(aligned)


def _pieces_of(op: ir.Operation) -> _PlacedPieces | None:
    """Returns the pieces of a concatenate, update or pad; None if their offsets are unknown."""
    whole = shape_of(op.results[0])
    zero = (0,) * len(whole)
    if op.name == CONCATENATE:
        dim = integer(op, "dimension")
        ends = accumulate(shape_of(value)[dim] for value in op.operands)
        pieces = [
            (value, (*zero[:dim], end - shape_of(value)[dim], *zero[dim + 1 :]))
            for value, end in zip(op.operands, ends, strict=True)
        ]
        *others, base = sorted(pieces, key=lambda piece: shape_of(piece[0])[dim])
        return _PlacedPieces(base, others, base[0])
    if op.name == DYNAMIC_UPDATE_SLICE:
        base, update, *indices = op.operands
        starts = [fold_value(start) for start in indices]
        offset = tuple(int(start) for start in starts if start is not None)
        sizes = zip(offset, shape_of(update), whole, strict=False)
        # An update that is not within the whole would be clamped.
        is_within = len(offset) == len(whole) and all(0 <= o <= w - n for o, n, w in sizes)
        return _PlacedPieces((base, zero), [(update, offset)], update) if is_within else None
    low, high, between = (
        integers(op, f"{name}_padding{side}")
        for name, side in (("edge", "_low"), ("edge", "_high"), ("interior", ""))
    )
    if any(between) or min((*low, *high), default=0) < 0:
        return None
    return _PlacedPieces((op.operands[1], zero), [(op.operands[0], low)], op.operands[0])


def _saves_exchange(
    op: ir.Operation, pieces: _PlacedPieces, shape: Ints, over: Sequence[Axes]
) -> bool:
    """Returns True if most rows come from one computed piece, and others only from short ends."""
    maker = producer(pieces.main)
    if maker is None or maker.name not in ELEMENTWISE:
        return False
    if op.name == CONCATENATE:
        dim = integer(op, "dimension")
        longest = max((shape_of(value)[dim] for value, _ in pieces.others), default=0)
        return bool(over[dim]) and _ENDS * longest <= shape[dim]
    sizes = zip(shape_of(pieces.main), shape, over, strict=True)
    return any(axes and whole // 2 < size < whole for size, whole, axes in sizes)


class _AlignedValues:
    """Values of one block in the frame of a whole value, each written once.

    `build` writes before the op whose pieces are aligned; `left` counts the ops that it may add."""

    build: Builder
    left = 0

    def __init__(self, shardings: ValueShardings) -> None:
        self._shardings = shardings
        self._written: dict[tuple[ir.Value, Ints, Ints], ir.Value] = {}
        self._sides: dict[tuple[str, int, int, Ints], ir.Value] = {}  # of masks

    def assemble(
        self, pieces: _PlacedPieces, offset: Ints, shape: Ints, over: Sequence[Axes]
    ) -> ir.Value:
        """Returns a value of a shape, divided over axes, that has all pieces from an offset on.

        Raises _NotAlignedError."""
        base, first = pieces.base
        result = self._align(base, _sum(first, offset), shape, over)
        for value, place in pieces.others:
            start = _sum(place, offset)
            piece = self._align(value, start, shape, over)
            rows = self._rows(start, _sum(start, tuple(shape_of(value))), shape, over)
            if rows is None:
                result = piece
            else:
                chosen = self.build.same("select", rows, piece, result)
                result = self._state(chosen, over)
        return result

    def reduce_aligned(self, block: ir.Block) -> None:
        """Lets reduces of a block, over all dimensions that are longer in the frame, run on aligned
        values. Only those behind these values do."""
        every, ops = self._written, [view.operation for view in block.operations]
        place = {key_of(op): number for number, op in enumerate(ops)}
        for number, op in enumerate(ops):
            if op.name != REDUCE or len(op.operands) != 2:
                continue
            # Masks are written anew: those of other ops may come later in the text.
            self._sides = {}
            self._written = {
                key: value
                for key, value in every.items()
                if (maker := producer(value)) is None or place.get(key_of(maker), number) < number
            }
            operand, start = op.operands
            frame = self._frame_of(operand)
            if frame is None:
                continue
            offset, shape, over = frame
            reduced = integers(op, "dimensions")
            sizes = zip(shape_of(operand), shape, strict=True)
            if any(own != size and dim not in reduced for dim, (own, size) in enumerate(sizes)):
                continue
            self.build, self.left = Builder(ir.InsertionPoint(op), op.location), _MOST_OPS
            try:
                value = self._align(operand, offset, shape, over)
                rows = self._rows(offset, _sum(offset, tuple(shape_of(operand))), shape, over)
                if rows is not None:
                    spread = self._state(self.build.broadcast(start, shape, []), over)
                    value = self._state(self.build.same("select", rows, value, spread), over)
            except _NotAlignedError:
                continue
            if RULE in op.attributes:
                del op.attributes[RULE]
            op.operands[0] = value

    def _frame_of(self, value: ir.Value) -> tuple[Ints, Ints, Sequence[Axes]] | None:
        """Returns the offset, the shape and the division of a frame.

        In it, one of the values that a value is made of, element by element, is aligned already.
        """
        own, pending, seen = shape_of(value), [value], set[ir.Value]()
        while pending:
            value = pending.pop()
            maker = producer(value)
            if value in seen or shape_of(value) != own or len(seen) > _MOST_OPS:
                continue
            seen.add(value)
            for known, offset, shape in self._written:
                if known == value and own != list(shape):
                    aligned = self._written[known, offset, shape]
                    return offset, shape, self._shardings.axes_by_dim(aligned)
            if maker is not None and maker.name in ELEMENTWISE:
                pending += maker.operands
        return None

    def _align(self, value: ir.Value, offset: Ints, shape: Ints, over: Sequence[Axes]) -> ir.Value:
        """Returns a value of a shape that has a value's elements from an offset on."""
        key = (value, offset, shape)
        written = self._written.get(key)
        if written is None:
            written = self._written[key] = self._write(value, offset, shape, over)
        return written

    def _write(self, value: ir.Value, offset: Ints, shape: Ints, over: Sequence[Axes]) -> ir.Value:
        own, op = tuple(shape_of(value)), producer(value)
        if not own:
            return self._state(self.build.broadcast(value, shape, []), over) if shape else value
        if op is not None and op.name in CONSTANTS and is_splat(op):
            type_ = self.build.tensor(shape, element_of(value))
            return self._state(copy_constant(op, type_, self.build.point), over)
        if own == shape or (op is not None and op.name in CONSTANTS):
            return self._move(value, offset, shape, over)
        if op is None:
            raise _NotAlignedError
        if op.name == SLICE and set(integers(op, "strides")) == {1}:
            starts = tuple(-start for start in integers(op, "start_indices"))
            return self._align(op.operands[0], _sum(offset, starts), shape, over)
        if op.name == BROADCAST:
            return self._broadcast(op, offset, shape, over)
        if op.name in (CONCATENATE, DYNAMIC_UPDATE_SLICE, PAD):
            pieces = _pieces_of(op)
            if pieces is not None:
                return self.assemble(pieces, offset, shape, over)
        if op.name not in ELEMENTWISE:
            raise _NotAlignedError
        operands = [
            self._align(each, offset, shape, over) if shape_of(each) else each
            for each in op.operands
        ]
        names = set(op.attributes) - {SHARDING, RULE}
        attributes = {name: op.attributes[name] for name in sorted(names)}
        types = [self.build.tensor(shape, element_of(value))]
        return self._state(self.build.create(op.name, operands, types, attributes).results[0], over)

    def _broadcast(
        self, op: ir.Operation, offset: Ints, shape: Ints, over: Sequence[Axes]
    ) -> ir.Value:
        operand, dims = op.operands[0], integers(op, "broadcast_dimensions")
        wide = shape_of(op.results[0])
        # A dimension that the broadcast keeps has the offset, one that it widens has none.
        kept = [wide[dim] == size for dim, size in zip(dims, shape_of(operand), strict=True)]
        narrow = tuple(shape[d] if k else 1 for d, k in zip(dims, kept, strict=True))
        starts = tuple(offset[d] if k else 0 for d, k in zip(dims, kept, strict=True))
        axes = [over[d] if k else () for d, k in zip(dims, kept, strict=True)]
        aligned = self._align(operand, starts, narrow, axes)
        return self._state(self.build.broadcast(aligned, shape, dims), over)

    def _move(self, value: ir.Value, offset: Ints, shape: Ints, over: Sequence[Axes]) -> ir.Value:
        own = shape_of(value)
        if tuple(own) == shape and not any(offset):
            return value
        high = [whole - size - o for whole, size, o in zip(shape, own, offset, strict=True)]
        if any(
            max(o, 0) >= whole - max(h, 0) for whole, o, h in zip(shape, offset, high, strict=True)
        ):
            raise _NotAlignedError  # no row is in the frame
        filling = self.build.splat(0, [], element_of(value))
        return self._state(self.build.pad(value, filling, offset, high, [0] * len(own)), over)

    def _rows(self, start: Ints, end: Ints, shape: Ints, over: Sequence[Axes]) -> ir.Value | None:
        """Returns True for the elements from a start to an end; None if these are all."""
        mask: ir.Value | None = None
        for dim, (first, limit, size) in enumerate(zip(start, end, shape, strict=True)):
            for direction, bound in (("GE", first), ("LT", limit)):
                if bound <= 0 if direction == "GE" else bound >= size:
                    continue
                key = (direction, bound, dim, shape)
                side = self._sides.get(key)
                if side is None:
                    i32 = ir.IntegerType.get_signless(32, self.build.context)
                    row = self._state(self.build.iota(self.build.tensor(shape, i32), dim), over)
                    splat = self._state(self.build.splat_like(bound, row), over)
                    side = self._state(self.build.compare(direction, row, splat), over)
                    self._sides[key] = side
                mask = (
                    side if mask is None else self._state(self.build.same("and", mask, side), over)
                )
        return mask

    def _state(self, value: ir.Value, over: Sequence[Axes]) -> ir.Value:
        """States the sharding of a new value, and returns it."""
        self.left -= 1
        if self.left < 0:
            raise _NotAlignedError
        return self._shardings.state(value, tuple(over))


def _sum(one: Ints, other: Ints) -> Ints:
    return tuple(a + b for a, b in zip(one, other, strict=True))
