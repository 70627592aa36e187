"""The solver is as good as brute force; the search is close to the solver's optimum."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from schedule_settings import drawn_costs, drawn_setting, microbatches_held, room_of
from schedule_solver import Optimum, ScheduleModel, solve_setting, unit_of
from soaking import one_in

from stablehlo_tools.schedules.search.auto import find_best, lower_bound
from stablehlo_tools.schedules.setting import Costs, ScheduleSetting, costs
from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    ActionPair,
    Placement,
    Table,
    loop,
    table_of,
    v_shape,
)
from stablehlo_tools.schedules.table_simulator import execute, peak_bytes, simulate
from stablehlo_tools.schedules.validator import violations

SECONDS = 600.0  # of the solver for a setting; most take a tenth of one
CLOSE = 1e-9
# Of full gradients that take such a share of their two parts: the mean and the largest loss of the
# search against the optimum that are allowed.
BOUNDS = [(1.0, 0.03, 0.2), pytest.param(0.8, 0.06, 0.25, marks=pytest.mark.soak)]


def rows(microbatches: int, stages: tuple[int, ...], full: bool) -> list[list[Action]]:
    """Every order of a rank, microbatches in any order; with full gradients or without."""
    choices = [("F", "I", "W"), ("F", "B")] if full else [("F", "I", "W")]
    visits = [*product(stages, range(microbatches))]
    found: list[list[Action]] = []
    for kinds in product(choices, repeat=len(visits)):
        chains = [
            [Action(ActionKind(kind), *visit) for kind in chain]
            for visit, chain in zip(visits, kinds, strict=True)
        ]
        found += interleaved(chains)
    return found


def interleaved(chains: list[list[Action]]) -> Iterator[list[Action]]:
    """Every order that keeps those of the chains."""
    if not any(chains):
        yield []
    for at, chain in enumerate(chains):
        if chain:
            others = [*chains[:at], chain[1:], *chains[at + 1 :]]
            yield from ([chain[0], *rest] for rest in interleaved(others))


def brute_force(placement: Placement, m: int, of: Costs, limit: float | None, full: bool) -> float:
    """The least makespan of all orders within the limit; infinite where none fits."""
    orders: list[list[list[Action]]] = []
    for rank, stages in enumerate(placement.held):
        table = partial(_one_row, placement, m, rank)
        most = float("inf") if limit is None else limit * (1 + CLOSE)
        orders.append(
            [row for row in rows(m, stages, full) if peak_bytes(table(row), of)[rank] <= most]
        )
    makespans = [float("inf")]
    for chosen in product(*orders):
        run = execute(table_of("brute force", placement, m, chosen), of)
        if not run.stuck:
            makespans.append(max(map(max, run.ends)))
    return min(makespans)


def _one_row(placement: Placement, m: int, rank: int, row: list[Action]) -> Table:
    empty: list[list[Action]] = [[] for _ in range(placement.ranks)]
    return table_of("one row", placement, m, [*empty[:rank], row, *empty[rank + 1 :]])


def solved(
    placement: Placement, m: int, of: Costs, limit: float | None, most: float | None = None
) -> float:
    """The least makespan by the model alone, without a hint; infinite if none fits within `most`.

    By itself `most` is what one microbatch after the other takes, and somewhat more.
    """
    if most is None:
        both = map(sum, zip(of.input_gradient, of.weight_gradient, strict=True))
        longest = sum(map(max, zip(of.backward, both, strict=True))) + sum(of.forward)
        most = m * (longest + 2 * of.stages * of.communication)
    answer = ScheduleModel(placement, m, of, limit, most).solve(SECONDS)
    assert answer.proven
    if answer.rows is None:
        return float("inf")
    table = table_of("solved", placement, m, answer.rows)
    assert not violations(table, of, limit)
    makespan = simulate(table, of).makespan
    assert answer.bound == pytest.approx(makespan)
    return makespan


SMALL = {
    "one rank": (loop(1), 2, True),
    "loop": (loop(2), 2, True),
    "loop, split only": (loop(2), 2, False),
    "interleaved": (loop(2, 2), 1, True),
    "v": (v_shape(2), 1, True),
}


@pytest.mark.parametrize("seed", one_in(2, range(2)))
@pytest.mark.parametrize("count", [1.0, 1.6, 2.0, None])
@pytest.mark.parametrize("name", SMALL)
def test_as_good_as_brute_force(name: str, count: float | None, seed: int) -> None:
    placement, m, full = SMALL[name]
    of = drawn_costs(random.Random(seed), placement.stages)
    if not full:
        both = zip(of.input_gradient, of.weight_gradient, strict=True)
        of = replace(of, backward=tuple(map(sum, both)))
    limit = None
    if count is not None:
        held = [
            sum(of.weights[stage] + count * of.activation[stage] for stage in own)
            for own in placement.held
        ]
        limit = max(held)
    best = brute_force(placement, m, of, limit, full)
    assert solved(placement, m, of, limit) == pytest.approx(best)


def test_full_gradients_are_used_where_they_are_faster() -> None:
    of = costs(2, backward=1.2)
    best = brute_force(loop(2), 2, of, None, True)
    assert solved(loop(2), 2, of, None) == best < brute_force(loop(2), 2, of, None, False)


@pytest.mark.parametrize("seed", one_in(3, range(12)))
def test_phases_of_no_time(seed: int) -> None:
    dice = random.Random(seed)
    first, second, third = ([dice.choice((0.0, 1.0)) for _ in range(2)] for _ in range(3))
    of = costs(2, first, second, third, communication=dice.choice((0.0, 1.0)))
    for limit in (1.0, None):
        best = brute_force(loop(2), 2, of, limit, True)
        assert solved(loop(2), 2, of, limit) == pytest.approx(best)


def test_nothing_fits_the_model_of_a_placement_without_room() -> None:
    of = costs(2, weights=2.0)
    assert solved(loop(2), 2, of, 1.5) == solved(loop(2), 2, of, 2.5) == float("inf")
    assert solved(loop(2), 2, of, 3.0) < float("inf")


def checked(setting: ScheduleSetting) -> Optimum:
    """Returns the optimum, compared with the search, the bounds and the validator."""
    best = solve_setting(setting, SECONDS)
    timeline, found = best.timeline, find_best(setting).timeline
    assert not violations(best.table, timeline.costs, setting.limit)
    assert timeline.makespan == simulate(best.table, timeline.costs).makespan
    assert timeline.makespan <= found.makespan
    assert best.bound <= timeline.makespan * (1 + CLOSE)
    return best


def losses(numbers: range, full: float) -> list[float]:
    """What the search loses against the proven optimum, relative; 2 or 3 ranks."""
    lost: list[float] = []
    for number in numbers:
        setting = drawn_setting(number, 3, 4, least=2, full=full)
        best = checked(setting)
        if best.proven:
            lost.append(find_best(setting).timeline.makespan / best.timeline.makespan - 1)
    return lost


@pytest.mark.parametrize(("full", "mean", "most"), BOUNDS)
def test_the_search_is_close_to_the_optimum(full: float, mean: float, most: float) -> None:
    lost = losses(range(6), full)
    assert len(lost) == 6, "the solver proves all"
    assert sum(lost) / len(lost) <= mean
    assert max(lost) <= most


@pytest.mark.soak
@pytest.mark.parametrize(("full", "mean", "most"), BOUNDS)
def test_the_search_is_close_to_the_optimum_of_many(full: float, mean: float, most: float) -> None:
    lost = losses(range(8, 120), full)
    assert len(lost) >= 100
    assert sum(lost) / len(lost) <= mean
    assert max(lost) <= most


@pytest.mark.parametrize("number", range(8))
def test_the_lower_bound_is_below_the_optimum(number: int) -> None:
    setting = replace(drawn_setting(number, 3, 3, least=2), chunks=1)
    m, limit = setting.microbatches, setting.limit
    of = setting.costs(setting.ranks)
    best = solved(loop(setting.ranks), m, of, limit)
    room = room_of(loop(setting.ranks), of, limit)
    assert lower_bound(loop(setting.ranks), m, of, room) <= best * (1 + CLOSE)


@pytest.mark.parametrize("number", one_in(3, range(8)))
def test_the_lower_bound_is_below_the_optimum_of_two_chunks(number: int) -> None:
    setting = replace(drawn_setting(number, 3, 3, least=2), chunks=2)
    m, limit = setting.microbatches, setting.limit
    of = setting.costs(2 * setting.ranks)
    found = find_best(setting).timeline
    placements = (loop(setting.ranks, 2), v_shape(setting.ranks))
    best = {placement: solved(placement, m, of, limit, found.makespan) for placement in placements}
    assert min(best.values()) < float("inf") or found.table.placement not in placements
    for placement, makespan in best.items():
        room = room_of(placement, of, limit)
        assert lower_bound(placement, m, of, room) <= makespan * (1 + CLOSE)


@pytest.mark.parametrize(("ranks", "microbatches"), [(3, 4), (4, 4), (4, 6)])
def test_four_ranks_are_proven_at_once(ranks: int, microbatches: int) -> None:
    slices = costs(ranks, 1.1, 1.3, 0.7, communication=0.1)
    for count in (2.0, float(ranks)):
        limit = microbatches_held(slices, count)
        assert checked(ScheduleSetting(ranks, microbatches, slices, 1, limit)).proven


def test_the_search_s_own_schedule_is_in_the_model() -> None:
    """Nothing below the search's makespan is asked for, and the model still has an answer."""
    for number in range(8):
        setting = replace(drawn_setting(number, 3, 4, least=2), chunks=1)
        timeline = find_best(setting).timeline
        assert timeline.table.placement == loop(setting.ranks)
        model = ScheduleModel(
            loop(setting.ranks),
            setting.microbatches,
            timeline.costs,
            setting.limit,
            timeline.makespan,
        )
        model.hint(timeline.table)
        assert model.solve(SECONDS).rows is not None, number


def test_what_is_proven_is_the_same_each_time() -> None:
    setting = drawn_setting(1, 3, 4, least=2)
    first, second = (solve_setting(setting, SECONDS) for _ in range(2))
    assert first.proven
    assert first.table == second.table
    assert first.bound == second.bound


def test_too_little_time_leaves_the_search_s_schedule_and_a_bound() -> None:
    slices = costs(4, forward=[0.9, 1.3, 0.8, 1.1], kept=0.4)
    setting = ScheduleSetting(4, 8, slices, 2, 2.0)
    best, found = solve_setting(setting, seconds=1e-6), find_best(setting)
    assert not best.proven
    assert best.timeline.makespan == found.timeline.makespan
    assert found.bound * (1 - CLOSE) <= best.bound < best.timeline.makespan


def test_times_of_many_digits_leave_the_bound_below() -> None:
    """Rounded down, the bound is below the makespan by no more than a millionth for each action."""
    dice = random.Random(0)
    times = [[dice.uniform(0.5, 1.5) for _ in range(3)] for _ in range(3)]
    of = costs(3, *times, communication=0.1 * dice.random())
    setting = ScheduleSetting(3, 4, of, 1, 2.0)
    best = checked(setting)
    assert best.proven
    phases = 3 * 3 * 4
    assert 0 <= 1 - best.bound / best.timeline.makespan <= phases * 1e-6
    assert not unit_of([*of.forward, *of.backward]).divides


@pytest.mark.parametrize(
    ("figures", "size"),
    [
        ([1.0, 2.0], 1.0),
        ([0.1, 0.25, 1.0], 0.05),
        ([1 / 3, 0.5], 1 / 6),
        ([0.1 + 0.2, 0.6], 0.3),
        ([0.0, 0.0], 1.0),
        ([4e6, 6e6], 2e6),
    ],
)
def test_units_divide_fractions_of_few_digits(figures: list[float], size: float) -> None:
    unit = unit_of(figures)
    assert unit.divides
    assert unit.size == pytest.approx(size)
    assert [unit.whole(each) * unit.size for each in figures] == pytest.approx(figures)


@pytest.mark.parametrize("figures", [[2**0.5, 1.0], [1e-9, 1.0], [1e-9, 1e9]])
def test_units_round_other_figures_down(figures: list[float]) -> None:
    unit = unit_of(figures)
    assert not unit.divides
    for figure in figures:
        assert 0 <= figure - unit.whole(figure) * unit.size < unit.size


def test_pairs_are_no_hint_but_may_be_the_best_there_is() -> None:
    """Pairs that take less than their parts may be faster than all schedules of the solver."""
    setting = ScheduleSetting(2, 6, costs(2, overlapped=0.6), 2)
    best = solve_setting(setting, SECONDS)
    assert any(isinstance(step, ActionPair) for row in best.table.rows for step in row)
    assert best.bound <= best.timeline.makespan
