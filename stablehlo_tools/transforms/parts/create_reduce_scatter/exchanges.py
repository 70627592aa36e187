"""Removes unnecessary exchanges: all_to_alls that undo each other, exchanges of constants, repeated
all_gathers, and padded all_gathers that only one device of each group reads.

    %g = "stablehlo.all_gather"(%x)                      // tensor<2xf32>, 4 devices
    %p = stablehlo.pad %g, 0, high = [24]                // tensor<32xf32>
    %y = stablehlo.dynamic_slice %p, %offset              // to tensor<8xf32>, of device i at 8 i
  ==>
    %x1 = "stablehlo.collective_permute"(%x) {pairs = [[1, 0]]}
    %x2 = "stablehlo.collective_permute"(%x) {pairs = [[2, 0]]}
    %x3 = "stablehlo.collective_permute"(%x) {pairs = [[3, 0]]}
    %all = stablehlo.concatenate %x, %x1, %x2, %x3
    %y = stablehlo.select (%offset == 0), %all, 0

Partitioners write the last form if a small dimension is padded to be divided. Each operand is sent
to the one device that reads it, and the padded tensor is never stored. The slice's offset tells
that device from the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.device_values import DeviceValues, clamped_starts
from stablehlo_tools.analysis.replica_groups import ProcessGroups
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integer, integers
from stablehlo_tools.dialect.names import (
    BROADCAST,
    COLLECTIVE_PERMUTE,
    CONSTANT,
    DYNAMIC_SLICE,
    PAD,
    RESHAPE,
    SLICE,
    TRANSPOSE,
)
from stablehlo_tools.ir.builder import Builder, element_of
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.create_reduce_scatter.chunked import is_of_unsure_order
from stablehlo_tools.transforms.parts.create_reduce_scatter.slices import shape_of, splat_of
from stablehlo_tools.transforms.parts.create_reduce_scatter.smaller_collectives import (
    GroupForms,
    Rewrite,
    collective_like,
    copy_op,
    with_shape,
)

_COPIES = frozenset({BROADCAST, RESHAPE, TRANSPOSE, SLICE})  # of elements
_LONGEST = 16  # ops between two exchanges, or between a constant and its use
_SHARED = "stablehlo_tools.shared_gather"  # so that a second run counts the bytes already kept
_DROPPED = ("replica_groups", "all_gather_dim", "use_global_device_ids")
_MOST_MEMBERS = 8  # of a group; more permutes than that are slower than one all_gather


def plan_inverse(
    second: Collective, by_result: dict[ir.Value, Collective], forms: GroupForms
) -> Rewrite | None:
    """Returns the rewrite of two all_to_alls, the second the inverse of the first, to the layout
    ops between them. `by_result` maps results to all collectives of the module."""
    if len(second.op.results) != 1:
        return None
    between: list[ir.Operation] = []
    value = second.op.operands[0]
    split, concatenated = _dimensions(second)
    while (op := producer(value)) is not None and op.name in (RESHAPE, TRANSPOSE):
        if len(between) == _LONGEST:
            return None
        moved = [_before(op, dimension) for dimension in (split, concatenated)]
        if moved[0] is None or moved[1] is None:
            return None
        split, concatenated = moved[0], moved[1]
        between.append(op)
        value = op.operands[0]
    first = by_result.get(value)
    if first is None or first.kind != "all_to_all" or len(first.op.results) != 1:
        return None
    if first.op.block != second.op.block or first.is_async or second.is_async:
        return None
    if _dimensions(first) != (concatenated, split):
        return None
    groups = forms.groups(first)
    if groups is None or frozenset(groups) != frozenset(forms.groups(second) or ()):
        return None
    if sum(map(len, groups)) != forms.facts.grid.size:
        return None
    between.reverse()
    shapes = _shapes(first, between)
    if shapes is None:
        return None

    def repeat_between() -> Sequence[ir.Value]:
        value, point = first.op.operands[0], ir.InsertionPoint(second.op)
        for op, shape in zip(between, shapes, strict=True):
            value = copy_op(op, [value], with_shape(value.type, shape), point)
        second.op.results[0].replace_all_uses_with(value)
        return ()

    touched = [op.results[0] for op in (first.op, second.op, *between)]
    return Rewrite(touched, [second.op, first.op], repeat_between)


def plan_constant(collective: Collective, forms: GroupForms) -> Rewrite | None:
    """Returns the rewrite of an all_gather, all_to_all or permute of splat constants to
    constants."""
    op = collective.op
    splats = [_splat(value) for value in op.operands]
    known = [splat for splat in splats if splat is not None]
    if len(known) < len(splats) or any(shape_of(result) is None for result in op.results):
        return None
    if collective.kind == "collective_permute":  # the other devices receive zeros
        reached = len({target for _, target in forms.facts.groups(collective) or ()})
    else:
        reached = sum(map(len, forms.groups(collective) or ()))
    if reached != forms.facts.grid.size:
        return None

    def write_constants() -> Sequence[ir.Value]:
        build = Builder(ir.InsertionPoint(op), op.location)
        for result, splat in zip(op.results, known, strict=True):
            value = ir.DenseElementsAttr.get_splat(result.type, splat)
            result.replace_all_uses_with(build.op("constant", [], result.type, value=value))
        return ()

    return Rewrite(list(op.results), [op], write_constants)


def _dimensions(collective: Collective) -> tuple[int, int]:
    """Returns the dimension that an all_to_all splits, and the one along which it concatenates."""
    return integer(collective.op, "split_dimension"), integer(collective.op, "concat_dimension")


def _before(op: ir.Operation, dimension: int) -> int | None:
    """Returns the operand's dimension that becomes a whole dimension of the result; None if there
    is none.

    It cannot use the relation of dimensions: an exchange may join devices along a dimension of size
    1, for which a reshape has no factors.
    """
    before, after = shape_of(op.operands[0]), shape_of(op.results[0])
    if before is None or after is None or 0 in before:
        return None
    if op.name == TRANSPOSE:
        return integers(op, "permutation")[dimension]
    ahead, size = math.prod(after[:dimension]), after[dimension]
    places = [
        d for d, extent in enumerate(before) if extent == size and math.prod(before[:d]) == ahead
    ]
    return places[0] if len(places) == 1 else None


def _shapes(
    first: Collective, between: Sequence[ir.Operation]
) -> tuple[tuple[int, ...], ...] | None:
    """Returns the shapes of the layout ops' results when they are applied to the first exchange's
    operand."""
    split, concatenated = _dimensions(first)
    count = integer(first.op, "split_count")
    shapes: list[tuple[int, ...]] = []
    for op in between:
        after = shape_of(op.results[0])
        dimensions = range(0 if after is None else len(after))
        split, concatenated = (
            next((d for d in dimensions if _before(op, d) == was), -1)
            for was in (split, concatenated)
        )
        if after is None or -1 in (split, concatenated):
            return None
        sizes = list(after)
        sizes[split] *= count
        sizes[concatenated] //= count
        shapes.append(tuple(sizes))
    return tuple(shapes)


def _splat(value: ir.Value) -> ir.Attribute | None:
    """Returns the element of a splat constant, also after ops that only copy elements; else
    None."""
    for _ in range(_LONGEST):
        maker = producer(value)
        if maker is not None and maker.name == CONSTANT:
            return splat_of(value)
        if maker is None or maker.name not in _COPIES:
            return None
        value = maker.operands[0]
    return None


def share_gathers(collectives: Sequence[Collective], forms: GroupForms, memory_limit: int) -> None:
    """Replaces all_gathers by an equal earlier one, in the same block or in a block around it.

    A shared result stays live longer. If `memory_limit` is not 0, the shared results may have at
    most so many bytes in total, in program order.
    """
    firsts: dict[object, list[Collective]] = {}
    kept = {c.op.results[0] for c in collectives if _SHARED in c.op.attributes}
    total = sum(c.bytes_out or 0 for c in collectives if _SHARED in c.op.attributes)
    shared: list[tuple[ir.Operation, ir.Operation]] = []  # each before the one that repeats it
    for collective in collectives:
        if collective.kind != "all_gather" or collective.is_async:
            continue
        op, groups = collective.op, forms.groups(collective)
        key = (
            tuple(op.operands),
            tuple(str(result.type) for result in op.results),
            integer(op, "all_gather_dim"),
            None if groups is None else frozenset(groups),
        )
        candidates = firsts.setdefault(key, [])
        around: list[ir.Block] = []  # the op's block, and those of the ops around it
        current: ir.Operation | None = op
        while current is not None and current.name != "builtin.module":
            around.append(current.block)
            current = current.parent
        earlier = next((c for c in candidates if c.op.block in around), None)
        if earlier is None:
            candidates.append(collective)
            continue
        held = 0 if earlier.op.results[0] in kept else earlier.bytes_out
        if memory_limit and (held is None or total + held > memory_limit):
            candidates.insert(0, collective)  # may still serve what follows it
            continue
        total += held or 0
        kept.add(earlier.op.results[0])
        shared.append((earlier.op, op))
    for earlier, later in shared:
        replace(later, earlier.results)
        if memory_limit > 0:
            earlier.attributes[_SHARED] = ir.UnitAttr.get(earlier.context)


@dataclass(frozen=True)
class _Padded:
    """An all_gather, its pad and its slice; `pairs` send each operand to the device that reads it.

    A pair of None means that the reader holds the operand itself. The readers' slices begin at
    `offset`, which no other device's slice does. Along `dimension` they contain `ahead` and
    `behind` elements of the padding before and after the operands.
    """

    collective: Collective
    pad: ir.Operation
    taken: ir.Operation
    pairs: tuple[ir.Attribute | None, ...]
    dimension: int
    offset: int
    ahead: int
    behind: int

    def write(self) -> list[ir.Value]:
        """Writes permutes at the all_gather, and at the slice a select of their concatenation."""
        op, result = self.collective.op, self.taken.results[0]
        build = Builder(ir.InsertionPoint(self.taken), self.taken.location)
        start = self.taken.operands[1 + self.dimension]
        here = build.compare("EQ", start, build.splat(self.offset, [], element_of(start)))
        operand, listed = op.operands[0], list[ir.Value]()
        for pairs in self.pairs:
            part = operand
            if pairs is not None:
                changed = {"source_target_pairs": pairs}
                kind = COLLECTIVE_PERMUTE
                part = collective_like(op, kind, part, part.type, changed, dropped=_DROPPED)
            listed.append(part)
        shape = list(shape_of(operand) or ())
        for length, place in ((self.ahead, 0), (self.behind, len(listed) + 1)):
            shape[self.dimension] = length
            if length:
                listed.insert(place, build.broadcast(self.pad.operands[1], shape, []))
        whole = build.concatenate(listed, self.dimension)
        empty = build.broadcast(self.pad.operands[1], list(shape_of(result) or ()), [])
        result.replace_all_uses_with(build.same("select", here, whole, empty))
        return []


def plan_padded(collective: Collective, forms: GroupForms, values: DeviceValues) -> Rewrite | None:
    """Returns the rewrite of a padded all_gather that only one device in each group reads; else
    None."""
    op = collective.op
    if len(op.operands) != 1 or shape_of(op.results[0]) is None:
        return None
    pad = _only_user(op, PAD)
    taken = None if pad is None else _only_user(pad, DYNAMIC_SLICE)
    if pad is None or taken is None or pad.operands[0] != op.results[0]:
        return None
    dimension = integer(op, "all_gather_dim")
    low = _padded_ahead(pad, dimension)
    before, after = shape_of(taken.operands[0]), shape_of(taken.results[0])
    if low is None or before is None or after is None:
        return None
    if any(n != after[d] for d, n in enumerate(before) if d != dimension):
        return None  # it slices another dimension
    starts = values.scalar(taken.operands[1 + dimension])
    groups = None if starts is None else forms.groups(collective)
    if starts is None or not groups or is_of_unsure_order(collective, forms):
        return None
    size, extent = after[dimension], before[dimension]
    length = (shape_of(op.results[0]) or ())[dimension]
    devices = forms.facts.grid.size
    offsets = np.broadcast_to(starts.reshape(-1), (devices,))
    begins = clamped_starts(offsets, size, extent)
    takers = [d for d in range(devices) if low - size < begins[d] < low + length]
    if len({int(begins[d]) for d in takers}) != 1 or len({int(offsets[d]) for d in takers}) != 1:
        return None
    begin, offset = int(begins[takers[0]]), int(offsets[takers[0]])
    ahead, behind = low - begin, begin + size - low - length
    others = [int(offsets[d]) for d in range(devices) if d not in takers]
    if ahead < 0 or behind < 0 or offset in others:
        return None
    pairs = _pairs(collective, groups, takers, forms)
    if pairs is None:
        return None
    padded = _Padded(collective, pad, taken, pairs, dimension, offset, ahead, behind)
    return Rewrite([each.results[0] for each in (op, pad, taken)], [op], padded.write)


def _only_user(op: ir.Operation, name: str) -> ir.Operation | None:
    users = [use.owner.operation for use in op.results[0].uses]
    return users[0] if len(users) == 1 and users[0].name == name else None


def _padded_ahead(pad: ir.Operation, dimension: int) -> int | None:
    """Returns the number of elements that a pad adds before a dimension; None if it pads another
    dimension, between elements, or by a negative number."""
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    low, high, between = (integers(pad, name) for name in names)
    others = [n for d in range(len(low)) if d != dimension for n in (low[d], high[d])]
    if any(between) or any(others) or low[dimension] < 0 or high[dimension] < 0:
        return None
    return low[dimension]


def _pairs(
    collective: Collective, groups: ProcessGroups, takers: Sequence[int], forms: GroupForms
) -> tuple[ir.Attribute | None, ...] | None:
    """Returns, for each member of a group, the pairs that send its operand to the group's reader.

    Returns None if that is impossible: unequal or large groups, or two readers in a group.
    """
    members = len(groups[0])
    if any(len(group) != members for group in groups) or members > _MOST_MEMBERS:
        return None
    if sum(map(len, groups)) != forms.facts.grid.size:
        return None
    attributes: list[ir.Attribute | None] = []
    for member in range(members):
        pairs = tuple((g[member], d) for g in groups for d in g if d in takers)
        if len({source for source, _ in pairs}) < len(pairs):
            return None  # two readers in one group
        is_sent = any(source != target for source, target in pairs)
        attribute = forms.express_pairs(pairs, collective) if is_sent else None
        if is_sent and attribute is None:
            return None
        attributes.append(attribute)
    return tuple(attributes)
