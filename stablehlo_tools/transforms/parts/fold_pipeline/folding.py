"""Replaces a pipeline by one loop over its layers, for all microbatches.

    %r = sdy.manual_computation(%x) manual_axes={"stage"} { ... the pipeline ... }
  ==>
    %r = ... the loop over layers ...

The used results of the pipeline are traced back to the segments that computed them. The chains of
stages among these are written as one loop, and so are segments that they start from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import SHARDING_CONSTRAINT, SLICE, WHILE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.inline import copy_body
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.ir.views import ManualComputation
from stablehlo_tools.transforms.parts.fold_pipeline.batch_layout import (
    BatchLayout,
    DividedSamples,
    batch_stage,
    unbatched_dims,
)
from stablehlo_tools.transforms.parts.fold_pipeline.composing import (
    Composer,
    Located,
    shift_piece,
    stack_piece,
)
from stablehlo_tools.transforms.parts.fold_pipeline.layer_scans import LayerBlock, layer_of
from stablehlo_tools.transforms.parts.fold_pipeline.layers import BlockRepetition, LayerOperand
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.segments import (
    Scratch,
    Segment,
    Segments,
    erase_unused,
)
from stablehlo_tools.transforms.parts.fold_pipeline.stage_chains import (
    ChainFinder,
    Chains,
    Pieces,
    StageInputs,
)
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Computed,
    Outside,
    Source,
    SourceBox,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer


class Output(NamedTuple):
    """A value to be replaced, which is a box of a result."""

    value: ir.Value
    result: int
    box: Box


def outputs_of(
    op: ir.Operation, *, but: Callable[[ir.Operation], bool] = lambda _: False
) -> Iterator[Output]:
    """Yields the used results of an op, or the slices of a result that has no other use.

    The last ticks of a pipeline give its outputs, the others garbage that must not be traced. Uses
    by ops for which `but` returns True do not count.
    """
    for number, result in enumerate(op.results):
        users = [user for user in _users(result) if not but(user)]
        if not users:
            continue
        boxes = [_sliced_box(user) for user in users]
        if None in boxes:
            yield Output(result, number, Box.whole(shape_of(result)))
            continue
        for user, box in zip(users, boxes, strict=True):
            assert box is not None
            yield Output(user.results[0], number, box)


def _users(value: ir.Value) -> Iterator[ir.Operation]:
    """Yields the ops that use a value. A sharding constraint counts as the slices of its result if
    it has no other use."""
    for op in [use.owner.operation for use in value.uses]:
        behind = list(_users(op.results[0])) if op.name == SHARDING_CONSTRAINT else []
        yield from behind if behind and all(map(_sliced_box, behind)) else [op]


def _sliced_box(op: ir.Operation) -> Box | None:
    """Returns the box that a slice without strides reads; None for any other op."""
    if op.name != SLICE or any(stride != 1 for stride in integers(op, "strides")):
        return None
    return Box(integers(op, "start_indices"), tuple(shape_of(op.results[0])))


class FoldSite:
    """The place of the loop over layers: before the pipeline's loop, or before the manual
    computation around it."""

    def __init__(self, region: LoopRegion) -> None:
        self.anchor = region.manual or region.loop
        self.point = ir.InsertionPoint(self.anchor)
        self._entering: dict[ir.Value, ir.Value] = {}
        if region.manual is not None:
            arguments = ManualComputation(region.manual).body.arguments
            self._entering.update(zip(arguments, region.manual.operands, strict=True))

    def entering(self, value: ir.Value) -> ir.Value:
        """Returns the value at this place for a value from outside of the region."""
        return self._entering.get(value, value)

    def type_of(self, output: Output) -> ir.Type:
        """Returns the type that an output has at this place."""
        return ir.RankedTensorType.get(
            output.box.sizes, element_of(output.value), loc=self.anchor.location
        )


def fold(region: LoopRegion, module: ir.Module) -> int:
    """Replaces a pipeline by a loop over its layers; returns the number of its stages.

    A loop with fewer than two is not a pipeline. Raises UnresolvedError for a pipeline that is not
    understood, and SameStageError for a loop that is not a pipeline. In these three cases, do not
    use the module afterwards.
    """
    scratch = Scratch(module)
    tracer, site = Tracer(region), FoldSite(region)
    outputs = list(outputs_of(site.anchor))
    # Trace everything first: writing adds ops to the block that is traced.
    pieces = [tracer.left(output.result, output.box) for output in outputs]
    writer = PipelineWriter(tracer, scratch, site)
    values = [
        writer.value(consists_of, site.type_of(output))
        for output, consists_of in zip(outputs, pieces, strict=True)
    ]
    for output, value in zip(outputs, values, strict=True):
        output.value.replace_all_uses_with(value)
    erase_unused(site.anchor.block, site.anchor)
    scratch.clear()
    return writer.finder.most_stages


class PipelineWriter:
    """Writes the values that a pipeline computes, at a site."""

    def __init__(
        self, tracer: Tracer, scratch: Scratch, site: FoldSite, segments: Segments | None = None
    ) -> None:
        self._tracer = tracer
        self._scratch = scratch
        self._segments = segments or Segments(tracer.region, scratch)
        self._build = Builder(site.point, tracer.region.loop.location)
        self._entering = site.entering
        self._composer = Composer(self._build, self._locate_source)
        # Values computed outside of the loop: by rank, and once for ranks that compute the same.
        self._around: dict[Computed, ir.Value] = {}
        self._alike: dict[tuple[Segment, tuple[Pieces, ...]], Sequence[ir.Value]] = {}
        self._in_loop: dict[tuple[Computed, Box], Located] = {}
        self._divided = DividedSamples(tracer, self._segments)
        self.finder = ChainFinder(tracer, self._segments, scratch)

    def value(self, pieces: Sequence[SourceBox], type_: ir.Type) -> ir.Value:
        """Returns a tensor of a type that consists of pieces. Raises UnresolvedError."""
        self._write_sources(pieces)
        return self._composer.compose(pieces, type_)

    def _locate_source(self, source: Source, box: Box) -> Located:
        if isinstance(source, Outside):
            return Located(self._entering(source.value), box)
        assert isinstance(source, Computed)
        if source.tick < 0:
            return Located(self._around[source], box)
        return self._in_loop[source, box]

    def _write_sources(self, pieces: Iterable[SourceBox]) -> None:
        """Writes the sources of pieces that are not written yet.

        Boxes of one value that have the same size are microbatches of one loop, in the order in
        which they leave the pipeline.
        """
        groups: dict[tuple[ir.Value, tuple[int, ...]], dict[tuple[Computed, Box], None]] = {}
        for piece in pieces:
            source = piece.source
            if not isinstance(source, Computed):
                continue
            if source.tick < 0:
                self._write_around(source)
            elif (source, piece.box) not in self._in_loop:
                group = groups.setdefault((source.value, piece.box.sizes), {})
                group[source, piece.box] = None
        for group in groups.values():
            ends = sorted(group, key=lambda end: end[0].tick)
            self._write_chains(self.finder.chains(ends))

    def _write_around(self, source: Computed) -> None:
        """Writes the value that a rank computes outside of the loop, once for ranks that compute
        the same."""
        if source in self._around:
            return
        segment, inputs = self.around(source)
        key = segment, inputs
        if key not in self._alike:
            values = [
                self.value(pieces, value.type)
                for pieces, value in zip(inputs, segment.inputs, strict=True)
            ]
            _, self._alike[key] = copy_body(segment.block, values, self._build.point)
        self._around[source] = self._alike[key][segment.outputs.index(source.value)]

    def around(self, source: Computed) -> tuple[Segment, tuple[Pieces, ...]]:
        """Returns the segment that computes a value outside of the loop, and the pieces of its
        inputs."""
        maker = maker_of(source.value)
        together = list(maker.results) if maker.name == WHILE else [source.value]
        segment = self._segments.segment_of(together)
        return segment, tuple(
            tuple(self._tracer.pieces(value, source.rank, -1, Box.whole(shape_of(value))))
            for value in segment.inputs
        )

    def _write_chains(self, chains: Chains) -> None:
        """Writes the loop that replaces chains, and notes the results."""
        inputs = StageInputs.from_chains(chains)
        # A layer is the body of the scan in a stage; without a scan, it is the stage.
        stage = chains.rows.block
        layer = None
        if chains.length > 1:
            layer = layer_of(stage, chains.handoffs, inputs.layered, self._scratch, reverse=False)
        layers = layer or LayerBlock(stage)
        stage = batch_stage(layers.block, inputs.batch, chains.handoffs, self._scratch)
        divided = self._divided.are_in(inputs.batch)
        layout = BatchLayout.from_inputs(len(chains.inputs), inputs.batch, stage, divided=divided)
        results = self._write_layers(chains, inputs, layers, layout)
        for number, output in enumerate(chains.segment.outputs):
            shape = shape_of(layers.returned[number])
            readable = layout.readable_shape(results[number], shape, number)
            value = self._composer.reshape_value(results[number], readable)
            for microbatch, instance in enumerate(chains.last):
                source = Computed(output, instance.rank, instance.tick)
                box = chains.box(number, instance)
                self._in_loop[source, box] = layout.locate_output(value, shape, number, microbatch)

    def _write_layers(
        self, chains: Chains, inputs: StageInputs, layers: LayerBlock, layout: BatchLayout
    ) -> list[ir.Value]:
        """Writes the layers on their inputs; returns the results of the last one."""
        operands = self._operands(inputs, layers, layout)
        ordered = tuple(operands[number] for number in range(len(operands)))
        dims = unbatched_dims(layers.block) if layout.stage is None else layout.stage.dims
        trips = chains.length * layers.each
        loop = BlockRepetition(dims, layout.samples, chains.handoffs, ordered, trips)
        if layout.stage is not None or not inputs.batch:
            return loop.write(self._build)
        return loop.write_per_microbatch(self._build, layout.count, inputs.batch)

    def _operands(
        self, inputs: StageInputs, layers: LayerBlock, layout: BatchLayout
    ) -> dict[int, LayerOperand]:
        """Returns the operands of the layers by number of the input: fixed, of the microbatches, or
        stacked. Inputs that differ for each layer and microbatch are left out."""
        types = [argument.type for argument in layers.block.arguments]
        operands: dict[int, LayerOperand] = {}
        for number, pieces in inputs.fixed.items():
            operands[number] = LayerOperand(self.value(pieces, types[number]))
        for number, microbatches in inputs.batch.items():
            type_ = types[number]
            shape = ir.RankedTensorType(type_).shape
            pieces = [
                layout.piece(piece, number, shape, microbatch)
                for microbatch, own in enumerate(microbatches)
                for piece in own
            ]
            value = self._composer.reshape_value(
                self.value(pieces, type_), layout.input_shape(number, shape)
            )
            operands[number] = LayerOperand(value)
        for number, stages in inputs.layered.items():
            operands[number] = self._stack(stages, types[number], layers.inputs.get(number), layers)
        return operands

    def _stack(
        self, stages: Sequence[Pieces], type_: ir.Type, dim: int | None, layers: LayerBlock
    ) -> LayerOperand:
        """Returns the inputs of all layers, stacked along a dimension: a new one, or that of the
        layers in a stage."""
        if dim is None:
            pieces = [stack_piece(piece, n) for n, own in enumerate(stages) for piece in own]
            return LayerOperand(self.value(pieces, type_), 0)
        pieces = [shift_piece(p, dim, n * layers.each) for n, own in enumerate(stages) for p in own]
        return LayerOperand(self.value(pieces, type_), dim, whole=True)
