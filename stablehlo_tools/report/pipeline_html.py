"""The pipelines of a report's programs, as a section of its page: figures, and rank by tick.

The section is drawn here and not by the page's scripts; a page without pipelines is as if there
were none. The chart is that of `schedule` (schedule_html.py), without its zoom.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from importlib import resources

from stablehlo_tools.report.document import Document, ProgramReport
from stablehlo_tools.report.pipeline_document import PipelineReport, tick_timeline
from stablehlo_tools.report.pipeline_text import layers_of, pipeline_figures
from stablehlo_tools.report.schedule_html import axis_marks, legend_items, rank_row

_STYLES = ("schedule.css", "pipeline.css")
_TICK = 26  # pixels that a tick takes at least
_LABEL = 64  # and the name of a rank


def pipeline_section(document: Document) -> str:
    """The section, "" where no program has a pipeline."""
    blocks = [
        block
        for program in document.programs
        for each in program.pipelines
        for block in _block(program, each, several=len(document.programs) > 1)
    ]
    if not blocks:
        return ""
    head = '  <section id="pipelines-section" aria-labelledby="pipelines-heading">\n'
    heading = '    <h2 id="pipelines-heading">Pipelines</h2>\n'
    return f"{head}{heading}{''.join(f'    {block}\n' for block in blocks)}  </section>\n"


def pipeline_style(document: Document) -> str:
    """The style of charts, "" where there are none."""
    if not any(program.pipelines for program in document.programs):
        return ""
    folder = resources.files("stablehlo_tools.report") / "page"
    return "".join((folder / name).read_text("utf-8") for name in _STYLES)


def _block(program: ProgramReport, each: PipelineReport, *, several: bool) -> Iterator[str]:
    schedule = each.schedule
    of = f"{program.name}, {program.target}: " if several else ""
    chunks = "chunk" if schedule.chunks == 1 else "chunks"
    title = (
        f"{of}{each.kind} over {each.axis}: {schedule.ranks} ranks of {schedule.chunks} {chunks} "
        f"of {layers_of(each.layers)}, {schedule.microbatches} microbatches"
    )
    yield f"<h3>{html.escape(title)}</h3>"
    yield f'<p class="hint">{html.escape(each.place)}</p>'
    yield from _chart(each)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(said)}</td></tr>"
        for name, said in pipeline_figures(each)
    )
    yield f'<div class="tablebox"><table class="pipeline"><tbody>{rows}</tbody></table></div>'


def _chart(each: PipelineReport) -> Iterator[str]:
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
