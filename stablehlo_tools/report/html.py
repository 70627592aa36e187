"""Renders the page of `report`: one HTML file without network access, drawn from embedded data.

The assets are in `page/`. Events are most of the data, so they are encoded as numbers. An event is
the gap since the one before it on its stream, its length, and the number of its description, which
iterations of a loop share. `page/document.js` decodes them.

Pipeline figures and charts (rank by tick) are rendered here, not by the page's scripts. A page
without pipelines has none of their elements. The chart is that of `schedule` (schedule_html.py),
without its zoom.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from stablehlo_tools.report.cost_text import advice_gain, advice_limits, advice_of
from stablehlo_tools.report.document import SCHEMA, Advised, Document, ProgramReport, Section
from stablehlo_tools.report.pipeline_report import (
    PipelineReport,
    layers_of,
    pipeline_figures,
    tick_timeline,
)
from stablehlo_tools.report.schedule_html import asset, axis_marks, legend_items, rank_row
from stablehlo_tools.report.schedule_table import count_text

# The order matters: at load time, a script uses only definitions of earlier ones.
SCRIPTS = (
    "format.js",
    "document.js",
    "elements.js",
    "summary.js",
    "lane.js",
    "memory.js",
    "timeline.js",
    "details.js",
    "table.js",
    "page.js",
)
_FINE_BELOW_NS = 1e6  # shorter programs keep thousandths of a nanosecond
# Fields of a program that are encoded one by one, or rendered here.
_ENCODED = frozenset(
    [
        "events",
        "bands",
        "memory",
        "collectives",
        "kernels",
        "loops",
        "alive",
        "pipelines",
        "advised",
        "draw",
    ]
)
_STYLES = ("schedule.css", "pipeline.css")
_CHART_STYLES = ("uplot.css",)
CHARTS = ("uplot.js", "candidates.js")  # uPlot, and what draws with it
_TICK = 26  # least width of a tick, in pixels
_COPY = '<button type="button" class="quiet copy">Copy</button>'
_LABEL = 64  # width of a rank's name


def render_page(document: Document) -> str:
    """Returns the whole page, to be written as UTF-8."""
    pipelines = _headed_section(
        "pipelines",
        "Pipelines",
        (
            block
            for program in document.programs
            for each in program.pipelines
            for block in _pipeline_block(program, each, several=len(document.programs) > 1)
        ),
    )
    advice = (
        block
        for at, program in enumerate(document.programs)
        if program.advised is not None
        and program.advised not in [each.advised for each in document.programs[:at]]
        for block in _advice_block(program, program.advised)
    )
    strings = _Numbers()
    data = {
        "schema": SCHEMA,
        "title": document.title,
        "version": document.version,
        "programs": [_program(program, strings) for program in document.programs],
        "strings": list(strings),
        "candidates": list(document.candidates),
    }
    drawn = bool(document.candidates)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts = {
        "title": html.escape(document.title.encode("utf-8", "replace").decode()),
        "style": "".join(
            map(asset, ("page.css", *_STYLES * bool(pipelines), *_CHART_STYLES * drawn))
        ),
        "theme": asset("theme.js"),
        "advice": _headed_section("advice", "What to do", advice),
        "sections": "".join(map(_section, document.sections)),
        "pipelines": pipelines,
        "data": text.replace("<", "\\u003c"),  # so that no string closes the script element
        "scripts": "\n".join(
            f"<script>\n{asset(name)}</script>" for name in (*CHARTS * drawn, *SCRIPTS)
        ),
    }
    # In one pass, as a name in the program may look like a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], asset("page.html"))


class _Numbers(dict[Hashable, int]):
    """The numbers of distinct values, by first use: reading the number of a new one adds it."""

    def __missing__(self, value: Hashable) -> int:
        return self.setdefault(value, len(self))


def _program(program: ProgramReport, strings: _Numbers) -> dict[str, Any]:
    tick = 1.0 if program.total_ns >= _FINE_BELOW_NS else 1e-3
    descriptions = _Numbers()
    lanes: list[list[int]] = [[] for _ in program.streams]
    ends = [0] * len(lanes)
    for event in sorted(program.events, key=lambda event: (event.begin, event.end)):
        begin, end = round(event.begin / tick), round(event.end / tick)
        texts = (event.label, event.op, event.place, event.kind)
        figures = (event.collective, event.folded, int(event.critical))
        number = descriptions[(*(strings[text] for text in texts), *figures)]
        lanes[event.stream] += (begin - ends[event.stream], end - begin, number)
        ends[event.stream] = end
    # As alternating time since the last step, and bytes.
    memory: list[int] = []
    before = 0
    for ns, size in program.memory:
        time = round(ns / tick)
        memory += (time - before, round(size))
        before = time
    names = (name for name in ProgramReport.__dataclass_fields__ if name not in _ENCODED)
    return _plain({name: getattr(program, name) for name in names}) | {
        "tick": tick,
        "descriptions": list(descriptions),
        "lanes": lanes,
        "memory": memory,
        "bands": [
            (round(band.begin, 3), round(band.end, 3), band.label, band.level)
            for band in program.bands
        ],
        "collectives": [
            _plain(asdict(row))
            | {
                "axes": list(row.axes),
                "hidden_by": [(strings[by.name], _number(by.ns)) for by in row.hidden_by],
            }
            for row in program.collectives
        ],
        "kernels": [_plain(asdict(row)) for row in program.kernels],
        "loops": [_plain(asdict(row)) for row in program.loops],
        "alive": [_plain(asdict(row)) for row in program.alive],
    }


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _number(value) if isinstance(value, float) else value
        for name, value in fields.items()
    }


def _number(value: float) -> float | int | None:
    """Returns the shortest JSON number for a figure; None if it is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else round(value, 3)


def _headed_section(name: str, title: str, blocks: Iterable[str]) -> str:
    """Returns a section with a heading; "" without blocks."""
    content = "".join(f"    {block}\n" for block in blocks)
    if not content:
        return ""
    head = f'  <section id="{name}-section" aria-labelledby="{name}-heading">\n'
    heading = f'    <h2 id="{name}-heading">{title}</h2>\n'
    return f"{head}{heading}{content}  </section>\n"


def _advice_block(program: ProgramReport, advised: Advised) -> Iterator[str]:
    said = f"{program.name}, {program.target}: {advice_of(advised, program.target)}"
    yield f'<p class="hint">{html.escape(said)}</p>'
    if advised.items:
        yield "<ol>"
        for item in advised.items:
            pipeline = (
                f"<br><code>opt -p '{html.escape(item.pipeline)}'</code> {_COPY}"
                if item.pipeline
                else ""
            )
            yield (
                f"<li><b>{html.escape(advice_gain(item))}</b>: {html.escape(item.cause)}"
                f'<br><span class="hint">{html.escape(item.place)}</span>'
                f"<br>{html.escape(item.remedy)}{pipeline}</li>"
            )
        yield "</ol>"
    for line in advice_limits(advised):
        yield f"<p>{html.escape(line)}</p>"


def _section(section: Section) -> str:
    """Returns a table, rendered here and not by the page's scripts."""

    def row(cells: Sequence[str], tag: str) -> str:
        inside = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{inside}</tr>"

    head = f"<thead>{row(section.headings, 'th')}</thead>" if any(section.headings) else ""
    pairs = "" if head else ' class="pairs"'
    body = "".join(row(cells, "td") for cells in section.rows)
    hint = f'<p class="hint">{html.escape(section.hint)}</p>' if section.hint else ""
    return (
        f'  <section class="told">\n    <h2>{html.escape(section.title)}</h2>{hint}\n'
        f'    <div class="tablebox"><table{pairs}>{head}<tbody>{body}</tbody></table></div>\n'
        f"    {section.drawing}\n  </section>\n"
    )


def _pipeline_block(
    program: ProgramReport, each: PipelineReport, *, several: bool
) -> Iterator[str]:
    schedule = each.schedule
    of = f"{program.name}, {program.target}: " if several else ""
    title = (
        f"{of}{each.kind} over {each.axis}: {schedule.ranks} ranks of "
        f"{count_text(schedule.chunks, 'chunk')} of {layers_of(each.layers)}, "
        f"{schedule.microbatches} microbatches"
    )
    yield f"<h3>{html.escape(title)}</h3>"
    yield f'<p class="hint">{html.escape(each.place)}</p>'
    yield from _pipeline_chart(each)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(said)}</td></tr>"
        for name, said in pipeline_figures(each)
    )
    yield f'<div class="tablebox"><table class="pipeline"><tbody>{rows}</tbody></table></div>'


def _pipeline_chart(each: PipelineReport) -> Iterator[str]:
    if not each.is_drawn:
        yield f'<p class="hint">{each.cells:,} cells are too many to draw each of them.</p>'
        return
    timeline = tick_timeline(each.kind, each.schedule)
    yield f'<ul class="legend">{"".join(legend_items(timeline))}</ul>'
    width = _LABEL + _TICK * each.schedule.ticks
    yield '<div class="chart" tabindex="0" role="group" aria-label="Ranks by tick">'
    yield f'<div class="wide" style="min-width:{width}px">'
    axis = "".join(axis_marks(timeline, least=1.0))
    yield f'<div class="rank axis"><b>tick</b><div class="steps">{axis}</div></div>'
    yield from (rank_row(timeline, rank) for rank in range(each.schedule.ranks))
    yield "</div></div>"
