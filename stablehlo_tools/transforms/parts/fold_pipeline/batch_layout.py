"""The positions of microbatches in the tensors of stages that compute them together.

A stage that computes each sample independently processes the microbatches as one batch: along a
dimension of each of its inputs, which is searched for. Other stages read the microbatches stacked
along a new dimension.

Another axis of the mesh may divide the samples of a microbatch. The samples then have to be the
major dimension of the batch. If the microbatches were the major one, no sharding could state that
an axis divides the samples inside of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, Graph, propagate
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.entry import outside_of
from stablehlo_tools.analysis.shardings import axes_by_dimension, function_sharding, result_sharding
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CONVERT
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.fold_pipeline.composing import (
    Located,
    interleave_piece,
    shift_piece,
    split_samples,
    stack_piece,
)
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch, Segments
from stablehlo_tools.transforms.parts.fold_pipeline.stage_chains import Handoff, Pieces
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Computed,
    Convert,
    Outside,
    SourceBox,
    TraceReshape,
    UnresolvedError,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer
from stablehlo_tools.transforms.parts.scaling import NotScaledError, follow_batch


@dataclass(frozen=True)
class BatchedStage:
    """A block that runs on more samples: the dimensions of its inputs and outputs that hold the
    samples; None for an output that is a sum over samples."""

    dims: BatchDims
    inputs: dict[int, int]
    outputs: tuple[int | None, ...]

    def output_dim(self, output: int) -> int:
        """Returns the sample dimension of an output that is not a sum."""
        dim = self.outputs[output]
        assert dim is not None
        return dim


def unbatched_dims(block: ir.Block) -> BatchDims:
    """Returns a block without a batch dimension, to be run unchanged."""
    return propagate(Graph.from_block(block), {}, 1)


def batch_stage(
    block: ir.Block,
    batch: Collection[int],
    handoffs: Sequence[Handoff],
    scratch: Scratch,
    *,
    along: Mapping[int, int] | None = None,
    sums: Collection[int] = (),
    fixed: Collection[int] = (),
) -> BatchedStage | None:
    """Returns the stage with all microbatches as one batch; None if it mixes samples.

    `batch` are the inputs that differ between microbatches. Those that are passed from stage to
    stage are tried first, and dimensions of size 1 last. `along` gives known dimensions of inputs.
    The outputs `sums` are to be sums over the microbatches. The inputs `fixed`, the same for all
    microbatches, may have a batch dimension; they are then repeated for each.
    """
    graph = Graph.from_block(block)
    handed = {handoff.input for handoff in handoffs}
    known = {number: DimTiling(dim) for number, dim in (along or {}).items()}
    for number in sorted(batch, key=lambda n: n not in handed):
        shape = graph.shape(graph.root.arguments[number]) or ()
        for dim in sorted(range(len(shape)), key=lambda d: shape[d] == 1):
            try:
                seeds, parts = {**known, number: DimTiling(dim)}, shape[dim]
                shapes = {n: graph.shape(graph.root.arguments[n]) or () for n in seeds}
                if not all(tiling.fits(shapes[n], parts) for n, tiling in seeds.items()):
                    continue
                dims = follow_batch(graph, seeds, parts, sums=sums)
                stage = _fitting(dims, batch, handoffs, sums, fixed)
                if stage is not None:
                    # Raises NotScaledError if it cannot be written.
                    scratch.scaled_function(dims, 2 * parts)
                    return stage
            except NotScaledError:
                continue
    return None


def _fitting(
    dims: BatchDims,
    batch: Collection[int],
    handoffs: Sequence[Handoff],
    sums: Collection[int],
    fixed: Collection[int],
) -> BatchedStage | None:
    """Returns the dimensions of inputs and outputs. Returns None unless just the inputs of the
    batch have one, and a stage passes on each sample where the next one reads it."""
    root = dims.graph.root
    inputs = {
        i: dims.tilings[number] for i, number in enumerate(root.arguments) if number in dims.tilings
    }
    outputs = [dims.tilings.get(number) for number in root.returned]
    if not set(batch) <= inputs.keys() <= {*batch, *fixed}:
        return None
    if any((tiling is None) != (place in sums) for place, tiling in enumerate(outputs)):
        return None
    tilings = [*inputs.values(), *(tiling for tiling in outputs if tiling is not None)]
    # The samples have to be consecutive, so that microbatches can be put side by side.
    if any(tiling.outer != 1 for tiling in tilings):
        return None
    for handoff in handoffs:
        # The loop over layers passes the batch on from layer to layer, and may only convert it.
        moved = any(not isinstance(op, Convert) for op in handoff.ops)
        if moved or inputs[handoff.input] != outputs[handoff.output]:
            return None
    return BatchedStage(
        dims,
        {i: tiling.dim for i, tiling in inputs.items()},
        tuple(None if tiling is None else tiling.dim for tiling in outputs),
    )


@dataclass(frozen=True)
class BatchLayout:
    """The positions of `count` microbatches: in one batch, or stacked if there is no `stage`.

    With `minor`, the first samples of all microbatches come first, then the second ones. An input
    whose sample dimension is outside of the microbatches has this order. It is required if an axis
    of the mesh divides the samples.
    """

    count: int
    stage: BatchedStage | None
    minor: bool

    @staticmethod
    def from_inputs(
        count: int,
        batch: Mapping[int, Sequence[Pieces]],
        stage: BatchedStage | None,
        *,
        divided: bool = False,
    ) -> BatchLayout:
        """Returns the layout of the first input that is one box of a value for each microbatch. If
        an axis of the mesh has `divided` the samples, the layout is `minor`."""
        if stage is None or divided:
            return BatchLayout(count, stage, stage is not None)
        whole = (each for each in batch.values() if all(len(pieces) == 1 for pieces in each))
        boxes = [pieces[0].box for pieces in next(whole, ())]
        sizes = boxes[0].sizes if boxes else ()
        # The boxes differ along a dimension in which each has size 1, after a larger dimension.
        differs = (any(b.starts[d] != boxes[0].starts[d] for b in boxes) for d in range(len(sizes)))
        dim = next((dim for dim, found in enumerate(differs) if found), None)
        minor = dim is not None and sizes[dim] == 1 and any(size > 1 for size in sizes[:dim])
        return BatchLayout(count, stage, minor)

    @property
    def samples(self) -> int:
        """The number of parts that the batch holds, of all microbatches; 1 if they are not one
        batch."""
        return 1 if self.stage is None else self.count * self.stage.dims.parts

    def piece(
        self, piece: SourceBox, number: int, shape: Sequence[int], microbatch: int
    ) -> SourceBox:
        """Returns a piece of one microbatch's input as a piece of the input of all."""
        if self.stage is None:
            return stack_piece(piece, microbatch)
        dim = self.stage.inputs[number]
        if self.minor:
            return interleave_piece(piece, dim, self.stage.dims.parts, microbatch)
        return shift_piece(piece, dim, microbatch * shape[dim])

    def input_shape(self, number: int, shape: Sequence[int]) -> list[int]:
        """Returns the shape of an input of all microbatches, if that of one is `shape`."""
        if self.stage is None:
            return [self.count, *shape]
        dim = self.stage.inputs[number]
        return [*shape[:dim], shape[dim] * self.count, *shape[dim + 1 :]]

    def readable_shape(self, value: ir.Value, shape: Sequence[int], output: int) -> list[int]:
        """Returns the shape of an output of all microbatches in which each one's part is a box."""
        if self.stage is None or not self.minor:
            return shape_of(value)
        dim = self.stage.output_dim(output)
        sizes = list(split_samples(shape, dim, self.stage.dims.parts))
        sizes[dim + 1] = self.count
        return sizes

    def locate_output(
        self, value: ir.Value, shape: Sequence[int], output: int, microbatch: int
    ) -> Located:
        """Returns the position of one microbatch's output in that of all, which has its readable
        shape."""
        if self.count == 1:
            return Located(value, Box.whole(shape))
        if self.stage is None:
            box = Box.whole([1, *shape]).along(0, microbatch, 1)
            return Located(value, box, (TraceReshape(box.sizes, tuple(shape)),))
        dim = self.stage.output_dim(output)
        if not self.minor:
            size = shape[dim]
            return Located(value, Box.whole(shape).along(dim, microbatch * size, size))
        sizes = split_samples(shape, dim, self.stage.dims.parts)
        box = Box.whole(sizes).along(dim + 1, microbatch, 1)
        return Located(value, box, (TraceReshape(sizes, tuple(shape)),))


class DividedSamples:
    """Traces the inputs of microbatches back to the values that enter a pipeline."""

    def __init__(self, tracer: Tracer, segments: Segments) -> None:
        self._tracer = tracer
        self._segments = segments
        self._followed: set[tuple[Computed, Computed]] = set()

    def are_in(self, batch: Mapping[int, Sequence[Pieces]]) -> bool:
        """Returns True if another axis of the mesh divides the samples in the inputs of the
        microbatches, by number of the input. Returns False if that is unknown: only the layout
        depends on it."""
        region = self._tracer.region
        if region.manual is None or len(region.mesh_axes()) == 1:
            return False
        self._followed.clear()
        try:
            return any(self._differ(each[0], each[-1]) for each in batch.values())
        except UnresolvedError:
            return False

    def _differ(self, first: Pieces, last: Pieces) -> bool:
        """Returns True if pieces that differ between microbatches are divided."""
        return any(self._is_divided(a, b) for a, b in zip(first, last, strict=False) if a != b)

    def _is_divided(self, first: SourceBox, last: SourceBox) -> bool:
        source, other = first.source, last.source
        if isinstance(source, Outside):
            return any(first.box.sizes[dim] > 1 for dim in self._open_dims(source.value))
        if not isinstance(source, Computed) or not isinstance(other, Computed):
            return False
        if (source, other) in self._followed:
            return False
        self._followed.add((source, other))
        if source == other:  # a part for each microbatch
            return any(self._is_divided(piece, piece) for piece in self._inputs(source))
        return self._differ(tuple(self._inputs(source)), tuple(self._inputs(other)))

    def _inputs(self, source: Computed) -> Iterator[SourceBox]:
        """Yields the pieces that a value is computed from, on its rank in its tick."""
        pieces = (
            self._tracer.pieces(value, source.rank, source.tick, Box.whole(shape_of(value)))
            for value in self._segments.segment_of([source.value]).inputs
        )
        return chain.from_iterable(pieces)

    def _open_dims(self, value: ir.Value) -> list[int]:
        """Returns the dimensions of a value from outside that other axes divide."""
        value, region = outside_of(value), self._tracer.region
        while (op := producer(value)) is not None and op.name == CONVERT:
            value = op.operands[0]
        if op is not None:
            sharding = result_sharding(op, ir.OpResult(value).result_number)
        else:
            argument = ir.BlockArgument(value)
            function = argument.owner.owner.operation
            sharding = function_sharding(function, "arg_attrs", argument.arg_number)
        axes = [] if sharding is None else axes_by_dimension(sharding)
        return [dim for dim, own in enumerate(axes) if set(own) - {region.ranks.axis}]
