"""The page of a set of rank programs: that of its schedule, with messages, memory and the proof."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from stablehlo_tools.diagnostics import size
from stablehlo_tools.mpmd.set_report import Level, RankRow, SetReport
from stablehlo_tools.report.mpmd_text import memory_cells, message_rows, verdict
from stablehlo_tools.report.schedule_html import render_page

_END = "</main>"
_WIDTH, _HEIGHT = 1000, 60  # of a curve, in units of its own
_MEMORY = ("Rank", "Stages", "Held", "Bound", "Peak", "Limit", "Weights", "Arguments", "Peak at")
_LINKS = ("From", "To", "Messages", "Bytes", "Behind the schedule", "Bytes")
_STYLE = (
    "<style>.curve{width:100%;height:60px;background:var(--lane)}"
    ".curve .held{fill:var(--f1)}.curve .bound{fill:none;stroke:var(--b0);stroke-width:2}"
    "</style>"
)


def render_set(report: SetReport) -> str:
    """The whole page, to be written as UTF-8. Raises ToolError for more steps than it can show."""
    page = render_page(report.timeline)
    sections = "\n".join([_STYLE, *_proof(report), *_messages(report), *_memory(report)])
    before, _, behind = page.rpartition(_END)
    return f"{before}{sections}\n{_END}{behind}"


def _proof(report: SetReport) -> Iterator[str]:
    yield from _headed("proof", "Proof")
    yield f"<pre>{html.escape(verdict(report))}</pre>"
    what = f"{report.name}, made from {report.source}, {report.devices} devices a rank"
    yield f'<p class="hint">{html.escape(what)}; stablehlo-tools {html.escape(report.version)}</p>'
    yield "</section>"


def _messages(report: SetReport) -> Iterator[str]:
    yield from _headed("messages", "Messages between ranks")
    yield _table("messages", _LINKS, message_rows(report))
    yield "</section>"


def _memory(report: SetReport) -> Iterator[str]:
    """The table, and a curve for each rank: what it holds of microbatches, and the bound."""
    if not report.is_proven:
        return
    yield from _headed("memory", "Memory")
    yield _table("memory", _MEMORY, [memory_cells(row) for row in report.ranks])
    most = max(max(row.held, row.bound) for row in report.ranks) or 1.0
    for row in report.ranks:
        what = html.escape(f"rank {row.rank}: {'; '.join(row.what)}")
        yield f'<p class="hint">{what}</p>'
        yield _curve(row, most)
    yield (
        '<p class="hint">Filled: bytes of microbatches that the program holds behind each action '
        "and message, in the order of the program. Line: what its schedule holds there. Peak: all "
        "that is alive at once. Limit: what is of no microbatch, the bound, and the most that a "
        "function takes while it runs.</p>"
    )
    yield "</section>"


def _curve(row: RankRow, most: float) -> str:
    held = _steps(row.levels, [level.held for level in row.levels], most)
    bound = _steps(row.levels, [level.bound for level in row.levels], most)
    title = html.escape(f"rank {row.rank}: {size(row.held)} held, bound {size(row.bound)}")
    return (
        f'<svg class="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{title}"><title>{title}</title>'
        f'<path class="held" d="M0 {_HEIGHT}{held}V{_HEIGHT}Z"/>'
        f'<path class="bound" vector-effect="non-scaling-stroke" d="M0 {_HEIGHT}{bound}"/></svg>'
    )


def _steps(levels: Sequence[Level], values: Sequence[float], most: float) -> str:
    """A line in steps, one for each level."""
    share = _WIDTH / max(len(levels), 1)
    return "".join(
        f"V{_HEIGHT * (1 - value / most):.2f}H{share * (at + 1):.2f}"
        for at, value in enumerate(values)
    )


def _headed(name: str, title: str) -> Iterator[str]:
    yield f'<section aria-labelledby="{name}-heading">'
    yield f'<h2 id="{name}-heading">{title}</h2>'


def _table(name: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th class="numeric">{html.escape(cell)}</th>' for cell in heads)
    body = "".join(
        "<tr>" + "".join(f'<td class="numeric">{html.escape(c)}</td>' for c in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="tablebox"><table id="{name}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
