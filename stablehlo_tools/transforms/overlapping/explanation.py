"""What a program hides of each collective as it is written, and what stands in the way."""

from __future__ import annotations

from collections.abc import Iterator

from stablehlo_tools.analysis.tasks.graph import TracedGraph
from stablehlo_tools.diagnostics import Diagnostic, Severity, to_place
from stablehlo_tools.overlap.simulator import simulate
from stablehlo_tools.report.document import CollectiveRow
from stablehlo_tools.report.rows import collective_numbers, collective_rows
from stablehlo_tools.report.units import duration

_HIDDEN = 0.02  # of a transfer's time: exposed for less, it is as good as hidden
_IN_ORDER = "the compute that could hide it hides others, or memory does not allow it"


def explain(traced: TracedGraph) -> Iterator[Diagnostic]:
    """A note for each collective of a program, loops included, in program order."""
    rows = collective_rows(traced.graph, simulate(traced.graph))
    for ((path, start), _), row in zip(collective_numbers(traced.graph).items(), rows, strict=True):
        ops = _at(traced, path).ops[start]
        location = ops[-1].location if ops else None
        yield Diagnostic(Severity.NOTE, _sentence(row), to_place(location))


def _at(traced: TracedGraph, path: tuple[int, ...]) -> TracedGraph:
    for task in path:
        traced = traced.bodies[task]
    return traced


def _sentence(row: CollectiveRow) -> str:
    what = f"{row.kind} of {duration(row.ns / max(1, row.times))}"
    if row.times != 1:
        what = f"{row.times} times {what}"
    if row.exposed_ns <= _HIDDEN * row.ns:
        hiders = [hider.name for hider in row.hidden_by]
        more = f" and {len(hiders) - 1} more" if len(hiders) > 1 else ""
        return f"{what}: hidden under {hiders[0]}{more}" if hiders else f"{what}: takes no time"
    return f"{what}: {duration(row.exposed_ns)} exposed: {row.why or _IN_ORDER}"
