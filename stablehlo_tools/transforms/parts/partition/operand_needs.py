"""The elements of an op's operands that each device needs along a divided dimension.

    slice, pad, concatenate      the elements in its block of the result
    reverse                      the elements at the other end, reversed
    dynamic_update_slice         if the start is known, the rows of the update in its block
    reduce_window, convolution   the elements that the windows of its block of the result read.
                                 If a convolution's kernel is longer than its result (the
                                 gradient of a kernel), the elements that its block of the kernel
                                 reads

All shapes are global. On these elements the op runs as on a single device, except for the indices
along the dimension (`local_ops`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import conv_numbers
from stablehlo_tools.dialect.dimensions import integer, integers
from stablehlo_tools.dialect.names import (
    CONCATENATE,
    CONVOLUTION,
    DYNAMIC_UPDATE_SLICE,
    PAD,
    REVERSE,
    SLICE,
)
from stablehlo_tools.ir.values import splat_of
from stablehlo_tools.transforms.parts.partition.halo import (
    DimensionParts,
    HaloPiece,
    HaloPlan,
    plan,
)

REDUCE_WINDOW = "stablehlo.reduce_window"
SELECT_AND_SCATTER = "stablehlo.select_and_scatter"
Shapes = Sequence[Sequence[int]]  # of operands, then of results


@dataclass(frozen=True)
class HaloNeed:
    """Pieces of operands that each device puts together along a dimension.

    `parts` says how each operand is held. With `fills`, places between and around the pieces have
    to be filled, too. Before the exchange each device spreads its elements `spread` apart.
    """

    parts: tuple[DimensionParts, ...]
    pieces: tuple[HaloPiece, ...]
    target: DimensionParts
    fills: bool = False
    spread: int = 1

    @property
    def plan(self) -> HaloPlan:
        """The messages and runs that make the target."""
        return plan(self.parts, self.pieces, self.target, self.fills)


@dataclass(frozen=True)
class NeededWindow:
    """A window op along a dimension: `places` windows of `size` elements, with the op's attributes.
    `low` and `high` are its padding."""

    places: int
    size: int
    stride: int
    apart: int  # the window dilation
    spread: int  # the base dilation
    low: int
    high: int

    @property
    def is_element(self) -> bool:
        """True if each window reads one element, that of its own place."""
        steps = self.size, self.stride, self.apart, self.spread
        return all(step == 1 for step in steps) and not (self.low or self.high)

    def elements_read(self, length: int) -> int:
        """Returns the number of (spread) elements that `length` adjacent windows read."""
        return (length - 1) * self.stride + (self.size - 1) * self.apart + 1


def need_of(op: ir.Operation, dim: int, parts: int, shapes: Shapes) -> HaloNeed | None:
    """Returns what a device needs along a divided dimension of the first operand. Returns None if
    an op needs only its own elements, or if its need is unknown."""
    size, count = shapes[0][dim], len(op.operands)
    blocks = DimensionParts.blocks(size, parts)
    if op.name in (CONVOLUTION, REDUCE_WINDOW):
        looks = conv_window if op.name == CONVOLUTION else reduced_window
        window = looks(op, dim, shapes)
        return None if window is None or window.is_element else window_need(window, size, parts)
    if op.name == CONCATENATE and integer(op, "dimension") == dim:
        sizes = [shape[dim] for shape in shapes[:count]]
        held = tuple(DimensionParts.blocks(n, parts) for n in sizes)
        pieces = tuple(HaloPiece(k, 0, sum(sizes[:k]), n) for k, n in enumerate(sizes))
        return HaloNeed(held, pieces, DimensionParts.blocks(sum(sizes), parts))
    if op.name == REVERSE and dim in integers(op, "dimensions"):
        return HaloNeed((blocks.reverse_parts(),), (HaloPiece(0, 0, 0, size),), blocks)
    if op.name == DYNAMIC_UPDATE_SLICE and shapes[1][dim] < size:
        start = known_start(op, dim, size - shapes[1][dim])
        if start is None:
            return None
        # Each row of the update goes to the device that holds the row it overwrites.
        rows = shapes[1][dim]
        update = DimensionParts.blocks(rows, parts)
        return HaloNeed((update,), (HaloPiece(0, 0, start, rows),), blocks)
    if op.name == SLICE:
        start, stride = (integers(op, name)[dim] for name in ("start_indices", "strides"))
        taken = shapes[-1][dim]
        span = (taken - 1) * stride + 1 if taken else 0
        block = -(-taken // parts)
        length = (block - 1) * stride + 1 if block else 0
        target = DimensionParts.steps(span, length, parts, block * stride)
        need = HaloNeed((blocks,), (HaloPiece(0, start, 0, span),), target)
    elif op.name == PAD:
        padded = shapes[-1][dim]
        low, inner = (integers(op, name)[dim] for name in ("edge_padding_low", "interior_padding"))
        spread = blocks.dilate_parts(inner + 1)
        pieces = _place_piece(spread.size, low, padded)
        need = HaloNeed((spread,), pieces, DimensionParts.blocks(padded, parts), True, inner + 1)
    else:
        return None
    stays = need.target == need.parts[0] and need.pieces == (HaloPiece(0, 0, 0, size),)
    return None if stays and need.spread == 1 else need


def needs_of(op: ir.Operation, dim: int, parts: int, shapes: Shapes) -> list[HaloNeed]:
    """Returns all that a device needs along a divided dimension."""
    if op.name == SELECT_AND_SCATTER:
        window = reduced_window(op, dim, shapes)
        return [] if window.is_element else list(pooled_needs(window, shapes[0][dim], parts))
    need = need_of(op, dim, parts, shapes)
    return [] if need is None else [need]


def pooled_needs(window: NeededWindow, size: int, parts: int) -> tuple[HaloNeed, HaloNeed]:
    """Returns the needs of a select_and_scatter whose windows are all inside its operand.

    The first is of the operand: the elements read by windows that touch a device's block of the
    result. The second is of the source: the places of these windows. All devices have the same
    number of windows; places outside of the source are filled with the identity.
    """
    blocks = DimensionParts.blocks(size, parts)
    reach = window.size - 1
    first = [-(-(start - reach) // window.stride) for start in blocks.starts]
    # The range must begin at or before each block, because the block is sliced out of the result.
    if any(one * window.stride > start for one, start in zip(first, blocks.starts, strict=True)):
        first = [(start - reach) // window.stride for start in blocks.starts]
    ends = [start + blocks.length for start in blocks.starts]
    count = max(  # enough windows to reach the end of each block
        max((end - 1) // window.stride + 1, -(-(end - window.size) // window.stride) + 1) - one
        for one, end in zip(first, ends, strict=True)
    )
    low = max(0, -min(first))  # places are counted from 0 on
    length = (count - 1) * window.stride + window.size
    starts = tuple((one + low) * window.stride for one in first)
    looked = DimensionParts(low * window.stride + size, length, starts)
    added = DimensionParts(max(first) + low + count, count, tuple(one + low for one in first))
    held = DimensionParts.blocks(window.places, parts)
    return (
        HaloNeed((blocks,), (HaloPiece(0, 0, low * window.stride, size),), looked),
        HaloNeed((held,), (HaloPiece(0, 0, low, window.places),), added, True),
    )


def known_start(update: ir.Operation, dim: int, last: int) -> int | None:
    """Returns the index from which a dynamic_update_slice writes along a dimension, clamped to
    `last`. Returns None unless the start is a constant."""
    start = splat_of(update.operands[2 + dim])
    return max(0, min(start, last)) if isinstance(start, int) else None


def _place_piece(size: int, low: int, whole: int) -> tuple[HaloPiece, ...]:
    """Returns the piece of a source of `size` elements, placed from `low` on in a target of `whole`
    places; () if nothing is inside."""
    start, place = max(0, -low), max(0, low)
    taken = min(size - start, whole - place)
    return (HaloPiece(0, start, place, taken),) if taken > 0 else ()


def reduced_window(op: ir.Operation, dim: int, shapes: Shapes) -> NeededWindow:
    """Returns the window of a reduce_window or select_and_scatter along a dimension."""
    rank = len(shapes[0])
    size, stride, apart, spread = (
        integers(op, name, [1] * rank)[dim]
        for name in ("window_dimensions", "window_strides", "window_dilations", "base_dilations")
    )
    low, high = integers(op, "padding", [0] * (2 * rank))[2 * dim : 2 * dim + 2]
    places = shapes[1][dim] if "scatter" in op.name else shapes[-1][dim]
    return NeededWindow(places, size, stride, apart, spread, low, high)


def conv_window(op: ir.Operation, dim: int, shapes: Shapes) -> NeededWindow | None:
    """Returns the window of a convolution along a spatial dimension of its image; None for other
    dimensions. The places are those of the result or, if that is shorter, of the kernel."""
    numbers = conv_numbers(op)
    if dim not in numbers.input_spatial:
        return None
    i, rank = numbers.input_spatial.index(dim), len(numbers.input_spatial)
    stride, spread, apart = (
        integers(op, name, [1] * rank)[i]
        for name in ("window_strides", "lhs_dilation", "rhs_dilation")
    )
    low, high = integers(op, "padding", [0] * (2 * rank))[2 * i : 2 * i + 2]
    kernel = shapes[1][numbers.kernel_spatial[i]]
    result = shapes[2][numbers.output_spatial[i]]
    if kernel > result:
        return NeededWindow(kernel, result, apart, stride, spread, low, high)
    return NeededWindow(result, kernel, stride, apart, spread, low, high)


def window_need(window: NeededWindow, size: int, parts: int) -> HaloNeed:
    """Returns the elements, with padding, that the windows of each device's block of places
    read."""
    held = DimensionParts.blocks(size, parts).dilate_parts(window.spread)
    block = -(-window.places // parts)
    length = max(window.elements_read(block), 0)
    starts = DimensionParts.steps(0, length, parts, block * window.stride).starts
    target = DimensionParts(starts[-1] + length, length, starts)
    pieces = _place_piece(held.size, window.low, window.low + held.size + window.high)
    return HaloNeed((held,), pieces, target, True, window.spread)
