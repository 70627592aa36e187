"""Evaluates small integer tensors before the run: tables, device ids and counters, by device.

An array has a leading dimension of rows, of size 1 if all rows are the same. The other dimensions
are the tensor's. A row is the value on one device, or in one iteration of a loop. All analyses that
evaluate integers before the run (`device_values`, `loop_values`, `uniformity`, `demand`) apply ops
by the functions of this module. Arithmetic is the dialect's (`integer_arithmetic`); this module
adds the ops that move elements.

Values are known if they follow from constants, `partition_id` and `replica_id`. They are followed
through arithmetic, table lookups, calls, arguments that are the same in all calls, invariant
carries and the edges of manual computations. Everything is computed for all devices at once.
`fold_value` knows less: only what a compiler finds from constants and identities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.communication import is_public
from stablehlo_tools.analysis.loops import comparison_direction, integer_range, is_integer_scalar
from stablehlo_tools.analysis.replica_groups import AxisRef, DeviceMesh, mesh_axes_groups
from stablehlo_tools.analysis.shardings import (
    dimension_axes,
    manual_axes,
    sharding_axes,
    sharding_per_value,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect import integer_arithmetic
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.integer_arithmetic import (
    COMPARISONS,
    HOLD_OF_EQUALS,
    Undefined,
    bitcast,
    integer_dtype,
)
from stablehlo_tools.dialect.names import (
    BARRIER,
    BITCAST_CONVERT,
    BROADCAST,
    COMPARE,
    CONCATENATE,
    CONVERT,
    DYNAMIC_SLICE,
    GATHER,
    IF,
    IOTA,
    MANUAL_COMPUTATION,
    RESHAPE,
    REVERSE,
    SHARDING_CONSTRAINT,
    SLICE,
    TRANSPOSE,
    WHILE,
)
from stablehlo_tools.dialect.reducers import absorbing_integer
from stablehlo_tools.dialect.traits import CALLS, DEVICE_IDS, Trait, full_names, ops_with
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import CONSTANTS, producer, value_of
from stablehlo_tools.ir.views import Function, ManualComputation
from stablehlo_tools.ir.walk import FUNCTION, callee_name, functions_by_name, symbol_name, walk
from stablehlo_tools.ir.while_loop import is_invariant

Values = NDArray[Any]

_MOST_SLICES = 256  # of a gather, in all rows


def element_dtype(type_: ir.Type) -> np.dtype[Any] | None:
    """Returns the NumPy type of a tensor of booleans or whole-byte integers; None for others."""
    if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
        return None
    element = type_.element_type
    if not isinstance(element, ir.IntegerType):
        return None
    return integer_dtype(element.width, signed=not element.is_unsigned)


def has_few_integers(type_: ir.Type, most: int) -> bool:
    """Returns True for a tensor of at most `most` elements that have an `element_dtype`."""
    return element_dtype(type_) is not None and math.prod(ir.RankedTensorType(type_).shape) <= most


def clamped_starts(starts: Values, size: int, extent: int) -> Values:
    """Returns starts of slices of `size` in a dimension of `extent`, clamped as in StableHLO."""
    last = extent - size
    if starts.dtype.kind == "u":
        return np.minimum(starts.astype(np.uint64), np.uint64(last)).astype(np.int64)
    return np.clip(starts.astype(np.int64), 0, last)


def apply(
    op: ir.Operation, operands: Sequence[Values], undefined: Undefined = Undefined.UNKNOWN
) -> Values | None:
    """Returns the result of an op with one result; None for ops that are not understood."""
    name = op.name
    if name in integer_arithmetic.COMPUTED:
        rank = max(operand.ndim for operand in operands)  # scalars may be mixed with tensors
        sides = [
            x.reshape(x.shape[0], *[1] * (rank - 1)) if x.ndim == 1 < rank else x for x in operands
        ]
        return integer_arithmetic.compute_op(name, sides, undefined)
    move = _MOVES.get(name)
    return None if move is None else move(op, *operands)


def evaluate_op(op: ir.Operation, operands: Iterable[Values | None]) -> Values | None:
    """Returns the result of an op of COMPUTED, in its NumPy type; None if an operand is unknown.

    The operands are read in order, up to the first unknown one.
    """
    known: list[Values] = []
    for operand in operands:
        if operand is None:
            return None
        known.append(operand)
    result, dtype = apply(op, known), element_dtype(op.results[0].type)
    return None if result is None or dtype is None else result.astype(dtype, copy=False)


def chosen_regions(branch: ir.Operation, index: Values) -> Values:
    """Returns the region of an `if` or `case` that each integer selects.

    For a `case`, that is the last region if the integer is out of range.
    """
    if branch.name == IF:
        return np.where(index, 0, 1)
    last = len(branch.regions) - 1
    return np.where((index < 0) | (index > last), last, index)


def scalar_rows(numbers: Sequence[int], type_: ir.Type) -> Values:
    """Returns rows of an integer scalar of any width, in the form that `scalar_result` reads."""
    return np.array(numbers, element_dtype(type_) or np.int64)


def scalar_result(op: ir.Operation, rows: Sequence[Values]) -> Values | None:
    """Returns the result of an op of SCALAR_OPS on integer scalars of any width; None for others.

    Undefined divisions give XLA's results.
    """
    type_ = op.results[0].type
    if op.name not in SCALAR_OPS or not is_integer_scalar(type_):
        return None
    result = rows[0] if op.name in _HANDING_ON else apply(op, rows, Undefined.AS_XLA)
    if result is None:
        return None
    dtype = element_dtype(type_)
    if dtype is not None:
        return result.astype(dtype, copy=False)
    low, high = integer_range(type_)  # 2 or 4 bits, which NumPy has no type for
    return (result.astype(np.int64) - low) % (high - low + 1) + low


def _constant(op: ir.Operation) -> Values | None:
    attribute = value_of(op)
    if not isinstance(attribute, ir.DenseIntElementsAttr):
        return None
    return np.array(attribute).reshape(1, *shape_of(op.results[0]))


def _iota(op: ir.Operation) -> Values:
    shape = shape_of(op.results[0])
    dimension = ir.IntegerAttr(op.attributes["iota_dimension"]).value
    along = [size if d == dimension else 1 for d, size in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[dimension]).reshape(along), shape)[None]


def _convert(op: ir.Operation, x: Values) -> Values | None:
    dtype = element_dtype(op.results[0].type)
    return None if dtype is None else x.astype(dtype)


def _bitcast(op: ir.Operation, x: Values) -> Values | None:
    dtype = element_dtype(op.results[0].type)
    return None if dtype is None else bitcast(x, dtype)


def _broadcast(op: ir.Operation, x: Values) -> Values:
    shape, dimensions = shape_of(op.results[0]), integers(op, "broadcast_dimensions")
    sizes = [1] * len(shape)
    for dimension, size in zip(dimensions, x.shape[1:], strict=True):
        sizes[dimension] = size
    order = sorted(range(len(dimensions)), key=lambda i: dimensions[i])
    ordered = x.transpose(0, *(1 + i for i in order))
    return np.broadcast_to(ordered.reshape(x.shape[0], *sizes), (x.shape[0], *shape))


def _slice(op: ir.Operation, x: Values) -> Values:
    names = ("start_indices", "limit_indices", "strides")
    ranges = zip(*(integers(op, name) for name in names), strict=True)
    return x[(slice(None), *(slice(*part) for part in ranges))]


def _concatenate(op: ir.Operation, *parts: Values) -> Values:
    count = max(part.shape[0] for part in parts)
    whole = [np.broadcast_to(part, (count, *part.shape[1:])) for part in parts]
    return np.concatenate(whole, 1 + ir.IntegerAttr(op.attributes["dimension"]).value)


def _dynamic_slice(op: ir.Operation, x: Values, *starts: Values) -> Values:
    for dimension, (start, size) in enumerate(
        zip(starts, integers(op, "slice_sizes"), strict=True), 1
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
    """Returns None for many slices, and for batching dimensions."""
    numbers = bindings.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    if len(numbers.operand_batching_dims):
        return None
    sizes = integers(op, "slice_sizes")
    along = 1 + int(numbers.index_vector_dim)
    if along == indices.ndim:
        indices = indices[..., None]
    starts = np.moveaxis(indices, along, -1)
    batch = starts.shape[1:-1]
    count = max(len(table), len(starts))
    rows = starts.reshape(len(starts), -1, starts.shape[-1])
    if count * rows.shape[1] > _MOST_SLICES:
        return None
    slices: list[Values] = []
    for n in range(count):
        operand = table[n % len(table)]
        for row in rows[n % len(rows)]:
            begins = [0] * operand.ndim  # clamped, so that the slice fits
            for dimension, start in zip(numbers.start_index_map, row, strict=True):
                last = operand.shape[dimension] - sizes[dimension]
                begins[dimension] = min(max(int(start), 0), last)
            window = tuple(slice(b, b + size) for b, size in zip(begins, sizes, strict=True))
            slices.append(operand[window])
    kept = [size for d, size in enumerate(sizes) if d not in list(numbers.collapsed_slice_dims)]
    whole = np.array(slices).reshape(count, *batch, *kept)
    offsets = [1 + d for d in numbers.offset_dims]
    return np.moveaxis(whole, range(whole.ndim - len(kept), whole.ndim), offsets)


_MOVES: dict[str, Callable[..., Values | None]] = {
    BITCAST_CONVERT: _bitcast,
    BROADCAST: _broadcast,
    COMPARE: lambda op, one, other: COMPARISONS[comparison_direction(op)](one, other),
    CONCATENATE: _concatenate,
    **dict.fromkeys(CONSTANTS, _constant),
    CONVERT: _convert,
    DYNAMIC_SLICE: _dynamic_slice,
    GATHER: _gather,
    IOTA: _iota,
    RESHAPE: lambda op, x: x.reshape(x.shape[0], *shape_of(op.results[0])),
    REVERSE: lambda op, x: np.flip(x, tuple(1 + d for d in integers(op, "dimensions"))),
    SHARDING_CONSTRAINT: lambda _, x: x,
    SLICE: _slice,
    TRANSPOSE: lambda op, x: x.transpose(0, *(1 + d for d in integers(op, "permutation"))),
}

COMPUTED = integer_arithmetic.COMPUTED | frozenset(_MOVES)

# The ops on scalars that loops count and index with. The set is kept small on purpose: with more
# ops, more loops would be understood, and the output of the passes would change.
_HANDING_ON = frozenset({BROADCAST, CONVERT, RESHAPE, SHARDING_CONSTRAINT})
SCALAR_OPS = (
    (integer_arithmetic.COMPUTED | _HANDING_ON | {COMPARE})
    - ops_with(Trait.SHIFT)
    - full_names("abs sign")
)


_LARGEST = 1 << 16  # elements of a tensor that is evaluated
_LARGEST_ON_ALL = 1 << 20  # the same, all devices together
_MOST_NESTED = 8  # calls, each evaluated separately
_DEEPEST = 100  # ops in a row, so that Python's stack suffices


class _CallContext:
    """A call whose callee is evaluated with the arguments of only this call."""

    def __init__(self, op: ir.Operation | None, around: _CallContext | None) -> None:
        self.op = op
        self.around = around
        self.level: int = 0 if around is None else around.level + 1
        self.known: dict[ir.Value, Values | None] = {}
        self.inner: dict[ir.Value, _CallContext] = {}


class DeviceValues:
    """Evaluates integer tensors for all devices of a module; valid until the module changes.

    Arrays have a leading dimension for the devices, in flattened ids (`replica_id * num_partitions
    + partition_id`). It is of size 1 for values that are the same on all. `given` are values that
    the caller knows, for example in one iteration of a loop.
    """

    def __init__(
        self, module: ir.Module, facts: ModuleFacts, given: Mapping[ir.Value, Values] | None = None
    ) -> None:
        self.facts = facts
        self.module = module
        self.root = _CallContext(None, None)
        self.root.known.update(given or {})
        self.functions = functions_by_name(module)

    def known_tensor(self, value: ir.Value) -> Values | None:
        """Returns the tensor on every device, of shape (devices or 1, ...); None if unknown."""
        return self._value_in_call(value, self.root, _DEEPEST)

    def scalar(self, value: ir.Value) -> Values | None:
        """Returns the integer on every device: an array of shape (devices,); None if unknown."""
        known = self.known_tensor(value)
        if known is None or known.ndim != 1:
            return None
        return np.broadcast_to(known, (self.facts.grid.size,))

    def _value_in_call(self, value: ir.Value, call: _CallContext, depth: int) -> Values | None:
        if value in call.known:
            return call.known[value]
        call.known[value] = None  # ends the evaluation of recursive functions
        is_read = depth and has_few_integers(value.type, _LARGEST)
        known = self._compute_in_call(value, call, depth - 1) if is_read else None
        if known is not None and known.size > _LARGEST_ON_ALL:
            known = None
        call.known[value] = known
        return known

    def _compute_in_call(self, value: ir.Value, call: _CallContext, depth: int) -> Values | None:
        op = producer(value)
        if op is None:
            return self._argument(ir.BlockArgument(value), call, depth)
        if op.name in COMPUTED:
            return evaluate_op(op, [self._value_in_call(v, call, depth) for v in op.operands])
        position = ir.OpResult(value).result_number
        if op.name in DEVICE_IDS:
            devices = np.arange(self.facts.grid.size, dtype=np.uint32)
            width = np.uint32(self.facts.grid.num_partitions)
            return devices % width if op.name == "stablehlo.partition_id" else devices // width
        if op.name == BARRIER:
            return self._value_in_call(op.operands[position], call, depth)
        if op.name == WHILE:
            return self._carry(op, position, call, depth)
        if op.name in CALLS:
            callee = self.functions.get(callee_name(op))
            if callee is None or len(callee.regions[0].blocks) != 1 or call.level == _MOST_NESTED:
                return None
            returned = Function(callee).yield_of(position)
            inner = call.inner.setdefault(op.results[0], _CallContext(op, call))
            return self._value_in_call(returned, inner, depth)
        if op.name == MANUAL_COMPUTATION:
            return self._leaving(op, position, call, depth)
        return None

    def _argument(
        self, argument: ir.BlockArgument, call: _CallContext, depth: int
    ) -> Values | None:
        op, position = argument.owner.owner.operation, argument.arg_number
        if op.name == WHILE:
            return self._carry(op, position, call, depth)
        if op.name == "sdy.named_computation":
            return self._value_in_call(op.operands[position], call, depth)
        if op.name == MANUAL_COMPUTATION:
            return self._entering(op, position, call, depth)
        if op.name != FUNCTION or argument.owner != Function(op).body:
            return None
        if call.op is not None and call.around is not None:
            return self._value_in_call(call.op.operands[position], call.around, depth)
        return self._common_argument(op, position, depth)

    def _carry(
        self, loop: ir.Operation, position: int, call: _CallContext, depth: int
    ) -> Values | None:
        """Returns a loop's carry; None unless it is invariant."""
        if not is_invariant(loop, position):
            return None
        return self._value_in_call(loop.operands[position], call, depth)

    def _common_argument(self, function: ir.Operation, position: int, depth: int) -> Values | None:
        """Returns an argument of a private function; None unless all calls pass the same value."""
        callers = self._callers.get(symbol_name(function), [])
        if is_public(function) or not callers:
            return None
        passed = [self._value_in_call(op.operands[position], self.root, depth) for op in callers]
        first = passed[0]
        if first is None or any(p is None or not np.array_equal(p, first) for p in passed):
            return None
        return first

    @cached_property
    def _callers(self) -> dict[str, list[ir.Operation]]:
        """The calls of each function; a function with other references has none."""
        calls: dict[str, list[ir.Operation]] = {}
        otherwise: set[str] = set()

        def visit(op: ir.Operation) -> ir.WalkResult:
            if op.name in CALLS:
                calls.setdefault(callee_name(op), []).append(op)
            elif op.name == "func.constant":
                otherwise.add(ir.FlatSymbolRefAttr(op.attributes["value"]).value)
            elif op.name == "stablehlo.custom_call" and "called_computations" in op.attributes:
                listed = ir.ArrayAttr(op.attributes["called_computations"])
                otherwise.update(ir.FlatSymbolRefAttr(symbol).value for symbol in listed)
            return ir.WalkResult.ADVANCE

        walk(self.module.operation, visit)
        return {name: ops for name, ops in calls.items() if name not in otherwise}

    def _entering(
        self, op: ir.Operation, position: int, call: _CallContext, depth: int
    ) -> Values | None:
        """Returns a device's shard of an operand of a manual computation."""
        whole = self._value_in_call(op.operands[position], call, depth)
        sharding = sharding_per_value(op.attributes["in_shardings"])[position]
        dimensions = [refs for refs, _ in dimension_axes(sharding)]
        if whole is None or any(ref.size is not None for refs in dimensions for ref in refs):
            return None  # an axis is split
        manual = manual_axes(op)
        axes_of = [[AxisRef(ref.name) for ref in refs if ref.name in manual] for refs in dimensions]
        if not any(axes_of):
            return whole
        mesh = self._mesh(sharding)
        if mesh is None:
            return None
        shard: Values | None = whole
        for dimension, axes in enumerate(axes_of, 1):
            if axes and shard is not None:
                shard = _shard_dimension(shard, dimension, mesh_axes_groups(mesh, axes))
        return shard

    def _leaving(
        self, op: ir.Operation, position: int, call: _CallContext, depth: int
    ) -> Values | None:
        """Returns a result of a manual computation that is whole and the same on all devices."""
        sharding = sharding_per_value(op.attributes["out_shardings"])[position]
        manual = manual_axes(op)
        mesh = self._mesh(sharding)
        if mesh is None or manual.intersection(sharding_axes(sharding)[1]):
            return None
        known = self._value_in_call(ManualComputation(op).yield_of(position), call, depth)
        if known is None or len(known) == 1:
            return known
        for group in mesh_axes_groups(mesh, [AxisRef(axis) for axis in sorted(manual)]):
            if (known[list(group)] != known[group[0]]).any():
                return None
        return known

    def _mesh(self, sharding: ir.Attribute) -> DeviceMesh | None:
        mesh = self.facts.meshes.get(sharding_axes(sharding)[0])
        return mesh if mesh is not None and mesh.size == self.facts.grid.size else None


def _shard_dimension(
    whole: Values, dimension: int, groups: Sequence[Sequence[int]]
) -> Values | None:
    """Divides a dimension into equal parts, the n-th for the n-th member of each group."""
    parts, devices = len(groups[0]), sum(len(group) for group in groups)
    if whole.shape[dimension] % parts:
        return None
    size = whole.shape[dimension] // parts
    rows = np.broadcast_to(whole, (devices, *whole.shape[1:]))
    number = {device: n for group in groups for n, device in enumerate(group)}
    shards = [
        np.take(rows[device], number[device] * size + np.arange(size), dimension - 1)
        for device in range(devices)
    ]
    return np.stack(shards)


_DEEPEST_FOLDED = 16  # ops from a value to its constants
_MOST_FOLDED = 64  # ops visited, for one value
_RIGHT = frozenset({"power", "remainder"})  # only the right operand decides


def fold_value(value: ir.Value) -> Values | None:
    """Returns the integers or booleans that a value surely is, in its shape; None if unknown."""
    known = _Folding().evaluate_value(value, 0)
    return None if known is None else known[0]


class _Folding:
    """Computes values with a leading dimension of size 1; arguments of blocks are unknown."""

    def __init__(self) -> None:
        self.left = _MOST_FOLDED

    def evaluate_value(self, value: ir.Value, depth: int) -> Values | None:
        op, dtype = producer(value), element_dtype(value.type)
        self.left -= 1
        if op is None or dtype is None or depth > _DEEPEST_FOLDED or self.left < 0:
            return None
        if not has_few_integers(value.type, _LARGEST):
            return None
        number = self._forced_number(op, dtype, depth + 1)
        if number is not None:
            return np.broadcast_to(np.array(number, dtype), (1, *shape_of(value)))
        if op.name not in COMPUTED:
            return None
        return evaluate_op(op, (self.evaluate_value(operand, depth + 1) for operand in op.operands))

    def _forced_number(self, op: ir.Operation, dtype: np.dtype[Any], depth: int) -> int | None:
        """Returns the number that all elements are, whatever some operands are; None if unknown."""
        name = op.name.removeprefix("stablehlo.")
        if name == "compare":
            one, other = op.operands
            # Not for floats, because NaN differs from itself.
            if one != other or element_dtype(one.type) is None:
                return None
            return int(comparison_direction(op) in HOLD_OF_EQUALS)
        if name in ("subtract", "xor"):
            return 0 if op.operands[0] == op.operands[1] else None
        if name == "clamp":
            low, high = (self._splat(op.operands[i], depth) for i in (0, 2))
            return low if low == high else None
        width = 1 if dtype.kind == "b" else 8 * dtype.itemsize
        known = absorbing_integer(name, width, signed=dtype.kind == "i")
        if known is None:
            return None
        absorbing, result = known
        operands = list(op.operands)[1:] if name in _RIGHT else list(op.operands)
        is_decided = any(self._splat(operand, depth) == absorbing for operand in operands)
        return result if is_decided else None

    def _splat(self, value: ir.Value, depth: int) -> int | None:
        known = self.evaluate_value(value, depth)
        is_splat = known is not None and known.size and (known == known.flat[0]).all()
        return int(known.flat[0]) if known is not None and is_splat else None
