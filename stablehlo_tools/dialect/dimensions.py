"""Relates the dimensions of each op's operands and results: which correspond, and how.

    relation = dimensions_of(op)        # OpDimensions; None for ops that have none

`factors.py` defines the parts of the relation. It is used in three ways:

1. Find where a dimension of an operand goes (for example to follow a batch forwards):

       for link in relation.of_operand(0, dim):
           if link.role is FactorRole.KEPT:
               follow(op.results[link.result.tensor], link.result.dim)
               others = link.factor.operands          # operands that must be cut as well

2. Find the elements of an operand that a result needs (backwards: a demand, a window, a box):

       for link in relation.of_result(0, dim):
           if link.role in (FactorRole.KEPT, FactorRole.MOVED):
               taken = link.operand.positions(link.factor.size)    # a range, e.g. of a slice
               put = link.result.positions(link.factor.size)       # its range in the result

   A slice has a range of the operand; a pad and a concatenate have a range of the result. A
   reverse has a descending one. A dynamic_slice has a `start` of None.

3. Find the dimensions that must be whole, or are equal along (for shardings, for other sizes):

       whole = [f for f in relation.factors if f.role not in PASSED_THROUGH]
       alike = all(f.role is FactorRole.REPEATED for f in relation.along_result(0, dim))

No relation exists for control flow and calls, whose clients visit their regions; for custom calls
other than the kernels of `kernels/`, composites and random numbers; for constants
(`ir.values.is_splat` says if all elements are equal); for tensors with dynamic dimensions; and for
ops with values other than tensors. A client that supports fewer ops lists them, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import (
    conv_numbers,
    dot_numbers,
    gather_numbers,
    scatter_numbers,
)
from stablehlo_tools.dialect.factors import (
    Along,
    Factor,
    FactorRole,
    OpDimensions,
    Shape,
    Shapes,
    with_whole,
)
from stablehlo_tools.dialect.kernels.table import kernel_factors
from stablehlo_tools.dialect.microbatch_marks import ROWS
from stablehlo_tools.dialect.reshapes import DimPart, reshape_factors, without_empty
from stablehlo_tools.dialect.traits import ELEMENTWISE

Factors = Sequence[Factor]
Rule = Callable[[ir.Operation, Shapes, Shapes], Iterable[Factor] | None]


def dimensions_of(op: ir.Operation) -> OpDimensions | None:
    """Returns the relation of an op's dimensions; None without one (see above)."""
    rule = _RULES.get(op.name)
    if rule is None:
        return None
    operands, results = static_shapes(op.operands), static_shapes(op.results)
    if operands is None or results is None:
        return None
    factors = _own_rows(op, operands, results) if ROWS in op.attributes else None
    factors = factors or rule(op, operands, results)
    return None if factors is None else OpDimensions(operands, results, tuple(factors))


def static_shapes(values: Iterable[ir.Value]) -> Shapes | None:
    """Returns the shapes of tensors; None if one is not a tensor or has a dynamic dimension."""
    shapes: list[Shape] = []
    for value in values:
        shape = static_shape(value.type)
        if shape is None:
            return None
        shapes.append(shape)
    return tuple(shapes)


def static_shape(type_: ir.Type) -> Shape | None:
    """Returns the shape of a tensor type; None for dynamic shapes and other types."""
    if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
        return None
    return tuple(type_.shape)


# Attributes that the rules read.


def integers(op: ir.Operation, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
    """Returns a list attribute of integers, or a matrix row by row; `default` without it."""
    if name not in op.attributes:
        return tuple(default)
    attribute = op.attributes[name]
    if isinstance(attribute, ir.DenseIntElementsAttr):
        return tuple(int(number) for number in np.array(attribute).reshape(-1))
    return tuple(ir.DenseI64ArrayAttr(attribute))


def integer(op: ir.Operation, name: str, default: int = 0) -> int:
    """Returns an integer attribute; `default` without it."""
    return ir.IntegerAttr(op.attributes[name]).value if name in op.attributes else default


# Functions without an op parameter are pure and cached by shapes.


def _by_shapes(relate: Callable[[Shapes, Shapes], Factors | None]) -> Rule:
    """Returns the rule of ops whose relation depends only on shapes."""
    return lambda op, operands, results: relate(operands, results)


def _by_list(name: str, relate: Callable[[tuple[int, ...], Shapes, Shapes], Factors]) -> Rule:
    """Returns the rule of ops whose relation depends on shapes and a list attribute."""
    return lambda op, operands, results: relate(integers(op, name), operands, results)


def _kept(size: int, operands: Iterable[tuple[int, int]], *results: tuple[int, int]) -> Factor:
    return _factor(size, FactorRole.KEPT, operands, *results)


def _factor(
    size: int, role: FactorRole, operands: Iterable[tuple[int, int]], *results: tuple[int, int]
) -> Factor:
    """Returns a factor that fills each of its dimensions, given as pairs (tensor, dimension)."""
    return Factor(
        size,
        role,
        tuple(Along(tensor, dim) for tensor, dim in operands),
        tuple(Along(tensor, dim) for tensor, dim in results),
    )


@lru_cache(maxsize=4096)
def _elementwise(operands: Shapes, results: Shapes) -> Factors | None:
    """Relates operands that have the result's shape or are scalars."""
    (shape,) = results
    if any(operand not in (shape, ()) for operand in operands):
        return None
    whole = [i for i, operand in enumerate(operands) if operand]
    return [_kept(size, ((i, d) for i in whole), (0, d)) for d, size in enumerate(shape)]


@lru_cache(maxsize=1024)
def _pairs(operands: Shapes, results: Shapes) -> Factors | None:
    """Relates operand i to result i, which must have the same shape."""
    if operands != results:
        return None
    return [
        _kept(size, [(i, d)], (i, d))
        for i, shape in enumerate(operands)
        for d, size in enumerate(shape)
    ]


def _iota(op: ir.Operation, operands: Shapes, results: Shapes) -> Factors:
    counted = integer(op, "iota_dimension")
    return [
        _factor(size, FactorRole.WHOLE if d == counted else FactorRole.REPEATED, (), (0, d))
        for d, size in enumerate(results[0])
    ]


# Ops that reorder, resize or add dimensions.


@lru_cache(maxsize=1024)
def _transpose(order: tuple[int, ...], operands: Shapes, results: Shapes) -> Factors:
    return [_kept(results[0][r], [(0, d)], (0, r)) for r, d in enumerate(order)]


@lru_cache(maxsize=1024)
def _broadcast_to(dims: tuple[int, ...], operands: Shapes, results: Shapes) -> Factors:
    """Relates a broadcast; a dimension of size 1 may become a longer one, which repeats it."""
    source = {result: dim for dim, result in enumerate(dims)}
    factors: list[Factor] = []
    for result, size in enumerate(results[0]):
        dim = source.get(result)
        if dim is None:
            factors.append(_factor(size, FactorRole.REPEATED, (), (0, result)))
        elif operands[0][dim] == size:
            factors.append(_kept(size, [(0, dim)], (0, result)))
        else:
            one = Along(0, dim, 0, 0)
            factors.append(Factor(size, FactorRole.REPEATED, (one,), (Along(0, result),)))
    return factors


@lru_cache(maxsize=4096)
def _reshape(operands: Shapes, results: Shapes) -> Factors:
    """Relates a reshape: factors of only one shape are WHOLE, dimensions of size 1 have none."""
    before, after = operands[0], results[0]
    filled = without_empty(before, after)
    if filled is None:
        factors = [_factor(n, FactorRole.WHOLE, [(0, d)]) for d, n in enumerate(before)]
        return factors + [_factor(n, FactorRole.WHOLE, (), (0, d)) for d, n in enumerate(after)]
    factors: list[Factor] = []
    before, after = filled
    for factor in reshape_factors(before, after):
        one, other = factor.before, factor.after
        if one is None or other is None:
            role = FactorRole.WHOLE
        else:
            role = _part_role(before[one.dim] == factor.size, after[other.dim] == factor.size)
        factors.append(Factor(factor.size, role, _part(one), _part(other)))
    return factors


def _part(part: DimPart | None) -> tuple[Along, ...]:
    return () if part is None else (Along(0, part.dim, 0, part.step),)


def _part_role(fills_operand: bool, fills_result: bool) -> FactorRole:
    """Returns the role of an independent factor, which may share its dimensions with others."""
    if fills_operand:
        return FactorRole.KEPT if fills_result else FactorRole.MERGED
    return FactorRole.SPLIT if fills_result else FactorRole.REGROUPED


def _bitcast_convert(op: ir.Operation, operands: Shapes, results: Shapes) -> Factors:
    """Relates a bitcast. If the element width changes, one shape has a last dimension of pieces."""
    before, after = operands[0], results[0]
    shared = min(len(before), len(after))
    factors = [_kept(before[d], [(0, d)], (0, d)) for d in range(shared)]
    factors += [_factor(n, FactorRole.WHOLE, [(0, shared)]) for n in before[shared:]]
    return factors + [_factor(n, FactorRole.WHOLE, (), (0, shared)) for n in after[shared:]]


# Ops that move elements to static positions.


def _slice(op: ir.Operation, operands: Shapes, results: Shapes) -> Iterator[Factor]:
    starts, strides = integers(op, "start_indices"), integers(op, "strides")
    for d, (before, after) in enumerate(zip(operands[0], results[0], strict=True)):
        if before == after:
            yield _kept(after, [(0, d)], (0, d))
            continue
        taken = Along(0, d, starts[d], strides[d])
        yield Factor(after, FactorRole.MOVED, (taken,), (Along(0, d),))


def _pad(op: ir.Operation, operands: Shapes, results: Shapes) -> Iterator[Factor]:
    """Relates a pad. Elements that negative padding cuts off, and padding, are in no factor."""
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    edges = zip(*(integers(op, name) for name in names), strict=True)
    for d, (low, high, interior) in enumerate(edges):
        size, padded = operands[0][d], results[0][d]
        if not (low or high or interior):
            yield _kept(size, [(0, d)], (0, d))
            continue
        step = 1 + interior
        first = -(min(low, 0) // step)
        put = range(low + first * step, min(low + size * step, padded), step)
        count = max(min(len(put), size - first), 0)
        taken, put = Along(0, d, first), Along(0, d, low + first * step, step)
        yield Factor(count, FactorRole.MOVED, (taken,), (put,))


def _concatenate(op: ir.Operation, operands: Shapes, results: Shapes) -> Iterator[Factor]:
    joined = integer(op, "dimension")
    for d, size in enumerate(results[0]):
        if d != joined:
            yield _kept(size, ((i, d) for i in range(len(operands))), (0, d))
            continue
        start = 0
        for i, shape in enumerate(operands):
            put = Along(0, d, start)
            yield Factor(shape[d], FactorRole.MOVED, (Along(i, d),), (put,))
            start += shape[d]


# Ops that move elements to positions known at run time.


def _dynamic_update_slice(op: ir.Operation, operands: Shapes, results: Shapes) -> Iterator[Factor]:
    for d, (whole, part) in enumerate(zip(operands[0], operands[1], strict=True)):
        if whole == part:
            yield _kept(whole, [(0, d), (1, d)], (0, d))
            continue
        yield _factor(whole, FactorRole.INDEXED, [(0, d)], (0, d))
        yield Factor(part, FactorRole.INDEXED, (Along(1, d),), (Along(0, d, None),))


def _gather(op: ir.Operation, operands: Shapes, results: Shapes) -> Iterator[Factor]:
    """Relates a gather. Reads the slice sizes from the result, so that dynamic_gather works too."""
    numbers = gather_numbers(op)
    (operand, indices, *_), (result,) = operands, results
    batching = dict(zip(numbers.indices_batching, numbers.operand_batching, strict=True))
    batch_dims = numbers.batch_dims(len(result))
    for index_dim, dim in zip(numbers.index_dims(len(indices)), batch_dims, strict=True):
        beside = [(0, batching[index_dim])] if index_dim in batching else []
        yield _kept(result[dim], [*beside, (1, index_dim)], (0, dim))
    for dim, offset in zip(numbers.window_dims(len(operand)), numbers.windows, strict=True):
        size = result[offset]
        if size == operand[dim]:  # its start is clamped to 0
            yield _kept(size, [(0, dim)], (0, offset))
            continue
        is_indexed = dim in numbers.index_map
        role = FactorRole.INDEXED if is_indexed else FactorRole.MOVED
        taken = Along(0, dim, None if is_indexed else 0)
        yield Factor(size, role, (taken,), (Along(0, offset),))
    for dim in numbers.omitted:
        is_indexed = dim in numbers.index_map
        role = FactorRole.INDEXED if is_indexed else FactorRole.MOVED
        yield Factor(1, role, (Along(0, dim, None if is_indexed else 0),), ())
    if numbers.index_vector < len(indices):
        size = indices[numbers.index_vector]
        yield _factor(size, FactorRole.WHOLE, [(1, numbers.index_vector)])
    if len(operands) > 2:  # the slice sizes of a dynamic_gather
        yield _factor(operands[2][0], FactorRole.WHOLE, [(2, 0)])


def _scatter(op: ir.Operation, operands: Shapes, results: Shapes) -> Iterator[Factor]:
    """Relates a scatter.

    Windows that are partly outside of an operand are dropped whole. A window dimension with an
    index is thus INDEXED even if it is as long as the operand's.
    """
    numbers = scatter_numbers(op)
    count = len(results)
    operand, indices, update = operands[0], operands[count], operands[count + 1]
    inputs, updates = range(count), range(count + 1, 2 * count + 1)
    batching = dict(zip(numbers.indices_batching, numbers.operand_batching, strict=True))
    batch_dims = numbers.batch_dims(len(update))
    for index_dim, dim in zip(numbers.index_dims(len(indices)), batch_dims, strict=True):
        beside = [(count, index_dim), *((i, dim) for i in updates)]
        if index_dim not in batching:
            yield _factor(update[dim], FactorRole.REDUCED, beside)
            continue
        own = batching[index_dim]
        along = [(i, own) for i in inputs]
        yield _kept(operand[own], [*along, *beside], *along)
    for dim, window in zip(numbers.window_dims(len(operand)), numbers.windows, strict=True):
        is_indexed = dim in numbers.index_map
        along = [(i, dim) for i in inputs]
        if operand[dim] == update[window] and not is_indexed:
            yield _kept(operand[dim], [*along, *((i, window) for i in updates)], *along)
            continue
        yield _factor(operand[dim], FactorRole.INDEXED, along, *along)
        put = tuple(Along(i, dim, None if is_indexed else 0) for i in inputs)
        taken = tuple(Along(i, window) for i in updates)
        role = FactorRole.INDEXED if is_indexed else FactorRole.MOVED
        yield Factor(update[window], role, taken, put)
    for dim in numbers.omitted:
        along = [(i, dim) for i in inputs]
        yield _factor(operand[dim], FactorRole.INDEXED, along, *along)
    if numbers.index_vector < len(indices):
        size = indices[numbers.index_vector]
        yield _factor(size, FactorRole.WHOLE, [(count, numbers.index_vector)])


# Contractions and reductions.


def _dot_general(op: ir.Operation, operands: Shapes, results: Shapes) -> Factors:
    numbers = dot_numbers(op)
    lhs, rhs = operands
    batching = list(zip(numbers.lhs_batching, numbers.rhs_batching, strict=True))
    standing = [[(0, one), (1, other)] for one, other in batching]
    standing += [[(0, d)] for d in numbers.lhs_free(len(lhs))]
    standing += [[(1, d)] for d in numbers.rhs_free(len(rhs))]
    factors = [_kept(results[0][r], along, (0, r)) for r, along in enumerate(standing)]
    return factors + [
        _factor(lhs[one], FactorRole.CONTRACTED, [(0, one), (1, other)])
        for one, other in zip(numbers.lhs_contracting, numbers.rhs_contracting, strict=True)
    ]


def _dot(op: ir.Operation, operands: Shapes, results: Shapes) -> Factors:
    lhs, rhs = operands
    summed = len(lhs) - 1
    standing = [[(0, d)] for d in range(summed)] + [[(1, d)] for d in range(1, len(rhs))]
    factors = [_kept(results[0][r], along, (0, r)) for r, along in enumerate(standing)]
    return [*factors, _factor(lhs[summed], FactorRole.CONTRACTED, [(0, summed), (1, 0)])]


def _convolution(op: ir.Operation, operands: Shapes, results: Shapes) -> Iterator[Factor]:
    """Relates a convolution. Groups are the outer factor of features and batches.

    Spatial dimensions are WINDOWED, even if the kernel has size 1 along them.
    """
    numbers = conv_numbers(op)
    (image, kernel), (result,) = operands, results
    batch_groups = integer(op, "batch_group_count", 1)
    feature_groups = integer(op, "feature_group_count", 1)
    batch, features = numbers.input_batch, numbers.input_feature
    made, outputs = numbers.kernel_output_feature, numbers.output_feature
    groups = batch_groups * feature_groups
    each_batch = image[batch] // batch_groups
    each_input = image[features] // feature_groups
    each_output = kernel[made] // groups
    if groups > 1:
        dim, step = (batch, each_batch) if batch_groups > 1 else (features, each_input)
        yield Factor(
            groups,
            FactorRole.REGROUPED,
            (Along(0, dim, 0, step), Along(1, made, 0, each_output)),
            (Along(0, outputs, 0, each_output),),
        )
    of_batch = _part_role(batch_groups == 1, True)
    yield _factor(each_batch, of_batch, [(0, batch)], (0, numbers.output_batch))
    yield _factor(each_output, _part_role(groups == 1, groups == 1), [(1, made)], (0, outputs))
    summed = [(0, features), (1, numbers.kernel_input_feature)]
    yield _factor(each_input, FactorRole.CONTRACTED, summed)
    rank = len(numbers.input_spatial)
    strides = integers(op, "window_strides", [1] * rank)
    padding = integers(op, "padding", [0] * (2 * rank))
    spread = integers(op, "lhs_dilation", [1] * rank)
    apart = integers(op, "rhs_dilation", [1] * rank)
    for i, (one, window, other) in enumerate(
        zip(numbers.input_spatial, numbers.kernel_spatial, numbers.output_spatial, strict=True)
    ):
        start = -padding[2 * i] if spread[i] == 1 else None
        places = Along(0, one, start, strides[i])
        within = Along(0, one, 0 if spread[i] == 1 else None, apart[i])
        yield Factor(result[other], FactorRole.WINDOWED, (places,), (Along(0, other),))
        yield Factor(kernel[window], FactorRole.WINDOWED, (within, Along(1, window)), ())


@lru_cache(maxsize=1024)
def _reduce(dims: tuple[int, ...], operands: Shapes, results: Shapes) -> Factors:
    """Relates a reduce. The second half of the operands are initial values, of rank 0."""
    count = len(results)
    factors: list[Factor] = []
    left = 0
    for d, size in enumerate(operands[0]):
        along = [(i, d) for i in range(count)]
        if d in dims:
            factors.append(_factor(size, FactorRole.REDUCED, along))
            continue
        factors.append(_kept(size, along, *((i, left) for i in range(count))))
        left += 1
    return factors


def _reduce_window(op: ir.Operation, operands: Shapes, results: Shapes) -> Iterator[Factor]:
    count = len(results)
    for d, window in enumerate(_windows(op, len(operands[0]))):
        size, places = operands[0][d], results[0][d]
        if window.is_element:
            along = [(i, d) for i in range(count)]
            yield _kept(size, along, *along)
            continue
        put = tuple(Along(i, d) for i in range(count))
        taken = tuple(Along(i, d, window.start, window.stride) for i in range(count))
        yield Factor(places, FactorRole.WINDOWED, taken, put)
        inside = tuple(Along(i, d, window.origin, window.dilation) for i in range(count))
        yield Factor(window.size, FactorRole.WINDOWED, inside, ())


def _select_and_scatter(op: ir.Operation, operands: Shapes, results: Shapes) -> Iterator[Factor]:
    """Relates a select_and_scatter. Each element of operand 1 belongs to a window of operand 0, and
    the result has it at one position of that window."""
    for d, window in enumerate(_windows(op, len(operands[0]))):
        size, places = operands[0][d], operands[1][d]
        if window.is_element:
            yield _kept(size, [(0, d), (1, d)], (0, d))
            continue
        taken = Along(0, d, window.start, window.stride)
        inside = Along(0, d, window.origin, window.dilation)
        yield Factor(places, FactorRole.WINDOWED, (taken, Along(1, d)), (taken,))
        yield Factor(window.size, FactorRole.WINDOWED, (inside,), (inside,))


class _WindowDimension:
    """The window of an op along one dimension."""

    def __init__(self, size: int, stride: int, low: int, high: int, spread: int, apart: int):
        self.size = size
        self.stride = stride
        self.dilation = apart
        self.start = -low if spread == 1 else None  # base dilation adds positions without elements
        self.origin = 0 if spread == 1 else None
        self.is_element = size == stride == spread == apart == 1 and not (low or high)


def _windows(op: ir.Operation, rank: int) -> list[_WindowDimension]:
    ones = [1] * rank
    padding = integers(op, "padding", [0] * (2 * rank))
    rows = zip(
        integers(op, "window_dimensions", ones),
        integers(op, "window_strides", ones),
        padding[0::2],
        padding[1::2],
        integers(op, "base_dilations", ones),
        integers(op, "window_dilations", ones),
        strict=True,
    )
    return [_WindowDimension(*row) for row in rows]


# Ops on matrices and rows, which they need whole.


def _last(count: int) -> Rule:
    """Returns the rule of ops on each matrix (2) or row (1) of the last dimensions."""

    def rule(op: ir.Operation, operands: Shapes, results: Shapes) -> Factors:
        rank = len(operands[0])
        return _but(frozenset(range(rank - count, rank)), operands, results)

    return rule


def _triangular_solve(op: ir.Operation, operands: Shapes, results: Shapes) -> Factors:
    """Relates a triangular_solve. Rows and columns of both matrices are WHOLE.

    Each column of a solution is independent, but compilers call a routine for each matrix.
    """
    rank = len(operands[0])
    solved = rank - (2 if ir.BoolAttr(op.attributes["left_side"]).value else 1)
    rows = [(0, rank - 2), (0, rank - 1), (1, solved)]
    factors = [_kept(operands[0][d], [(0, d), (1, d)], (0, d)) for d in range(rank - 2)]
    factors.append(_factor(operands[1][solved], FactorRole.WHOLE, rows, (0, solved)))
    other = 2 * rank - 3 - solved
    return [*factors, _factor(operands[1][other], FactorRole.WHOLE, [(1, other)], (0, other))]


@lru_cache(maxsize=1024)
def _but(whole: frozenset[int], operands: Shapes, results: Shapes) -> Factors:
    """Relates all dimensions as KEPT except `whole`, which may change their sizes."""
    return [
        _factor(
            size,
            FactorRole.WHOLE if d in whole else FactorRole.KEPT,
            ((i, d) for i in range(len(operands))),
            *((i, d) for i in range(len(results))),
        )
        for d, size in enumerate(operands[0])
    ]


def _batch_norm(op: ir.Operation, operands: Shapes, results: Shapes) -> Iterator[Factor]:
    """Relates a batch norm. Statistics have one dimension, the features'.

    Inference is elementwise; the others need statistics over all other dimensions.
    """
    features = integer(op, "feature_index")
    rank = len(operands[0])
    for d, size in enumerate(operands[0]):
        if d == features:
            one = [(i, d if len(shape) == rank and i in (0, 4) else 0)
                   for i, shape in enumerate(operands)]  # fmt: skip
            other = [(i, d if not i else 0) for i in range(len(results))]
            yield _kept(size, one, *other)
            continue
        full = [i for i, shape in enumerate(operands) if i in (0, 4) and shape == operands[0]]
        role = FactorRole.KEPT if op.name.endswith("inference") else FactorRole.WHOLE
        yield _factor(size, role, ((i, d) for i in full), (0, d))


# Collectives, on the part of each device.


def _all_gather(op: ir.Operation, operands: Shapes, results: Shapes) -> Factors:
    dim = integer(op, "all_gather_dim")
    pieces = results[0][dim] // max(operands[0][dim], 1)
    return _exchange_factors(frozenset({dim}), pieces, operands, results)


def _reduce_scatter(op: ir.Operation, operands: Shapes, results: Shapes) -> Factors:
    dim = integer(op, "scatter_dimension")
    pieces = operands[0][dim] // max(results[0][dim], 1)
    return _exchange_factors(frozenset({dim}), pieces, operands, results)


def _all_to_all(op: ir.Operation, operands: Shapes, results: Shapes) -> Factors:
    dims = frozenset({integer(op, "split_dimension"), integer(op, "concat_dimension")})
    return _exchange_factors(dims, integer(op, "split_count"), operands, results)


@lru_cache(maxsize=1024)
def _exchange_factors(
    dims: frozenset[int], pieces: int, operands: Shapes, results: Shapes
) -> Factors:
    return [
        _factor(pieces, FactorRole.EXCHANGED, [(i, d)], (i, d))
        if d in dims
        else _kept(size, [(i, d)], (i, d))
        for i, shape in enumerate(operands)
        for d, size in enumerate(shape)
    ]


def _own_rows(op: ir.Operation, operands: Shapes, results: Shapes) -> Factors:
    """Relates the tensors of an op that runs on the rows of a microbatch; see `microbatch_marks`.
    A result without rows is a sum over them."""
    dims = integers(op, ROWS)
    taken, given = (
        [(tensor, dim) for tensor, dim in enumerate(side) if dim >= 0]
        for side in (dims[: len(operands)], dims[len(operands) :])
    )
    tensor, dim = taken[0]
    role = FactorRole.KEPT if given else FactorRole.CONTRACTED
    return with_whole([_factor(operands[tensor][dim], role, taken, *given)], operands, results)


_ELEMENTWISE, _EACH_BY_ITSELF = _by_shapes(_elementwise), _by_shapes(_pairs)
_RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _ELEMENTWISE),
    "chlo.top_k": _last(1),
    "sdy.sharding_constraint": _ELEMENTWISE,
    "stablehlo.all_gather": _all_gather,
    "stablehlo.all_reduce": _EACH_BY_ITSELF,
    "stablehlo.all_to_all": _all_to_all,
    "stablehlo.batch_norm_grad": _batch_norm,
    "stablehlo.batch_norm_inference": _batch_norm,
    "stablehlo.batch_norm_training": _batch_norm,
    "stablehlo.bitcast_convert": _bitcast_convert,
    # The operand's dimensions are the last of the result.
    "stablehlo.broadcast": lambda op, operands, results: _broadcast_to(
        tuple(range(len(results[0]) - len(operands[0]), len(results[0]))), operands, results
    ),
    "stablehlo.broadcast_in_dim": _by_list("broadcast_dimensions", _broadcast_to),
    "stablehlo.cholesky": _last(2),
    "stablehlo.collective_broadcast": _EACH_BY_ITSELF,
    "stablehlo.collective_permute": _EACH_BY_ITSELF,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.convolution": _convolution,
    "stablehlo.custom_call": kernel_factors,
    "stablehlo.cross-replica-sum": _EACH_BY_ITSELF,
    "stablehlo.dot": _dot,
    "stablehlo.dot_general": _dot_general,
    "stablehlo.dynamic_gather": _gather,
    # The start of a dimension taken whole is clamped to 0, so KEPT.
    "stablehlo.dynamic_slice": lambda op, operands, results: [
        _kept(after, [(0, d)], (0, d))
        if before == after
        else Factor(after, FactorRole.INDEXED, (Along(0, d, None),), (Along(0, d),))
        for d, (before, after) in enumerate(zip(operands[0], results[0], strict=True))
    ],
    "stablehlo.dynamic_update_slice": _dynamic_update_slice,
    "stablehlo.fft": lambda op, operands, results: _last(len(integers(op, "fft_length")))(
        op, operands, results
    ),
    "stablehlo.gather": _gather,
    "stablehlo.iota": _iota,
    "stablehlo.map": _ELEMENTWISE,
    "stablehlo.optimization_barrier": _EACH_BY_ITSELF,
    "stablehlo.pad": _pad,
    "stablehlo.reduce": _by_list("dimensions", _reduce),
    "stablehlo.reduce_scatter": _reduce_scatter,
    "stablehlo.reduce_window": _reduce_window,
    "stablehlo.reshape": _by_shapes(_reshape),
    "stablehlo.reverse": _by_list(
        "dimensions",
        lambda flipped, operands, results: [
            Factor(size, FactorRole.MOVED, (Along(0, d, size - 1, -1),), (Along(0, d),))
            if d in flipped
            else _kept(size, [(0, d)], (0, d))
            for d, size in enumerate(results[0])
        ],
    ),
    "stablehlo.scatter": _scatter,
    "stablehlo.select_and_scatter": _select_and_scatter,
    "stablehlo.slice": _slice,
    "stablehlo.sort": lambda op, operands, results: _but(
        frozenset({integer(op, "dimension", -1) % max(len(operands[0]), 1)}), operands, results
    ),
    "stablehlo.transpose": _by_list("permutation", _transpose),
    "stablehlo.triangular_solve": _triangular_solve,
}
