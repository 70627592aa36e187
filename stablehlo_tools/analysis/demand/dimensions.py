"""Which part of an operand each part of a result is made from, along one dimension.

A `Lane` says that the positions `results` along a dimension of the result depend on just the
positions `operands` along a dimension of the operand, one to one. What an op does in its other
dimensions is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.traits import ELEMENTWISE

WHOLE = slice(None)


@dataclass(frozen=True)
class Lane:
    """A dimension of an operand beside the dimension of the result that it becomes."""

    operand: int
    result: int
    operands: slice = WHOLE
    results: slice = WHOLE

    @property
    def is_whole(self) -> bool:
        """Whether all positions are kept, in order."""
        return self.operands == WHOLE and self.results == WHOLE


def static_shape(kind: ir.Type) -> tuple[int, ...] | None:
    """The dimensions of a tensor; None for a symbolic one and for what is no tensor."""
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        return None
    return tuple(kind.shape)


def lanes(op: ir.Operation, position: int) -> list[Lane]:
    """The lanes between an operand of an op and its only result; none where nothing is known."""
    if len(op.results) != 1:
        return []
    before = static_shape(op.operands[position].type)
    after = static_shape(op.results[0].type)
    if before is None or after is None:
        return []
    if op.name in _SAME_SHAPE:
        return _identity(before) if before == after else []
    rule = _RULES.get(op.name)
    return [] if rule is None else rule(op, position, before, after)


_SAME_SHAPE = ELEMENTWISE | {
    "sdy.sharding_constraint",
    "stablehlo.all_reduce",
    "stablehlo.collective_permute",
}
Shape = tuple[int, ...]


def _identity(shape: Shape) -> list[Lane]:
    return [Lane(d, d) for d in range(len(shape))]


def _numbers(op: ir.Operation, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(op.attributes[name]))


def _broadcast(op: ir.Operation, _: int, before: Shape, after: Shape) -> list[Lane]:
    placed = enumerate(_numbers(op, "broadcast_dimensions"))
    return [Lane(d, r) for d, r in placed if before[d] == after[r]]


def _transpose(op: ir.Operation, _: int, before: Shape, after: Shape) -> list[Lane]:
    return [Lane(d, r) for r, d in enumerate(_numbers(op, "permutation"))]


def _reshape(_: ir.Operation, __: int, before: Shape, after: Shape) -> list[Lane]:
    """Dimensions of more than one element that have as many elements before them as ever."""
    if 0 in before:
        return []
    places = {place: d for d, place in enumerate(_places(after)) if after[d] > 1}
    return [
        Lane(d, places[place])
        for d, place in enumerate(_places(before))
        if before[d] > 1 and place in places and after[places[place]] == before[d]
    ]


def _places(shape: Shape) -> list[int]:
    """How many elements the dimensions before each hold."""
    counts = [1]
    for size in shape:
        counts.append(counts[-1] * size)
    return counts[: len(shape)]


def _slice(op: ir.Operation, _: int, before: Shape, after: Shape) -> list[Lane]:
    names = ("start_indices", "limit_indices", "strides")
    parts = zip(*(_numbers(op, name) for name in names), strict=True)
    return [
        Lane(d, d) if after[d] == before[d] else Lane(d, d, slice(*part))
        for d, part in enumerate(parts)
    ]


def _concatenate(op: ir.Operation, position: int, before: Shape, after: Shape) -> list[Lane]:
    along = ir.IntegerAttr(op.attributes["dimension"]).value
    sizes = [ir.RankedTensorType(value.type).shape[along] for value in op.operands]
    start = sum(sizes[:position])
    placed = slice(start, start + before[along])
    return [Lane(d, d, WHOLE, placed if d == along else WHOLE) for d in range(len(before))]


def _pad(op: ir.Operation, position: int, before: Shape, after: Shape) -> list[Lane]:
    if position != 0:
        return []
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    parts = enumerate(zip(*(_numbers(op, name) for name in names), strict=True))
    return [
        Lane(d, d, WHOLE, slice(low, low + before[d]))
        for d, (low, high, interior) in parts
        if low >= 0 and high >= 0 and not interior
    ]


def _reverse(op: ir.Operation, _: int, before: Shape, after: Shape) -> list[Lane]:
    flipped = _numbers(op, "dimensions")
    return [
        Lane(d, d, slice(None, None, -1) if d in flipped else WHOLE) for d in range(len(before))
    ]


def _reduce(op: ir.Operation, position: int, before: Shape, after: Shape) -> list[Lane]:
    if len(op.operands) != 2 or position != 0:
        return []
    gone = _numbers(op, "dimensions")
    kept = [d for d in range(len(before)) if d not in gone]
    return [Lane(d, r) for r, d in enumerate(kept)]


def _dynamic_slice(op: ir.Operation, position: int, before: Shape, after: Shape) -> list[Lane]:
    """What is sliced whole; a dimension with a window has no lane, for its place is computed."""
    if position != 0:
        return []
    return [Lane(d, d) for d, size in enumerate(before) if after[d] == size]


def _dynamic_update(op: ir.Operation, position: int, before: Shape, after: Shape) -> list[Lane]:
    if position > 1:
        return []
    return [Lane(d, d) for d, size in enumerate(before) if after[d] == size]


def _scatter(op: ir.Operation, position: int, before: Shape, after: Shape) -> list[Lane]:
    return _identity(before) if position == 0 and len(op.operands) == 3 else []


_RULES: dict[str, Callable[[ir.Operation, int, Shape, Shape], list[Lane]]] = {
    f"stablehlo.{name}": rule
    for name, rule in {
        "broadcast_in_dim": _broadcast,
        "transpose": _transpose,
        "reshape": _reshape,
        "slice": _slice,
        "concatenate": _concatenate,
        "pad": _pad,
        "reverse": _reverse,
        "reduce": _reduce,
        "dynamic_slice": _dynamic_slice,
        "dynamic_update_slice": _dynamic_update,
        "scatter": _scatter,
    }.items()
}


def windowed(window: Sequence[int], whole: Sequence[int]) -> list[int]:
    """The dimensions of which a slice or an update takes less than all."""
    return [d for d, (part, size) in enumerate(zip(window, whole, strict=True)) if part != size]
