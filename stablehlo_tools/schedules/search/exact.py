"""The best schedule of a small setting, proven by a constraint solver (OR-Tools, extra `solver`).

It says how good the search is, and offers the optimum where that can be found. Searched are all
orders of forwards and of full or split gradients, on the placements that the search looks at: loop
and V, of the chunks a rank that the setting asks for, else of one and of two. Two pipelines in
opposite directions are not searched, nor pairs that overlap: where pairs take no less than their
parts one after the other, nothing is lost with them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from stablehlo_tools.diagnostics import solver_module
from stablehlo_tools.schedules.search.auto import find_best, lower_bound
from stablehlo_tools.schedules.setting import Setting
from stablehlo_tools.schedules.simulator import Timeline, simulate
from stablehlo_tools.schedules.table import Action, Pair, Placement, Table, loop, table_of, v_shape

if TYPE_CHECKING:
    from stablehlo_tools.schedules.search.exact_model import Answer

NAME = "exact"
SECONDS = 60.0
_CHUNKS = (1, 2)  # where the setting leaves it open
_EXACT = 1e-9  # relative: what counts as equal


class ExactBest(NamedTuple):
    """A schedule, timed; whether nothing is faster; a makespan that nothing is below.

    `proven` and `bound` speak of the placements that are searched. Where times are no multiples of
    one unit (exact_model.py), the bound of a proven schedule may be below its makespan by a
    millionth of the longest phase for every action.
    """

    timeline: Timeline
    proven: bool
    bound: float

    @property
    def table(self) -> Table:
        """The schedule."""
        return self.timeline.table


def exact(setting: Setting, seconds: float = SECONDS) -> ExactBest:
    """The schedule of least makespan within the limit, or the best that is found in `seconds`.

    Never worse than what `find_best` finds, which the solver begins with; what is proven is the
    same each time. `seconds` are those of the solver. Raises ToolError where no schedule fits the
    limit, and if OR-Tools is not installed.
    """
    model = solver_module("stablehlo_tools.schedules.search.exact_model")
    best = find_best(setting).timeline
    left, proven = seconds, True
    bounds: list[float] = []
    placements = [*searched(setting)]
    for count, placement in enumerate(placements):
        bound = _bound(setting, placement)
        bounds.append(bound)
        if bound >= best.makespan * (1 - _EXACT):
            continue
        begin = time.monotonic()
        costs = setting.costs(placement.stages)
        search = model.Model(placement, setting.microbatches, costs, setting.limit, best.makespan)
        if _can_begin(best.table, placement):
            search.hint(best.table)
        answer: Answer = search.solve(max(left, 0.0) / (len(placements) - count))
        left -= time.monotonic() - begin
        bounds[-1] = max(bound, answer.bound)
        optimum = None if answer.rows is None else _timed(setting, placement, answer.rows)
        proven = proven and answer.proven and (optimum is None or _fits(setting, optimum))
        if optimum is not None and _fits(setting, optimum) and _faster(optimum, best):
            best = optimum
    return ExactBest(best, proven, min([best.makespan, *bounds]))


def searched(setting: Setting) -> Iterator[Placement]:
    """The placements that the solver looks at."""
    for chunks in _CHUNKS if setting.chunks is None else (setting.chunks,):
        if not setting.can_be_cut(chunks):
            continue
        yield loop(setting.ranks, chunks)
        if chunks > 1 and setting.ranks > 1:
            yield v_shape(setting.ranks, chunks)


def _bound(setting: Setting, placement: Placement) -> float:
    costs = setting.costs(placement.stages)
    return lower_bound(placement, setting.microbatches, costs, setting.room(placement))


def _can_begin(table: Table, placement: Placement) -> bool:
    """Whether the model of a placement knows a table."""
    pairs = any(isinstance(step, Pair) for row in table.rows for step in row)
    return table.placement == placement and not pairs


def _timed(setting: Setting, placement: Placement, rows: list[list[Action]]) -> Timeline:
    table = table_of(NAME, placement, setting.microbatches, rows)
    return simulate(table, setting.costs(placement.stages))


def _fits(setting: Setting, timeline: Timeline) -> bool:
    return setting.fits(max(timeline.peak_bytes))


def _faster(one: Timeline, other: Timeline) -> bool:
    return one.makespan < other.makespan * (1 - _EXACT)
