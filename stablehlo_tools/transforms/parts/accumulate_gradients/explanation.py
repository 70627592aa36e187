"""What a division comes to, in a note."""

from __future__ import annotations

from stablehlo_tools.diagnostics import Diagnostic, note
from stablehlo_tools.transforms.parts.accumulate_gradients.boundary import accumulated_bytes
from stablehlo_tools.transforms.parts.accumulate_gradients.division import Division
from stablehlo_tools.transforms.parts.accumulate_gradients.refusals import seeds_text


def explained(division: Division) -> Diagnostic:
    """Which arguments carry the batch, what runs in the loop, and what leaves it."""
    graph = division.dims.graph
    size = sum(accumulated_bytes(graph.values[n]) for n, _ in division.sums)
    return note(
        f"accumulate-gradients: the batch is {seeds_text(division.trial)}; {len(division.inside)} "
        f"of {len(graph.root.nodes)} ops run on each of {division.dims.parts} microbatches; "
        f"{len(division.sums)} sums, {size} bytes, are accumulated, and {len(division.samples)} "
        "values of samples are put together",
        division.inside[0].op.location,
    )
