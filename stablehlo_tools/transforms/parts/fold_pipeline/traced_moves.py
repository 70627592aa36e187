"""Maps elements of a result to elements of the operands, for ops that only move elements.

For slices and pads, the relation of the op's dimensions gives this map. For selects, branches and
windows at indices, operands of the op give it, and these must be known integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from stablehlo_tools.analysis.device_values import COMPUTED, Values, chosen_regions, evaluate_op
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import gather_numbers, scatter_numbers
from stablehlo_tools.dialect.dimensions import dimensions_of, integer, integers
from stablehlo_tools.dialect.factors import FactorRole, OpDimensions
from stablehlo_tools.dialect.names import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    COLLECTIVE_PERMUTE,
    COMPARE,
    CONVERT,
    GATHER,
    IOTA,
    REDUCE,
    RESHAPE,
    SCATTER,
    SELECT,
    SHARDING_CONSTRAINT,
    SLICE,
    TRANSPOSE,
)
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.reshapes import runs
from stablehlo_tools.dialect.traits import BRANCHES, ELEMENTWISE, Trait, ops_with
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import producer, splat_of
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    BoxQuery,
    BroadcastScalar,
    Convert,
    TraceReshape,
    Transpose,
    reshaped_box,
)

# Returns the value of an operand for the query; None if it is unknown.
Integers = Callable[[ir.Value], Values | None]
Answer = Sequence[BoxQuery] | None

_MOST_PIECES = 64  # per result, if a predicate cuts it or if it is followed element by element
_MOST_WINDOWS = 1 << 10

# The collectives by which pipelines pass values on; others between ranks are refused.
BETWEEN_RANKS = frozenset({ALL_GATHER, ALL_REDUCE, COLLECTIVE_PERMUTE})
_AT_INDICES = ops_with(Trait.INDEXED)  # slices, updates, gathers, scatters
_REPEATING = frozenset({BROADCAST, CONVERT, RESHAPE, SHARDING_CONSTRAINT})
# Ops whose integer result follows from the operands' integers at the same position.
_POSITIONAL = ELEMENTWISE & COMPUTED | {COMPARE, CONVERT}
# Ops whose result elements are each one element of the operand with the same number.
RELAYOUTS = ops_with(Trait.BIJECTIVE) | {SLICE, CONVERT, BARRIER, SHARDING_CONSTRAINT}
MOVING = (
    RELAYOUTS
    | ops_with(Trait.LAYOUT)
    | ops_with(Trait.PIECE)
    | ops_with(Trait.JOIN)
    | _AT_INDICES
    | BRANCHES
    | {SELECT}
)


def follow_move(op: ir.Operation, query: BoxQuery, known: Integers) -> Answer:
    """Returns the queries for the elements of operands that an op moves to its result. Returns None
    if the op computes them, or if their origin is unknown."""
    if op.name in (SHARDING_CONSTRAINT, BARRIER):
        return [query.in_value(op.operands[ir.OpResult(query.value).result_number], query.box)]
    if op.name == SELECT:
        return _follow_select(op, query, numbers_along(op.operands[0], known))
    if op.name in BRANCHES:
        index = known(op.operands[0])
        if index is None:
            return None
        end = terminator(op.regions[int(chosen_regions(op, index))].blocks[0])
        return [query.in_value(end.operands[ir.OpResult(query.value).result_number], query.box)]
    if op.name in _AT_INDICES:
        windows = (_indexed_windows if op.name in (GATHER, SCATTER) else _window)(op, known)
        if windows is None:
            return None
        if op.name in ops_with(Trait.PIECE):
            return _read(op, query, windows)
        return _follow_update(op, query, windows)
    if op.name == CONVERT:
        view_op = Convert(str(element_of(query.value)))
        return [query.through(op.operands[0], query.box, view_op)]
    if op.name == TRANSPOSE:
        order = integers(op, "permutation")
        box = Transpose(tuple(order.index(d) for d in range(len(order)))).transpose_box(query.box)
        return [query.through(op.operands[0], box, Transpose(order))]
    if op.name == RESHAPE or is_reshaping_sum(op):
        before, after = tuple(shape_of(op.operands[0])), tuple(shape_of(query.value))
        inner = reshaped_box(query.box, after, before)
        if inner is None:
            return None
        return [query.through(op.operands[0], inner, TraceReshape(inner.sizes, query.box.sizes))]
    relation = dimensions_of(op) if op.name in MOVING else None
    if relation is None:
        return None
    if op.name == BROADCAST:
        return _broadcast(op, query, relation)
    if op.name in ops_with(Trait.JOIN):
        return _follow_concatenate(op, query, relation)
    return _follow_slice(op, query, relation)


def is_reshaping_sum(op: ir.Operation) -> bool:
    """Returns True if an op sums along dimensions of size 1 only. jax writes such a sum as the
    transpose of a broadcast along these dimensions."""
    if op.name != REDUCE or len(op.results) != 1 or splat_of(op.operands[1]) != 0:
        return False
    shape = shape_of(op.operands[0])
    if any(shape[dim] != 1 for dim in integers(op, "dimensions")):
        return False
    return reducer_kind(Combining(op).combiner) == "add"


def merges(reshape: ir.Operation) -> bool:
    """Returns True if a reshape merges or regroups several dimensions, ignoring those of size 1."""
    before, after = (tuple(shape_of(v)) for v in (reshape.operands[0], reshape.results[0]))
    return any(
        len(long) > 1 and long != [after[dim] for dim in given if after[dim] != 1]
        for taken, given in runs(before, after)
        for long in [[before[dim] for dim in taken if before[dim] != 1]]
    )


def deciding_operands(op: ir.Operation) -> tuple[list[ir.Value], list[ir.Value]]:
    """Returns the operands of a moving op that select the elements, and the operands that are
    moved."""
    operands = list(op.operands)
    if op.name == SELECT or op.name in BRANCHES:
        return operands[:1], operands[1:]
    if op.name not in _AT_INDICES:
        return [], operands
    if op.name == SCATTER:
        return operands[1:2], [operands[0], *operands[2:]]
    moved = 2 if op.name in ops_with(Trait.JOIN) else 1
    return operands[moved:], operands[:moved]


def repeated_number(value: ir.Value) -> float | int | complex | None:
    """Returns the number in all elements of a value, if it is a splat constant, possibly broadcast
    or converted; None for any other value."""
    maker = producer(value)
    while maker is not None and maker.name in _REPEATING:
        value = maker.operands[0]
        maker = producer(value)
    return splat_of(value)


# Ops that move elements between positions which the op itself states.


def _broadcast(op: ir.Operation, query: BoxQuery, relation: OpDimensions) -> Answer:
    """Follows the broadcast of a scalar, or one that repeats no element within the query."""
    operand, dims = op.operands[0], integers(op, "broadcast_dimensions")
    box = Box.whole(shape_of(operand))
    if not box.sizes:
        return [query.through(operand, box, BroadcastScalar(query.box.sizes))]
    for dim, size in enumerate(query.box.sizes):
        (factor,) = relation.along_result(0, dim)
        if factor.role is FactorRole.KEPT:
            box = box.along(factor.operands[0].dim, query.box.starts[dim], size)
        elif size != 1:
            return None
    if list(dims) != sorted(dims):
        return None
    return [query.through(operand, box, TraceReshape(box.sizes, query.box.sizes))]


def _follow_slice(op: ir.Operation, query: BoxQuery, relation: OpDimensions) -> Answer:
    """Follows a slice or a reverse: strided and reversed elements are followed one by one."""
    box = query.box
    for dim, (start, size) in enumerate(zip(box.starts, query.box.sizes, strict=True)):
        (link,) = relation.of_result(0, dim)
        taken = link.operand
        assert taken.start is not None
        if taken.step != 1 and size != 1:
            if size > _MOST_PIECES:
                return None
            pieces = query.box.cut(dim, range(start, start + size))
            return [query.part(op, piece) for piece in pieces]
        box = box.along(dim, taken.start + taken.step * start, size)
    return [query.in_value(op.operands[0], box)]


def _follow_concatenate(op: ir.Operation, query: BoxQuery, relation: OpDimensions) -> Answer:
    if "edge_padding_low" in op.attributes:
        return _follow_pad(op, query, relation)
    dim = integer(op, "dimension")
    factors = relation.along_result(0, dim)
    edges = [factor.results[0].start or 0 for factor in factors]
    queries: list[BoxQuery] = []
    for box in query.box.cut(dim, edges):
        start = box.starts[dim]
        number = max(n for n, edge in enumerate(edges) if edge <= start)
        inner = box.along(dim, start - edges[number], box.sizes[dim])
        operand = factors[number].operands[0].tensor
        queries.append(query.part(op, box).in_value(op.operands[operand], inner))
    return queries


def _follow_pad(op: ir.Operation, query: BoxQuery, relation: OpDimensions) -> Answer:
    if any(integers(op, "interior_padding")):
        return None
    links = [relation.of_result(0, dim)[0] for dim in range(len(query.box.sizes))]
    starts = [link.result.start or 0 for link in links]
    taken = [link.operand.start or 0 for link in links]
    by = [one - other for one, other in zip(taken, starts, strict=True)]
    queries: list[BoxQuery] = []
    for box, inside in _around(query.box, starts, [link.factor.size for link in links]):
        part = query.part(op, box)
        if inside:
            queries.append(part.in_value(op.operands[0], box.shift_by(by)))
        else:
            fill = op.operands[1]
            queries.append(part.through(fill, Box.whole(()), BroadcastScalar(box.sizes)))
    return queries


def _around(box: Box, starts: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[Box, bool]]:
    """Yields a box in pieces outside and inside of a window, with a flag; the one inside comes
    last."""
    inside = [box]
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        pieces = [piece for b in inside for piece in b.cut(dim, [start, start + size])]
        inside = [p for p in pieces if start <= p.starts[dim] < start + size]
        yield from ((p, False) for p in pieces if p not in inside)
    yield from ((p, True) for p in inside)


# Ops that move elements by a predicate or by indices.


def numbers_along(value: ir.Value, known: Integers) -> Values | None:
    """Returns integers that are known, or that follow from the positions of the elements, for a
    tensor of any size. A dimension along which they do not differ has size 1."""
    numbers = known(value)
    op = producer(value)
    if numbers is not None or op is None or len(op.results) != 1:
        return numbers
    shape = shape_of(value)
    if op.name == IOTA:
        dim = integer(op, "iota_dimension")
        return np.arange(shape[dim]).reshape([n if d == dim else 1 for d, n in enumerate(shape)])
    if op.name == BROADCAST:
        inner = numbers_along(op.operands[0], known)
        sizes = [1] * len(shape)
        dims = integers(op, "broadcast_dimensions")
        if inner is None or list(dims) != sorted(dims):
            return None
        for dim, size in zip(dims, inner.shape, strict=True):
            sizes[dim] = size
        return inner.reshape(sizes)
    if op.name not in _POSITIONAL:
        return None
    taken = [numbers_along(operand, known) for operand in op.operands]
    if any(one is None for one in taken):
        return None
    result = evaluate_op(op, [None if one is None else one[None] for one in taken])
    return None if result is None else result[0]


def _follow_select(op: ir.Operation, query: BoxQuery, predicate: Values | None) -> Answer:
    if predicate is None:
        return None
    if predicate.ndim:
        cut = zip(query.box.slices(), predicate.shape, strict=True)
        predicate = predicate[tuple(s if size > 1 else slice(0, 1) for s, size in cut)]
    if predicate.all() or not predicate.any():
        return [query.in_value(op.operands[1 if predicate.all() else 2], query.box)]
    for dim, start in enumerate(query.box.starts):
        rows = np.moveaxis(predicate, dim, 0).reshape(predicate.shape[dim], -1)
        changes = 1 + np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1))
        if len(changes) and len(changes) < _MOST_PIECES:
            boxes = query.box.cut(dim, [start + int(change) for change in changes])
            return [query.part(op, box) for box in boxes]
    return None


@dataclass(frozen=True)
class _Windows:
    """Windows at known indices of a tensor, side by side in another one: the result of a
    dynamic_slice or a gather, or the update of a dynamic_update_slice or a scatter.

    Dimension `numbered[k]` of the other tensor is component k of the window's number. Its dimension
    `inner[i]` runs along dimension `kept[i]` of the tensor. `sizes` is the shape of a window in the
    tensor, and `starts` returns the start of the window with a number.
    """

    shape: Sequence[int]
    sizes: Sequence[int]
    counts: tuple[int, ...]
    numbered: tuple[int, ...]
    inner: tuple[int, ...]
    kept: tuple[int, ...]
    starts: Callable[[Sequence[int]], list[int]]

    def clamp_starts(self, number: Sequence[int]) -> list[int]:
        """Returns the start of a window, moved so that the window fits, as StableHLO reads it."""
        starts = zip(self.starts(number), self.shape, self.sizes, strict=True)
        return [min(max(start, 0), extent - size) for start, extent, size in starts]

    def fits(self, number: Sequence[int]) -> bool:
        """Returns True if a window is inside of the tensor."""
        starts = zip(self.starts(number), self.shape, self.sizes, strict=True)
        return all(start >= 0 and start + size <= extent for start, extent, size in starts)

    def in_tensor(self, box: Box, starts: Sequence[int]) -> Box:
        """Returns the box of the tensor for a box of one window in the other tensor."""
        inner = Box(tuple(starts), (1,) * len(self.shape))
        for dim, along in zip(self.kept, self.inner, strict=True):
            inner = inner.along(dim, starts[dim] + box.starts[along], box.sizes[along])
        return inner

    def in_windows(self, box: Box, number: Sequence[int], starts: Sequence[int]) -> Box:
        """Returns the box of the other tensor for a box of the tensor, in the window of a
        number."""
        rank = len(self.numbered) + len(self.inner)
        inner = Box((0,) * rank, (1,) * rank)
        for dim, place in zip(self.numbered, number, strict=True):
            inner = inner.along(dim, place, 1)
        for dim, along in zip(self.kept, self.inner, strict=True):
            inner = inner.along(along, box.starts[dim] - starts[dim], box.sizes[dim])
        return inner


def _read(op: ir.Operation, query: BoxQuery, windows: _Windows) -> Answer:
    """Follows each window that the query covers, one by one along the dimensions that number
    them."""
    box = query.box
    if prod(box.sizes[d] for d in windows.numbered) > _MOST_WINDOWS:
        return None
    queries: list[BoxQuery] = []
    for number in product(*(range(box.starts[d], box.end(d)) for d in windows.numbered)):
        one = box
        for dim, place in zip(windows.numbered, number, strict=True):
            one = one.along(dim, place, 1)
        inner = windows.in_tensor(one, windows.clamp_starts(number))
        queries.append(_in_other(query.part(op, one), op.operands[0], inner))
    return queries


def _follow_update(op: ir.Operation, query: BoxQuery, windows: _Windows) -> Answer:
    """Follows elements inside of a window to the update: to the last window written there."""
    if prod(windows.counts) > _MOST_WINDOWS:
        return None
    update = op.operands[2 if op.name == SCATTER else 1]
    inside: list[BoxQuery] = []
    outside = [query]
    for number in sorted(product(*map(range, windows.counts)), reverse=True):
        if op.name != SCATTER:
            starts = windows.clamp_starts(number)
        elif windows.fits(number):
            starts = windows.starts(number)
        else:
            continue  # StableHLO skips windows that reach outside
        pending, outside = outside, []
        for left in pending:
            for box, is_inside in _around(left.box, starts, windows.sizes):
                part = left.part(op, box)
                if not is_inside:
                    outside.append(part)
                    continue
                inside.append(_in_other(part, update, windows.in_windows(box, number, starts)))
    return [left.in_value(op.operands[0], left.box) for left in outside] + inside


def _in_other(query: BoxQuery, value: ir.Value, box: Box) -> BoxQuery:
    """Returns the query for the same elements in a tensor with other dimensions of size 1."""
    if box.sizes == query.box.sizes:
        return query.in_value(value, box)
    return query.through(value, box, TraceReshape(box.sizes, query.box.sizes))


def _window(op: ir.Operation, known: Integers) -> _Windows | None:
    """Returns the one window of a dynamic_slice or a dynamic_update_slice; None if it is
    unknown."""
    indices, (whole, *update) = deciding_operands(op)
    shape, sizes = shape_of(whole), shape_of(update[0] if update else op.results[0])
    starts: list[int] = []
    for index, extent, size in zip(indices, shape, sizes, strict=True):
        start = known(index)
        if start is None and extent != size:
            return None
        starts.append(0 if start is None else int(start))
    dims = tuple(range(len(shape)))
    return _Windows(shape, sizes, (), (), dims, dims, lambda _: starts)


def _indexed_windows(op: ir.Operation, known: Integers) -> _Windows | None:
    """Returns the windows of a gather or a scatter; None if they are unknown. A scatter must
    replace elements, or add to zeros in windows that do not overlap."""
    if op.name == GATHER:
        numbers, other = gather_numbers(op), shape_of(op.results[0])
        inner = numbers.windows
    elif len(op.results) == 1 and (
        _replaces(op)
        # as jax writes the transpose of a gather
        or (repeated_number(op.operands[0]) == 0 and reducer_kind(Combining(op).combiner) == "add")
    ):
        numbers, other = scatter_numbers(op), shape_of(op.operands[2])
        inner = numbers.windows
    else:
        return None
    indices, vector = known(op.operands[1]), numbers.index_vector
    if indices is None:
        return None
    # Make the components of an index the last dimension; the others number the window.
    rows = indices[..., None] if vector == indices.ndim else np.moveaxis(indices, vector, -1)
    shape = shape_of(op.operands[0])
    kept = numbers.window_dims(len(shape))
    sizes = [1] * len(shape)
    for dim, along in zip(kept, inner, strict=True):
        sizes[dim] = other[along]
    batching = [
        (dim, index - (index > vector))
        for dim, index in zip(numbers.operand_batching, numbers.indices_batching, strict=True)
    ]

    def starts(number: Sequence[int]) -> list[int]:
        start = [0] * len(shape)
        for dim, index in zip(numbers.index_map, rows[tuple(number)], strict=True):
            start[dim] = int(index)
        for dim, component in batching:
            start[dim] = number[component]
        return start

    counts = rows.shape[:-1]
    if op.name == SCATTER and not _replaces(op):  # its windows must not overlap
        if prod(counts) > _MOST_WINDOWS:
            return None
        first = np.array([starts(number) for number in np.ndindex(*counts)]).reshape(-1, len(sizes))
        apart = (np.abs(first[:, None] - first[None]) >= np.array(sizes)).any(axis=-1)
        if not (apart | np.eye(len(first), dtype=bool)).all():
            return None
    numbered = numbers.batch_dims(len(other))
    return _Windows(shape, sizes, counts, numbered, inner, kept, starts)


def _replaces(scatter: ir.Operation) -> bool:
    """Returns True if the region of a scatter returns the update unchanged."""
    block = Combining(scatter).combiner
    return list(terminator(block).operands) == [block.arguments[1]]
