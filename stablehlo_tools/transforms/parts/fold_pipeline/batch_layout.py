"""Where the microbatches of a stage are once they are computed together.

A stage that computes each sample by itself takes the microbatches as one batch: along a dimension
of each of its inputs, which is to be found. Other stages take them stacked, one after the other.

Where another axis of the mesh than that of the stages divides the samples of a microbatch, these
have to come first in the batch: of a dimension in which the microbatches come first, no sharding
says that an axis divides what lies within each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, Graph, propagate
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.entry import outside_of
from stablehlo_tools.analysis.shardings import (
    axes_by_dimension,
    function_sharding,
    result_sharding,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CONVERT
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.fold_pipeline.chains import Handoff, Pieces
from stablehlo_tools.transforms.parts.fold_pipeline.composing import (
    Located,
    interleaved,
    shifted,
    split_samples,
    stacked,
)
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch, Segments
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Computed,
    Convert,
    Outside,
    Piece,
    Reshape,
    UnresolvedError,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer
from stablehlo_tools.transforms.parts.scaling import (
    NotScaledError,
    follow_batch,
)


@dataclass(frozen=True)
class BatchedStage:
    """How a block runs on more samples: the dimension of each input and output that they are
    along; None for an output that is a sum over them."""

    dims: BatchDims
    inputs: dict[int, int]
    outputs: tuple[int | None, ...]

    def output_dim(self, output: int) -> int:
        """The dimension of an output that is no sum."""
        dim = self.outputs[output]
        assert dim is not None
        return dim


def unbatched(block: ir.Block) -> BatchDims:
    """A block without a batch, which is run as it is."""
    return propagate(Graph.of(block), {}, 1)


def batched(
    block: ir.Block,
    batch: Collection[int],
    handoffs: Sequence[Handoff],
    scratch: Scratch,
    *,
    along: Mapping[int, int] | None = None,
    sums: Collection[int] = (),
    fixed: Collection[int] = (),
) -> BatchedStage | None:
    """How a stage computes the microbatches together, each sample as before; None where it does
    not compute each sample by itself.

    `batch` are the inputs that differ from microbatch to microbatch. What is handed on is tried
    first, and dimensions of one element last. Of the inputs `along` the dimension is known. The
    outputs `sums` are to be sums over the microbatches. The inputs `fixed`, the same for all, may
    be ones that are then taken once for each.
    """
    graph = Graph.of(block)
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
                    scratch.scaled(dims, 2 * parts)  # shows whether there is a way to write it
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
    """The dimensions of inputs and outputs, where just the inputs of the batch have one, and a
    stage hands on each sample as the next one takes it."""
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
    if any(tiling.outer != 1 for tiling in tilings):
        return None
    for handoff in handoffs:
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
    """Where the `count` microbatches are: in one batch, or stacked where there is no `stage` that
    computes each sample by itself.

    With `minor`, the first samples of all microbatches come first, then the second ones: as they
    do in an input that had the samples outside of the microbatches, and have to where an axis of
    the mesh divides the samples.
    """

    count: int
    stage: BatchedStage | None
    minor: bool

    @staticmethod
    def of(
        count: int,
        batch: Mapping[int, Sequence[Pieces]],
        stage: BatchedStage | None,
        *,
        divided: bool = False,
    ) -> BatchLayout:
        """The layout in which the first input that is boxes of a value has the microbatches; where
        an axis of the mesh has `divided` the samples, that with the samples outside."""
        if stage is None:
            return BatchLayout(count, stage, False)
        if divided:
            return BatchLayout(count, stage, True)
        minor = [
            _is_minor([pieces[0].box for pieces in microbatches])
            for microbatches in batch.values()
            if all(len(pieces) == 1 for pieces in microbatches)
        ]
        return BatchLayout(count, stage, bool(minor) and minor[0])

    @property
    def samples(self) -> int:
        """Of all microbatches, where they are one batch."""
        return 1 if self.stage is None else self.count * self.stage.dims.parts

    def piece(self, piece: Piece, number: int, shape: Sequence[int], microbatch: int) -> Piece:
        """A piece of an input of a microbatch, in that of all."""
        if self.stage is None:
            return stacked(piece, microbatch)
        dim = self.stage.inputs[number]
        if self.minor:
            return interleaved(piece, dim, self.stage.dims.parts, microbatch)
        return shifted(piece, dim, microbatch * shape[dim])

    def input_shape(self, number: int, shape: Sequence[int]) -> list[int]:
        """The shape of an input of all microbatches, of which one has `shape`."""
        if self.stage is None:
            return [self.count, *shape]
        dim = self.stage.inputs[number]
        return [*shape[:dim], shape[dim] * self.count, *shape[dim + 1 :]]

    def readable_shape(self, value: ir.Value, shape: Sequence[int], output: int) -> list[int]:
        """The shape in which an output of all microbatches has each in a box."""
        if self.stage is None or not self.minor:
            return shape_of(value)
        dim = self.stage.output_dim(output)
        sizes = list(split_samples(shape, dim, self.stage.dims.parts))
        sizes[dim + 1] = self.count
        return sizes

    def output(
        self, value: ir.Value, shape: Sequence[int], output: int, microbatch: int
    ) -> Located:
        """Where an output of a microbatch is, in that of all in its readable shape."""
        if self.count == 1:
            return Located(value, Box.whole(shape))
        if self.stage is None:
            box = Box.whole([1, *shape]).along(0, microbatch, 1)
            return Located(value, box, (Reshape(box.sizes, tuple(shape)),))
        dim = self.stage.output_dim(output)
        if not self.minor:
            size = shape[dim]
            return Located(value, Box.whole(shape).along(dim, microbatch * size, size))
        sizes = split_samples(shape, dim, self.stage.dims.parts)
        box = Box.whole(sizes).along(dim + 1, microbatch, 1)
        return Located(value, box, (Reshape(sizes, tuple(shape)),))


def _is_minor(boxes: Sequence[Box]) -> bool:
    """Whether boxes differ in their position along a dimension behind others of some size."""
    first = boxes[0]
    for dim in range(len(first.sizes)):
        if any(box.starts[dim] != first.starts[dim] for box in boxes):
            return first.sizes[dim] == 1 and any(size > 1 for size in first.sizes[:dim])
    return False


class DividedSamples:
    """Follows what microbatches take back to where they enter a pipeline."""

    def __init__(self, tracer: Tracer, segments: Segments) -> None:
        self._tracer = tracer
        self._segments = segments
        self._followed: set[tuple[Computed, Computed]] = set()

    def are_in(self, batch: Mapping[int, Sequence[Pieces]]) -> bool:
        """Whether they are in what the microbatches take, by number of the input. Not where that
        cannot be followed: it is only laid out otherwise then."""
        region = self._tracer.region
        if region.manual is None or len(region.mesh_axes()) == 1:
            return False
        self._followed.clear()
        try:
            return any(self._differ(each[0], each[-1]) for each in batch.values())
        except UnresolvedError:
            return False

    def _differ(self, first: Pieces, last: Pieces) -> bool:
        """Whether what differs from one microbatch to another is divided."""
        return any(self._is_divided(a, b) for a, b in zip(first, last, strict=False) if a != b)

    def _is_divided(self, first: Piece, last: Piece) -> bool:
        source, other = first.source, last.source
        if isinstance(source, Outside):
            return any(first.box.sizes[dim] > 1 for dim in self._open_dimss(source.value))
        if not isinstance(source, Computed) or not isinstance(other, Computed):
            return False
        if (source, other) in self._followed:
            return False
        self._followed.add((source, other))
        if source == other:  # a part for each microbatch
            return any(self._is_divided(piece, piece) for piece in self._inputs(source))
        return self._differ(tuple(self._inputs(source)), tuple(self._inputs(other)))

    def _inputs(self, source: Computed) -> Iterator[Piece]:
        """What a value is computed of, on its rank in its tick."""
        pieces = (
            self._tracer.pieces(value, source.rank, source.tick, Box.whole(shape_of(value)))
            for value in self._segments.of([source.value]).inputs
        )
        return chain.from_iterable(pieces)

    def _open_dimss(self, value: ir.Value) -> list[int]:
        """The dimensions of a value from outside that other axes divide."""
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
