"""Ops that only move elements, by places that are known: what of an operand each takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stablehlo_tools.analysis.device_arithmetic import Values
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.transforms.parts.fold_pipeline import moved_across, moved_windows
from stablehlo_tools.transforms.parts.fold_pipeline.boxes import (
    Convert,
    Reshape,
    Spread,
    Transpose,
    reshaped_box,
)
from stablehlo_tools.transforms.parts.fold_pipeline.items import Item, Piece

if TYPE_CHECKING:
    from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer

Followed = Sequence[Item] | Piece | None
Rule = Callable[["Tracer", ir.Operation, Item], Followed]
_MOST = 64  # pieces of a select


def follow(tracer: Tracer, op: ir.Operation, item: Item) -> Followed:
    """The elements of operands that elements of a result are; None where the op computes them."""
    rule = _RULES.get(op.name)
    return None if rule is None else rule(tracer, op, item)


def _numbers(op: ir.Operation, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(op.attributes[name]))


def _same(tracer: Tracer, op: ir.Operation, item: Item) -> Followed:
    return [item.at(op.operands[0], item.box)]


def _barrier(tracer: Tracer, op: ir.Operation, item: Item) -> Followed:
    return [item.at(op.operands[ir.OpResult(item.value).result_number], item.box)]


def _convert(tracer: Tracer, op: ir.Operation, item: Item) -> Followed:
    step = Convert(str(element_of(item.value)))
    return [item.through(op.operands[0], item.box, step)]


def _reshape(tracer: Tracer, op: ir.Operation, item: Item) -> Followed:
    before, after = tuple(shape_of(op.operands[0])), tuple(shape_of(item.value))
    box = reshaped_box(item.box, after, before)
    if box is None:
        return None
    return [item.through(op.operands[0], box, Reshape(box.sizes, item.box.sizes))]


def _transpose(tracer: Tracer, op: ir.Operation, item: Item) -> Followed:
    order = _numbers(op, "permutation")
    back = Transpose(tuple(order.index(d) for d in range(len(order)))).back(item.box)
    assert back is not None
    return [item.through(op.operands[0], back[0], Transpose(tuple(order)))]


def _broadcast(tracer: Tracer, op: ir.Operation, item: Item) -> Followed:
    """A scalar in any shape, or where nothing is repeated in what is asked for."""
    operand, dims = op.operands[0], _numbers(op, "broadcast_dimensions")
    before = shape_of(operand)
    repeated = [
        d for d in range(len(item.box.sizes)) if d not in dims or before[dims.index(d)] == 1
    ]
    if not before:
        return [item.through(operand, item.box.whole(()), Spread(item.box.sizes))]
    if any(item.box.sizes[d] != 1 for d in repeated) or dims != sorted(dims):
        return None
    box = item.box.whole(before)
    for place, dim in enumerate(dims):
        if before[place] != 1:
            box = box.along(place, item.box.starts[dim], item.box.sizes[dim])
    return [item.through(operand, box, Reshape(box.sizes, item.box.sizes))]


def _slice(tracer: Tracer, op: ir.Operation, item: Item) -> Followed:
    starts, strides = _numbers(op, "start_indices"), _numbers(op, "strides")
    for dim, stride in enumerate(strides):
        if stride != 1 and item.box.sizes[dim] != 1:
            if item.box.sizes[dim] > _MOST:
                return None
            places = range(item.box.starts[dim], item.box.end(dim))
            return [item.part(op, box) for box in item.box.cut(dim, places)]
    moved = [
        start + at * (stride - 1)
        for start, at, stride in zip(starts, item.box.starts, strides, strict=True)
    ]
    return [item.at(op.operands[0], item.box.moved(moved))]


def _reverse(tracer: Tracer, op: ir.Operation, item: Item) -> Followed:
    box, shape = item.box, shape_of(item.value)
    for dim in _numbers(op, "dimensions"):
        if box.sizes[dim] != 1:
            if box.sizes[dim] > _MOST:
                return None
            return [item.part(op, b) for b in box.cut(dim, range(box.starts[dim], box.end(dim)))]
        box = box.along(dim, shape[dim] - 1 - box.starts[dim], 1)
    return [item.at(op.operands[0], box)]


def _concatenate(tracer: Tracer, op: ir.Operation, item: Item) -> Followed:
    dim = ir.IntegerAttr(op.attributes["dimension"]).value
    edges = np.cumsum([0, *(shape_of(operand)[dim] for operand in op.operands)])
    found: list[Item] = []
    for box in item.box.cut(dim, [int(edge) for edge in edges]):
        place = int(np.searchsorted(edges, box.starts[dim], side="right")) - 1
        inner = box.along(dim, box.starts[dim] - int(edges[place]), box.sizes[dim])
        found.append(item.part(op, box).at(op.operands[place], inner))
    return found


def _pad(tracer: Tracer, op: ir.Operation, item: Item) -> Followed:
    low = _numbers(op, "edge_padding_low")
    if any(_numbers(op, "interior_padding")):
        return None
    inner, fill = op.operands
    found: list[Item] = []
    for box, inside in moved_windows.around(item.box, low, shape_of(inner)):
        part = item.part(op, box)
        if inside:
            found.append(part.at(inner, box.moved([-n for n in low])))
        else:
            found.append(part.through(fill, box.whole(()), Spread(box.sizes)))
    return found


def _select(tracer: Tracer, op: ir.Operation, item: Item) -> Followed:
    predicate = tracer.control(op.operands[0], item)
    if predicate is None:
        return None
    if predicate.ndim:
        ranges = zip(item.box.starts, item.box.sizes, strict=True)
        predicate = predicate[tuple(slice(s, s + n) for s, n in ranges)]
    if predicate.all() or not predicate.any():
        return [item.at(op.operands[1 if predicate.all() else 2], item.box)]
    return _by_changes(op, item, predicate)


def _by_changes(op: ir.Operation, item: Item, predicate: Values) -> Followed:
    """The box in pieces between the places where a predicate changes along a dimension."""
    for dim, start in enumerate(item.box.starts):
        rows = np.moveaxis(predicate, dim, 0).reshape(predicate.shape[dim], -1)
        changes = 1 + np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1))
        if len(changes) and len(changes) < _MOST:
            return [item.part(op, b) for b in item.box.cut(dim, [start + int(c) for c in changes])]
    return None


def _branch(tracer: Tracer, op: ir.Operation, item: Item) -> Followed:
    index = tracer.control(op.operands[0], item)
    if index is None:
        return None
    last = len(op.regions) - 1
    if op.name == "stablehlo.if":
        chosen = 0 if bool(index) else 1
    else:
        chosen = int(index) if 0 <= int(index) <= last else last
    end = terminator(op.regions[chosen].blocks[0])
    return [item.at(end.operands[ir.OpResult(item.value).result_number], item.box)]


_RULES: dict[str, Rule] = {
    "sdy.sharding_constraint": _same,
    "stablehlo.optimization_barrier": _barrier,
    "stablehlo.convert": _convert,
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": _transpose,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.slice": _slice,
    "stablehlo.reverse": _reverse,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.pad": _pad,
    "stablehlo.select": _select,
    "stablehlo.if": _branch,
    "stablehlo.case": _branch,
    "stablehlo.dynamic_slice": moved_windows.dynamic_slice,
    "stablehlo.dynamic_update_slice": moved_windows.dynamic_update_slice,
    "stablehlo.gather": moved_windows.gather,
    "stablehlo.scatter": moved_windows.scatter,
    "stablehlo.collective_permute": moved_across.permute,
    "stablehlo.all_reduce": moved_across.all_reduce,
    "stablehlo.all_gather": moved_across.all_gather,
}
MOVING = frozenset(_RULES)
