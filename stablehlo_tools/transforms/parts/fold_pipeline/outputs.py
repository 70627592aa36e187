"""What of a loop, or of the manual computation around it, the rest of the program uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.transforms.parts.fold_pipeline.composing import shifted
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import Box, Piece
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer


class Output(NamedTuple):
    """A value to be replaced, which is a box of a result."""

    value: ir.Value
    result: int
    box: Box


def outputs_of(op: ir.Operation, region: LoopRegion, *, slices: bool) -> Iterator[Output]:
    """The results of an op that are used; or, if asked, the slices where nothing else is of one."""
    for number, result in enumerate(op.results):
        users = [use.owner.operation for use in result.uses]
        if not users:
            continue
        boxes = [_sliced(user) if slices else None for user in users]
        if None in boxes:
            yield Output(result, number, Box.whole(region.leaving_shape(number)))
            continue
        for user, box in zip(users, boxes, strict=True):
            assert box is not None
            yield Output(user.results[0], number, box)


def _sliced(op: ir.Operation) -> Box | None:
    """The box that a slice without strides takes."""
    if op.name != "stablehlo.slice":
        return None
    names = ("start_indices", "limit_indices", "strides")
    starts, limits, strides = (list(ir.DenseI64ArrayAttr(op.attributes[name])) for name in names)
    if any(stride != 1 for stride in strides):
        return None
    sizes = tuple(limit - start for start, limit in zip(starts, limits, strict=True))
    return Box(tuple(starts), sizes)


def traced(tracer: Tracer, output: Output) -> list[Piece]:
    """What an output consists of. Raises UnresolvedError."""
    region = tracer.region
    if region.manual is None:
        return tracer.pieces(region.loop.results[output.result], 0, -1, output.box)
    end = region.returned(output.result)
    dim = region.leaving_dim(output.result)
    if dim is None:
        return tracer.pieces(end, 0, -1, output.box)
    size = shape_of(end)[dim]
    found: list[Piece] = []
    for box in output.box.cut(dim, [rank * size for rank in range(region.ranks.count)]):
        rank = box.starts[dim] // size
        inner = box.along(dim, box.starts[dim] - rank * size, box.sizes[dim])
        by = box.starts[dim] - output.box.starts[dim]
        found += [shifted(piece, dim, by) for piece in tracer.pieces(end, rank, -1, inner)]
    return found
