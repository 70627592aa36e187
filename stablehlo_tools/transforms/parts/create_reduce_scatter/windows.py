"""The part of a value that each device takes, seen through the ops between value and slice.

A window says for each dimension which chunk every device takes. It is followed backwards: from
what a slice takes of an op's result to what that is of the op's operand, where the op computes
the one from the other alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from stablehlo_tools.analysis.device_arithmetic import clamped_starts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.constants import splat_element
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.create_reduce_scatter.plan import Chunks

# Ops of one element each that are exact or round correctly: the same bits on a part as on a whole.
ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "abs",
        "add",
        "and",
        "bitcast_convert",
        "ceil",
        "clamp",
        "compare",
        "complex",
        "convert",
        "divide",
        "floor",
        "imag",
        "is_finite",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "real",
        "remainder",
        "round_nearest_afz",
        "round_nearest_even",
        "select",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sqrt",
        "subtract",
        "xor",
    )
) | {"sdy.sharding_constraint"}
RESHAPE = "stablehlo.reshape"
TRANSPOSE = "stablehlo.transpose"
BROADCAST = "stablehlo.broadcast_in_dim"
DYNAMIC_SLICE = "stablehlo.dynamic_slice"
CONSTANT = "stablehlo.constant"


@dataclass(frozen=True)
class Cut:
    """A dimension divided into `count` equal chunks, of which device d takes `taken[d]`.

    `start`: the scalar in the program that says where the chunk begins in a dimension of `extent`.
    """

    count: int
    taken: tuple[int, ...]
    start: ir.Value = field(compare=False)
    extent: int = field(compare=False)


Window = tuple[Cut | None, ...]  # one entry for each dimension, None for the whole of it


def shape_of(value: ir.Value) -> tuple[int, ...] | None:
    """The static shape of a tensor."""
    kind = value.type
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        return None
    return tuple(kind.shape)


def chunks_of(window: Window) -> list[Chunks]:
    """The dimensions that are cut."""
    return [Chunks(d, cut.count, cut.taken) for d, cut in enumerate(window) if cut is not None]


def narrowed_shape(shape: Sequence[int], window: Window) -> list[int]:
    """The shape of what one device takes."""
    pairs = zip(shape, window, strict=True)
    return [size if cut is None else size // cut.count for size, cut in pairs]


def sliced_window(op: ir.Operation, values: DeviceValues) -> Window | None:
    """What a dynamic_slice takes of its operand; None unless every cut is into equal chunks."""
    shape = shape_of(op.operands[0])
    if shape is None:
        return None
    sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
    window: list[Cut | None] = []
    for extent, size, start in zip(shape, sizes, list(op.operands)[1:], strict=True):
        if size == extent:
            window.append(None)
            continue
        if size == 0 or extent % size:
            return None
        starts = values.scalar(start)
        if starts is None:
            return None
        begins = clamped_starts(starts, size, extent)
        if (begins % size).any():
            return None
        window.append(Cut(extent // size, tuple(int(i) for i in begins // size), start, extent))
    return tuple(window)


def window_before(op: ir.Operation, position: int, window: Window) -> Window | None:
    """What a window of an op's result is of one operand; None where the op is not understood.

    The other operands must be such that the window of them can be had too.
    """
    if len(op.results) != 1 or len(op.regions):
        return None
    before, after = shape_of(op.operands[position]), shape_of(op.results[0])
    if before is None or after is None:
        return None
    if op.name == TRANSPOSE:
        order = list(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
        moved = dict(zip(order, window, strict=True))
        return tuple(moved[d] for d in range(len(order)))
    if op.name == RESHAPE:
        return _before_reshape(before, after, window)
    if op.name == BROADCAST:
        return _before_broadcast(op, before, after, window)
    if op.name not in ELEMENTWISE or before != after:
        return None
    others = [value for i, value in enumerate(op.operands) if i != position]
    return window if all(can_narrow(value, window) for value in others) else None


def can_narrow(value: ir.Value, window: Window) -> bool:
    """Whether `rewriting.narrowed` can give a window of a value."""
    shape = shape_of(value)
    if shape is None:
        return False
    if not shape or not any(window) or splat_of(value) is not None:
        return True
    maker = producer(value)
    if maker is not None and maker.name == BROADCAST and spreads(maker, window):
        return True
    return all(cut is None or cut.extent == e for cut, e in zip(window, shape, strict=True))


def splat_of(value: ir.Value) -> ir.Attribute | None:
    """The element of a constant that has one value for all elements."""
    maker = producer(value)
    if maker is None or maker.name != CONSTANT:
        return None
    return splat_element(maker)


def spreads(broadcast: ir.Operation, window: Window) -> bool:
    """Whether a broadcast_in_dim fills every cut dimension with copies."""
    shape = shape_of(broadcast.operands[0])
    if shape is None:
        return False
    dimensions = list(ir.DenseI64ArrayAttr(broadcast.attributes["broadcast_dimensions"]))
    return all(window[d] is None or size == 1 for d, size in zip(dimensions, shape, strict=True))


def _before_broadcast(
    op: ir.Operation, before: Sequence[int], after: Sequence[int], window: Window
) -> Window | None:
    dimensions = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
    pairs = zip(dimensions, before, strict=True)
    return tuple(window[d] if size == after[d] else None for d, size in pairs)


def _before_reshape(before: Sequence[int], after: Sequence[int], window: Window) -> Window | None:
    """A cut stays a cut where as many elements stand before its dimension, in row-major order.

    A chunk of a dimension is then a chunk of the leading one of those that it is made from.
    """
    if 0 in before:
        return None
    result: list[Cut | None] = [None] * len(before)
    for dimension, cut in enumerate(window):
        if cut is None:
            continue
        ahead = math.prod(after[:dimension])
        found = [
            d
            for d, size in enumerate(before)
            if math.prod(before[:d]) == ahead and size > 1 and size % cut.count == 0
        ]
        if not found:
            return None
        (place,) = found
        result[place] = cut
    return tuple(result)
