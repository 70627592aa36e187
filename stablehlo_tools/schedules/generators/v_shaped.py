"""V-shaped schedules: ZB-V, V-Half and V-Min.

Each rank holds two stages, so that the last stage is on the rank of the first, and the gradients
are split. A building block (arXiv 2405.15362, for ZB-V also arXiv 2401.10241, section 6) says how
much memory a schedule takes; the order is then searched for: the block's phases are moved ahead in
several ways and, where they take unlike times, also dispatched by two priorities. Of the tables
found, always the same, the one of the lowest makespan is kept, then of the lowest span, then of
the fewest activations.

Given no costs, all phases are taken to be alike. Any number of ranks and of microbatches has its
table, and the limits on memory hold for any costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from stablehlo_tools.schedules.costs import Costs, unit_costs
from stablehlo_tools.schedules.generators.v_search import (
    PERIOD,
    Problem,
    Rows,
    block,
    by_slots,
    by_times,
    dispatched,
    evened,
    inserted,
    problem,
    written,
)
from stablehlo_tools.schedules.simulator import simulate
from stablehlo_tools.schedules.table import Table

_LARGE = 50_000  # phases of a table of which only the most promising candidate is written out
_REHEARSED = 3  # microbatches a rank of what shows which one that is

_Search = Callable[[Problem], Rows]


def zb_v(ranks: int, microbatches: int, costs: Costs | None = None) -> Table:
    """No bubble by span: the memory of 1F1B, and twice its messages.

    Rank r holds at most min(2p, m + r + 1) activations, each half of a rank's part of the model.
    Where F = I = W and m >= 2p - 1 the makespan is 6mF + (p - 1)F and the span 6mF, F of a stage.
    Raises ToolError for costs of another number of stages than 2p.
    """
    limits = tuple(min(2 * ranks, microbatches + rank + 1) for rank in range(ranks))
    return _best("zb-v", microbatches, (4, 2, 4, 2), (1, 1, 1), limits, costs)


def v_half(ranks: int, microbatches: int, costs: Costs | None = None) -> Table:
    """Half the memory of 1F1B and half its bubble.

    A rank holds at most 2 floor((p + 2) / 2) activations. Where F = I = W and m >= p the makespan
    is (3p - 4)F more than 6mF for odd p > 1, and (3p - 7)F for even p > 2, F of a stage; with 1F1B
    it is 6(p - 1)F. Raises ToolError for costs of another number of stages than 2p.
    """
    limits = (2 * ((ranks + 2) // 2),) * ranks
    pauses = (1, 1, 2) if ranks % 2 else (1, 4, 2)
    return _best("v-half", microbatches, (2, 1, 2, 1), pauses, limits, costs)


def v_min(ranks: int, microbatches: int, costs: Costs | None = None) -> Table:
    """A third of the memory of 1F1B and two thirds of its bubble.

    A rank holds at most 2 floor((p + 4) / 3) activations. Where F = I = W, m >= p and p > 1 the
    makespan is (4p - 5)F more than 6mF if p is one more than a multiple of 3, else (4p - 7)F. The
    bubble grows with m where phases take unlike times: so little memory leaves no slack. Raises
    ToolError for costs of another number of stages than 2p.
    """
    limits = (2 * ((ranks + 4) // 3),) * ranks
    pauses = (1, 1, 1) if ranks % 3 else (1, 3, 1)
    return _best("v-min", microbatches, (1, 1, 1, 1), pauses, limits, costs)


def _best(
    name: str,
    microbatches: int,
    strides: tuple[int, ...],
    pauses: tuple[int, ...],
    limits: tuple[int, ...],
    costs: Costs | None,
) -> Table:
    ranks = len(limits)
    times = unit_costs(2 * ranks) if costs is None else costs
    given = problem(block(ranks, strides, pauses), microbatches, limits, times)
    searches = list(_searches(given, strides))
    if microbatches > _REHEARSED * ranks and PERIOD * ranks * microbatches > _LARGE:
        search = min(searches, key=partial(_predicted, given, times))
        return written(name, given, search(given))
    tables = [written(name, given, search(given)) for search in searches]
    return min(tables, key=lambda table: _merit(table, times))


def _searches(given: Problem, strides: tuple[int, ...]) -> Iterator[_Search]:
    yield partial(inserted, put_off=False)
    yield partial(inserted, put_off=True)
    if given.is_even:
        return
    for weight in (2, 3):
        yield lambda problem, weight=weight: inserted(evened(problem, weight), put_off=False)
    yield lambda problem: dispatched(problem, by_slots(problem))
    yield lambda problem: dispatched(problem, by_times(problem, strides))


def _predicted(given: Problem, costs: Costs, search: _Search) -> tuple[float, ...]:
    """What a search's table would be like, by the line through two rehearsals.

    With equal times every microbatch adds the same to all tables, and the shorter one tells.
    """

    def rehearsed(rounds: int) -> tuple[float, ...]:
        fewer = replace(given, microbatches=rounds * given.ranks)
        return _merit(written("rehearsal", fewer, search(fewer)), costs)

    short = rehearsed(_REHEARSED - 1)
    if given.is_even:
        return short
    left = given.microbatches / given.ranks - _REHEARSED
    return tuple(to + (to - of) * left for of, to in zip(short, rehearsed(_REHEARSED), strict=True))


def _merit(table: Table, costs: Costs) -> tuple[float, ...]:
    """The less the better, the first figure first."""
    timeline = simulate(table, costs)
    return timeline.makespan, timeline.span, sum(timeline.peak_activations)
