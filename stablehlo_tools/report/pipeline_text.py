"""A pipeline in a terminal: what it is, its bubble, bytes and times, and who does what when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stablehlo_tools.diagnostics import duration, size
from stablehlo_tools.report.pipeline_document import PipelineReport, tick_timeline
from stablehlo_tools.report.schedule_gantt import IDLE, MIXED, Gantt, shown

_COLUMNS = 96  # of a chart
_MOST_RANKS = 64
_WIDEST_TICK = 4  # columns


def pipeline_lines(pipeline: PipelineReport) -> Iterator[str]:
    """The block of one pipeline."""
    schedule = pipeline.schedule
    yield (
        f'pipeline over "{pipeline.axis}": {pipeline.kind}, {schedule.ranks} ranks of '
        f"{_count(schedule.chunks, 'chunk')} of {layers_of(pipeline.layers)}, "
        f"{_count(schedule.microbatches, 'microbatch', 'es')}; {pipeline.place}"
    )
    yield from (f"  {name:9} {said}" for name, said in pipeline_figures(pipeline))
    if schedule.ranks <= _MOST_RANKS and pipeline.is_drawn:
        yield ""
        yield from (f"  {line}" for line in _chart(pipeline))


def pipeline_figures(pipeline: PipelineReport) -> Iterator[tuple[str, str]]:
    """What is said of a pipeline beside its name, in words."""
    schedule = pipeline.schedule
    yield (
        "bubble",
        f"{percent(pipeline.bubble)}: {pipeline.cells - pipeline.run:,} of {pipeline.cells:,} "
        f"{_cells(pipeline)} in {schedule.ticks:,} ticks have no work; "
        f"closed form {pipeline.formula} = {percent(pipeline.closed_form)}",
    )
    yield "garbage", "skipped" if pipeline.skips else "computed in cells without work"
    if pipeline.times is not None:
        yield from _times(pipeline)
    yield (
        "permuted",
        f"{_each(pipeline, [each.sent_bytes for each in pipeline.directions])} a tick; "
        f"{size(pipeline.permuted_bytes)} in all, {percent(pipeline.permuted_read)} of it read",
    )
    slots = [
        f"{each.direction} {size(each.received_bytes)} in {_count(each.receive_slots, 'slot')}"
        for each in pipeline.directions
    ]
    yield "received", ", ".join(slots)
    if schedule.kept_slots:
        held = f"{_count(schedule.kept_slots, 'slot')} of a chunk and a microbatch"
        yield "kept", f"{size(pipeline.kept_bytes)} in {held}, from forward to backward"
    else:
        yield from _left(pipeline)
    yield "weights", size(pipeline.weights_bytes)
    if pipeline.reductions:
        ends = f"by {_count(pipeline.reductions, 'reduction')} over the ranks at the end"
        yield "reduced", f"{size(pipeline.reduced_bytes)}, {ends}"
    if pipeline.devices > 1:
        yield (
            "sizes",
            f"are of a rank: {pipeline.devices} devices, which share it as other axes divide it",
        )


def percent(share: float) -> str:
    """`42.9 %`."""
    return f"{100 * share:.1f} %"


def layers_of(sizes: Sequence[int]) -> str:
    """`2 layers`, `1 to 2 layers`."""
    least, most = min(sizes), max(sizes)
    return _count(most, "layer") if least == most else f"{least} to {most} layers"


def _cells(pipeline: PipelineReport) -> str:
    twice = pipeline.cells > pipeline.schedule.ranks * pipeline.schedule.ticks
    return "forward and backward cells" if twice else "cells"


def _times(pipeline: PipelineReport) -> Iterator[tuple[str, str]]:
    times = pipeline.times
    assert times is not None
    yield (
        "time",
        f"{duration(times.total_ns)} predicted, {percent(times.bubble)} of it bubble and overhead",
    )
    parts = [f"a layer {_each(pipeline, times.layer_ns, duration)}"]
    parts.append(f"a permute {_each(pipeline, times.permute_ns, duration)}")
    if times.head_ns:
        parts.append(f"the head {duration(times.head_ns)}")
    yield "of which", ", ".join((*parts, f"the rest of a tick {duration(times.rest_ns)}"))


def _left(pipeline: PipelineReport) -> Iterator[tuple[str, str]]:
    for each in pipeline.directions:
        if each.read_bytes:
            yield "read", f"{size(each.read_bytes)} of what another loop left for each microbatch"
        if each.written_bytes:
            back = each.direction == "backward"
            what = "gradients" if back else "what layers leave for each microbatch"
            yield "left", f"{size(each.written_bytes)} of {what}"


def _each(
    pipeline: PipelineReport, figures: Sequence[float], unit: Callable[[float], str] = size
) -> str:
    """A figure for each direction."""
    rows = zip(pipeline.directions, figures, strict=True)
    return ", ".join(f"{row.direction} {unit(figure)}" for row, figure in rows)


def _chart(pipeline: PipelineReport) -> Iterator[str]:
    timeline = tick_timeline(pipeline.kind, pipeline.schedule)
    gantt = Gantt(timeline, min(_COLUMNS, _WIDEST_TICK * pipeline.schedule.ticks))
    ranks = pipeline.schedule.ranks
    label = len(f"r{ranks - 1} ")
    yield f"{' ' * label}{gantt.axis(0, gantt.width)}  ticks".rstrip()
    for rank in range(ranks):
        yield f"r{rank}".ljust(label) + shown(gantt.row(rank), False)
    if gantt.in_blocks:
        yield (
            f"a column is a block of ticks: F, B, or {MIXED} for both, in lower case where over a "
            f"tenth of it is idle, {IDLE} where over half is"
        )
    elif pipeline.schedule.chunks > 1:
        yield "odd chunks in lower case"


def _count(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}" + ("" if count == 1 else ending)
