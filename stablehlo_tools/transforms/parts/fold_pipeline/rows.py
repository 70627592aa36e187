"""Segments of one stage, out of segments that compute all stages side by side in a dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.dimension_propagation.graph import Graph
from stablehlo_tools.analysis.dimension_propagation.layout import Layout
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import is_float
from stablehlo_tools.transforms.parts.fold_pipeline.scaling import (
    NotScaledError,
    Scaling,
    follow_batch,
)
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch, Segment
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import Box, UnresolvedError


@dataclass(frozen=True)
class Rows:
    """A segment for one of `count` stages that lie along a dimension.

    `function` computes one; `dims[i]` is the dimension of input i that the stages divide, or None
    where all take the same.
    """

    function: ir.Operation
    count: int
    dims: tuple[int | None, ...]

    def box(self, value: ir.Value, number: int, row: int) -> Box:
        """What a stage takes of an input."""
        whole, dim = Box.whole(shape_of(value)), self.dims[number]
        if dim is None:
            return whole
        size = whole.sizes[dim] // self.count
        return whole.along(dim, row * size, size)


def all_of(segment: Segment) -> Rows:
    """A segment that is computed as it is."""
    return Rows(segment.function, 1, (None,) * len(segment.inputs))


def row_of(segment: Segment, dim: int, count: int, scratch: Scratch) -> Rows:
    """A segment of one of several stages, which lie along a dimension of its outputs.

    Raises UnresolvedError where a stage depends on another one within a tick.
    """
    graph, failed = Graph.of(segment.block), segment.outputs[0].owner
    mixing: ir.Operation | None = None
    for place, value in enumerate(segment.inputs):
        if not is_float(value.type) or not isinstance(value.type, ir.RankedTensorType):
            continue
        for seed, size in enumerate(shape_of(value)):
            if size % count:
                continue
            try:
                dims = follow_batch(graph, {place: Layout(seed)}, count)
                layouts = [dims.layouts.get(number) for number in graph.root.returned]
                if any(layout != Layout(dim) for layout in layouts):
                    continue
                return _rows(graph, dims_of(graph, dims.layouts), Scaling(dims, 1), count, scratch)
            except NotScaledError as error:
                mixing = mixing or error.op
    op = mixing or (failed.operation if not isinstance(failed, ir.Block) else segment.function)
    raise UnresolvedError(f"{op.name} computes several stages together, not each by itself", op, 3)


def dims_of(graph: Graph, layouts: Mapping[int, Layout]) -> tuple[int | None, ...]:
    """The dimension of each argument that carries the batch."""
    found = [layouts.get(number) for number in graph.root.arguments]
    return tuple(None if layout is None else layout.dim for layout in found)


def _rows(
    graph: Graph,
    dims: Sequence[int | None],
    scaling: Scaling,
    count: int,
    scratch: Scratch,
) -> Rows:
    arguments = [graph.values[number] for number in graph.root.arguments]
    kinds = [scaling.kind(argument) for argument in arguments]
    function = scratch.typed(
        kinds,
        lambda block, values: scaling.write(graph.root, values, ir.InsertionPoint(block)),
    )
    return Rows(function, count, tuple(dims))
