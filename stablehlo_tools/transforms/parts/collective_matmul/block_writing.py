"""Writes a region block by block.

    %b1 = collective_permute %x                   // the rows of the device before: on their way
    %h0 = dot_general %x, %w                      // while the device's own are multiplied
    %b2 = collective_permute %b1
    %h1 = dot_general %b1, %w
    …
    %y = dynamic_update_slice … %h1 at the rows of the device before, and so on

With `hold`, barriers keep XLA:GPU to this order. Otherwise it would begin hop after hop at once,
one in flight, and multiply when all blocks are there. It would also merge several products that
share an operand into one. So a hop waits for the product before the one that it runs beside, and
each product has its own operands.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stablehlo_tools.analysis.collectives import Channels
from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, OpTiling, part_shape
from stablehlo_tools.analysis.replica_groups import ProcessGroups
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integer
from stablehlo_tools.dialect.names import ALL_TO_ALL, DOT_GENERAL
from stablehlo_tools.ir.builder import Builder, barrier, element_of, shape_of
from stablehlo_tools.ir.clone import alike_clone
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.transforms.parts.block_rewriter import part_clone
from stablehlo_tools.transforms.parts.collective_matmul.regions import RingRegion
from stablehlo_tools.transforms.parts.collective_matmul.rings import (
    BlockPart,
    DeviceRing,
    RingDirection,
)
from stablehlo_tools.transforms.parts.create_reduce_scatter.smaller_collectives import (
    GroupForms,
    collective_like,
)
from stablehlo_tools.transforms.parts.one_part import apart

_OF_OTHERS = (
    "replica_groups",
    "all_gather_dim",
    "scatter_dimension",
    "use_global_device_ids",
    "split_dimension",
    "concat_dimension",
    "split_count",
)


type Blocks = dict[tuple[int, BlockPart], ir.Value]  # by number of the value, and part


@dataclass
class Held:
    """The blocks of assembled values, for later regions of the module with the same ring and
    tiling."""

    blocks: dict[ir.Value, tuple[DeviceRing, DimTiling, dict[BlockPart, ir.Value]]] = field(
        default_factory=dict[ir.Value, tuple[DeviceRing, DimTiling, dict[BlockPart, ir.Value]]]
    )

    def get(
        self, value: ir.Value, ring: DeviceRing, tiling: DimTiling, part: BlockPart
    ) -> ir.Value | None:
        """Returns a part of a value; None if it was not assembled from such parts."""
        known = self.blocks.get(value)
        return known[2][part] if known is not None and known[:2] == (ring, tiling) else None


class RegionWriter:
    """Rewrites one region at the place of its last op."""

    def __init__(
        self,
        region: RingRegion,
        ring: DeviceRing,
        forms: GroupForms,
        channels: Channels,
        held: Held,
        *,
        hold: bool,
    ) -> None:
        self._region = region
        self._ring = ring
        self._forms = forms
        self._channels = channels
        self._hold = hold
        self._nodes = region.nodes
        last = self._nodes[-1].op
        self._build = Builder(ir.InsertionPoint(last), last.location)
        self._parts = region.size * ring.halves
        self._held = held
        self._blocks: Blocks = {}
        self._cut: dict[tuple[int, DimTiling, BlockPart], ir.Value] = {}
        self._places: dict[
            tuple[BlockPart, int], ir.Value
        ] = {}  # start indices, by part and length
        self._start: ir.Value | None = None
        self._device: ir.Value | None = None
        self._over_blocks: dict[Node, ir.Value] = {}  # partial sums of products over blocks
        self._sums = [
            _RingSum(node, direction, order)
            for node in region.scatters
            for direction, order in ring.sums
        ]
        self._leaving: dict[int, ir.Value] = {}  # partial sums to be sent on, by sum
        self._arrived: dict[int, ir.Value] = {}  # partial sums that arrived, for the next term
        self._taken_later: list[int] = []  # values whose blocks are used after their turn
        self._anchor: _Slot | None = None  # a product's result of the previous turn

    def run(self) -> None:
        """Rewrites the region."""
        region = self._region
        region.order.make_room(self._nodes)
        for node, tiling in region.gathers.items():
            self._own_parts(node, tiling)
        self._taken_later = self._numbers_taken_later()
        for part, steps in self._turns():
            for node in region.gathers:
                self._hand_on(node, part)
            for node in steps:
                self._copy(node, region.steps[node], part)
            for number in range(len(self._sums)):
                self._add_term(number)
            for node in region.exchanges:
                # The result for a part is sent to the part's device. The block that arrives in
                # exchange is another device's result for a part of this device.
                block, back = self._blocks.get((node.operands[0], part)), self._back(node, part)
                if block is not None and back not in self._blocks:
                    self._blocks[back] = self._send_straight(node, block, part)
            self._anchor = self._anchor_of(part)
        self._replace_results()
        for node in reversed(self._nodes):
            node.op.erase()
        region.order.without(self._nodes)

    def _numbers_taken_later(self) -> list[int]:
        """Returns values that depend on products and whose blocks are used after their turn."""
        region = self._region
        numbers = [number for number, _ in region.used_outside()]
        numbers += [node.operands[0] for node in region.scatters]
        for node in region.summed_products() if self._ring.way is RingDirection.BOTH else ():
            numbers += node.operands
        gathered = {node.results[0] for node in region.gathers}
        return [number for number in dict.fromkeys(numbers) if number not in gathered]

    def _anchor_of(self, part: BlockPart) -> _Slot | None:
        """Returns a result of a turn's products that is still to be used; None if there is none."""
        if self._leaving:
            return self._leaving, next(reversed(self._leaving))
        for node in self._region.exchanges:
            back = self._back(node, part)
            if back in self._blocks:
                return self._blocks, back
        for number in reversed(self._taken_later):
            if (number, part) in self._blocks:
                return self._blocks, (number, part)
        if self._over_blocks:
            return self._over_blocks, next(reversed(self._over_blocks))
        return None

    def _own_parts(self, node: Node, tiling: DimTiling) -> None:
        """Writes the device's own block of a gathered value, or its halves."""
        (operand,), halves = node.op.operands, self._ring.halves
        if node.name == ALL_TO_ALL:
            own = self._ring.part(0)
            self._blocks[node.results[0], own] = self._cut_out(operand, _split(node), own)
            if self._ring.arriving[0] != own:
                self._exchange(node, self._ring.arriving[0])
            return
        size = shape_of(operand)[tiling.dim] // halves
        for half in range(halves):
            own = operand
            if halves > 1:
                start = half * size
                own = self._build.slice_along(operand, tiling.dim, start, start + size)
            self._blocks[node.results[0], BlockPart(half, 0)] = own

    def _turns(self) -> list[tuple[BlockPart, list[Node]]]:
        """Returns the ops that run on each part, one turn after the other.

        If the block that arrives last is needed first by a sum, the summed products run after all
        blocks have arrived.
        """
        region, ring = self._region, self._ring
        steps = list(region.steps)
        if not region.gathers:
            return [(part, steps) for part in ring.summing]
        if not region.scatters or ring.way is not RingDirection.BOTH:
            return [(part, steps) for part in ring.arriving]
        last = region.summed_products()
        first = [node for node in steps if node not in last]
        return [
            *((part, first) for part in ring.arriving),
            *((part, [node for node in steps if node in last]) for part in ring.summing),
        ]

    def _replace_results(self) -> None:
        region = self._region
        for node, tiling in region.scatters.items():
            halves = [
                self._complete_sum(node, BlockPart(half, 0)) for half in range(self._ring.halves)
            ]
            total = halves[0] if len(halves) == 1 else self._build.concatenate(halves, tiling.dim)
            node.op.results[0].replace_all_uses_with(total)
        for node, summed in self._over_blocks.items():
            result, total = node.op.results[0], summed
            if total.type != result.type:
                total = self._build.op("convert", [total], result.type)
            result.replace_all_uses_with(total)
        for node in region.exchanges:
            along = DimTiling(integer(node.op, "concat_dimension"))
            node.op.results[0].replace_all_uses_with(self._together(node.results[0], along))
        for number, tiling in region.used_outside():
            whole = self._together(number, tiling)
            region.graph.values[number].replace_all_uses_with(whole)

    def _complete_sum(self, node: Node, own: BlockPart) -> ir.Value:
        """Completes and returns the sum of the device's own part."""
        total = self._blocks[node.operands[0], own]
        for number, each in enumerate(self._sums):
            if each.node is not node or each.order[0].half != own.half:
                continue
            self._send(number)
            while not each.is_complete:
                self._add_term(number)
                self._send(number)
            total = self._build.same("add", self._arrived.pop(number), total)
        return total

    def _back(self, node: Node, part: BlockPart) -> tuple[int, BlockPart]:
        """Returns the block of an exchange's result that arrives as a part is sent."""
        return node.results[0], self._ring.opposite(part)

    def _exchange(self, node: Node, there: BlockPart) -> None:
        """Begins to send the part that arrives as `there` directly to its device."""
        if (node.results[0], there) in self._blocks:
            return
        (operand,) = node.op.operands
        leaving = self._ring.opposite(there)
        leaves = self._cut_out(operand, _split(node), leaving)
        awaited = [] if self._anchor is None else [self._anchor]
        (block,) = self._fence_values([leaves], awaited)
        self._blocks[node.results[0], there] = self._send_straight(node, block, leaving)

    def _send_straight(self, node: Node, block: ir.Value, part: BlockPart) -> ir.Value:
        """Sends the block of a part directly to its device; returns the block that arrives."""
        if part.offset:
            for pairs in self._ring.straight(part):
                block = self._permute(node.op, block, pairs)
        return block

    def _hand_on(self, node: Node, part: BlockPart) -> None:
        """Begins the next hops of a part, to the devices that use it later."""
        value = node.results[0]
        if node.name == ALL_TO_ALL:
            arriving = self._ring.arriving
            for following in arriving[arriving.index(part) + 1 :][:1]:
                self._exchange(node, following)
            return
        for direction, hops in self._ring.hops(part.half).items():
            hop = -direction * part.offset + 1  # the number of the next hop
            there = BlockPart(part.half, -direction * hop)
            if 0 < hop <= hops and (value, there) not in self._blocks:
                awaited = [] if self._anchor is None else [self._anchor]
                (block,) = self._fence_values([self._blocks[value, part]], awaited)
                pairs = self._ring.pairs(direction)
                self._blocks[value, there] = self._permute(node.op, block, pairs)

    def _copy(self, node: Node, step: OpTiling, part: BlockPart) -> None:
        """Writes an op on one part; before a product, sends the waiting sums."""
        op = node.op
        operands: Sequence[ir.Value] = [
            value if tiling is None else self._block(node.operands[place], value, tiling, part)
            for place, (value, tiling) in enumerate(zip(op.operands, step.operands, strict=True))
        ]
        if node.name == DOT_GENERAL:
            leaving = list(self._leaving)
            operands = self._fence_values(operands, [(self._leaving, number) for number in leaving])
            for number in leaving:
                self._send(number)
        copy = part_clone(op, step, operands, self._build.point, self._parts)
        made = copy.results[0]
        if step.combine is not None:
            # Products of a narrow float are summed in f32.
            element = element_of(made)
            if isinstance(element, ir.FloatType) and element.width < 32:
                element = ir.F32Type.get(made.context)
            made.set_type(self._build.tensor(shape_of(made), element))
        if step.combine is None:
            for number, result in zip(node.results, copy.results, strict=True):
                self._blocks[number, part] = result
        elif node in self._over_blocks:
            self._over_blocks[node] = self._build.same("add", self._over_blocks[node], made)
        else:
            self._over_blocks[node] = made

    def _send(self, number: int) -> None:
        """Sends a waiting sum to the next device."""
        each, total = self._sums[number], self._leaving.pop(number, None)
        if total is not None:
            pairs = self._ring.pairs(each.direction)
            self._arrived[number] = self._permute(each.node.op, total, pairs)

    def _add_term(self, number: int) -> None:
        """Adds the device's term to a sum that arrived, if the term is computed already."""
        each = self._sums[number]
        if each.is_complete or number in self._leaving:
            return
        term = self._blocks.get((each.node.operands[0], each.order[each.added]))
        if term is None:
            return
        if each.added:
            if len(self._sums) == 1:  # only this term can run beside the hop
                (term,) = self._fence_values([term], [])
            term = self._build.same("add", self._arrived.pop(number), term)
        self._leaving[number] = term
        each.added += 1

    def _block(self, number: int, value: ir.Value, tiling: DimTiling, part: BlockPart) -> ir.Value:
        """Returns a block of an operand: a known one, or one cut from the whole value."""
        known = self._blocks.get((number, part))
        if known is not None:
            return known
        key = (number, tiling, part)
        if key not in self._cut:
            held = self._held.get(value, self._ring, tiling, part)
            self._cut[key] = held or self._cut_out(value, tiling, part)
        return self._cut[key]

    def _cut_out(self, value: ir.Value, tiling: DimTiling, part: BlockPart) -> ir.Value:
        build, shape = self._build, shape_of(value)
        sizes = list(part_shape(tuple(shape), tiling, self._parts))
        type_ = build.tensor(sizes, element_of(value))
        alike = alike_clone(value, tiling.dim, type_, build.point)
        if alike is not None:
            return alike
        if tiling.outer == 1:
            return build.dynamic_slice(value, self._start_indices(tiling, part, sizes), sizes)
        rows = apart(shape, tiling, self._parts)
        one = [1 if dim == tiling.dim + 1 else size for dim, size in enumerate(rows)]
        taken = build.dynamic_slice(
            build.reshape(value, rows), self._start_indices(tiling, part, one), one
        )
        return build.reshape(taken, sizes)

    def _together(self, number: int, tiling: DimTiling) -> ir.Value:
        """Assembles a value from its blocks."""
        build, value = self._build, self._region.graph.values[number]
        shape = shape_of(value)
        rows = shape if tiling.outer == 1 else apart(shape, tiling, self._parts)
        whole = build.splat(0, rows, element_of(value))
        for part in self._ring.arriving:
            block = self._blocks[number, part]
            if tiling.outer > 1:
                sizes = [1 if dim == tiling.dim + 1 else size for dim, size in enumerate(rows)]
                block = build.reshape(block, sizes)
            whole = build.update(whole, block, self._start_indices(tiling, part, shape_of(block)))
        whole = whole if rows == shape else build.reshape(whole, shape)
        blocks = {part: self._blocks[number, part] for part in self._ring.arriving}
        # Later regions with this ring read the blocks instead of cutting the value again.
        self._held.blocks[whole] = self._ring, tiling, blocks
        return whole

    def _permute(self, op: ir.Operation, value: ir.Value, pairs_of: ProcessGroups) -> ir.Value:
        pairs = self._forms.express_pairs(pairs_of, self._region.like)
        assert pairs is not None, "asked when the region was found"
        sent = collective_like(
            self._region.like.op,
            "stablehlo.collective_permute",
            value,
            value.type,
            {"source_target_pairs": pairs},
            dropped=_OF_OTHERS,
            location=op.location,
            point=self._build.point,
        )
        self._channels.renew(maker_of(sent))
        return sent

    def _fence_values(
        self, values: Sequence[ir.Value], awaited: Sequence[_Slot]
    ) -> Sequence[ir.Value]:
        """Returns values after a barrier that also waits for `awaited`; without `hold`, the values.

        `awaited` slots get the barrier's results, because XLA drops unused ones. The results are
        different values to a compiler, so that it does not merge their users.
        """
        if not self._hold:
            return values
        operands = [*values, *(held[key] for held, key in awaited)]
        results = [*barrier(operands, self._build.point, self._build.location).results]
        for (held, key), result in zip(awaited, results[len(values) :], strict=True):
            held[key] = result
        return results[: len(values)]

    def _start_indices(
        self, tiling: DimTiling, part: BlockPart, sizes: Sequence[int]
    ) -> list[ir.Value]:
        """Returns the start indices of a part, also in a value whose parts have their own
        dimension."""
        if self._start is None:
            self._start = self._build.i32(0)
        starts = [self._start] * len(sizes)
        dim = tiling.dim if tiling.outer == 1 else tiling.dim + 1
        length = sizes[dim]
        key = (part, length)
        if key not in self._places:
            places = self._ring.places(self._forms.facts.grid.size, part)
            table = self._build.table([length * place for place in places])
            if self._device is None:
                by = "replica_id" if self._forms.facts.grid.num_partitions == 1 else "partition_id"
                unsigned = ir.IntegerType.get_unsigned(32, self._build.context)
                self._device = self._build.op(by, [], self._build.tensor([], unsigned))
            row = self._build.dynamic_slice(table, [self._device], [1])
            self._places[key] = self._build.reshape(row, [])
        starts[dim] = self._places[key]
        return starts


@dataclass
class _RingSum:
    """A sum that travels in one direction; its next term is that of the part `order[added]`."""

    node: Node
    direction: int
    order: Sequence[BlockPart]
    added: int = 0

    @property
    def is_complete(self) -> bool:
        """True if all devices have added their term."""
        return self.added == len(self.order)


type _Slot = tuple[MutableMapping[Any, ir.Value], Any]  # a mapping of values, and a key in it


def _split(node: Node) -> DimTiling:
    """Returns the tiling of the parts that an all_to_all sends."""
    return DimTiling(integer(node.op, "split_dimension"))
