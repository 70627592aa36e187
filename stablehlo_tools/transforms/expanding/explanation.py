"""What a plan comes to, in notes."""

from __future__ import annotations

from collections.abc import Iterator

from stablehlo_tools.diagnostics import Diagnostic, note
from stablehlo_tools.transforms.expanding.phases import Phase
from stablehlo_tools.transforms.expanding.planning import Pipelined, Plan


def explained(plan: Plan) -> Iterator[Diagnostic]:
    """A note for each pipeline."""
    for each in plan.pipelines:
        yield _account(each, plan)


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
