"""Cuts the units of a step into stages.

The heaviest is about as light as can be. Of such cuts those are taken that are most even, by the
squares of what stages take, and send least, by the time that it takes: a message as long as a stage
counts as much as a stage that is alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.staging.units import Span, Units

_SLACK = 1.05  # of the least heaviest stage: what evenness and fewer bytes may cost
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Cuts:
    """The units at which stages begin, without the first; and what each stage weighs."""

    begins: tuple[int, ...]
    ns: tuple[float, ...]

    def stage_of(self, unit: int) -> int:
        """The stage of a unit."""
        return bisect_left(self.begins, unit + 1)

    def stages_of(self, span: Span) -> range:
        """The stages that have units of a span."""
        return range(self.stage_of(span.first), self.stage_of(span.limit - 1) + 1)

    def counts(self, span: Span) -> tuple[int, ...]:
        """How many units of a span are on each stage that has any."""
        inside = [unit for unit in self.begins if span.first < unit < span.limit]
        return tuple(b - a for a, b in pairwise([span.first, *inside, span.limit]))


def cut_units(units: Units, stages: int, ns_per_byte: float, place: ir.Location) -> Cuts:
    """The cuts into so many stages, none of them empty. Raises ToolError where units are fewer."""
    count = len(units.ns)
    if count < stages:
        raise ToolError(
            f"expand-mpmd: the forward has {count} ops and iterations over layers, too few for "
            f"{stages} stages (P5)",
            place,
        )
    upto = [0.0, *accumulate(units.ns)]
    limit = _least_heaviest(upto, stages) * _SLACK
    sent = [size * ns_per_byte for size in units.crossing]
    begins = _cheapest(upto, sent, stages, limit)
    edges = [0, *begins, count]
    return Cuts(tuple(begins), tuple(upto[b] - upto[a] for a, b in pairwise(edges)))


def _least_heaviest(upto: Sequence[float], stages: int) -> float:
    """The least weight such that so many stages, each of it at most, hold all units."""
    low, high = upto[-1] / stages, upto[-1]
    for _ in range(60):
        middle = (low + high) / 2
        if _fits(upto, stages, middle):
            high = middle
        else:
            low = middle
    return high


def _fits(upto: Sequence[float], stages: int, limit: float) -> bool:
    first, count = 0, len(upto) - 1
    for _ in range(stages):
        first = _reach(upto, first, limit)
        if first >= count:
            return True
    return False


def _reach(upto: Sequence[float], first: int, limit: float) -> int:
    """The last unit at which a stage from `first` can end."""
    return bisect_left(upto, (upto[first] + limit) * _ROUNDING, first + 1) - 1


def _cheapest(
    upto: Sequence[float], crossing: Sequence[float], stages: int, limit: float
) -> list[int]:
    """Where stages begin, none heavier than the limit. `crossing[u]` is the time, in nanoseconds,
    that a cut in front of unit u costs."""
    count = len(upto) - 1
    mean = max(upto[-1], 1.0) / stages
    edges = np.asarray(upto) / mean
    most = limit * _ROUNDING / mean
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    chosen: list[np.ndarray] = []
    for stage in range(stages):
        following = np.full(count + 1, np.inf)
        origin = np.full(count + 1, -1)
        for first in range(stage, count):
            if np.isinf(best[first]):
                continue
            so_far = best[first] + (crossing[first] / mean if first else 0.0)
            end = int(np.searchsorted(edges, edges[first] + most, side="right"))
            ends = slice(first + 1, end)
            found = so_far + (edges[ends] - edges[first]) ** 2
            better = found < following[ends]
            following[ends][better] = found[better]
            origin[ends][better] = first
        best = following
        chosen.append(origin)
    return _traced(chosen, count)


def _traced(chosen: Sequence[np.ndarray], count: int) -> list[int]:
    begins: list[int] = []
    end = count
    for origin in reversed(chosen):
        end = int(origin[end])
        begins.append(end)
    return begins[::-1][1:]
