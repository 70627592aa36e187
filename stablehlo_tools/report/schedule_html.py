"""Renders the page of a schedule: one HTML file without network access, with chart and figures.

Each step is an element positioned in shares of the makespan, so that zooming only widens the chart.
Its title, shown on hover, describes the step. The page has the style of the page of `report`
(page/), and a style and a script of its own.
"""

from __future__ import annotations

import html
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import NamedTuple

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.report.schedule_gantt import (
    NAMES,
    axis_step,
    chunk_of,
    letter_of,
    letters_of,
    microbatch_of,
    timed_steps,
)
from stablehlo_tools.report.schedule_table import describe_schedule, percent, row_unit
from stablehlo_tools.report.units import OF_A_MODEL, FigureUnits, figure
from stablehlo_tools.schedules.forms import SearchSummary
from stablehlo_tools.schedules.setting import Costs
from stablehlo_tools.schedules.table_simulator import Timeline

MOST_STEPS = 50_000
_NARROW = "\u202f"  # a no-break space between a figure and its unit
_SHADES = 4  # number of shades; further chunks repeat them
_CLASSES = {">": "send", "<": "receive", "^": "copy"}  # for letters that are invalid class names


class CardTerm(NamedTuple):
    """A figure of the card, and the text beside it."""

    value: str
    beside: str = ""


def render_page(
    timeline: Timeline,
    search: SearchSummary | None = None,
    units: FigureUnits = OF_A_MODEL,
    terms: Mapping[str, CardTerm] = MappingProxyType({}),
) -> str:
    """Returns the whole page, to be written as UTF-8; `terms` add to its card or replace terms.

    Raises ToolError if it has more steps than a page can show.
    """
    steps = sum(map(len, timeline.table.rows))
    if steps > MOST_STEPS:
        raise ToolError(
            f"{timeline.table.name} has {steps:,} steps, but a page shows at most {MOST_STEPS:,}: "
            "choose the table or JSON"
        )
    bubble = percent(timeline.bubble).replace(" ", _NARROW)
    lead = f"{units.said(timeline.makespan)} a step, {bubble} of it bubble."
    if search is not None:
        lead += (
            f" Found by {search.origin}; no schedule on the searched placements is faster than "
            f"{figure(search.bound)}: this is {percent(max(0.0, search.gap))} above."
        )
    ranks = range(timeline.table.ranks)
    lengths = [end - start for rank in ranks for _, start, end in timed_steps(timeline, rank)]
    # The median length of a step, as a share of the makespan.
    usual = statistics.median(lengths) / timeline.makespan if lengths else 0.0
    parts = {
        "title": html.escape(describe_schedule(timeline.table)),
        "house": asset("page.css"),
        "style": asset("schedule.css"),
        "theme": asset("theme.js"),
        "lead": html.escape(lead),
        "card": _card(timeline, units, terms),
        "legend": "\n".join(legend_items(timeline)),
        "usual": f"{usual:.6g}",
        "axis": "\n".join(axis_marks(timeline, units=units)),
        "ranks": "\n".join(rank_row(timeline, rank, units) for rank in ranks),
        "figures": "\n".join(_figures(timeline, units)),
        "per_rank": "\n".join(_per_rank(timeline, units)),
        "costs": "\n".join(_costs(timeline.costs, units)),
    }
    # In one pass, as the name of a schedule may look like a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], asset("schedule.html"))


def asset(name: str) -> str:
    """Returns the text of a file in `page/`."""
    return (resources.files("stablehlo_tools.report") / "page" / name).read_text("utf-8")


def _card(timeline: Timeline, units: FigureUnits, more: Mapping[str, CardTerm]) -> str:
    """Returns the card, as in the page of `report`: the total, its parts, and the memory peak."""
    bubble = timeline.bubble
    parts = (("compute", 1 - bubble), ("idle", bubble))
    lengths = "".join(
        f'<span class="{kind}" style="--part:{100 * part:.3f}%"></span>' for kind, part in parts
    )
    peak = max(timeline.peak_bytes)
    sent = units.amount(timeline.bytes_sent)
    beside = f"bytes {sent}" if units is OF_A_MODEL else sent
    terms = {
        "Bubble": CardTerm(percent(bubble), "of the ranks' time"),
        "Peak memory": CardTerm(units.amount(peak), f"rank {timeline.peak_bytes.index(peak)}"),
        "Messages": CardTerm(f"{timeline.messages:,}", beside),
        "Activations": CardTerm(
            str(max(timeline.peak_activations)), "stages × microbatches at most"
        ),
        **more,
    }
    listed = "".join(
        f"<dt>{name}</dt><dd><strong>{html.escape(term.value)}</strong>"
        f'<span class="beside">{html.escape(term.beside)}</span></dd>'
        for name, term in terms.items()
    )
    return (
        f'<article class="card"><h2><span class="name">{html.escape(timeline.table.name)}</span>'
        f'</h2><p class="total"><strong>{units.time(timeline.makespan)}</strong> makespan</p>'
        f'<div class="lengths" role="img" aria-label="{percent(bubble)} bubble">{lengths}</div>'
        f"<dl>{listed}</dl></article>"
    )


def legend_items(timeline: Timeline) -> Iterator[str]:
    """Yields the legend of a chart's colours."""
    chunks = min(timeline.table.placement.chunks, _SHADES)
    for letter in letters_of(timeline):
        swatches = "".join(f'<i class="{_class(letter, chunk)}"></i>' for chunk in range(chunks))
        yield f"<li>{swatches} {html.escape(NAMES[letter])}</li>"
    if chunks > 1:
        yield "<li>a shade for each chunk of a rank, the darkest is the first</li>"


def axis_marks(
    timeline: Timeline, least: float = 0.0, units: FigureUnits = OF_A_MODEL
) -> Iterator[str]:
    """Yields the axis above a chart: times at least `least` apart, in shares of the makespan."""
    makespan = timeline.makespan
    if not makespan:
        return
    step = axis_step(max(makespan / units.marks, least))
    for tick in range(int(makespan / step + 1e-9) + 1):
        time = tick * step
        yield f'<span style="left:{_share(time, makespan)}%">{units.mark(time)}</span>'


def rank_row(timeline: Timeline, rank: int, units: FigureUnits = OF_A_MODEL) -> str:
    """Returns the element of a rank with its steps."""
    makespan = timeline.makespan
    steps: list[str] = []
    for step, start, end in timed_steps(timeline, rank):
        left, width = _share(start, makespan), _share(end - start, makespan)
        said = f"{step}, {units.time(start)} to {units.time(end)}, takes {units.time(end - start)}"
        letter = letter_of(step)
        look = _class(letter, chunk_of(timeline, rank, step) % _SHADES)
        letter = "" if letter in _CLASSES else letter  # of messages: too narrow for a letter
        steps.append(
            f'<i class="{look}" style="left:{left}%;width:{width}%" '
            f'title="{html.escape(said)}">{letter}{microbatch_of(step)}</i>'
        )
    return f'<div class="rank"><b>rank {rank}</b><div class="steps">{"".join(steps)}</div></div>'


def _class(letter: str, chunk: int) -> str:
    return f"{_CLASSES.get(letter, letter)} c{chunk}"


def _share(time: float, makespan: float) -> str:
    return f"{100 * time / makespan:.4f}".rstrip("0").rstrip(".")


def _figures(timeline: Timeline, units: FigureUnits) -> Iterator[str]:
    """Yields the rows of the table of metrics."""
    alive = f"Peak activations, stages × {row_unit(timeline.table)}"
    said = (
        ("Makespan", units.time(timeline.makespan)),
        ("Longest span of a rank", units.time(timeline.span)),
        ("Bubble by END", percent(timeline.bubble)),
        ("Bubble by SPAN", percent(timeline.bubble_of_span)),
        (alive, str(max(timeline.peak_activations))),
        ("Peak of weights and activations", units.amount(max(timeline.peak_bytes))),
        ("Messages", f"{timeline.messages:,}"),
        ("Bytes sent", units.amount(timeline.bytes_sent)),
    )
    for name, value in said:
        yield _row(name, (value,))


def _per_rank(timeline: Timeline, units: FigureUnits) -> Iterator[str]:
    held = timeline.table.placement.held
    makespan = timeline.makespan
    for rank in range(timeline.table.ranks):
        idle = timeline.idle[rank]
        cells = (
            ", ".join(map(str, held[rank])),
            units.time(idle),
            percent(idle / makespan if makespan else 0.0),
            str(timeline.peak_activations[rank]),
            units.amount(timeline.peak_bytes[rank]),
        )
        yield _row(rank, cells)


def _costs(costs: Costs, units: FigureUnits) -> Iterator[str]:
    times = (costs.forward, costs.input_gradient, costs.weight_gradient, costs.backward)
    amounts = (costs.activation, costs.kept, costs.weights)
    for stage in range(len(costs.forward)):
        cells = [units.time(row[stage]) for row in times]
        cells += [units.amount(row[stage]) for row in amounts]
        yield _row(stage, cells)


def _row(name: object, cells: Sequence[str]) -> str:
    figures = "".join(f'<td class="numeric">{cell}</td>' for cell in cells)
    return f"<tr><td>{name}</td>{figures}</tr>"
