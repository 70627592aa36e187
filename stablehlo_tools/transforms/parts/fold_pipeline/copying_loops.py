"""Loops that only copy rows, written as moves of whole tensors.

What of a layer depends on its weights alone, jax computes before a pipeline that it differentiates,
in a loop of its own. Of layers whose weights are packed in one array, that is a copy of each part:

    %first, %second = stablehlo.while {                 // over the layers
      %row = stablehlo.dynamic_slice %weights, %layer
      %first = stablehlo.dynamic_update_slice (slice %row [0:1]), %layer
      %second = stablehlo.dynamic_update_slice (slice %row [1:2]), %layer
    }
  ==>
    %first = stablehlo.slice %weights [0:8, 0:1]
    %second = stablehlo.slice %weights [0:8, 1:2]

Left as it is, each stage would be given such a loop of its own, beside the one over all layers.
"""

from __future__ import annotations

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.values import has_uses, producer
from stablehlo_tools.ir.walk import ops_named, terminator
from stablehlo_tools.transforms.parts.fold_pipeline.composing import Composer, Located
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion, Ranks
from stablehlo_tools.transforms.parts.fold_pipeline.moves import MOVING
from stablehlo_tools.transforms.parts.fold_pipeline.recognition import region_of
from stablehlo_tools.transforms.parts.fold_pipeline.segments import erase_unused
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Computed,
    Known,
    Outside,
    Piece,
    Source,
    UnresolvedError,
    View,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer


def write_copying_loops_as_moves(module: ir.Module, block: ir.Block) -> None:
    """Rewrites the loops of a block, and of loops in it, of which all that is used was moved."""
    effects = Effects({})
    for loop in reversed(ops_named(block.owner.operation, {WHILE})):
        if effects.has_effect(loop) or not _may_copy(loop):
            continue
        facts = ModuleFacts.of(module)
        region = region_of(loop, Ranks.single(facts), DeviceValues(module, facts))
        moved = None if isinstance(region, str) else _moved(region)
        if moved is None:
            continue
        composer = Composer(Builder(ir.InsertionPoint(loop), loop.location), _located)
        for result, pieces in moved:
            result.replace_all_uses_with(composer.compose(pieces, result.type))
        around = loop.block
        loop.erase()
        erase_unused(around)


def _may_copy(loop: ir.Operation) -> bool:
    """Whether the last iteration moves elements into all results that are used, and some are."""
    ends = terminator(loop.regions[1].blocks[0]).operands
    used = [end for end, result in zip(ends, loop.results, strict=True) if has_uses(result)]
    makers = [producer(end) for end in used]
    return bool(used) and all(op is not None and op.name in MOVING for op in makers)


def _moved(region: LoopRegion) -> list[tuple[ir.Value, list[Piece]]] | None:
    """What the used results of a loop consist of; None where it computes something of it."""
    tracer = _MoveTracer(region)
    moved: list[tuple[ir.Value, list[Piece]]] = []
    for number, result in enumerate(region.loop.results):
        if not has_uses(result):
            continue
        whole = Box.whole(shape_of(result))
        try:
            moved.append((result, tracer.followed(tracer.leaving(number, whole, View(whole)))))
        except UnresolvedError:
            return None
    return moved


def _located(source: Source, box: Box) -> Located:
    assert isinstance(source, Outside)
    return Located(source.value, box)


class _MoveTracer(Tracer):
    """Follows what a loop moves, up to the first thing that it computes."""

    def _beyond(self, piece: Piece) -> list[Piece]:
        if isinstance(piece.source, Computed | Known):
            raise UnresolvedError("the loop computes it", self.region.loop, 4)
        return super()._beyond(piece)
