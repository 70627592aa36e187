"""The grid of layers that a grid of stages is, where stages have written their layers out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stablehlo_tools.analysis.dataflow import Dataflow
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.fold_pipeline.chains import (
    Handoff,
    Instance,
    Pieces,
    StageInputs,
)
from stablehlo_tools.transforms.parts.fold_pipeline.grids import Grid
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Computed,
    Outside,
    Piece,
    View,
)
from stablehlo_tools.transforms.parts.fold_pipeline.written_layers import (
    WrittenLayers,
    written_layers,
)
from stablehlo_tools.transforms.parts.roll_layers.iterations import taken
from stablehlo_tools.transforms.parts.roll_layers.repetitions import look


def by_layer(
    first: Grid, second: Grid, block: ir.Block, scratch: Scratch
) -> tuple[Grid, Grid] | None:
    """A pipeline and its backward, in cells of one layer each; None where one of them has not
    written its layers out, or others, and where a layer takes what depends on the microbatch and
    another one something else instead. Both stand in `block`: what layers take of it is the same
    where it is computed alike."""
    layers = _layers_of(first), _layers_of(second)
    if layers[0] is None or layers[1] is None or layers[0].count != layers[1].count:
        return None
    alike = _Alike(block)
    first, second = (replace(grid, inputs=alike.inputs(grid.inputs)) for grid in (first, second))
    cut = _cut(first, layers[0], scratch), _cut(second, layers[1], scratch)
    if cut[0] is None or cut[1] is None:
        return None
    return None if StageInputs.sorted(cut[0].inputs, cut[0].handoffs).cells else (cut[0], cut[1])


def _layers_of(grid: Grid) -> WrittenLayers | None:
    """The layers of a stage that hands one value on, in whichever places the next one takes it."""
    handed = {handoff.output for handoff in grid.handoffs}
    if len(handed) != 1 or any(handoff.ops for handoff in grid.handoffs):
        return None
    one, *others = (handoff.input for handoff in grid.handoffs)
    if any(row[0][number] != row[0][one] for row in grid.inputs for number in others):
        return None
    block = grid.rows.function.regions[0].blocks[0]
    return written_layers(block, (one, *others), handed.pop())


def _cut(grid: Grid, layers: WrittenLayers, scratch: Scratch) -> Grid | None:
    """A grid in cells of layers; None where stages lie along another dimension of some of them."""
    state, outputs, rows = grid.handoffs[0].input, grid.segment.outputs, grid.rows
    numbers = [(handed, *own) for handed, own in zip(layers.handed, layers.outputs, strict=True)]
    dims = [
        {rows.outputs[number] for number in column if number is not None}
        for column in zip(*numbers, strict=True)
    ]
    if any(len(own) != 1 for own in dims):
        return None
    taken = [(state, *own) for own in layers.inputs]
    types = [rows.function.regions[0].blocks[0].arguments[number].type for number in taken[0]]
    made = tuple(tuple(None if n is None else outputs[n] for n in own) for own in numbers)
    layer_rows = replace(
        rows,
        function=scratch.function(types, layers.write),
        dims=tuple(rows.dims[number] for number in taken[0]),
        outputs=tuple(own.pop() for own in dims),
    )
    cut = replace(grid, rows=layer_rows, handoffs=(Handoff(0, 0, ()),), made=made)

    def handed_on(layer: int, cell: Instance) -> Pieces:
        """What a layer of a cell hands on; nothing where nobody but the next layer takes it."""
        value = made[layer][0]
        return () if value is None else (_whole(value, cell, cut.box(0, cell.row)),)

    inputs = tuple(
        tuple(
            tuple(
                handed_on(layer - 1, cell) if layer and number == state else given[number]
                for number in own
            )
            for cell, given in zip(cells, row, strict=True)
            for layer, own in enumerate(taken)
        )
        for cells, row in zip(grid.cells, grid.inputs, strict=True)
    )
    return replace(cut, inputs=inputs)


class _Alike:
    """The values of a block, those that are computed alike as the first of them."""

    def __init__(self, block: ir.Block) -> None:
        flow, effects = Dataflow.of(block, opened=()), Effects({})
        first: dict[int, int] = {}
        known: dict[Any, tuple[int, ...]] = {}
        for node in flow.nodes:
            if not effects.has_effect(node.op):
                key = look(node.op), tuple(first.get(number, number) for number in taken(node))
                first.update(zip(node.results, known.setdefault(key, node.results), strict=True))
        self._first = {flow.values[n]: flow.values[own] for n, own in first.items()}

    def inputs(
        self, inputs: tuple[tuple[tuple[Pieces, ...], ...], ...]
    ) -> tuple[tuple[tuple[Pieces, ...], ...], ...]:
        """The inputs of cells, in terms of these."""
        return tuple(
            tuple(tuple(tuple(map(self._piece, own)) for own in cell) for cell in row)
            for row in inputs
        )

    def _piece(self, piece: Piece) -> Piece:
        source = piece.source
        if isinstance(source, Outside) or (isinstance(source, Computed) and source.tick < 0):
            source = replace(source, value=self._first.get(source.value, source.value))
        return replace(piece, source=source)


def _whole(value: ir.Value, cell: Instance, box: Box) -> Piece:
    """All that a cell computes as a value."""
    return Piece(Computed(value, cell.rank, cell.tick), box, View(Box.whole(box.sizes)))
