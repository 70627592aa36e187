"""Which places windows meet, of reduce_window and convolutions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stablehlo_tools.bindings import ir

_MOST = 1 << 20  # pairs of a window and a place in it


@dataclass(frozen=True)
class Reach:
    """`every_window`: each holds an element of the operand; `every_element` is in some window;
    `every_place` of the window holds an element at least once.
    """

    every_window: bool = False
    every_element: bool = False
    every_place: bool = False


Names = tuple[str, str, str]
OF_REDUCE_WINDOW: Names = ("window_strides", "base_dilations", "window_dilations")
OF_CONVOLUTION: Names = ("window_strides", "lhs_dilation", "rhs_dilation")


def reach_of(op: ir.Operation, sizes: list[int], windows: list[int], names: Names) -> Reach:
    """How the windows of an op lie on an operand of these sizes."""
    rank = len(sizes)
    strides, base, spread = (_numbers(op, name, rank) for name in names)
    padding = op.attributes.get("padding")
    edges = np.zeros((rank, 2), np.int64)
    if padding is not None:
        edges = np.array(ir.DenseIntElementsAttr(padding)).reshape(rank, 2)
    found = [
        _along(size, window, stride, dilation, gap, int(low), int(high))
        for size, window, stride, dilation, gap, (low, high) in zip(
            sizes, windows, strides, base, spread, edges, strict=True
        )
    ]
    return Reach(
        all(reach.every_window for reach in found),
        all(reach.every_element for reach in found),
        all(reach.every_place for reach in found),
    )


def _numbers(op: ir.Operation, name: str, rank: int) -> list[int]:
    attribute = op.attributes.get(name)
    return [1] * rank if attribute is None else list(ir.DenseI64ArrayAttr(attribute))


def _along(
    size: int, window: int, stride: int, dilation: int, gap: int, low: int, high: int
) -> Reach:
    """Along one dimension, whose windows lie side by side with those along any other."""
    dilated = (size - 1) * dilation + 1
    reach = (window - 1) * gap + 1
    count = (low + dilated + high - reach) // stride + 1
    if size < 1 or window < 1 or count < 1 or count * window > _MOST:
        return Reach()
    places = np.arange(count)[:, None] * stride + np.arange(window) * gap - low
    is_element = (places >= 0) & (places < dilated) & (places % dilation == 0)
    return Reach(
        bool(is_element.any(axis=1).all()),
        len(np.unique(places[is_element])) == size,
        bool(is_element.any(axis=0).all()),
    )
