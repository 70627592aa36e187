"""What each device needs of an op's operands along a divided dimension, for its part of the result.

    slice, pad, concatenate      the elements that are in its block of the result
    reverse                      those at the other end, turned round
    dynamic_update_slice         from a start that is known, the rows of the update that are in its
                                 block
    reduce_window, convolution   those that the windows of its block of the result look at; of a
                                 convolution whose kernel is longer than its result (the gradient
                                 of a kernel), those that its block of the kernel looks at

All shapes are global. An op on what it needs is the op on a single device, but for the places along
the dimension that it knows itself (`local_ops`).
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
from stablehlo_tools.transforms.parts.partition.halo import Parts, Piece, Plan, plan

REDUCE_WINDOW = "stablehlo.reduce_window"
SELECT_AND_SCATTER = "stablehlo.select_and_scatter"
Shapes = Sequence[Sequence[int]]  # of operands, then of results


@dataclass(frozen=True)
class Need:
    """Pieces of operands, one after another in `parts`, that each device puts together along a
    dimension of theirs; `fills`: what lies between and around pieces counts, too.

    Before that each device spreads its elements `spread` apart.
    """

    parts: tuple[Parts, ...]
    pieces: tuple[Piece, ...]
    target: Parts
    fills: bool = False
    spread: int = 1

    @property
    def plan(self) -> Plan:
        """Who sends what to whom."""
        return plan(self.parts, self.pieces, self.target, self.fills)


@dataclass(frozen=True)
class Window:
    """A window op along a dimension: `places` windows of `size` elements, with what its attributes
    say of them. `low` and `high` are its padding."""

    places: int
    size: int
    stride: int
    apart: int  # elements of one window
    spread: int  # elements that the windows look at
    low: int
    high: int

    @property
    def is_element(self) -> bool:
        """Whether each place is that of one element."""
        steps = self.size, self.stride, self.apart, self.spread
        return all(step == 1 for step in steps) and not (self.low or self.high)

    def taken(self, length: int) -> int:
        """How many elements, spread, as many windows side by side look at."""
        return (length - 1) * self.stride + (self.size - 1) * self.apart + 1


def need_of(op: ir.Operation, dim: int, parts: int, shapes: Shapes) -> Need | None:
    """What a device needs along a dimension of the first operand that is divided; None for an op
    that needs its own elements alone, or of which that is not known."""
    size, count = shapes[0][dim], len(op.operands)
    if op.name in (CONVOLUTION, REDUCE_WINDOW):
        looks = conv_window if op.name == CONVOLUTION else reduced_window
        window = looks(op, dim, shapes)
        return None if window is None or window.is_element else window_need(window, size, parts)
    if op.name == CONCATENATE and integer(op, "dimension") == dim:
        return joined([shape[dim] for shape in shapes[:count]], parts)
    if op.name == REVERSE and dim in integers(op, "dimensions"):
        turned = Parts.blocks(size, parts).reversed()
        return Need((turned,), (Piece(0, 0, 0, size),), Parts.blocks(size, parts))
    if op.name == DYNAMIC_UPDATE_SLICE and shapes[1][dim] < size:
        start = known_start(op, dim, size - shapes[1][dim])
        if start is None:
            return None
        # The rows of the update, where the rows are that they overwrite.
        rows = shapes[1][dim]
        pieces = (Piece(0, 0, start, rows),)
        return Need((Parts.blocks(rows, parts),), pieces, Parts.blocks(size, parts))
    if op.name == SLICE:
        need = _slice(op, dim, parts, shapes[-1][dim], size)
    elif op.name == PAD:
        padded = shapes[-1][dim]
        low, inner = (integers(op, name)[dim] for name in ("edge_padding_low", "interior_padding"))
        held = Parts.blocks(size, parts).spread(inner + 1)
        pieces = _placed(held.size, low, padded)
        need = Need((held,), pieces, Parts.blocks(padded, parts), True, inner + 1)
    else:
        return None
    stays = need.target == need.parts[0] and need.pieces == (Piece(0, 0, 0, size),)
    return None if stays and need.spread == 1 else need


def needs_of(op: ir.Operation, dim: int, parts: int, shapes: Shapes) -> list[Need]:
    """All that a device needs along a dimension that is divided."""
    if op.name == SELECT_AND_SCATTER:
        window = reduced_window(op, dim, shapes)
        return [] if window.is_element else list(pooled_needs(window, shapes[0][dim], parts))
    need = need_of(op, dim, parts, shapes)
    return [] if need is None else [need]


def pooled_needs(window: Window, size: int, parts: int) -> tuple[Need, Need]:
    """Of a select_and_scatter whose windows are all inside: what the windows look at that touch a
    device's block of the result, and their places in the source.

    All devices have as many windows; those of no place in the source count for nothing.
    """
    blocks = Parts.blocks(size, parts)
    reach = window.size - 1
    first = [-(-(start - reach) // window.stride) for start in blocks.starts]
    if any(one * window.stride > start for one, start in zip(first, blocks.starts, strict=True)):
        first = [(start - reach) // window.stride for start in blocks.starts]
    ends = [start + blocks.length for start in blocks.starts]
    count = max(  # so many that they reach to the block's end, too
        max((end - 1) // window.stride + 1, -(-(end - window.size) // window.stride) + 1) - one
        for one, end in zip(first, ends, strict=True)
    )
    low = max(0, -min(first))  # places are counted from 0 on
    length = (count - 1) * window.stride + window.size
    starts = tuple((one + low) * window.stride for one in first)
    looked = Parts(low * window.stride + size, length, starts)
    added = Parts(max(first) + low + count, count, tuple(one + low for one in first))
    held = Parts.blocks(window.places, parts)
    return (
        Need((blocks,), (Piece(0, 0, low * window.stride, size),), looked),
        Need((held,), (Piece(0, 0, low, window.places),), added, True),
    )


def _slice(op: ir.Operation, dim: int, parts: int, taken: int, size: int) -> Need:
    start, stride = (integers(op, name)[dim] for name in ("start_indices", "strides"))
    span = (taken - 1) * stride + 1 if taken else 0
    block = -(-taken // parts)
    length = (block - 1) * stride + 1 if block else 0
    target = Parts.steps(span, length, parts, block * stride)
    return Need((Parts.blocks(size, parts),), (Piece(0, start, 0, span),), target)


def known_start(update: ir.Operation, dim: int, last: int) -> int | None:
    """Where a dynamic_update_slice writes along a dimension, at `last` at most; None where only the
    running program knows."""
    start = splat_of(update.operands[2 + dim])
    return max(0, min(start, last)) if isinstance(start, int) else None


def joined(sizes: Sequence[int], parts: int) -> Need:
    """Operands one behind the other."""
    held = tuple(Parts.blocks(size, parts) for size in sizes)
    pieces = tuple(Piece(k, 0, sum(sizes[:k]), size) for k, size in enumerate(sizes))
    return Need(held, pieces, Parts.blocks(sum(sizes), parts))


def _placed(size: int, low: int, whole: int) -> tuple[Piece, ...]:
    """A source of a size in a target, from place `low` on, as far as it is within."""
    start, place = max(0, -low), max(0, low)
    taken = min(size - start, whole - place)
    return (Piece(0, start, place, taken),) if taken > 0 else ()


def reduced_window(op: ir.Operation, dim: int, shapes: Shapes) -> Window:
    """The window of a reduce_window or select_and_scatter along a dimension."""
    rank = len(shapes[0])
    size, stride, apart, spread = (
        integers(op, name, [1] * rank)[dim]
        for name in ("window_dimensions", "window_strides", "window_dilations", "base_dilations")
    )
    low, high = integers(op, "padding", [0] * (2 * rank))[2 * dim : 2 * dim + 2]
    places = shapes[1][dim] if "scatter" in op.name else shapes[-1][dim]
    return Window(places, size, stride, apart, spread, low, high)


def conv_window(op: ir.Operation, dim: int, shapes: Shapes) -> Window | None:
    """The window of a convolution along a spatial dimension of its image, of which the places are
    the result's or, where that is shorter, the kernel's; None for other dimensions."""
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
        return Window(kernel, result, apart, stride, spread, low, high)
    return Window(result, kernel, stride, apart, spread, low, high)


def window_need(window: Window, size: int, parts: int) -> Need:
    """What the windows of each device's block of places look at, padding included."""
    held = Parts.blocks(size, parts).spread(window.spread)
    block = -(-window.places // parts)
    target = Parts.steps(0, max(window.taken(block), 0), parts, block * window.stride)
    end = target.starts[-1] + target.length
    target = Parts(end, target.length, target.starts)
    domain = window.low + held.size + window.high
    pieces = _placed(held.size, window.low, domain)
    return Need((held,), pieces, target, True, window.spread)
