"""Whether another axis of the mesh than that of the stages divides the samples of a microbatch.

Then the samples have to come first where the microbatches become one batch: of a dimension in
which the microbatches come first, no sharding says that an axis divides what lies within each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

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
from stablehlo_tools.transforms.parts.fold_pipeline.chains import Pieces
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Segments
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Computed,
    Outside,
    Piece,
    UnresolvedError,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer


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
