"""Where the elements of a value come from, past everything that only moves them.

A value is asked for on one rank, in one iteration of the loop (a *tick*), as a box of elements. Ops
that move elements by known indices are followed, through carries into earlier ticks and through
permutes to other ranks, until what was asked for is in pieces: of what an op computed, of a value
from outside, of a constant. What no output asks for, such as the garbage of ramp-up, is never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stablehlo_tools.analysis.device_arithmetic import Values
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.constants import CONSTANTS, is_splat, splat_of, value_text
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.fold_pipeline.boxes import Box, View
from stablehlo_tools.transforms.parts.fold_pipeline.items import (
    Computed,
    Item,
    Outside,
    Piece,
    Splat,
    UnresolvedError,
    known_source,
)
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.moves import follow

_IDS = frozenset({"stablehlo.partition_id", "stablehlo.replica_id"})
_MOST = 1 << 16  # pieces of one value


class Tracer:
    """Follows values of a region."""

    def __init__(self, region: LoopRegion) -> None:
        self.region = region

    def pieces(self, value: ir.Value, rank: int, tick: int, box: Box) -> list[Piece]:
        """What a box of a value consists of, by place. Raises UnresolvedError."""
        pending = [Item(value, rank, tick, box, View(Box.whole(box.sizes)))]
        done: list[Piece] = []
        while pending:
            item = pending.pop()
            found = self._followed(item)
            if isinstance(found, Piece):
                done.append(found)
            else:
                pending += found
            if len(done) + len(pending) > _MOST:
                raise UnresolvedError("what it holds is in too many pieces", self.region.loop, 4)
        return sorted(done, key=lambda piece: piece.view.target.starts)

    def control(self, value: ir.Value, item: Item) -> Values | None:
        """A value on the rank and in the tick of an item, where it is control."""
        return self.region.control_at(value, item.rank, item.tick)

    def _followed(self, item: Item) -> Piece | Sequence[Item]:
        region = self.region
        known = self.control(item.value, item)
        if known is not None:
            part = known[
                tuple(slice(s, s + n) for s, n in zip(item.box.starts, item.box.sizes, strict=True))
            ]
            return Piece(known_source(part), Box.whole(item.box.sizes), item.view)
        entered = region.argument_number(item.value)
        if entered is not None:
            if item.tick <= 0 or region.is_invariant(entered):
                return [item.before(region.loop.operands[entered], -1)]
            return [item.before(region.ends[entered], item.tick - 1)]
        op = producer(item.value)
        if op is not None and op == region.loop:
            place = ir.OpResult(item.value).result_number
            return [item.before(region.ends[place], region.ticks - 1)]
        if op is not None and op.name in CONSTANTS and is_splat(op):
            text = value_text(op).rpartition(" : ")[0]
            zero = splat_of(item.value) == 0
            splat = Splat(text, str(element_of(item.value)), zero)
            return Piece(splat, Box.whole(item.box.sizes), item.view)
        if op is None or not region.is_inside(op):
            return Piece(
                Outside(item.value), region.unsharded(item.value, item.rank, item.box), item.view
            )
        if op.name in _IDS:
            raise UnresolvedError(f"{op.name} is not the same on all devices of a stage", op, 3)
        tick = item.tick if region.is_in_loop(op) else -1
        item = replace(item, tick=tick)
        followed = follow(self, op, item)
        if followed is not None:
            return followed
        if tick >= 0 and not region.is_varying(op):
            tick = -1
        rank = item.rank if tick >= 0 or region.differs(item.value) else 0
        return Piece(Computed(item.value, rank, tick), item.box, item.view)
