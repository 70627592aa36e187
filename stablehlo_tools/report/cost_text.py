"""Renders a timed program as text: totals, collectives, loops, allocations at the memory peak."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from stablehlo_tools.diagnostics import duration, share, size, table_lines
from stablehlo_tools.report.document import Advice, Advised, Document, ProgramReport
from stablehlo_tools.report.pipeline_report import pipeline_lines

_MOST_COLLECTIVES = 5
_MOST_ALIVE = 8
_MOST_KERNELS = 8
_CONTENDED = 1.001  # least ratio to the total for a line of its own
_HEADINGS = (
    "#", "kind", "groups", "axes", "type", "bytes", "times", "time", "exposed", "hidden by",
    "hideable", "place",
)  # fmt: skip
_PLACE = re.compile(r"(?:.*?/)?([^/\s]+:\d+(?::\d+)?(?: in \S+)?)(?: \(.*\))?$")
_LEFT = frozenset({"kind", "groups", "axes", "type", "hidden by", "place", "loop", "kernel"})
_SPARE = ("groups", "type", "hidden by", "hideable", "axes")  # left out of narrow tables in turn
_TOLD = 0.05  # least share of the total
_OTHERS = "copies and kernels of other streams than the collectives'"


def to_text(document: Document, *, width: int | None = None, whole: bool = False) -> str:
    """Returns the document as text, program after program, in lines of at most `width`.

    Without `whole`: totals, advice, and the collectives with most exposed time."""
    wrapper = textwrap.TextWrapper(width or 0, break_long_words=False)
    programs: list[str] = []
    for program in document.programs:
        lines: list[str] = []
        for line in _program(program, width, whole=whole):
            indent = len(line) - len(line.lstrip())
            # A command stays whole, so that it can be copied.
            if (
                width is None
                or len(line) <= width
                or line.lstrip().startswith(("opt ", "stablehlo-"))
            ):
                lines.append(line)
            else:
                wrapper.subsequent_indent = " " * (indent + 4)
                lines += wrapper.wrap(line)
        programs.append("\n".join(lines))
    return "\n\n".join(programs)


def _program(program: ProgramReport, width: int | None, *, whole: bool) -> Iterator[str]:
    yield f"{program.name}, {program.target}, on {program.devices} x {program.hardware}"
    yield from (f"  note: {note}" for note in program.notes)
    yield (
        f"  total      {duration(program.total_ns):>9}   compute {duration(program.compute_ns)}, "
        f"communication {duration(program.communication_ns)}"
    )
    others = program.other_waits_ns
    of_others = (
        f", {duration(others)} of it for {_OTHERS}" if others > _TOLD * program.total_ns else ""
    )
    yield (
        f"  exposed    {duration(program.exposed_ns):>9}   "
        f"{share(program.exposed_ns, program.total_ns)} of the total{of_others}"
    )
    if program.contended_ns > _CONTENDED * program.total_ns:
        yield (
            f"  contended  {duration(program.contended_ns):>9}   the total if collectives slow "
            "the ops beside them"
        )
    above = "there are no tasks"
    if program.floor_ns:
        above = f"this one takes {program.total_ns / program.floor_ns:.2f} times as long"
    yield (
        f"  floor      {duration(program.floor_ns):>9}   {program.floor_is}: no order of these "
        f"tasks is faster; {above}"
    )
    if program.slot_floor_ns is not None and program.slot_floor_ns > program.floor_ns:
        yield (
            f"  one slot   {duration(program.slot_floor_ns):>9}   no order is faster with one "
            "collective in flight at a time, as XLA:GPU has them"
        )
    yield (
        f"  peak       {size(program.peak_bytes):>9}   "
        f"{share(program.peak_bytes, program.capacity_bytes)} of {size(program.capacity_bytes)}"
        f"{': does not fit' if program.peak_bytes > program.capacity_bytes else ''}"
    )
    yield from _what_to_do(program)
    yield from _collectives(program, width, whole=whole)
    if whole:
        yield from _loops(program, width)
        yield from _kernels(program, width)
        yield from _alive(program)
    for pipeline in program.pipelines:
        yield ""
        yield from (f"  {line}".rstrip() for line in pipeline_lines(pipeline))


def _what_to_do(program: ProgramReport) -> Iterator[str]:
    advised = program.advised
    if advised is None:
        return
    yield ""
    yield f"  what to do, {advice_of(advised, program.target)}:"
    for number, item in enumerate(advised.items, 1):
        yield f"    {number}. {advice_gain(item)}: {item.cause}"
        yield f"       at {short_place(item.place)}"
        yield f"       {item.remedy}"
        if item.pipeline is not None:
            yield f"       opt -p '{item.pipeline}'"
    yield from (f"    {line}" for line in advice_limits(advised))


def advice_of(advised: Advised, target: str) -> str:
    """Returns the total that the gains refer to, as text."""
    total = duration(advised.total_ns)
    if target == "as written":
        return f"each by itself, of the {total} left after a compiler orders the ops"
    return f"each by itself, of the {total} of the compiled schedule"


def advice_limits(advised: Advised) -> Iterator[str]:
    """Yields lines on the limits of the items, and the command that searches beyond them."""
    off = advised.total_ns - advised.modelled_ns
    is_off = off >= advised.least * advised.total_ns
    if not advised.items:
        yield f"no pass or change alone gains more than {100 * advised.least:g} %"
    if is_off:
        yield (
            "gains are by a model in which the compiler's schedule needs "
            f"{duration(advised.modelled_ns)}; they do not include the other {duration(off)}"
        )
    if advised.search and (is_off or not advised.items):
        yield f"several passes together, each candidate compiled: {advised.search}"


def advice_gain(item: Advice) -> str:
    """Returns an item's gain as text: `12.4 ms and 1.20 GiB, 8.1 %`."""
    parts = [duration(item.gain_ns)] if item.gain_ns > 0 else []
    parts += [size(item.gain_bytes)] if item.gain_bytes > 0 else []
    return f"{' and '.join(parts)}, {100 * item.share:.1f} %"


def _collectives(program: ProgramReport, width: int | None, *, whole: bool) -> Iterator[str]:
    yield ""
    if not program.collectives:
        yield "  no collectives"
        return
    rows: list[tuple[str, ...]] = []
    reasons: dict[str, list[int]] = {}
    shown = list(program.collectives)
    if not whole:
        shown = sorted(shown, key=lambda row: -row.exposed_ns)[:_MOST_COLLECTIVES]
    for row in shown:
        hidden_by = row.hidden_by[0].name if row.hidden_by else "-"
        hidden_by = hidden_by if len(hidden_by) <= 28 else hidden_by[:27] + "…"
        rows.append(
            (
                str(row.number),
                row.kind,
                row.groups,
                ",".join(row.axes) or "-",
                row.dtype,
                size(row.bytes),
                str(row.times),
                duration(row.ns),
                duration(row.exposed_ns),
                f"{hidden_by}, …" if len(row.hidden_by) > 1 else hidden_by,
                share(row.hideable_ns, row.ns),
                short_place(row.place),
            )
        )
        if row.why:
            reasons.setdefault(row.why, []).append(row.number)
    yield from _table(_HEADINGS, rows, width)
    if not whole:
        others = len(program.collectives) - len(shown)
        left = sum(row.exposed_ns for row in program.collectives) - sum(r.exposed_ns for r in shown)
        counted = f"{others} other collective{'s' * (others != 1)}, {duration(left)} exposed; "
        yield f"  {counted * (others > 0)}--all also lists loops, kernels and memory at the peak"
    if reasons:
        yield ""
        yield "  reasons why no order hides these whole:"
        yield from (f"    {_numbers(numbers)}: {why}" for why, numbers in reasons.items())


def _loops(program: ProgramReport, width: int | None) -> Iterator[str]:
    if not program.loops:
        return
    yield ""
    yield from _table(
        ("loop", "trips", "time", "an iteration", "place"),
        [
            (
                "  " * row.depth + row.name,
                "?" if row.trips is None else str(row.trips),
                duration(row.ns),
                duration(row.period_ns),
                short_place(row.place),
            )
            for row in program.loops
        ],
        width,
    )


def _kernels(program: ProgramReport, width: int | None) -> Iterator[str]:
    if not program.kernels:
        return
    yield ""
    rows = [
        (
            row.name,
            str(row.times),
            duration(row.ns),
            share(row.ns, program.compute_ns),
            short_place(row.place),
        )
        for row in program.kernels[:_MOST_KERNELS]
    ]
    yield from _table(("kernel", "times", "time", "of compute", "place"), rows, width)


def _alive(program: ProgramReport) -> Iterator[str]:
    if not program.alive:
        return
    yield ""
    yield "  live at the memory peak:"
    shown = program.alive[:_MOST_ALIVE]
    yield from (
        f"    {size(held.bytes):>9}  {held.name}  {short_place(held.place)}" for held in shown
    )
    if len(program.alive) > len(shown):
        yield f"    and others, each at most {size(program.alive[len(shown)].bytes)}"


def short_place(place: str) -> str:
    """Returns a place without folders and without the op's name: `layers.py:17 in rms_norm`."""
    match = _PLACE.match(place)
    return match.group(1) if match else place


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None
) -> Iterator[str]:
    spare = [heading for heading in _SPARE if heading in headings]
    for line in table_lines([headings, *rows], _LEFT, width=width and width - 2, spare=spare):
        yield "  " + (line if width is None or len(line) <= width - 2 else line[: width - 3] + "…")


def _numbers(numbers: Sequence[int]) -> str:
    """Returns numbers as ranges: `#0, #3 to #7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"#{run[0]}" if len(run) == 1 else f"#{run[0]} to #{run[-1]}" for run in runs]
    return ", ".join(parts)
