"""The batch that the microbatches make up, as the dimension of a stage's inputs it lies in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.dimension_propagation.graph import Graph
from stablehlo_tools.analysis.dimension_propagation.layout import Layout
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, propagate
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.transforms.parts.fold_pipeline.chains import Link
from stablehlo_tools.transforms.parts.fold_pipeline.composing import (
    Placed,
    apart,
    interleaved,
    shifted,
    stacked,
)
from stablehlo_tools.transforms.parts.fold_pipeline.inputs import Terms
from stablehlo_tools.transforms.parts.fold_pipeline.scaling import (
    NotScaledError,
    Scaling,
    follow_batch,
)
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import Box, Convert, Piece, Reshape


@dataclass(frozen=True)
class Widening:
    """How a block runs on more samples: the dimension of each input and output that they lie in."""

    dims: BatchDims
    inputs: dict[int, int]
    outputs: tuple[int, ...]


def as_it_is(block: ir.Block) -> BatchDims:
    """A block without a batch."""
    return propagate(Graph.of(block), {}, 1)


@dataclass(frozen=True)
class Order:
    """Where the microbatches are: in one batch, or stacked where there is no widening.

    With `minor`, the first samples of all microbatches come first, then the second ones: as they
    do in an input that had the samples outside of the microbatches.
    """

    count: int
    wide: Widening | None
    minor: bool

    @staticmethod
    def of(count: int, batch: Mapping[int, Terms], wide: Widening | None) -> Order:
        """The order that an input, the first that is pieces of a value, has them in."""
        if wide is None:
            return Order(count, wide, False)
        minor = [
            _is_minor([term[0].box for term in terms])
            for terms in batch.values()
            if all(len(term) == 1 for term in terms)
        ]
        return Order(count, wide, bool(minor) and minor[0])

    @property
    def samples(self) -> int:
        """Of all microbatches, where they are one batch."""
        return 1 if self.wide is None else self.count * self.wide.dims.parts

    def piece(self, piece: Piece, number: int, shape: Sequence[int], microbatch: int) -> Piece:
        """A piece of an input of a microbatch, in that of all."""
        if self.wide is None:
            return stacked(piece, microbatch)
        dim = self.wide.inputs[number]
        if self.minor:
            return interleaved(piece, dim, self.wide.dims.parts, microbatch)
        return shifted(piece, dim, microbatch * shape[dim])

    def shape(self, number: int, shape: Sequence[int]) -> list[int]:
        """The shape of an input of all microbatches."""
        if self.wide is None:
            return [self.count, *shape]
        dim = self.wide.inputs[number]
        return [*shape[:dim], shape[dim] * self.count, *shape[dim + 1 :]]

    def held(self, value: ir.Value, shape: Sequence[int], output: int) -> list[int]:
        """The shape in which an output of all microbatches has each in a box."""
        if self.wide is None or not self.minor:
            return shape_of(value)
        dim = self.wide.outputs[output]
        sizes = list(apart(shape, dim, self.wide.dims.parts))
        sizes[dim + 1] = self.count
        return sizes

    def placed(self, value: ir.Value, shape: Sequence[int], output: int, microbatch: int) -> Placed:
        """Where an output of a microbatch is, in that of all as it is held."""
        if self.count == 1:
            return Placed(value, Box.whole(shape))
        if self.wide is None:
            box = Box.whole([1, *shape]).along(0, microbatch, 1)
            return Placed(value, box, (Reshape(box.sizes, tuple(shape)),))
        dim = self.wide.outputs[output]
        if not self.minor:
            size = shape[dim]
            return Placed(value, Box.whole(shape).along(dim, microbatch * size, size))
        sizes = apart(shape, dim, self.wide.dims.parts)
        box = Box.whole(sizes).along(dim + 1, microbatch, 1)
        return Placed(value, box, (Reshape(sizes, tuple(shape)),))


def _is_minor(boxes: Sequence[Box]) -> bool:
    """Whether boxes differ in their place along a dimension behind others of some size."""
    first = boxes[0]
    for dim in range(len(first.sizes)):
        if any(box.starts[dim] != first.starts[dim] for box in boxes):
            return first.sizes[dim] == 1 and any(size > 1 for size in first.sizes[:dim])
    return False


def widening(
    block: ir.Block, batch: Collection[int], links: Sequence[Link], scratch: Scratch
) -> Widening | None:
    """How a stage computes the microbatches together, each sample as before; None where it does
    not compute each sample by itself.

    `batch` are the inputs that differ from microbatch to microbatch.
    """
    graph = Graph.of(block)
    for number in sorted(batch, key=lambda n: n not in {link.input for link in links}):
        shape = graph.shape(graph.root.arguments[number]) or ()
        for dim in sorted(range(len(shape)), key=lambda d: shape[d] == 1):
            try:
                dims = follow_batch(graph, {number: Layout(dim)}, shape[dim])
                found = _fitting(dims, batch, links)
                if found is not None:
                    _try(dims, scratch)
                    return found
            except NotScaledError:
                continue
    return None


def _try(dims: BatchDims, scratch: Scratch) -> None:
    """Writes the block for twice as many samples. Raises NotScaledError where there is no way."""
    root, scaling = dims.graph.root, Scaling(dims, 2 * dims.parts)
    kinds = [scaling.kind(dims.graph.values[number]) for number in root.arguments]
    scratch.typed(kinds, lambda b, given: scaling.write(root, given, ir.InsertionPoint(b)))


def _fitting(dims: BatchDims, batch: Collection[int], links: Sequence[Link]) -> Widening | None:
    root = dims.graph.root
    inputs = {
        i: dims.layouts[number] for i, number in enumerate(root.arguments) if number in dims.layouts
    }
    outputs = [dims.layouts.get(number) for number in root.returned]
    if inputs.keys() != set(batch) or None in outputs:
        return None
    layouts = [*inputs.values(), *(layout for layout in outputs if layout is not None)]
    if any(layout.outer != 1 for layout in layouts):
        return None
    for link in links:
        moved = any(not isinstance(op, Convert) for op in link.ops)
        if moved or inputs[link.input] != outputs[link.output]:
            return None
    return Widening(
        dims,
        {i: layout.dim for i, layout in inputs.items()},
        tuple(layout.dim for layout in outputs if layout is not None),
    )
