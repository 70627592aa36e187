"""Rewrites a block so that loops over layers go over ranges of them, and stacks are pieces."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.channels import Channels
from stablehlo_tools.analysis.dimension_propagation.graph import Node, captured
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.layer_loops import LayerLoop
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.transforms.parts.all_parts import AllPartsWriter
from stablehlo_tools.transforms.parts.split_layers.rows import (
    ROWS,
    CutLoops,
    in_pieces,
    rows_of,
    stacks,
)
from stablehlo_tools.transforms.parts.split_layers.writing import RangeWriter, ranges


class RangeEmission(AllPartsWriter):
    """Rewrites a block as the analysis of its rows says, with `counts` layers in each range."""

    def __init__(
        self, dims: BatchDims, loops: CutLoops, counts: Sequence[int], channels: Channels
    ) -> None:
        super().__init__(dims, channels, counts)
        self._cut = loops

    def _loop(self, node: Node) -> None:
        loop = self._cut.find(node)
        if loop is not None:
            self._ranges(loop)
            self._dead.append(loop.op)
        elif self._cut.is_left(node):
            self._take_whole(node.op, range(len(node.operands)))
            self._capture_whole(node)
        else:
            super()._loop(node)

    def _ranges(self, loop: LayerLoop) -> None:
        """Writes the loops over ranges, and lets what they give stand for what the loop gave."""
        op = loop.op
        outside = {value: self._pieces.whole(value, op) for value in captured(op)}
        writer = RangeWriter(loop, outside, self._channels)
        pieces = {carry: list(self._taken_rows(loop, carry)) for carry in stacks(loop)}
        current = {
            carry: self._pieces.whole(value, op)
            for carry, value in enumerate(op.operands)
            if carry not in pieces
        }
        for part in ranges(loop, self._sizes):
            current |= writer.counters(part, current)
            rows = {carry: each[part.number] for carry, each in pieces.items()}
            operands = {**current, **rows}
            made = writer.write(part, [operands[carry] for carry in range(len(op.operands))])
            for carry in (*loop.counters, *loop.flows):
                current[carry] = made.results[carry]
            for carry in loop.writes:
                pieces[carry][part.number] = made.results[carry]
        for carry, value in current.items():
            op.results[carry].replace_all_uses_with(value)
        for carry, each in pieces.items():
            self._give_rows(loop, carry, each)

    def _taken_rows(self, loop: LayerLoop, carry: int) -> Sequence[ir.Value]:
        """The rows of a stack that each range goes over."""
        value = loop.op.operands[carry]
        if carry in in_pieces(loop):
            return self._pieces.parts_of(value, ROWS, loop.op)
        whole, rows = self._pieces.whole(value, loop.op), rows_of(loop, carry)
        build = Builder(ir.InsertionPoint(loop.op), loop.op.location)
        found: list[ir.Value] = []
        first = rows.first
        for count in self._sizes:
            found.append(build.slice_along(whole, 0, first, first + rows.span * count))
            first += rows.span * count
        return found

    def _give_rows(self, loop: LayerLoop, carry: int, pieces: list[ir.Value]) -> None:
        """What stands for a stack behind the loop."""
        result, value = loop.op.results[carry], loop.op.operands[carry]
        if carry in in_pieces(loop):
            self._pieces.put(result, ROWS, pieces)
            return
        whole, rows = self._pieces.whole(value, loop.op), rows_of(loop, carry)
        if carry not in loop.writes:
            result.replace_all_uses_with(whole)
            return
        build = Builder(ir.InsertionPoint(loop.op), loop.op.location)
        end, size = rows.first + rows.span * loop.trips, shape_of(whole)[0]
        edges = ((0, rows.first, 0), (end, size, len(pieces) + 1))
        for first, last, place in edges:
            if first < last:
                pieces.insert(place, build.slice_along(whole, 0, first, last))
        result.replace_all_uses_with(build.concatenate(pieces, 0))
