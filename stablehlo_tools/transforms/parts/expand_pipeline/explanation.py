"""What a plan comes to, in notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from stablehlo_tools.analysis.collectives import tensor_bytes
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, note
from stablehlo_tools.transforms.parts.expand_pipeline.phases import Phase
from stablehlo_tools.transforms.parts.expand_pipeline.planning import Pipelined, Plan


def explained(plan: Plan) -> Iterator[Diagnostic]:
    """A note for each pipeline."""
    for each in plan.pipelines:
        yield _account(each, plan)


def exchanged(permutes: Sequence[ir.Operation]) -> Iterator[Diagnostic]:
    """A note on what is sent to put stacks into another order, if anything is."""
    if not permutes:
        return
    sent: dict[int, int] = {}
    for permute in permutes:
        size = tensor_bytes(ir.RankedTensorType(permute.operands[0].type)) or 0
        for source, target in np.array(permute.attributes["source_target_pairs"]).tolist():
            sent[source] = sent.get(source, 0) + size * (source != target)
    yield note(
        f"expand-pipeline: a rank sends up to {max(sent.values())} bytes to bring stacks from the "
        "order of the layers into that of the ranks, or back: chunks go round the ranks in turn; "
        "with layout=pipeline none are sent",
        permutes[0].location,
    )


def _account(each: Pipelined, plan: Plan) -> Diagnostic:
    schedule, chunks, work = each.schedule, each.chunks, each.work
    op = work.loop.op if isinstance(work, Phase) else work.forward.loop.op
    layers = f"{chunks.longest}" if chunks.is_even else f"{chunks.sizes[-1]} to {chunks.longest}"
    cells = sum(
        cell is not None
        for direction in schedule.directions
        for column in direction.cells
        for cell in column
    )
    busy = cells / (schedule.ranks * schedule.ticks)
    text = (
        f"expand-pipeline: {schedule.name}: {chunks.trips} iterations on {schedule.ranks} ranks, "
        f"{schedule.chunks} chunks of {layers} on each; {schedule.microbatches} microbatches in "
        f"{schedule.ticks} ticks, {cells} chunks run, {busy:.3f} a rank and tick"
    )
    if schedule.kept_slots:
        text += f"; {schedule.kept_slots} chunks' activations kept on a rank"
    return note(text, op.location)
