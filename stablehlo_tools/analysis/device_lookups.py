"""What a gather out of a small table gives each device, in NumPy; see `device_arithmetic`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir

_MOST = 256  # slices out of the table, all devices together


def gathered(op: ir.Operation, table: NDArray[Any], indices: NDArray[Any]) -> NDArray[Any] | None:
    """The result of a gather; None for many slices, and for one with batching dimensions.

    Arrays have a leading dimension for the devices, or of size 1.
    """
    numbers = bindings.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    if len(numbers.operand_batching_dims):
        return None
    sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
    along = 1 + int(numbers.index_vector_dim)
    if along == indices.ndim:
        indices = indices[..., None]
    starts = np.moveaxis(indices, along, -1)
    batch = starts.shape[1:-1]
    devices = max(len(table), len(starts))
    rows = starts.reshape(len(starts), -1, starts.shape[-1])
    if devices * rows.shape[1] > _MOST:
        return None
    slices = [
        _slice(table[d % len(table)], row, list(numbers.start_index_map), sizes)
        for d in range(devices)
        for row in rows[d % len(rows)]
    ]
    kept = [size for d, size in enumerate(sizes) if d not in list(numbers.collapsed_slice_dims)]
    whole = np.array(slices).reshape(devices, *batch, *kept)
    offsets = [1 + d for d in numbers.offset_dims]
    return np.moveaxis(whole, range(whole.ndim - len(kept), whole.ndim), offsets)


def _slice(
    table: NDArray[Any], row: NDArray[Any], dimensions: Sequence[int], sizes: Sequence[int]
) -> NDArray[Any]:
    """One slice of the table; its start is clamped so that it fits."""
    begins = [0] * table.ndim
    for dimension, start in zip(dimensions, row, strict=True):
        begins[dimension] = min(max(int(start), 0), table.shape[dimension] - sizes[dimension])
    return table[tuple(slice(b, b + size) for b, size in zip(begins, sizes, strict=True))]
