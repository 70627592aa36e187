"""Which dimensions of an op must be whole on every device before it can run on parts.

Shardy's rules say so for most ops. Some of its passed-through dimensions are not (a pad that adds
as much as it takes away), and some ops have no rule that can be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.reducers import (
    identity_of,
    is_identity_of,
    reducer_kind,
    starts_idempotent,
)
from stablehlo_tools.analysis.tensor_shardings import rank_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import element_of, shape_of

# A dimension of a tensor: the tensor's number, operands first and then results, and the dimension.
Place = tuple[int, int]

# Ops whose result depends on more than its operands' elements at the same place, whatever a rule
# says: every device has to make all of it.
_WHOLE_OPS = frozenset(
    f"stablehlo.{name}"
    for name in (
        "rng_bit_generator",
        "batch_norm_training",
        "batch_norm_grad",
        "batch_norm_inference",
    )
)
_DILATIONS = ("base_dilations", "window_dilations")
_MOST_PIECES = 4  # the rounds that moving one of them takes, at most
_BATCH_DIMS = "num_batch_dims"
# Custom calls that compute each row of the last dimension, or each element, on its own.
_BATCHED_TARGETS = frozenset({"mhlo.topk", "mhlo.erf", "mhlo.erf_inv", "mhlo.tan"})


def is_whole_op(op: ir.Operation) -> bool:
    """Whether an op must run on whole tensors."""
    if op.name == "stablehlo.custom_call":
        target = ir.StringAttr(op.attributes["call_target_name"]).value
        return target not in _BATCHED_TARGETS and not batch_dims(op)
    return op.name in _WHOLE_OPS


def batch_dims(call: ir.Operation) -> int:
    """The leading dimensions along which jax says that a custom call computes each on its own."""
    frontend = call.attributes.get("mhlo.frontend_attributes")
    if not isinstance(frontend, ir.DictAttr) or _BATCH_DIMS not in frontend:
        return 0
    count = int(ir.StringAttr(frontend[_BATCH_DIMS]).value)
    batched = all(rank_of(value) >= count for value in (*call.operands, *call.results))
    return count if batched else 0


def is_row_update(update: ir.Operation, dim: int) -> bool:
    """Whether a dynamic_update_slice writes one row of a longer dimension."""
    return shape_of(update.operands[1])[dim] == 1 < shape_of(update.operands[0])[dim]


def moved_dim(op: ir.Operation) -> int | None:
    """The first dimension of a slice that takes one of several equal pieces, or of a pad that puts
    such a piece among others; None where there is none."""
    whole, part = shape_of(op.operands[0]), shape_of(op.results[0])
    if op.name == "stablehlo.slice":
        starts, strides = (integers(op, name) for name in ("start_indices", "strides"))
    else:
        whole, part = part, whole
        starts, highs, inner = (integers(op, name) for name in _PAD_EDGES)
        strides = [
            1 + abs(between) + (high < 0) for high, between in zip(highs, inner, strict=True)
        ]
    for dim, (all_, one) in enumerate(zip(whole, part, strict=True)):
        pieces, rest = divmod(all_, one) if one else (0, 1)
        equal = 1 < pieces <= _MOST_PIECES and not rest and strides[dim] == 1
        if equal and starts[dim] >= 0 and starts[dim] % one == 0:
            return dim
    return None


def joins_pieces(concatenate: ir.Operation) -> bool:
    """Whether a concatenate joins few operands, of one size and a type that has a plain zero."""
    kinds = {str(value.type) for value in concatenate.operands}
    element = element_of(concatenate.results[0])
    few = len(concatenate.operands) <= _MOST_PIECES
    return few and len(kinds) == 1 and isinstance(element, ir.FloatType | ir.IntegerType)


def is_piecewise(op: ir.Operation, dim: int) -> bool:
    """Whether a slice or window takes one element or window of each of the equal, adjacent pieces
    of a dimension."""
    whole = shape_of(op.operands[0])[dim]
    if op.name == "stablehlo.slice":
        stride, start = (integers(op, name)[dim] for name in ("strides", "start_indices"))
        pieces = shape_of(op.results[0])[dim]
        return stride > 1 and start < stride and pieces * stride == whole
    rank = rank_of(op.operands[0])
    window, stride = (
        integers(op, name, [1] * rank)[dim] for name in ("window_dimensions", "window_strides")
    )
    padded = any(integers(op, "padding", [0] * (2 * rank))[2 * dim : 2 * dim + 2])
    dilated = any(integers(op, name, [1] * rank)[dim] != 1 for name in _DILATIONS)
    return window == stride > 1 and whole % stride == 0 and not padded and not dilated


def undividable(op: ir.Operation) -> set[Place]:
    """The dimensions that must be whole, beyond what the op's rule says."""
    find = _FINDERS.get(op.name)
    return set(find(op)) if find else set()


def everywhere(op: ir.Operation, dims: Iterable[int]) -> Iterable[Place]:
    """The same dimensions of every tensor of an op that has them."""
    listed = list(dims)
    for number, value in enumerate((*op.operands, *op.results)):
        yield from ((number, dim) for dim in listed if dim < rank_of(value))


def _pad(op: ir.Operation) -> Iterable[Place]:
    edges = [integers(op, name) for name in _PAD_EDGES]
    padded = [dim for dim, three in enumerate(zip(*edges, strict=True)) if any(three)]
    return everywhere(op, (dim for dim in padded if dim != moved_dim(op)))


_PAD_EDGES = ("edge_padding_low", "edge_padding_high", "interior_padding")


def _sized(op: ir.Operation) -> Iterable[Place]:
    """A slice: the dimensions that it shortens, but for those cut into equal pieces."""
    whole, part = op.operands[0].type, op.results[0].type
    cut = [dim for dim in _differing(whole, part) if not is_piecewise(op, dim)]
    return everywhere(op, (dim for dim in cut if dim != moved_dim(op)))


def _shortened(op: ir.Operation) -> Iterable[Place]:
    """A dynamic slice: the dimensions that it shortens."""
    return everywhere(op, _differing(op.operands[0].type, op.results[0].type))


def _dynamic_update(op: ir.Operation) -> Iterable[Place]:
    """The update must be whole where it is shorter; so must all where it is longer than 1."""
    for dim in _differing(op.operands[0].type, op.operands[1].type):
        yield (1, dim)
        if not is_row_update(op, dim):
            yield from ((0, dim), (len(op.operands), dim))


def _windowed(op: ir.Operation) -> Iterable[Place]:
    rank = rank_of(op.operands[0])
    ones = [1] * rank
    window = integers(op, "window_dimensions", ones)
    strides = integers(op, "window_strides", ones)
    padding = integers(op, "padding", [0] * (2 * rank))
    dilations = [integers(op, name, ones) for name in _DILATIONS]
    for dim in range(rank):
        trivial = window[dim] == strides[dim] == 1 and not any(padding[2 * dim : 2 * dim + 2])
        if is_piecewise(op, dim):
            continue
        if not trivial or any(dilation[dim] != 1 for dilation in dilations):
            yield from everywhere(op, [dim])


def _convolution(op: ir.Operation) -> Iterable[Place]:
    """The spatial dimensions."""
    numbers = bindings.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    yield from ((0, dim) for dim in numbers.input_spatial_dimensions)
    yield from ((1, dim) for dim in numbers.kernel_spatial_dimensions)
    yield from ((2, dim) for dim in numbers.output_spatial_dimensions)


def _reduce(op: ir.Operation) -> Iterable[Place]:
    """The reduced dimensions, where parts of them cannot be combined."""
    if combines_by(op) is None:
        for dim in integers(op, "dimensions"):
            yield from ((number, dim) for number in range(len(op.operands) // 2))


def combines_by(reduce: ir.Operation) -> Literal["all_reduce", "all_gather"] | None:
    """What makes the whole of a reduce's partial results: an all_reduce with the same reducer, or
    for several values at once (an argmax) an all_gather and the reduce once more."""
    kind = reducer_kind(reduce.regions[0].blocks[0]) if len(reduce.results) == 1 else None
    if kind is not None and is_identity_of(kind, reduce.operands[1]):
        return "all_reduce"
    if not starts_idempotent(reduce):
        return None
    return "all_reduce" if kind is not None else "all_gather"


def _gather(op: ir.Operation) -> Iterable[Place]:
    """Dimensions that are cut: in the result, and in the operand unless indexed by element."""
    numbers = bindings.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    sizes = integers(op, "slice_sizes")
    shape = ir.RankedTensorType(op.operands[0].type).shape
    batching = list(numbers.operand_batching_dims)
    outside = [*batching, *numbers.collapsed_slice_dims]
    kept = [dim for dim in range(len(shape)) if dim not in outside]
    maskable = identity_of("add", element_of(op.operands[0])) is not None
    for dim, size in enumerate(sizes):
        indexed = size == 1 and dim in numbers.start_index_map and maskable
        if size != shape[dim] and dim not in batching and not indexed:
            yield (0, dim)
    for dim, result_dim in zip(kept, numbers.offset_dims, strict=True):
        if sizes[dim] != shape[dim]:
            yield (2, result_dim)


def _scatter(op: ir.Operation) -> Iterable[Place]:
    """Window dimensions that are written in part; all of a scatter into several tensors."""
    if len(op.results) > 1:
        yield from all_places(op)
        return
    numbers = bindings.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    operand = ir.RankedTensorType(op.operands[0].type).shape
    update = ir.RankedTensorType(op.operands[2].type).shape
    inserted = list(numbers.inserted_window_dims)
    outside = [*inserted, *numbers.input_batching_dims]
    kept = [dim for dim in range(len(operand)) if dim not in outside]
    for dim, update_dim in zip(kept, numbers.update_window_dims, strict=True):
        if operand[dim] != update[update_dim]:
            yield from ((0, dim), (2, update_dim), (3, dim))
    kind = reducer_kind(op.regions[0].blocks[0])
    if kind is None or identity_of(kind, element_of(op.operands[0])) is None:
        yield from ((2, dim) for dim in _free_update_dims(op, len(update)))
    for dim in inserted:
        if dim not in numbers.scattered_dims_to_operand_dims:
            yield from ((0, dim), (3, dim))


def _free_update_dims(op: ir.Operation, rank: int) -> list[int]:
    """The dimensions of a scatter's update along which several updates may meet in one element."""
    numbers = bindings.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    outer = [dim for dim in range(rank) if dim not in numbers.update_window_dims]
    indexed = [d for d in range(rank_of(op.operands[1])) if d != numbers.index_vector_dim]
    batching = list(numbers.scatter_indices_batching_dims)
    return [dim for dim, source in zip(outer, indexed, strict=True) if source not in batching]


def all_places(op: ir.Operation) -> Iterable[Place]:
    """Every dimension of every tensor."""
    for number, value in enumerate((*op.operands, *op.results)):
        yield from ((number, dim) for dim in range(rank_of(value)))


def _differing(one: ir.Type, other: ir.Type) -> list[int]:
    shapes = ir.RankedTensorType(one).shape, ir.RankedTensorType(other).shape
    return [dim for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]


def integers(op: ir.Operation, name: str, default: Sequence[int] = ()) -> list[int]:
    """An attribute's integers, row by row; the default where the op has none."""
    attribute = op.attributes.get(name)
    if attribute is None:
        return list(default)
    if isinstance(attribute, ir.DenseIntElementsAttr):
        return [int(value) for value in np.array(attribute).reshape(-1)]
    return [int(value) for value in ir.DenseI64ArrayAttr(attribute)]


_FINDERS: dict[str, Callable[[ir.Operation], Iterable[Place]]] = {
    "stablehlo.pad": _pad,
    "stablehlo.slice": _sized,
    "stablehlo.dynamic_slice": _shortened,
    "stablehlo.dynamic_update_slice": _dynamic_update,
    "stablehlo.reduce_window": _windowed,
    "stablehlo.select_and_scatter": _windowed,
    "stablehlo.convolution": _convolution,
    "stablehlo.reduce": _reduce,
    "stablehlo.gather": _gather,
    "stablehlo.scatter": _scatter,
}
