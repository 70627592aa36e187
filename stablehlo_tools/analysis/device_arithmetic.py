"""What ops compute of small integer arrays, one for each device, in NumPy.

An array has a leading dimension for the devices, of size 1 where they all hold the same; the other
dimensions are the tensor's. Integers wrap around as in StableHLO. What StableHLO leaves to the
implementation (division by zero, shifts by more than the width) is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools.analysis.device_lookups import gathered
from stablehlo_tools.analysis.trip_counts import comparison_direction
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.constants import value_of

Values = NDArray[Any]

_COMPARISONS: dict[str, Callable[[Values, Values], Values]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


def element_dtype(kind: ir.Type) -> np.dtype[Any] | None:
    """The NumPy type of a tensor's elements: booleans and whole-byte integers only."""
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        return None
    element = kind.element_type
    if not isinstance(element, ir.IntegerType):
        return None
    if element.width == 1:
        return np.dtype(np.bool_)
    if element.width not in (8, 16, 32, 64):
        return None
    return np.dtype(f"{'u' if element.is_unsigned else ''}int{element.width}")


def clamped_starts(starts: Values, size: int, extent: int) -> Values:
    """Where slices of `size` out of a dimension of `extent` begin, as StableHLO clamps it."""
    last = extent - size
    if starts.dtype.kind == "u":
        return np.minimum(starts.astype(np.uint64), np.uint64(last)).astype(np.int64)
    return np.clip(starts.astype(np.int64), 0, last)


def apply(op: ir.Operation, operands: Sequence[Values]) -> Values | None:
    """The result of an op with one result; None for ops and cases that are not understood."""
    compute = _COMPUTED.get(op.name)
    if compute is None:
        return None
    with np.errstate(all="ignore"):
        return compute(op, *operands)


def _shape(op: ir.Operation) -> list[int]:
    return list(ir.RankedTensorType(op.results[0].type).shape)


def _numbers(op: ir.Operation, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(op.attributes[name]))


def _number(op: ir.Operation, name: str) -> int:
    return ir.IntegerAttr(op.attributes[name]).value


def _constant(op: ir.Operation) -> Values | None:
    attribute = value_of(op)
    if not isinstance(attribute, ir.DenseIntElementsAttr):
        return None
    table = np.array(attribute)
    return table.reshape(1, *_shape(op))


def _iota(op: ir.Operation) -> Values:
    shape, dimension = _shape(op), _number(op, "iota_dimension")
    along = [size if d == dimension else 1 for d, size in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[dimension]).reshape(along), shape)[None]


def _convert(op: ir.Operation, x: Values) -> Values | None:
    kind = element_dtype(op.results[0].type)
    return None if kind is None else x.astype(kind)


def _bitcast(op: ir.Operation, x: Values) -> Values | None:
    kind = element_dtype(op.results[0].type)
    if kind is None or kind.itemsize != x.dtype.itemsize or "b" in (kind.kind, x.dtype.kind):
        return None
    return np.ascontiguousarray(x).view(kind)


def _reshape(op: ir.Operation, x: Values) -> Values:
    return x.reshape(x.shape[0], *_shape(op))


def _broadcast(op: ir.Operation, x: Values) -> Values:
    shape, dimensions = _shape(op), _numbers(op, "broadcast_dimensions")
    sizes = [1] * len(shape)
    for dimension, size in zip(dimensions, x.shape[1:], strict=True):
        sizes[dimension] = size
    order = sorted(range(len(dimensions)), key=lambda i: dimensions[i])
    ordered = x.transpose(0, *(1 + i for i in order))
    return np.broadcast_to(ordered.reshape(x.shape[0], *sizes), (x.shape[0], *shape))


def _transpose(op: ir.Operation, x: Values) -> Values:
    return x.transpose(0, *(1 + d for d in _numbers(op, "permutation")))


def _slice(op: ir.Operation, x: Values) -> Values:
    names = ("start_indices", "limit_indices", "strides")
    ranges = zip(*(_numbers(op, name) for name in names), strict=True)
    return x[(slice(None), *(slice(*part) for part in ranges))]


def _reverse(op: ir.Operation, x: Values) -> Values:
    return np.flip(x, tuple(1 + d for d in _numbers(op, "dimensions")))


def _concatenate(op: ir.Operation, *parts: Values) -> Values:
    devices = max(part.shape[0] for part in parts)
    whole = [np.broadcast_to(part, (devices, *part.shape[1:])) for part in parts]
    return np.concatenate(whole, 1 + _number(op, "dimension"))


def _dynamic_slice(op: ir.Operation, x: Values, *starts: Values) -> Values:
    for dimension, (start, size) in enumerate(
        zip(starts, _numbers(op, "slice_sizes"), strict=True), 1
    ):
        begins = clamped_starts(start, size, x.shape[dimension])
        positions = begins.reshape(-1, 1) + np.arange(size)
        devices = max(len(positions), x.shape[0])
        x = np.broadcast_to(x, (devices, *x.shape[1:]))
        shape = [1] * x.ndim
        shape[0], shape[dimension] = len(positions), size
        x = np.take_along_axis(x, positions.reshape(shape), dimension)
    return x


def _divide(_: ir.Operation, a: Values, b: Values) -> Values | None:
    if a.dtype.kind == "b" or not b.all() or _overflows(a, b):
        return None
    quotient = a // b
    inexact = (quotient * b != a) & ((a < 0) != (b < 0))
    return (quotient + inexact).astype(a.dtype)  # towards zero


def _remainder(_: ir.Operation, a: Values, b: Values) -> Values | None:
    if a.dtype.kind == "b" or not b.all() or _overflows(a, b):
        return None
    return np.fmod(a, b)


def _overflows(a: Values, b: Values) -> bool:
    if a.dtype.kind != "i":
        return False
    return bool(((a == np.iinfo(a.dtype).min) & (b == -1)).any())


def _compare(op: ir.Operation, a: Values, b: Values) -> Values:
    return _COMPARISONS[comparison_direction(op)](a, b)


def _clamp(_: ir.Operation, low: Values, x: Values, high: Values) -> Values:
    rank = x.ndim
    return np.minimum(np.maximum(x, _lifted(low, rank)), _lifted(high, rank))


def _select(_: ir.Operation, predicate: Values, a: Values, b: Values) -> Values:
    return np.where(_lifted(predicate, a.ndim), a, b)


def _lifted(scalar: Values, rank: int) -> Values:
    """A scalar of each device, for use beside tensors."""
    return scalar.reshape(scalar.shape[0], *[1] * (rank - 1)) if scalar.ndim == 1 else scalar


def _shifted(compute: Callable[[Values, Values], Values]) -> Callable[..., Values | None]:
    def shift(_: ir.Operation, x: Values, by: Values) -> Values | None:
        if x.dtype.kind == "b" or (by < 0).any() or (by >= 8 * x.dtype.itemsize).any():
            return None
        return compute(x, by)

    return shift


def _shift_right_logical(x: Values, by: Values) -> Values:
    bits = np.dtype(f"uint{8 * x.dtype.itemsize}")
    return np.right_shift(x.view(bits), by.view(bits)).view(x.dtype)


def _shift_right_arithmetic(x: Values, by: Values) -> Values:
    bits = np.dtype(f"int{8 * x.dtype.itemsize}")
    return np.right_shift(x.view(bits), by.view(bits)).view(x.dtype)


def _elementwise(compute: Callable[..., Values]) -> Callable[..., Values | None]:
    return lambda _, *operands: compute(*operands)


def _as_it_is(_: ir.Operation, x: Values) -> Values:
    return x


_COMPUTED: dict[str, Callable[..., Values | None]] = {
    f"stablehlo.{name}": compute
    for name, compute in {
        "constant": _constant,
        "iota": _iota,
        "convert": _convert,
        "bitcast_convert": _bitcast,
        "reshape": _reshape,
        "broadcast_in_dim": _broadcast,
        "transpose": _transpose,
        "slice": _slice,
        "reverse": _reverse,
        "concatenate": _concatenate,
        "dynamic_slice": _dynamic_slice,
        "gather": gathered,
        "add": _elementwise(np.add),
        "subtract": _elementwise(np.subtract),
        "multiply": _elementwise(np.multiply),
        "divide": _divide,
        "remainder": _remainder,
        "negate": _elementwise(np.negative),
        "abs": _elementwise(np.abs),
        "sign": _elementwise(np.sign),
        "minimum": _elementwise(np.minimum),
        "maximum": _elementwise(np.maximum),
        "clamp": _clamp,
        "and": _elementwise(np.bitwise_and),
        "or": _elementwise(np.bitwise_or),
        "xor": _elementwise(np.bitwise_xor),
        "not": _elementwise(np.invert),
        "shift_left": _shifted(np.left_shift),
        "shift_right_logical": _shifted(_shift_right_logical),
        "shift_right_arithmetic": _shifted(_shift_right_arithmetic),
        "compare": _compare,
        "select": _select,
    }.items()
} | {"sdy.sharding_constraint": _as_it_is}

COMPUTED = frozenset(_COMPUTED)
