"""From a pipeline that was read out of a module to the data that is shown of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stablehlo_tools.analysis.pipelines.bubbles import bubble_of, schedule_name
from stablehlo_tools.analysis.pipelines.pipeline import Pipeline
from stablehlo_tools.diagnostics import to_place
from stablehlo_tools.report.pipeline_document import (
    DirectionRow,
    PipelineReport,
    PipelineTimes,
)


def pipeline_report(
    pipeline: Pipeline, input_name: str, times: PipelineTimes | None = None
) -> PipelineReport:
    """The figures of one pipeline; `input_name` is named where an op has no source line."""
    schedule = pipeline.schedule
    bubble = bubble_of(schedule)
    directions = tuple(_directions(pipeline))
    return PipelineReport(
        place=to_place(pipeline.loop.location).render(input_name),
        kind=schedule_name(schedule),
        axis=pipeline.axis.name,
        mesh=pipeline.axis.mesh,
        devices=pipeline.devices,
        layers=pipeline.sizes,
        cells=bubble.cells,
        run=bubble.run,
        closed_form=bubble.closed_form,
        formula=bubble.formula,
        skips=pipeline.skips,
        directions=directions,
        permuted_read=_read(pipeline, directions),
        kept_bytes=pipeline.kept,
        weights_bytes=pipeline.weights,
        reductions=len(pipeline.finals),
        reduced_bytes=sum(each.bytes_in or 0 for each in pipeline.finals),
        schedule=schedule,
        times=times,
    )


def _directions(pipeline: Pipeline) -> Iterator[DirectionRow]:
    for phase, direction in zip(pipeline.phases, pipeline.schedule.directions, strict=True):
        yield DirectionRow(
            direction="backward" if phase.back else "forward",
            sent_bytes=phase.sent,
            receive_slots=direction.slots,
            received_bytes=phase.received,
            weights_bytes=sum(phase.held.weights.values()),
            read_bytes=phase.held.read,
            written_bytes=phase.held.written,
        )


def _read(pipeline: Pipeline, rows: Sequence[DirectionRow]) -> float:
    """The share of the bytes sent over the ring that a cell reads: each arrival serves one."""
    schedule = pipeline.schedule
    read = sum(
        row.sent_bytes
        for row, direction in zip(rows, schedule.directions, strict=True)
        for column in direction.cells
        for cell in column
        if cell is not None and cell.source >= 0
    )
    sent = schedule.ranks * schedule.ticks * sum(row.sent_bytes for row in rows)
    return read / sent if sent else 0.0
