"""Arrays of one row a device, many of which are one number all over, kept as views."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.demand.program import OpInstance
from stablehlo_tools.analysis.device_arithmetic import apply, clamped_starts
from stablehlo_tools.dialect.names import GATHER
from stablehlo_tools.dialect.traits import ELEMENTWISE, LAYOUT, Trait, ops_with

Values = NDArray[Any]

_MOVED = LAYOUT | ops_with(Trait.PIECE) - {GATHER}


def is_splat(values: Values) -> bool:
    """Whether a tensor is, on each device, one number all over, as can be told without looking."""
    if values.size == len(values):
        return True
    parts = zip(values.strides[1:], values.shape[1:], strict=True)
    return values.size > 0 and all(stride == 0 or size == 1 for stride, size in parts)


def lone(values: Values) -> Values:
    """The number that a splat is, for each device."""
    return values[(slice(None), *[0] * (values.ndim - 1))]


def spread(numbers: Values, shape: tuple[int, ...]) -> Values:
    """A splat of one number for each device."""
    return np.broadcast_to(numbers.reshape(-1, *[1] * len(shape)), (len(numbers), *shape))


def computed_splat(
    step: OpInstance, operands: list[Values], shape: tuple[int, ...]
) -> Values | None:
    """What an op makes of splats, where that is a splat."""
    if step.name in _MOVED:
        return spread(lone(operands[0]), shape)
    if step.name not in ELEMENTWISE:
        return None
    computed = apply(step.op, [lone(operand) for operand in operands])
    return None if computed is None else spread(computed, shape)


def converted(values: Values, dtype: np.dtype[Any] | None) -> Values:
    """The values as another NumPy type; a view stays one."""
    if values.dtype == dtype or dtype is None:
        return values
    if not is_splat(values) or values.ndim == 1:
        return values.astype(dtype)
    return spread(lone(values).astype(dtype), values.shape[1:])


def updated(whole: Values, part: Values, starts: list[Values]) -> Values:
    """What dynamic_update_slice makes of known tensors."""
    devices = max(len(array) for array in (whole, part, *starts))
    result = np.array(np.broadcast_to(whole, (devices, *whole.shape[1:])))
    begins = [
        np.broadcast_to(clamped_starts(start, size, extent), devices)
        for start, size, extent in zip(starts, part.shape[1:], whole.shape[1:], strict=True)
    ]
    for device in range(devices):
        window = tuple(
            slice(int(begin[device]), int(begin[device]) + size)
            for begin, size in zip(begins, part.shape[1:], strict=True)
        )
        result[(device, *window)] = part[device % len(part)]
    return result


def merged(chosen: Values | None, parts: list[Values | None], most: int) -> Values | None:
    """The rows of the region that each device runs; None above `most` numbers a device."""
    known = [part for part in parts if part is not None]
    if chosen is None or len(known) != len(parts):
        return None
    if sum(part.size for part in known) > most * len(chosen):
        return None
    return np.stack(known)[chosen, np.arange(len(chosen))]
