"""Renders the report of a set of rank programs: proof, messages, memory and schedule.

The forms are text, JSON, an HTML page (that of the schedule with more sections), and a trace for
ui.perfetto.dev. The trace has a thread for each rank. Slices are the phases of the schedule, arrows
the messages, and counters the bytes of microbatches that each rank holds. Times of a trace are
microseconds, from the costs that the set was built with.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from stablehlo_tools.diagnostics import size, table_lines
from stablehlo_tools.mpmd.manifest import Manifest
from stablehlo_tools.mpmd.set_report import RankMemoryLevel, RankRow, SetReport
from stablehlo_tools.report.document import SCHEMA
from stablehlo_tools.report.schedule_gantt import NAMES, letter_of, timed_steps
from stablehlo_tools.report.schedule_html import CardTerm, render_page
from stablehlo_tools.report.schedule_table import count_text, describe_schedule, percent, to_text
from stablehlo_tools.report.units import OF_A_PROGRAM, microseconds
from stablehlo_tools.schedules.table import Action, parts
from stablehlo_tools.schedules.table_simulator import simulate
from stablehlo_tools.schedules.validator import other_end

_MEMORY = ("rank", "stages", "held", "bound", "peak", "limit", "weights", "arguments", "peak at")
_LINKS = ("from", "to", "messages", "bytes", "finish", "bytes")
_MS_OF_S = 1e3
_END = "</main>"
_WIDTH, _HEIGHT = 1000, 60  # of a curve, in SVG units
_LINK_HEADS = ("From", "To", "Messages", "Bytes", "After the schedule", "Bytes")
_STYLE = (
    "<style>.curve{width:100%;height:60px;background:var(--lane)}"
    ".curve .held{fill:var(--memory);stroke:var(--memory-line)}"
    ".curve .bound{fill:none;stroke:var(--limit);stroke-width:2}"
    "</style>"
)
_PROCESS = 1


def to_page(report: SetReport, width: int) -> str:
    """Returns the report as text: the chart, at most `width` characters wide, and the tables."""
    parts = [to_text(report.timeline, width, units=OF_A_PROGRAM), verdict(report)]
    if report.is_proven:
        tables = [_LINKS, *_message_rows(report)], [_MEMORY, *_memory_rows(report)]
        parts += ["\n".join(table_lines(table)) for table in tables]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def verdict(report: SetReport) -> str:
    """Returns `proven` with figures of the set, or `not proven` with the findings."""
    if not report.is_proven:
        left_out = report.finding_count - len(report.findings)
        more = [f"and {left_out} more"] if left_out else []
        return "\n".join(["not proven", *(f"  {finding}" for finding in report.findings), *more])
    timeline = report.timeline
    actions = sum(row.actions for row in report.ranks)
    held = max(report.ranks, key=lambda row: row.held - row.bound)
    peak = max(report.ranks, key=lambda row: row.peak)
    return "\n".join(
        [
            f"proven: {describe_schedule(timeline.table)}",
            f"  order     {actions} actions and {report.messages} messages, as in the schedule",
            f"  deadlock  none: ordered under rendezvous, {len(report.ranks)} programs compiled "
            "separately",
            f"  messages  {size(report.bytes)} between ranks, for each device of a rank",
            f"  memory    {size(held.held)} held of microbatches, {size(held.bound)} by the "
            f"schedule (rank {held.rank}, the closest)",
            f"  peak      {size(peak.peak)} live at once, of {size(peak.limit)} at most (rank "
            f"{peak.rank} in {peak.peak_at})",
            f"  bubble    {percent(timeline.bubble)} of {microseconds(timeline.makespan)} "
            f"on {report.hardware}",
        ]
    )


def _message_rows(report: SetReport) -> list[tuple[str, ...]]:
    """Returns the cells of the table of messages, a row for each pair of ranks."""
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


def _memory_rows(report: SetReport) -> list[tuple[str, ...]]:
    """Returns the cells of the memory table, a row for each rank."""
    rows: list[tuple[str, ...]] = []
    for row in report.ranks:
        amounts = (row.held, row.bound, row.peak, row.limit, row.weights, row.arguments)
        stages = ",".join(map(str, row.stages))
        rows.append((str(row.rank), stages, *map(size, amounts), row.peak_at))
    return rows


def to_json(report: SetReport) -> dict[str, Any]:
    """Returns the proof as plain data, in bytes and seconds."""
    table, timeline = report.timeline.table, report.timeline
    fields: dict[str, Any] = {
        "proven": report.is_proven,
        "schedule": table.name,
        "ranks": table.ranks,
        "stages": table.stages,
        "microbatches": table.microbatches,
        "devices": report.devices,
        "findings": list(report.findings),
        "found": report.finding_count,
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
        "links": [asdict(link) for link in report.links],
    }


def summary(manifest: Manifest, alone: float) -> dict[str, Any]:
    """Returns counts, predicted times in seconds and bytes per rank, as plain data.

    `alone` is the time of the step on one rank, in seconds.
    """
    timeline = simulate(manifest.table, manifest.costs)
    return {
        "schedule": manifest.table.name,
        "microbatches": manifest.table.microbatches,
        "devices": manifest.devices,
        "hardware": manifest.hardware,
        "makespan": timeline.makespan,
        "one_rank": alone,
        "bubble": timeline.bubble,
        "messages": sum(transfer.is_scheduled for transfer in manifest.transfers),
        "finish_messages": sum(not transfer.is_scheduled for transfer in manifest.transfers),
        "ranks": [
            {
                "program": rank.program,
                "stages": [manifest.stages[stage].what for stage in rank.stages],
                "busy": busy,
                "bytes": peak,
            }
            for rank, busy, peak in zip(
                manifest.ranks, timeline.busy, timeline.peak_bytes, strict=True
            )
        ],
    }


def summary_text(facts: dict[str, Any]) -> str:
    """Returns the summary as text."""
    many = f" of {facts['devices']} devices" if facts["devices"] > 1 else ""
    lines = [
        f"{facts['schedule']}: {len(facts['ranks'])} ranks{many}, {facts['microbatches']} "
        f"microbatches, {facts['messages']} tensors sent, {facts['finish_messages']} more at the "
        "end",
        f"predicted on {facts['hardware']}: {facts['makespan'] * _MS_OF_S:.3f} ms a step, "
        f"{facts['bubble']:.1%} of it idle; {facts['one_rank'] * _MS_OF_S:.3f} ms on one rank",
    ]
    for rank in facts["ranks"]:
        lines.append(
            f"  {rank['program']}: {size(rank['bytes'])}, {rank['busy'] * _MS_OF_S:.3f} ms of work"
        )
        lines += [f"    {what}" for what in rank["stages"]]
    return "\n".join(lines)


def render_set(report: SetReport) -> str:
    """Returns the whole page, to be written as UTF-8. Raises ToolError if it has too many steps."""
    ranks, devices = len(report.ranks), report.devices
    beside = f"{count_text(ranks, 'rank')} of {count_text(devices, 'device')} each"
    terms = {"Runs on": CardTerm(report.hardware, beside)}
    if report.is_proven:
        peak = max(report.ranks, key=lambda row: row.peak)
        terms["Peak memory"] = CardTerm(size(peak.peak), f"rank {peak.rank} in {peak.peak_at}")
    page = render_page(report.timeline, units=OF_A_PROGRAM, terms=terms)
    what = f"{report.name}, made from {report.source}"
    proof = (
        f"<pre>{html.escape(verdict(report))}</pre>",
        f'<p class="hint">{html.escape(what)}; stablehlo-tools {html.escape(report.version)}</p>',
    )
    messages = _html_table("messages", _LINK_HEADS, _message_rows(report))
    lines = [
        _STYLE,
        *_section_lines("proof", "Proof", proof),
        *_section_lines("messages", "Messages between ranks", (messages,)),
    ]
    if report.is_proven:
        lines += _section_lines("memory", "Memory", _memory_section(report))
    before, _, behind = page.rpartition(_END)
    sections = "\n".join(lines)
    return f"{before}{sections}\n{_END}{behind}"


def _memory_section(report: SetReport) -> Iterator[str]:
    """Yields the table, and for each rank the curve of held microbatch bytes with its bound."""
    headings = [heading.capitalize() for heading in _MEMORY]
    yield _html_table("memory", headings, _memory_rows(report))
    most = max(max(row.held, row.bound) for row in report.ranks) or 1.0
    for row in report.ranks:
        what = html.escape(f"rank {row.rank}: {'; '.join(row.what)}")
        yield f'<p class="hint">{what}</p>'
        held = _steps(row.levels, [level.held for level in row.levels], most)
        bound = _steps(row.levels, [level.bound for level in row.levels], most)
        title = html.escape(f"rank {row.rank}: {size(row.held)} held, bound {size(row.bound)}")
        yield (
            f'<svg class="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" '
            f'role="img" aria-label="{title}"><title>{title}</title>'
            f'<path class="held" d="M0 {_HEIGHT}{held}V{_HEIGHT}Z"/>'
            f'<path class="bound" vector-effect="non-scaling-stroke" d="M0 '
            f'{_HEIGHT}{bound}"/></svg>'
        )
    yield (
        '<p class="hint">Filled: bytes of microbatches that the program holds after each action '
        "and message, in the order of the program. Line: bytes that its schedule allows there. "
        "Peak: all live bytes. Limit: bytes of no microbatch, plus the bound, plus the most that "
        "a function needs while it runs.</p>"
    )


def _steps(levels: Sequence[RankMemoryLevel], values: Sequence[float], most: float) -> str:
    """Returns SVG path commands of a step line, one step for each level."""
    share = _WIDTH / max(len(levels), 1)
    return "".join(
        f"V{_HEIGHT * (1 - value / most):.2f}H{share * (at + 1):.2f}"
        for at, value in enumerate(values)
    )


def _section_lines(name: str, title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yields a section with a heading."""
    yield f'<section aria-labelledby="{name}-heading">'
    yield f'<h2 id="{name}-heading">{title}</h2>'
    yield from lines
    yield "</section>"


def _html_table(name: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th class="numeric">{html.escape(cell)}</th>' for cell in heads)
    body = "".join(
        "<tr>" + "".join(f'<td class="numeric">{html.escape(c)}</td>' for c in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="tablebox scroll"><table id="{name}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def set_trace(report: SetReport) -> dict[str, Any]:
    """Returns the trace as plain data for `json.dump`."""
    process = {"pid": _PROCESS, "tid": _PROCESS, "ph": "M", "name": "process_name"}
    events = [
        {**process, "args": {"name": report.name}},
        *(event for row in report.ranks for event in _rank_events(report, row)),
        *_arrows(report),
    ]
    return {
        "displayTimeUnit": "ns",
        "otherData": {"title": report.name, "version": report.version, "schema": SCHEMA},
        "traceEvents": events,
    }


def _tid(rank: int) -> int:
    return _PROCESS + 1 + rank


def _rank_events(report: SetReport, row: RankRow) -> Iterator[dict[str, Any]]:
    """Yields the events of a rank: its name, its phases and its memory."""
    rank, timeline = row.rank, report.timeline
    of = {"pid": _PROCESS, "tid": _tid(rank)}
    yield {**of, "ph": "M", "name": "thread_name", "args": {"name": f"rank {rank}"}}
    yield {**of, "ph": "M", "name": "thread_sort_index", "args": {"sort_index": rank}}
    for step, start, end in timed_steps(timeline, rank):
        said = {"phase": NAMES[letter_of(step)]}
        yield {
            **of, "ph": "X", "ts": start, "dur": end - start, "name": str(step),
            "cat": letter_of(step), "args": said,
        }  # fmt: skip
    for level in row.levels:
        if level.time is not None:
            name = f"held by rank {rank}"
            amount = {"bytes": round(level.held)}
            yield {**of, "ph": "C", "ts": level.time, "name": name, "args": amount}


def _arrows(report: SetReport) -> Iterator[dict[str, Any]]:
    """Yields flow events from the end of each send to the phase after its receive."""
    made: dict[Action, tuple[int, float]] = {}
    read: dict[Action, tuple[int, float]] = {}
    timeline = report.timeline
    for rank, row in enumerate(timeline.table.rows):
        ends, starts = timeline.ends[rank], timeline.starts[rank]
        for at, step in enumerate(row):
            for action in parts(step) if step is not None else ():
                if action.kind.is_compute:
                    continue
                if action.kind.is_send:
                    made[action] = (rank, ends[at])
                    continue
                behind = (i for i in range(at, len(row)) if timeline.ends[rank][i] > starts[i])
                reader = next(behind, None)
                if reader is not None:
                    read[action] = (rank, starts[reader])
    for number, (send, (rank, time)) in enumerate(made.items(), 1):
        target = read.get(other_end(send))
        if target is None:
            continue
        common = {"pid": _PROCESS, "cat": "message", "name": str(send), "id": number}
        yield {**common, "ph": "s", "tid": _tid(rank), "ts": time}
        end = max(time, target[1])
        yield {**common, "ph": "f", "bp": "e", "tid": _tid(target[0]), "ts": end}
