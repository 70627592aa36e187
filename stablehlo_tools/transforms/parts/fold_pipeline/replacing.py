"""Puts the loop over layers in the place of a pipeline."""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.fold_pipeline.folding import Folding
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.outputs import outputs_of, traced
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch, Segments
from stablehlo_tools.transforms.parts.fold_pipeline.surroundings import Surroundings
from stablehlo_tools.transforms.parts.fold_pipeline.tidying import erase_unused
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer


def fold(region: LoopRegion, module: ir.Module) -> int:
    """Replaces a pipeline by a loop over its layers; returns how many stages it had.

    Fewer than two are no pipeline, and the module is then not to be used. Raises UnresolvedError
    for a pipeline that is not understood, SameStageError for a loop that is none.
    """
    scratch = Scratch(module)
    tracer, here = Tracer(region), Surroundings(region)
    outputs = list(outputs_of(here.anchor, region, slices=here.inner is None))
    pieces = [traced(tracer, output) for output in outputs]
    segments = Segments(region, scratch)
    folding = Folding(tracer, segments, scratch, here.point, region.loop.location, here.entering)
    values = [
        folding.value(found, here.kind(output))
        for output, found in zip(outputs, pieces, strict=True)
    ]
    for output, value in zip(outputs, here.leaving(outputs, values), strict=True):
        output.value.replace_all_uses_with(value)
    here.clear()
    erase_unused(here.anchor.block, here.anchor)
    scratch.clear()
    return folding.finder.found_stages
