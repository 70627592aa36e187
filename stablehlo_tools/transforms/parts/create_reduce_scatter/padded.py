"""All_gathers that are padded, and of which one device of each group takes all and others nothing.

    %g = "stablehlo.all_gather"(%x)                      // tensor<2xf32>, 4 devices
    %p = stablehlo.pad %g, 0, high = [24]                // tensor<32xf32>
    %y = stablehlo.dynamic_slice %p, %offset              // to tensor<8xf32>, of device i at 8 i
  ==>
    %x1 = "stablehlo.collective_permute"(%x) {pairs = [[1, 0]]}
    %x2 = "stablehlo.collective_permute"(%x) {pairs = [[2, 0]]}
    %x3 = "stablehlo.collective_permute"(%x) {pairs = [[3, 0]]}
    %all = stablehlo.concatenate %x, %x1, %x2, %x3
    %y = stablehlo.select (%offset == 0), %all, 0

Partitioners leave that where a small dimension is padded to be divided. Each operand goes to the
one device that wants it, and nobody holds what is padded. The devices are told apart by where their
slice begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.device_arithmetic import Values, clamped_starts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.replica_groups import ProcessGroups
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import DYNAMIC_SLICE
from stablehlo_tools.ir.builder import Builder, element_of
from stablehlo_tools.transforms.parts.create_reduce_scatter.chunked import is_of_unsure_order
from stablehlo_tools.transforms.parts.create_reduce_scatter.group_forms import GroupForms
from stablehlo_tools.transforms.parts.create_reduce_scatter.rewriting import collective_like
from stablehlo_tools.transforms.parts.create_reduce_scatter.slices import shape_of

_PAD = "stablehlo.pad"
_DROPPED = ("replica_groups", "all_gather_dim", "use_global_device_ids")
_MOST_MEMBERS = 8  # of a group: more permutes than that take longer than one all_gather


@dataclass(frozen=True)
class Padded:
    """An all_gather, its pad and its slice; `pairs` bring each operand to where it is taken.

    None among the pairs: it is the taker's own. The takers' slices begin at `offset`, those of no
    others, and have `ahead` and `behind` of the padding on both sides, along `dimension`.
    """

    collective: Collective
    pad: ir.Operation
    taken: ir.Operation
    pairs: tuple[ir.Attribute | None, ...]
    dimension: int
    offset: int
    ahead: int
    behind: int

    @property
    def touched(self) -> list[ir.Value]:
        """Values of ops that the rewrite removes."""
        return [op.results[0] for op in (self.collective.op, self.pad, self.taken)]

    @property
    def replaced(self) -> list[ir.Operation]:
        """The collective that may go."""
        return [self.collective.op]

    def apply(self) -> None:
        """Writes permutes where the all_gather stands, and what is made of them at the slice."""
        result, build = self.taken.results[0], self._builder()
        start = self.taken.operands[1 + self.dimension]
        here = build.compare("EQ", start, build.splat(self.offset, [], element_of(start)))
        whole = self._joined(build, [self._part(pairs) for pairs in self.pairs])
        empty = self._padding(build, list(shape_of(result) or ()))
        result.replace_all_uses_with(build.op("select", [here, whole, empty], result.type))

    def _builder(self) -> Builder:
        return Builder(ir.InsertionPoint(self.taken), self.taken.location)

    def _part(self, pairs: ir.Attribute | None) -> ir.Value:
        op = self.collective.op
        operand = op.operands[0]
        if pairs is None:
            return operand
        kind = "stablehlo.collective_permute"
        changed = {"source_target_pairs": pairs}
        return collective_like(op, kind, operand, operand.type, changed, dropped=_DROPPED)

    def _joined(self, build: Builder, parts: Sequence[ir.Value]) -> ir.Value:
        shape = list(shape_of(parts[0]) or ())
        listed = list(parts)
        for length, place in ((self.ahead, 0), (self.behind, len(parts) + 1)):
            shape[self.dimension] = length
            if length:
                listed.insert(place, self._padding(build, shape))
        attribute = build.integer(self.dimension)
        return build.op("concatenate", listed, self.taken.results[0].type, dimension=attribute)

    def _padding(self, build: Builder, shape: Sequence[int]) -> ir.Value:
        return build.broadcast(self.pad.operands[1], shape, [])


def plan_padded(collective: Collective, forms: GroupForms, values: DeviceValues) -> Padded | None:
    """What stands for an all_gather that is padded and of which one device a group takes all."""
    op = collective.op
    if len(op.operands) != 1 or shape_of(op.results[0]) is None:
        return None
    pad = _only_user(op, _PAD)
    taken = None if pad is None else _only_user(pad, DYNAMIC_SLICE)
    if pad is None or taken is None or pad.operands[0] != op.results[0]:
        return None
    dimension = ir.IntegerAttr(op.attributes["all_gather_dim"]).value
    low = _padded_ahead(pad, dimension)
    starts = None if low is None else _starts(taken, dimension, values)
    groups = None if starts is None else forms.groups(collective)
    if low is None or starts is None or not groups or is_of_unsure_order(collective, forms):
        return None
    size = (shape_of(taken.results[0]) or ())[dimension]
    extent = (shape_of(taken.operands[0]) or ())[dimension]
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
    return Padded(collective, pad, taken, pairs, dimension, offset, ahead, behind)


def _only_user(op: ir.Operation, name: str) -> ir.Operation | None:
    users = [use.owner.operation for use in op.results[0].uses]
    return users[0] if len(users) == 1 and users[0].name == name else None


def _padded_ahead(pad: ir.Operation, dimension: int) -> int | None:
    """What a pad puts in front of a dimension, if it puts something around that one alone."""
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    low, high, between = (list(ir.DenseI64ArrayAttr(pad.attributes[name])) for name in names)
    others = [n for d in range(len(low)) if d != dimension for n in (low[d], high[d])]
    if any(between) or any(others) or low[dimension] < 0 or high[dimension] < 0:
        return None
    return low[dimension]


def _starts(taken: ir.Operation, dimension: int, values: DeviceValues) -> Values | None:
    """Where each device's slice begins, if it is one of that dimension alone."""
    before, after = shape_of(taken.operands[0]), shape_of(taken.results[0])
    if before is None or after is None:
        return None
    if any(
        one != other
        for d, (one, other) in enumerate(zip(before, after, strict=True))
        if d != dimension
    ):
        return None
    return values.scalar(taken.operands[1 + dimension])


def _pairs(
    collective: Collective, groups: ProcessGroups, takers: Sequence[int], forms: GroupForms
) -> tuple[ir.Attribute | None, ...] | None:
    """For each member of a group, how its operand comes to the group's taker."""
    members = len(groups[0])
    if any(len(group) != members for group in groups) or members > _MOST_MEMBERS:
        return None
    if sum(map(len, groups)) != forms.facts.grid.size:
        return None
    attributes: list[ir.Attribute | None] = []
    for member in range(members):
        pairs = tuple((g[member], d) for g in groups for d in g if d in takers)
        if len({source for source, _ in pairs}) < len(pairs):
            return None  # two takers of one group
        if all(source == target for source, target in pairs):
            attributes.append(None)
            continue
        attribute = forms.express_pairs(pairs, collective)
        if attribute is None:
            return None
        attributes.append(attribute)
    return tuple(attributes)
