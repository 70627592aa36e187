"""A comparison of schedules as a table to read, as JSON, or as CSV."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from stablehlo_tools.report.schedule_table import figure, percent
from stablehlo_tools.schedules.catalogue import Candidate, Comparison

_HEADINGS = (
    "schedule", "chunks", "makespan", "by END", "by SPAN", "alive", "memory", "messages", "fits",
)  # fmt: skip
_FIELDS = Candidate._fields


def to_text(comparison: Comparison) -> str:
    """Best first; under the table what there is not and why, and which to use."""
    return "\n".join(_lines(comparison)) + "\n"


def to_json(comparison: Comparison) -> str:
    """One object: the setting's counts, a list of rows, the bound, the refusals, the advice."""
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


def to_csv(comparison: Comparison) -> str:
    """A line of names, then a line for each schedule; true and false as in JSON."""
    lines = [",".join(_FIELDS)]
    for candidate in comparison.candidates:
        values = candidate._asdict()
        lines.append(",".join(_plain(values[field]) for field in _FIELDS))
    return "\n".join(lines) + "\n"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _lines(comparison: Comparison) -> Iterator[str]:
    limited = comparison.setting.limit is not None
    headings = _HEADINGS if limited else _HEADINGS[:-1]
    rows = [_row(candidate)[: len(headings)] for candidate in comparison.candidates]
    yield from _table(headings, rows)
    if comparison.refusals:
        yield ""
        yield from (f"{refusal.name}: {refusal.why}" for refusal in comparison.refusals)
    yield ""
    if comparison.bound is not None:
        yield f"no schedule on the placements searched takes less than {figure(comparison.bound)}"
    yield comparison.advice


def _row(candidate: Candidate) -> tuple[str, ...]:
    return (
        candidate.name,
        str(candidate.chunks),
        figure(candidate.makespan),
        percent(candidate.bubble),
        percent(candidate.bubble_of_span),
        figure(candidate.activations),
        figure(candidate.memory),
        f"{candidate.messages:,}",
        "yes" if candidate.fits else "no",
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        first, *others = (
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *others])
