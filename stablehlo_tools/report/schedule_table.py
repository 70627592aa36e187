"""Renders a timed schedule as text: figures, chart and legend; and compares schedules."""

from __future__ import annotations

import json
from collections.abc import Iterator

from stablehlo_tools.diagnostics import table_lines
from stablehlo_tools.report.schedule_gantt import (
    FILLINGS,
    IDLE,
    NAMES,
    Gantt,
    Style,
    letters_of,
    paint_text,
    shown,
)
from stablehlo_tools.report.units import OF_A_MODEL, FigureUnits, figure
from stablehlo_tools.schedules.catalogue import ScheduleCandidate, ScheduleComparison
from stablehlo_tools.schedules.forms import SearchSummary
from stablehlo_tools.schedules.table import Table
from stablehlo_tools.schedules.table_simulator import Timeline

_PROVEN = 1e-9  # largest gap to the bound, as a share of it, of an optimal schedule
_LEAST_COLUMNS = 20
_MOST_PARTS, _MOST_LINES = 4, 64  # of a chart
_HEADINGS = ("idle", "alive", "held")
_LONGEST_AMOUNT = 7  # characters; longer amounts get four digits
_COMPARISON_HEADINGS = (
    "schedule", "runs with", "chunks", "makespan", "by END", "by SPAN", "alive", "memory",
    "messages", "fits",
)  # fmt: skip


def to_text(
    timeline: Timeline,
    width: int,
    colour: bool = False,
    search: SearchSummary | None = None,
    units: FigureUnits = OF_A_MODEL,
) -> str:
    """Returns the whole text, with the chart in lines of `width` characters if that is enough."""
    alive = max(timeline.peak_activations)
    figures = [
        describe_schedule(timeline.table),
        f"makespan     {units.time(timeline.makespan)}, longest span of a rank "
        f"{units.time(timeline.span)}",
        f"bubble       {percent(timeline.bubble)} by END, "
        f"{percent(timeline.bubble_of_span)} by SPAN",
        f"activations  {alive} at most, in stages x {row_unit(timeline.table)}",
        f"memory       {units.amount(max(timeline.peak_bytes))} at most, weights and activations",
        f"messages     {timeline.messages:,}, bytes {units.amount(timeline.bytes_sent)}",
    ]
    if search is not None:
        is_best = search.gap < _PROVEN
        above = "the best possible" if is_best else f"this is {percent(search.gap)} above"
        bound = f"{figure(search.bound)}, no schedule on these placements is faster"
        figures += [f"found        {search.origin}", f"bound        {bound}: {above}"]
    return "\n".join([*figures, "", *_chart(timeline, width, colour, units)]) + "\n"


def describe_schedule(table: Table) -> str:
    """Describes a schedule: `1f1b: 8 ranks, 8 stages (loop), 16 microbatches`."""
    use = "" if table.training else ", forward only"
    slices = f" of {table.sequence_slices} slices" if table.sequence_slices > 1 else ""
    return (
        f"{table.name}: {count_text(table.ranks, 'rank')}, {count_text(table.stages, 'stage')} "
        f"({table.placement.form}), {count_text(table.sequences, 'microbatch', 'es')}{slices}{use}"
    )


def row_unit(table: Table) -> str:
    """Returns the noun for the numbers in rows: `microbatches`, or `slices` of them."""
    return "microbatches" if table.sequence_slices == 1 else "slices"


def percent(share: float) -> str:
    """Formats a share: `30.4 %`."""
    return f"{100 * share:.1f} %"


def _chart(timeline: Timeline, width: int, colour: bool, units: FigureUnits) -> Iterator[str]:
    """Yields the chart, in several parts if each step then has enough columns."""
    # Right of the chart: the headings, then each rank's figures.
    makespan = timeline.makespan
    table: list[tuple[str, str, str]] = [_HEADINGS]
    figures = timeline.idle, timeline.peak_activations, timeline.peak_bytes
    for idle, alive, held in zip(*figures, strict=True):
        amount = units.amount(held)
        if units is OF_A_MODEL and len(amount) > _LONGEST_AMOUNT:
            amount = f"{held:.4g}"
        share = 100 * idle / makespan if makespan else 0.0
        table.append((f"{share:.1f}%", str(alive), amount))
    sides = table_lines(table, gap=" ")
    ranks = timeline.table.ranks
    label = len(f"r{ranks - 1} ")
    columns = max(_LEAST_COLUMNS, width - label - len(sides[0]) - 2)
    # The fewest parts that show every step; if that takes too many, one part in blocks of time.
    most = max(1, min(_MOST_PARTS, _MOST_LINES // timeline.table.ranks))
    charts = (Gantt(timeline, columns * parts) for parts in range(1, most + 1))
    drawn = next((chart for chart in charts if not chart.in_blocks), None)
    gantt = drawn or Gantt(timeline, columns)
    rows = [gantt.row(rank) for rank in range(ranks)]
    for begin in range(0, max(gantt.width, 1), columns):
        end = min(begin + columns, gantt.width)
        beside = sides if end == gantt.width else [""] * len(sides)
        axis = gantt.axis(begin, end).ljust(end - begin)
        yield f"{' ' * label}{axis}  {beside[0]}".rstrip()
        for rank, row in enumerate(rows):
            part = shown(row[begin:end], colour)
            yield f"{f'r{rank}'.ljust(label)}{part}  {beside[rank + 1]}".rstrip()
        yield ""
    yield from _legend(gantt, colour, units)


def _legend(gantt: Gantt, colour: bool, units: FigureUnits) -> Iterator[str]:
    chunks = gantt.timeline.table.placement.chunks
    for letter in letters_of(gantt.timeline):
        swatches = [
            paint_text(f" {shade} ", Style(letter, chunk)) if colour else shade
            for chunk in range(1 if gantt.in_blocks else chunks)
            for shade in (letter.lower() if chunk % 2 else letter,)
            if colour or chunk < 2
        ]
        filling = "" if gantt.in_blocks else f" {FILLINGS[letter]}"
        yield f"{' '.join(swatches)}{filling}  {NAMES[letter]}"
    if gantt.in_blocks:
        block = gantt.timeline.makespan / gantt.width
        yield f"{IDLE}  idle for more than half of the block, m or M  several of these"
        yield (
            f"too many steps to draw each: a column is a block of {units.said(block)}, and shows "
            "nine tenths of its work, in lower case if over a tenth of it is idle"
        )
        return
    yield f"{IDLE}  idle"
    if chunks > 1:
        yield f"{chunks} chunks a rank: {'a shade each, ' if colour else ''}odd ones in lower case"
    if units is OF_A_MODEL:
        yield f"{figure(gantt.scale)} column{'' if gantt.scale == 1 else 's'} a time unit"
    else:
        yield f"times above the chart are microseconds, a column is {units.time(1 / gantt.scale)}"
    if gantt.timeline.table.sequence_slices > 1:
        yield f"numbers are of slices, {gantt.timeline.table.sequence_slices} a microbatch"
    if gantt.hidden:
        yield f"{gantt.hidden} steps are shorter than a column and not drawn"


def count_text(count: int, noun: str, ending: str = "s") -> str:
    """Returns a count with its noun: `1 rank`, `4 ranks`."""
    return f"{count} {noun}" + ("" if count == 1 else ending)


def comparison_text(comparison: ScheduleComparison, units: FigureUnits = OF_A_MODEL) -> str:
    """Returns a table, best first, with the refused schedules and their reasons, and the advice."""
    limited = comparison.setting.limit is not None
    headings = _COMPARISON_HEADINGS if limited else _COMPARISON_HEADINGS[:-1]
    rows = [
        (
            candidate.name,
            candidate.runs_with,
            str(candidate.chunks),
            units.time(candidate.makespan),
            percent(candidate.bubble),
            percent(candidate.bubble_of_span),
            figure(candidate.activations),
            units.amount(candidate.memory),
            f"{candidate.messages:,}",
            "yes" if candidate.fits else "no",
        )[: len(headings)]
        for candidate in comparison.candidates
    ]
    lines = [comparison.advice, "", *table_lines([headings, *rows], headings[:2])]
    if comparison.refusals:
        lines += ["", *(f"{refusal.name}: {refusal.why}" for refusal in comparison.refusals)]
    if comparison.bound is not None:
        bound = units.time(comparison.bound)
        lines += ["", f"no schedule on the searched placements is faster than {bound}"]
    return "\n".join(lines) + "\n"


def comparison_json(comparison: ScheduleComparison) -> str:
    """Returns JSON: the setting's counts, a list of rows, the bound, the refusals, the advice."""
    setting = comparison.setting
    content = {
        "ranks": setting.ranks,
        "microbatches": setting.microbatches,
        "memory_limit": setting.limit,
        "schedules": [candidate._asdict() for candidate in comparison.candidates],
        "bound": comparison.bound,
        "refused": [refusal._asdict() for refusal in comparison.refusals],
        "advice": comparison.advice,
    }
    return json.dumps(content, indent=1) + "\n"


def comparison_csv(comparison: ScheduleComparison) -> str:
    """Returns CSV: a line of names, then a line for each schedule; booleans as in JSON."""
    lines = [",".join(ScheduleCandidate._fields)]
    for candidate in comparison.candidates:
        values = (v if isinstance(v, str) else json.dumps(v) for v in candidate)
        lines.append(",".join(values))
    return "\n".join(lines) + "\n"
