"""The page of a schedule: one HTML file that needs no network, with the chart and its figures.

Each step is an element that is placed in shares of the makespan, so that zooming is making the
chart wider; what a step is stands in its title, which shows where the pointer rests. The page has
the looks of the page of `report` (page/), and a style and a script of its own.
"""

from __future__ import annotations

import html
import re
import statistics
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import TYPE_CHECKING

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.report.schedule_gantt import (
    NAMES,
    axis_step,
    chunk_of,
    letter_of,
    microbatch_of,
)
from stablehlo_tools.report.schedule_table import described, figure, percent, units
from stablehlo_tools.schedules.setting import Costs
from stablehlo_tools.schedules.simulator import Timeline
from stablehlo_tools.schedules.table import Step

if TYPE_CHECKING:
    from stablehlo_tools.schedules.forms import Search

MOST_STEPS = 50_000
_MARKS = 40  # of the axis, at most
_SHADES = 4  # then the shades of chunks begin again
_CLASSES = {">": "send", "<": "receive", "^": "copy"}  # of the letters that make no class name


def render_page(timeline: Timeline, search: Search | None = None) -> str:
    """The whole page, to be written as UTF-8. Raises ToolError for more steps than it can show."""
    steps = sum(map(len, timeline.table.rows))
    if steps > MOST_STEPS:
        raise ToolError(
            f"{timeline.table.name} has {steps:,} steps, and a page shows {MOST_STEPS:,} at most: "
            "ask for the table or for JSON"
        )
    parts = {
        "title": html.escape(described(timeline.table)),
        "house": asset("page.css"),
        "style": asset("schedule.css"),
        "theme": asset("theme.js"),
        "lead": html.escape(_lead(timeline) + _of_search(search)),
        "legend": "\n".join(legend_items(timeline)),
        "usual": f"{_usual(timeline):.6g}",
        "axis": "\n".join(axis_marks(timeline)),
        "ranks": "\n".join(rank_row(timeline, rank) for rank in range(timeline.table.ranks)),
        "figures": "\n".join(_figures(timeline)),
        "per_rank": "\n".join(_per_rank(timeline)),
        "costs": "\n".join(_costs(timeline.costs)),
    }
    # In one sweep: the name of a schedule may look like a mark of the page.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], asset("schedule.html"))


def asset(name: str) -> str:
    """The text of a part of the pages, in `page/`."""
    return (resources.files("stablehlo_tools.report") / "page" / name).read_text("utf-8")


def _of_search(search: Search | None) -> str:
    if search is None:
        return ""
    return (
        f" Found by {search.origin}; nothing on the placements searched takes less than "
        f"{figure(search.bound)}: this is {percent(max(0.0, search.gap))} above."
    )


def _lead(timeline: Timeline) -> str:
    idle = percent(timeline.bubble)
    return f"{figure(timeline.makespan)} time units, {idle} of which the ranks are idle."


def legend_items(timeline: Timeline) -> Iterator[str]:
    """What the colours of a chart mean."""
    present = {letter_of(step) for row in timeline.table.rows for step in row if step is not None}
    chunks = min(timeline.table.placement.chunks, _SHADES)
    for letter, name in NAMES.items():
        if letter not in present:
            continue
        swatches = "".join(f'<i class="{_class(letter, chunk)}"></i>' for chunk in range(chunks))
        yield f"<li>{swatches} {html.escape(name)}</li>"
    if chunks > 1:
        yield "<li>a shade for each chunk of a rank, the darkest is the first</li>"


def _usual(timeline: Timeline) -> float:
    """The median step, as a share of the makespan."""
    lengths = [
        end - start
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
        if end > start
    ]
    return statistics.median(lengths) / timeline.makespan if lengths else 0.0


def axis_marks(timeline: Timeline, least: float = 0.0) -> Iterator[str]:
    """The times above a chart, placed in shares of the makespan, `least` apart or more."""
    makespan = timeline.makespan
    if not makespan:
        return
    step = axis_step(max(makespan / _MARKS, least))
    for tick in range(int(makespan / step + 1e-9) + 1):
        time = tick * step
        yield f'<span style="left:{_share(time, makespan)}%">{time:.10g}</span>'


def rank_row(timeline: Timeline, rank: int) -> str:
    """The steps of a rank."""
    rows = timeline.table.rows[rank], timeline.starts[rank], timeline.ends[rank]
    steps = "".join(
        _step(timeline, rank, step, start, end)
        for step, start, end in zip(*rows, strict=True)
        if step is not None and end > start
    )
    return f'<div class="rank"><b>rank {rank}</b><div class="steps">{steps}</div></div>'


def _step(timeline: Timeline, rank: int, step: Step, start: float, end: float) -> str:
    makespan, letter = timeline.makespan, letter_of(step)
    left, width = _share(start, makespan), _share(end - start, makespan)
    said = f"{step}, {start:.6g} to {end:.6g}, takes {end - start:.6g}"
    chunk = chunk_of(timeline, rank, step) % _SHADES
    return (
        f'<i class="{_class(letter, chunk)}" style="left:{left}%;width:{width}%" '
        f'title="{html.escape(said)}">{microbatch_of(step)}</i>'
    )


def _class(letter: str, chunk: int) -> str:
    return f"{_CLASSES.get(letter, letter)} c{chunk}"


def _share(time: float, makespan: float) -> str:
    return f"{100 * time / makespan:.4f}".rstrip("0").rstrip(".")


def _figures(timeline: Timeline) -> Iterator[str]:
    """The rows of the table of metrics."""
    alive = f"Peak activations, stages × {units(timeline.table)}"
    said = (
        ("Makespan", figure(timeline.makespan)),
        ("Longest span of a rank", figure(timeline.span)),
        ("Bubble by END", percent(timeline.bubble)),
        ("Bubble by SPAN", percent(timeline.bubble_of_span)),
        (alive, str(max(timeline.peak_activations))),
        ("Peak memory", figure(max(timeline.peak_bytes))),
        ("Messages", f"{timeline.messages:,}"),
        ("Bytes sent", figure(timeline.bytes_sent)),
    )
    for name, value in said:
        yield f'<tr><td>{name}</td><td class="numeric">{value}</td></tr>'


def _per_rank(timeline: Timeline) -> Iterator[str]:
    held = timeline.table.placement.held
    makespan = timeline.makespan
    for rank in range(timeline.table.ranks):
        idle = timeline.idle[rank]
        cells = (
            ", ".join(map(str, held[rank])),
            figure(idle),
            percent(idle / makespan if makespan else 0.0),
            str(timeline.peak_activations[rank]),
            figure(timeline.peak_bytes[rank]),
        )
        yield f"<tr><td>{rank}</td>{_numeric(cells)}</tr>"


def _costs(costs: Costs) -> Iterator[str]:
    figures = (
        costs.forward, costs.input_gradient, costs.weight_gradient, costs.backward,
        costs.activation, costs.kept, costs.weights,
    )  # fmt: skip
    for stage, row in enumerate(zip(*figures, strict=True)):
        yield f"<tr><td>{stage}</td>{_numeric([figure(value) for value in row])}</tr>"


def _numeric(cells: Sequence[str]) -> str:
    return "".join(f'<td class="numeric">{cell}</td>' for cell in cells)
