"""Windows at known places: dynamic slices, updates, gathers and scatters by known indices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.device_arithmetic import Values
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.transforms.parts.fold_pipeline.boxes import Box, Reshape
from stablehlo_tools.transforms.parts.fold_pipeline.items import Item

if TYPE_CHECKING:
    from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer

_MOST = 1 << 10  # windows


def dynamic_slice(tracer: Tracer, op: ir.Operation, item: Item) -> Sequence[Item] | None:
    """The slice's box, at its start."""
    starts = _starts(tracer, item, op.operands[0], op.operands[1:], shape_of(item.value))
    if starts is None:
        return None
    return [item.at(op.operands[0], item.box.moved(starts))]


def dynamic_update_slice(tracer: Tracer, op: ir.Operation, item: Item) -> Sequence[Item] | None:
    """What is inside of the update comes from it."""
    whole, update = op.operands[0], op.operands[1]
    starts = _starts(tracer, item, whole, op.operands[2:], shape_of(update))
    if starts is None:
        return None
    found: list[Item] = []
    for box, inside in around(item.box, starts, shape_of(update)):
        part = item.part(op, box)
        inner = box.moved([-start for start in starts])
        found.append(part.at(update, inner) if inside else part.at(whole, box))
    return found


def around(box: Box, starts: Sequence[int], sizes: Sequence[int]) -> list[tuple[Box, bool]]:
    """A box in pieces that are inside or outside of a window."""
    inside, found = [box], list[tuple[Box, bool]]()
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        pieces = [piece for b in inside for piece in b.cut(dim, [start, start + size])]
        inside = [p for p in pieces if start <= p.starts[dim] < start + size]
        found += [(p, False) for p in pieces if p not in inside]
    return found + [(p, True) for p in inside]


def _starts(
    tracer: Tracer, item: Item, whole: ir.Value, indices: Sequence[ir.Value], sizes: Sequence[int]
) -> list[int] | None:
    """Where a window starts, as StableHLO clamps it; None where that is not known."""
    starts: list[int] = []
    for index, extent, size in zip(indices, shape_of(whole), sizes, strict=True):
        known = tracer.control(index, item)
        if known is None and extent != size:
            return None
        starts.append(0 if known is None else min(max(int(known), 0), extent - size))
    return starts


@dataclass(frozen=True)
class _Indexing:
    """Which dimensions of a gather's result, or a scatter's updates, mean what.

    `scattered` are those of the indices, in order; window dimension `offsets[i]` runs along
    dimension `kept[i]` of the operand; `batching` pairs operand dimensions with places in
    `scattered`.
    """

    scattered: tuple[int, ...]
    offsets: tuple[int, ...]
    kept: tuple[int, ...]
    batching: tuple[tuple[int, int], ...]
    mapped: tuple[int, ...]

    def starts(self, rows: Values, index: Sequence[int], rank: int) -> list[int]:
        """Where the window of a place among the indices starts in the operand."""
        found = [0] * rank
        for dim, start in zip(self.mapped, rows[tuple(index)], strict=True):
            found[dim] = int(start)
        for dim, place in self.batching:
            found[dim] = index[place]
        return found


def _rows(tracer: Tracer, item: Item, indices: ir.Value, along: int) -> Values | None:
    """The indices with the dimension that holds the parts of one as the last."""
    known = tracer.control(indices, item)
    if known is None:
        return None
    return known[..., None] if along == known.ndim else np.moveaxis(known, along, -1)


def _batching(
    operand: Sequence[int], indices: Sequence[int], along: int
) -> tuple[tuple[int, int], ...]:
    return tuple((o, i - (i > along)) for o, i in zip(operand, indices, strict=True))


def gather(tracer: Tracer, op: ir.Operation, item: Item) -> Sequence[Item] | None:
    """A window of the operand for every index asked for."""
    numbers = bindings.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    rows = _rows(tracer, item, op.operands[1], numbers.index_vector_dim)
    if rows is None:
        return None
    whole, offsets = shape_of(op.operands[0]), tuple(numbers.offset_dims)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    form = _Indexing(
        tuple(d for d in range(len(item.box.sizes)) if d not in offsets),
        offsets,
        tuple(d for d in range(len(whole)) if d not in gone),
        _batching(
            list(numbers.operand_batching_dims),
            list(numbers.start_indices_batching_dims),
            numbers.index_vector_dim,
        ),
        tuple(numbers.start_index_map),
    )
    sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
    if prod(item.box.sizes[d] for d in form.scattered) > _MOST:
        return None
    found: list[Item] = []
    for box in _singles(item.box, form.scattered):
        starts = form.starts(rows, [box.starts[d] for d in form.scattered], len(whole))
        starts = [min(max(s, 0), n - z) for s, n, z in zip(starts, whole, sizes, strict=True)]
        inner = Box(tuple(starts), (1,) * len(whole))
        for offset, dim in zip(form.offsets, form.kept, strict=True):
            inner = inner.along(dim, starts[dim] + box.starts[offset], box.sizes[offset])
        part = item.part(op, box)
        found.append(part.through(op.operands[0], inner, Reshape(inner.sizes, box.sizes)))
    return found


def _singles(box: Box, dims: Sequence[int]) -> Iterator[Box]:
    """A box in pieces of one element along some dimensions."""
    ranges = [range(box.starts[d], box.end(d)) for d in dims]
    for places in product(*ranges):
        one = box
        for dim, place in zip(dims, places, strict=True):
            one = one.along(dim, place, 1)
        yield one


def scatter(tracer: Tracer, op: ir.Operation, item: Item) -> Sequence[Item] | None:
    """What is inside of a window comes from its update, where updates replace."""
    if len(op.results) != 1 or not _replaces(op):
        return None
    numbers = bindings.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    rows = _rows(tracer, item, op.operands[1], numbers.index_vector_dim)
    if rows is None or prod(rows.shape[:-1]) > _MOST:
        return None
    whole, updates = shape_of(op.operands[0]), op.operands[2]
    windows, shape = tuple(numbers.update_window_dims), shape_of(updates)
    gone = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
    form = _Indexing(
        tuple(d for d in range(len(shape)) if d not in windows),
        windows,
        tuple(d for d in range(len(whole)) if d not in gone),
        _batching(
            list(numbers.input_batching_dims),
            list(numbers.scatter_indices_batching_dims),
            numbers.index_vector_dim,
        ),
        tuple(numbers.scattered_dims_to_operand_dims),
    )
    found: list[Item] = []
    pending = [item]
    for index in sorted(product(*map(range, rows.shape[:-1])), reverse=True):
        starts = form.starts(rows, index, len(whole))
        sizes = [1] * len(whole)
        for offset, dim in zip(form.offsets, form.kept, strict=True):
            sizes[dim] = shape[offset]
        if any(s < 0 or s + z > n for s, z, n in zip(starts, sizes, whole, strict=True)):
            continue  # StableHLO leaves out what would reach outside
        later: list[Item] = []
        for left in pending:
            for box, inside in around(left.box, starts, sizes):
                part = left.part(op, box)
                if inside:
                    inner = _in_update(form, index, box, starts, len(shape))
                    step = Reshape(inner.sizes, box.sizes)
                    found.append(part.through(updates, inner, step))
                else:
                    later.append(part)
        pending = later
    return found + [left.at(op.operands[0], left.box) for left in pending]


def _in_update(
    form: _Indexing, index: Sequence[int], box: Box, starts: Sequence[int], rank: int
) -> Box:
    inner = Box((0,) * rank, (1,) * rank)
    for dim, place in zip(form.scattered, index, strict=True):
        inner = inner.along(dim, place, 1)
    for offset, dim in zip(form.offsets, form.kept, strict=True):
        inner = inner.along(offset, box.starts[dim] - starts[dim], box.sizes[dim])
    return inner


def _replaces(op: ir.Operation) -> bool:
    """Whether a scatter's region returns the update as it is."""
    block = op.regions[0].blocks[0]
    return list(terminator(block).operands) == [block.arguments[1]]
