"""Writes a grid of cells as a loop over layers, and the tensors that consist of its results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.transforms.parts.fold_pipeline.batch_layout import BatchLayout, unbatched_dims
from stablehlo_tools.transforms.parts.fold_pipeline.composing import Located, stack_piece
from stablehlo_tools.transforms.parts.fold_pipeline.folding import FoldSite, PipelineWriter
from stablehlo_tools.transforms.parts.fold_pipeline.grids import StageGrid
from stablehlo_tools.transforms.parts.fold_pipeline.layer_scans import LayerBlock
from stablehlo_tools.transforms.parts.fold_pipeline.layers import (
    GridLoop,
    GridResults,
    LayerOperand,
)
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch, Segments
from stablehlo_tools.transforms.parts.fold_pipeline.stage_chains import Pieces, StageInputs
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Computed,
    Outside,
    Shape,
    Source,
    SourceBox,
    Summed,
    TraceReshape,
    Transpose,
    UnresolvedError,
    ViewOp,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer


@dataclass(frozen=True)
class GridPlan:
    """A grid with its layout: the order of the microbatches, and the values that each layer keeps.

    `kept_inputs` and `kept_outputs` are numbers of inputs that are passed on, and of outputs.
    """

    grid: StageGrid
    inputs: StageInputs
    layout: BatchLayout
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    sums: frozenset[int]
    reverse: bool
    layers: LayerBlock

    def row(self, application: int) -> int:
        """Returns the row of an application in stacked values."""
        return self.grid.length - 1 - application if self.reverse else application

    def shape(self, output: int) -> list[int]:
        """Returns the shape of an output of a layer."""
        return shape_of(self.layers.returned[output])

    def last_input(self, output: int) -> int | None:
        """Returns the input that reads an output unchanged in the next layer; None if there is
        none."""
        handed = (h.input for h in self.grid.handoffs if h.output == output and not h.ops)
        return next(handed, None)


class GridWriter(PipelineWriter):
    """Writes the grid of a pipeline at a site. For a backward, `before` writes its pipeline."""

    def __init__(
        self,
        tracer: Tracer,
        scratch: Scratch,
        site: FoldSite,
        segments: Segments,
        before: GridWriter | None = None,
    ) -> None:
        super().__init__(tracer, scratch, site, segments)
        self._before = before
        self._written: tuple[GridPlan, GridResults] | None = None

    def owner_of(self, source: Computed) -> GridWriter:
        """Returns the writer that computes a value: that of the pipeline or that of its
        backward."""
        own = self._before is None or self._tracer.region.is_inside(maker_of(source.value))
        return self if own or self._before is None else self._before

    def write_grid(self, plan: GridPlan, cells: Mapping[int, ir.Value]) -> None:
        """Writes the loop; `cells` are the stacked inputs that differ for each layer and
        microbatch."""
        grid, inputs, layout = plan.grid, plan.inputs, plan.layout
        step = -1 if plan.reverse else 1
        ordered = {number: stages[::step] for number, stages in inputs.layered.items()}
        operands = self._operands(replace(inputs, layered=ordered), plan.layers, layout)
        operands |= {n: LayerOperand(value, 0) for n, value in cells.items()}
        loop = GridLoop(
            unbatched_dims(plan.layers.block) if layout.stage is None else layout.stage.dims,
            layout.samples,
            grid.handoffs,
            tuple(operands[number] for number in range(len(operands))),
            grid.length * plan.layers.each,
            plan.kept_inputs,
            plan.kept_outputs,
            plan.sums,
            plan.reverse,
        )
        batch = {*inputs.batch, *inputs.cells}
        if layout.stage is not None or not batch:
            results = loop.write(self._build)
        else:
            results = loop.write_per_microbatch(self._build, layout.count, batch)
        self._written = plan, results

    def kept(self, number: int, *, is_input: bool) -> ir.Value:
        """Returns an input or an output of all layers, stacked."""
        assert self._written is not None
        results = self._written[1]
        return (results.inputs if is_input else results.outputs)[number]

    def stacked_cells(
        self, table: Sequence[Sequence[Pieces]], plan: GridPlan, number: int
    ) -> ir.Value:
        """Returns an input that differs for each layer and microbatch, stacked from its pieces."""
        type_, layout = plan.layers.block.arguments[number].type, plan.layout
        shape = ir.RankedTensorType(type_).shape
        pieces: list[SourceBox] = []
        for microbatch, own in enumerate(table):
            for n, cell in enumerate(own):
                for piece in cell:
                    row = plan.row(n)
                    if layout.stage is None:
                        pieces.append(stack_piece(stack_piece(piece, row), microbatch))
                    else:
                        within = layout.piece(piece, number, shape, microbatch)
                        pieces.append(stack_piece(within, row))
        value = self.value(pieces, type_)
        whole = layout.input_shape(number, shape)
        rows = plan.grid.length
        if layout.stage is None:
            return self._composer.reshape_value(value, [whole[0], rows, *whole[1:]])
        return self._composer.reshape_value(value, [rows, *whole])

    def compose_output(self, pieces: Iterable[SourceBox], type_: ir.Type) -> ir.Value:
        """Returns a tensor of a type that consists of pieces, which may be of sums over ticks."""
        return self.value([part for piece in pieces for part in self._by_stage(piece)], type_)

    def _by_stage(self, piece: SourceBox) -> list[SourceBox]:
        """Returns a piece; one of a sum over ticks is cut into the parts that each stage adds
        up."""
        source = piece.source
        if not isinstance(source, Summed) or self._written is None:
            return [piece]
        grid = self._written[0].grid
        output = grid.output_number(source.value)
        dim = None if output is None else grid.rows.outputs[output]
        if output is None or dim is None:
            return [piece]
        edges = [grid.box(output, row).starts[dim] for row in range(grid.rows.count)]
        parts: list[SourceBox] = []
        for box in piece.box.cut(dim, edges):
            view = piece.view.restrict_to(box.relative_to(piece.box))
            if view is None:
                raise UnresolvedError(
                    "the backward returns the sums of several stages in an unknown arrangement",
                    maker_of(source.value),
                    6,
                )
            parts.append(replace(piece, box=box, view=view))
        return parts

    def _write_sources(self, pieces: Iterable[SourceBox]) -> None:
        for piece in pieces:
            # `write_grid` has written the cells; only values around the loops can be missing.
            if isinstance(piece.source, Computed) and piece.source.tick < 0:
                self.owner_of(piece.source)._write_around(piece.source)

    def _locate_source(self, source: Source, box: Box) -> Located:
        if isinstance(source, Summed):
            return self._locate_sum(source, box)
        if isinstance(source, Outside) and self._before is not None:
            return Located(self._before._entering(self._entering(source.value)), box)
        if not isinstance(source, Computed):
            return super()._locate_source(source, box)
        owner = self.owner_of(source)
        if owner is not self:
            return owner._locate_source(source, box)
        return super()._locate_source(source, box) if source.tick < 0 else self._cell(source, box)

    def _cell(self, source: Computed, box: Box) -> Located:
        """Returns the location of a box of a cell's result."""
        assert self._written is not None
        plan, results = self._written
        place = plan.grid.place_of(source, box)
        if place is None:
            raise UnresolvedError(
                "the part of it that is used is not one stage's result", maker_of(source.value), 6
            )
        output, microbatch, application = place
        shape, layout = plan.shape(output), plan.layout
        last = plan.last_input(output)
        if application == plan.grid.length - 1 and last is not None:
            value = results.last[last]
            value = self._composer.reshape_value(value, layout.readable_shape(value, shape, output))
            return layout.locate_output(value, shape, output, microbatch)
        stack, row = results.outputs[output], plan.row(application)
        each = plan.layers.each
        if layout.stage is None and layout.count > 1:
            inner = Box((microbatch, row * each, *([0] * len(shape))), (1, each, *shape))
            return Located(stack, inner, _unstack_ops(plan, output, inner.sizes, shape, each))
        if layout.stage is not None and layout.minor:
            sizes = layout.readable_shape(stack, shape, output)
            stack = self._composer.reshape_value(stack, [plan.grid.length * each, *sizes])
        within = layout.locate_output(stack, shape, output, microbatch)
        inner = Box((row * each, *within.box.starts), (each, *within.box.sizes))
        return Located(stack, inner, _unstack_ops(plan, output, inner.sizes, shape, each))

    def _locate_sum(self, source: Summed, box: Box) -> Located:
        """Returns the location of a box of a sum of a stage's results over ticks."""
        assert self._written is not None
        plan, results = self._written
        output, grid = plan.grid.output_number(source.value), plan.grid
        assert output is not None
        dim, row = grid.rows.outputs[output], 0
        if dim is not None:
            row = box.starts[dim] // grid.box(output, 0).sizes[dim]
            box = box.relative_to(Box(grid.box(output, row).starts, box.sizes))
        place, each, along = plan.row(grid.application_of(source, row)), 1, 0
        within = plan.layers.outputs.get(output)
        if within is not None:
            each, along = box.sizes[within], box.starts[within]
            box = box.along(within, 0, 1)
        inner = Box((place * plan.layers.each + along, *box.starts), (each, *box.sizes))
        ops = _unstack_ops(plan, output, inner.sizes, box.sizes, each)
        return Located(results.outputs[output], inner, ops)


def _unstack_ops(
    plan: GridPlan, output: int, sizes: Shape, layer: Sequence[int], each: int
) -> tuple[ViewOp, ...]:
    """Returns the ops that turn rows of a stack, a box of `sizes`, into an output of a stage with
    `each` layers; `layer` is the shape of one layer's output."""
    dim = plan.layers.outputs.get(output)
    if dim is None:
        return (TraceReshape(sizes, tuple(layer)),)
    others = (*layer[:dim], *layer[dim + 1 :])
    reshape = TraceReshape(sizes, (each, *others))
    order = (*range(1, dim + 1), 0, *range(dim + 1, len(layer)))
    return (reshape,) if not dim else (Transpose(order), reshape)
