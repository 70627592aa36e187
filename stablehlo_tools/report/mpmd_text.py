"""A set of rank programs in a terminal and as JSON: the proof, messages, memory, and the chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stablehlo_tools.diagnostics import duration, size
from stablehlo_tools.mpmd.set_report import RankRow, SetReport
from stablehlo_tools.report.schedule_table import described, percent, to_text

_MEMORY = ("rank", "stages", "held", "bound", "peak", "limit", "weights", "arguments", "peak at")
_LINKS = ("from", "to", "messages", "bytes", "finish", "bytes")
_NS = 1e3  # of a microsecond


def verdict(report: SetReport) -> str:
    """`proven` with what is known of the set, or what is wrong with it."""
    if report.is_proven:
        return "\n".join([f"proven: {described(report.timeline.table)}", *_summary(report)])
    left_out = report.found - len(report.findings)
    more = [f"and {left_out} more"] if left_out else []
    return "\n".join(["not proven", *(f"  {finding}" for finding in report.findings), *more])


def to_page(report: SetReport, width: int, colour: bool = False) -> str:
    """The whole report: the chart, in lines of at most `width` characters, and the tables."""
    parts = [to_text(report.timeline, width, colour), verdict(report)]
    if report.is_proven:
        parts += ["\n".join(messages_table(report)), "\n".join(memory_table(report))]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def message_rows(report: SetReport) -> list[tuple[str, ...]]:
    """How much goes from which rank to which, as cells."""
    return [
        (
            str(link.source),
            str(link.target),
            str(link.scheduled),
            size(link.scheduled_bytes),
            str(link.finish),
            size(link.finish_bytes),
        )
        for link in report.links
    ]


def messages_table(report: SetReport) -> Iterator[str]:
    """How much goes from which rank to which."""
    yield from _aligned([_LINKS, *message_rows(report)])


def memory_table(report: SetReport) -> Iterator[str]:
    """What each rank holds, against the bound of the schedule."""
    yield from _aligned([_MEMORY, *(memory_cells(row) for row in report.ranks)])


def memory_cells(row: RankRow) -> tuple[str, ...]:
    """The cells of a rank in the table of memory."""
    amounts = (row.held, row.bound, row.peak, row.limit, row.weights, row.arguments)
    stages = ",".join(map(str, row.stages))
    return (str(row.rank), stages, *map(size, amounts), row.peak_at)


def to_json(report: SetReport) -> dict[str, Any]:
    """The proof as data; bytes, and seconds."""
    table, timeline = report.timeline.table, report.timeline
    fields: dict[str, Any] = {
        "proven": report.is_proven,
        "schedule": table.name,
        "ranks": table.ranks,
        "stages": table.stages,
        "microbatches": table.microbatches,
        "devices": report.devices,
        "findings": list(report.findings),
        "found": report.found,
    }
    if not report.is_proven:
        return fields
    return fields | {
        "actions": sum(row.actions for row in report.ranks),
        "messages": report.messages,
        "bytes": report.bytes,
        "makespan": timeline.makespan / 1e6,
        "bubble": timeline.bubble,
        "memory": [
            {
                "rank": row.rank,
                "stages": list(row.stages),
                "held": row.held,
                "bound": row.bound,
                "peak": row.peak,
                "peak_at": row.peak_at,
                "limit": row.limit,
                "weights": row.weights,
                "arguments": row.arguments,
            }
            for row in report.ranks
        ],
        "links": [
            {
                "source": link.source,
                "target": link.target,
                "scheduled": link.scheduled,
                "scheduled_bytes": link.scheduled_bytes,
                "finish": link.finish,
                "finish_bytes": link.finish_bytes,
            }
            for link in report.links
        ],
    }


def _summary(report: SetReport) -> Iterator[str]:
    timeline = report.timeline
    actions = sum(row.actions for row in report.ranks)
    yield f"  order     {actions} actions and {report.messages} messages, as the schedule has them"
    yield f"  deadlock  none: ordered under rendezvous, {len(report.ranks)} programs compiled apart"
    yield f"  messages  {size(report.bytes)} between ranks, in each device of a rank"
    held = max(report.ranks, key=lambda row: row.held - row.bound)
    yield (
        f"  memory    {size(held.held)} held of microbatches, {size(held.bound)} by the schedule "
        f"(rank {held.rank}, the closest)"
    )
    peak = max(report.ranks, key=lambda row: row.peak)
    yield (
        f"  peak      {size(peak.peak)} alive at once, of {size(peak.limit)} at most "
        f"(rank {peak.rank} in {peak.peak_at})"
    )
    yield (
        f"  bubble    {percent(timeline.bubble)} of {duration(timeline.makespan * _NS)} "
        f"on {report.hardware}"
    )


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
