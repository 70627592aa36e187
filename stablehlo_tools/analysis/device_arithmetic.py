"""What ops compute of small integer arrays, in NumPy, for many rows at once.

An array has a leading dimension of rows, of size 1 where they all hold the same; the other
dimensions are the tensor's. A row is a device's value, or that of one iteration of a loop: all that
evaluates integers before the run (`device_values`, `loop_values`, `uniformity`, `demand`,
`elements.folding`) asks here what one op makes of them. Arithmetic is the dialect's
(`integer_arithmetic`); what is added here is how ops move elements about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools import bindings
from stablehlo_tools.analysis.trip_counts import (
    comparison_direction,
    integer_range,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect import integer_arithmetic
from stablehlo_tools.dialect.integer_arithmetic import Undefined, bitcast, compared, integer_dtype
from stablehlo_tools.dialect.names import (
    BITCAST_CONVERT,
    BROADCAST,
    COMPARE,
    CONCATENATE,
    CONSTANT,
    CONVERT,
    DYNAMIC_SLICE,
    GATHER,
    IOTA,
    RESHAPE,
    REVERSE,
    SHARDING_CONSTRAINT,
    SLICE,
    TRANSPOSE,
)
from stablehlo_tools.dialect.traits import Trait, full_names, ops_with
from stablehlo_tools.ir.values import value_of

Values = NDArray[Any]

_MOST_SLICES = 256  # of a gather, all rows together


def element_dtype(type_: ir.Type) -> np.dtype[Any] | None:
    """The NumPy type of a tensor's elements: booleans and whole-byte integers only."""
    if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
        return None
    element = type_.element_type
    if not isinstance(element, ir.IntegerType):
        return None
    return integer_dtype(element.width, signed=not element.is_unsigned)


def clamped_starts(starts: Values, size: int, extent: int) -> Values:
    """Where slices of `size` out of a dimension of `extent` begin, as StableHLO clamps it."""
    last = extent - size
    if starts.dtype.kind == "u":
        return np.minimum(starts.astype(np.uint64), np.uint64(last)).astype(np.int64)
    return np.clip(starts.astype(np.int64), 0, last)


def apply(
    op: ir.Operation, operands: Sequence[Values], undefined: Undefined = Undefined.UNKNOWN
) -> Values | None:
    """The result of an op with one result; None for ops and cases that are not understood."""
    name = op.name
    if name in integer_arithmetic.COMPUTED:
        return integer_arithmetic.computed(name, _side_by_side(operands), undefined)
    move = _MOVES.get(name)
    return None if move is None else move(op, *operands)


def evaluated(op: ir.Operation, operands: Iterable[Values | None]) -> Values | None:
    """The result of an op of COMPUTED, in its NumPy type; None where an operand is not known.

    The operands are asked for in order, and no more of them than are known.
    """
    known: list[Values] = []
    for operand in operands:
        if operand is None:
            return None
        known.append(operand)
    result, dtype = apply(op, known), element_dtype(op.results[0].type)
    return None if result is None or dtype is None else result.astype(dtype, copy=False)


def scalar_rows(numbers: Sequence[int], type_: ir.Type) -> Values:
    """An integer scalar of any width in each row, as `scalar_result` takes it."""
    return np.array(numbers, element_dtype(type_) or np.int64)


def scalar_result(op: ir.Operation, rows: Sequence[Values]) -> Values | None:
    """What an op of SCALAR_OPS makes of integer scalars of any width; None for another op.

    Divisions are taken to be XLA's.
    """
    if op.name not in SCALAR_OPS:
        return None
    type_ = op.results[0].type
    if not isinstance(type_, ir.RankedTensorType) or type_.rank:
        return None
    element = type_.element_type
    if not isinstance(element, ir.IntegerType):
        return None
    result = rows[0] if op.name in _HANDING_ON else apply(op, rows, Undefined.AS_XLA)
    if result is None:
        return None
    dtype = integer_dtype(element.width, signed=not element.is_unsigned)
    if dtype is not None:
        return result.astype(dtype, copy=False)
    low, high = integer_range(type_)  # of 2 or 4 bits, which NumPy has no type for
    return (result.astype(np.int64) - low) % (high - low + 1) + low


def _side_by_side(operands: Sequence[Values]) -> list[Values]:
    """Elementwise operands, of which some may be scalars beside tensors, for NumPy to broadcast."""
    rank = max(operand.ndim for operand in operands)
    return [x.reshape(x.shape[0], *[1] * (rank - 1)) if x.ndim == 1 < rank else x for x in operands]


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
    dtype = element_dtype(op.results[0].type)
    return None if dtype is None else x.astype(dtype)


def _bitcast(op: ir.Operation, x: Values) -> Values | None:
    dtype = element_dtype(op.results[0].type)
    return None if dtype is None else bitcast(x, dtype)


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
    count = max(part.shape[0] for part in parts)
    whole = [np.broadcast_to(part, (count, *part.shape[1:])) for part in parts]
    return np.concatenate(whole, 1 + _number(op, "dimension"))


def _dynamic_slice(op: ir.Operation, x: Values, *starts: Values) -> Values:
    for dimension, (start, size) in enumerate(
        zip(starts, _numbers(op, "slice_sizes"), strict=True), 1
    ):
        begins = clamped_starts(start, size, x.shape[dimension])
        positions = begins.reshape(-1, 1) + np.arange(size)
        count = max(len(positions), x.shape[0])
        x = np.broadcast_to(x, (count, *x.shape[1:]))
        shape = [1] * x.ndim
        shape[0], shape[dimension] = len(positions), size
        x = np.take_along_axis(x, positions.reshape(shape), dimension)
    return x


def _gather(op: ir.Operation, table: Values, indices: Values) -> Values | None:
    """None for many slices, and for batching dimensions."""
    numbers = bindings.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    if len(numbers.operand_batching_dims):
        return None
    sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
    along = 1 + int(numbers.index_vector_dim)
    if along == indices.ndim:
        indices = indices[..., None]
    starts = np.moveaxis(indices, along, -1)
    batch = starts.shape[1:-1]
    count = max(len(table), len(starts))
    rows = starts.reshape(len(starts), -1, starts.shape[-1])
    if count * rows.shape[1] > _MOST_SLICES:
        return None
    slices = [
        _row(table[n % len(table)], row, list(numbers.start_index_map), sizes)
        for n in range(count)
        for row in rows[n % len(rows)]
    ]
    kept = [size for d, size in enumerate(sizes) if d not in list(numbers.collapsed_slice_dims)]
    whole = np.array(slices).reshape(count, *batch, *kept)
    offsets = [1 + d for d in numbers.offset_dims]
    return np.moveaxis(whole, range(whole.ndim - len(kept), whole.ndim), offsets)


def _row(table: Values, row: Values, dimensions: Sequence[int], sizes: Sequence[int]) -> Values:
    """One slice of the table; its start is clamped so that it fits."""
    begins = [0] * table.ndim
    for dimension, start in zip(dimensions, row, strict=True):
        begins[dimension] = min(max(int(start), 0), table.shape[dimension] - sizes[dimension])
    return table[tuple(slice(b, b + size) for b, size in zip(begins, sizes, strict=True))]


def _compare(op: ir.Operation, one: Values, other: Values) -> Values:
    return compared(comparison_direction(op), one, other)


def _as_it_is(_: ir.Operation, x: Values) -> Values:
    return x


_MOVES: dict[str, Callable[..., Values | None]] = {
    BITCAST_CONVERT: _bitcast,
    BROADCAST: _broadcast,
    COMPARE: _compare,
    CONCATENATE: _concatenate,
    CONSTANT: _constant,
    CONVERT: _convert,
    DYNAMIC_SLICE: _dynamic_slice,
    GATHER: _gather,
    IOTA: _iota,
    RESHAPE: _reshape,
    REVERSE: _reverse,
    SHARDING_CONSTRAINT: _as_it_is,
    SLICE: _slice,
    TRANSPOSE: _transpose,
}

COMPUTED = integer_arithmetic.COMPUTED | frozenset(_MOVES)

# Of the scalars that loops count and index with. These alone have ever been followed there: with
# more of them more loops would be understood, and programs come out otherwise.
_HANDING_ON = frozenset({BROADCAST, CONVERT, RESHAPE, SHARDING_CONSTRAINT})
SCALAR_OPS = (
    (integer_arithmetic.COMPUTED | _HANDING_ON | {COMPARE})
    - ops_with(Trait.SHIFT)
    - full_names("abs sign")
)
