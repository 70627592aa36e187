"""What a program hides of each collective as it is written, and what stands in the way.

Of collectives that are alike there can be hundreds: sums of scalars, or those of each layer of an
unrolled program. They share one note, with their number and their times taken together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.tasks.graph import TracedGraph
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Severity, duration, size, to_place
from stablehlo_tools.overlap.collective_times import (
    CollectiveRow,
    collective_numbers,
    collective_rows,
)
from stablehlo_tools.overlap.simulator import simulate

_HIDDEN = 0.02  # of a transfer's time: exposed for less, it is as good as hidden
_SMALL = 4096  # bytes: such a collective takes its latency, whatever it carries
_FEW = 3  # collectives that are alike have a note each
_IN_ORDER = "the compute that could hide it hides others, or memory does not allow it"


@dataclass(frozen=True)
class _Explained:
    """A collective, its times, and the block that it runs in."""

    path: tuple[int, ...]
    location: ir.Location | None
    row: CollectiveRow

    @property
    def is_hidden(self) -> bool:
        return self.row.exposed_ns <= _HIDDEN * self.row.ns

    @property
    def alike(self) -> object:
        """Equal for those that may share a note: small ones, or those of one line of source."""
        if self.row.bytes <= _SMALL:
            return self.path, self.row.kind, None
        return self.path, self.row.kind, to_place(self.location), self.row.bytes


def explain(traced: TracedGraph) -> Iterator[Diagnostic]:
    """A note for each collective of a program, or for many that are alike, in program order."""
    rows = collective_rows(traced.graph, simulate(traced.graph))
    explained: list[_Explained] = []
    groups: dict[object, list[_Explained]] = {}
    for ((path, start), _), row in zip(collective_numbers(traced.graph).items(), rows, strict=True):
        ops = _at(traced, path).ops[start]
        explained.append(_Explained(path, ops[-1].location if ops else None, row))
        groups.setdefault(explained[-1].alike, []).append(explained[-1])
    for one in explained:
        group = groups[one.alike]
        if len(group) <= _FEW:
            yield Diagnostic(Severity.NOTE, _sentence(one), to_place(one.location))
        elif one is group[0]:
            yield Diagnostic(Severity.NOTE, _sentence_of_all(group), to_place(one.location))


def _at(traced: TracedGraph, path: tuple[int, ...]) -> TracedGraph:
    for task in path:
        traced = traced.bodies[task]
    return traced


def _sentence(one: _Explained) -> str:
    row = one.row
    what = f"{row.kind} of {duration(row.ns / max(1, row.times))}"
    if row.times != 1:
        what = f"{row.times} times {what}"
    if one.is_hidden:
        hiders = [hider.name for hider in row.hidden_by]
        more = f" and {len(hiders) - 1} more" if len(hiders) > 1 else ""
        return f"{what}: hidden under {hiders[0]}{more}" if hiders else f"{what}: takes no time"
    return f"{what}: {duration(row.exposed_ns)} exposed: {row.why or _IN_ORDER}"


def _sentence_of_all(group: Sequence[_Explained]) -> str:
    """What a note says of collectives that are alike, the first of them where it stands."""
    rows = [one.row for one in group]
    what = (
        f"{len(group)} {rows[0].kind}s of {size(max(row.bytes for row in rows))}"
        f"{' or less' if len({row.bytes for row in rows}) > 1 else ''}, "
        f"{duration(sum(row.ns for row in rows))} together, the first of them here"
    )
    exposed = sum(row.exposed_ns for row in rows)
    hidden = sum(one.is_hidden for one in group)
    if hidden == len(group):
        return f"{what}: all of them hidden"
    most = max(rows, key=lambda row: row.exposed_ns)
    return (
        f"{what}: {hidden or 'none'} of them hidden, {duration(exposed)} exposed; of the most "
        f"exposed: {most.why or _IN_ORDER}"
    )
