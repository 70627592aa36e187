"""The search for a schedule: never worse than what is named, never below the bound, always valid.

Its parts: filling an order with weight gradients, list scheduling, changing an order step by step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from schedule_random import PLACEMENTS, random_costs, random_table
from schedule_settings import drawn_costs, drawn_setting, microbatches_held, room_of
from soaking import one_in

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.catalogue import build, entries
from stablehlo_tools.schedules.search.auto import EFFORT, climb, find_best, lower_bound
from stablehlo_tools.schedules.search.orders import OrderDraft, draft_from_table, greedies
from stablehlo_tools.schedules.search.zero_bubble import POLICIES, Policy, fill
from stablehlo_tools.schedules.setting import Costs, ScheduleSetting, costs, unit_costs
from stablehlo_tools.schedules.table import ActionKind, Placement, Table, actions_of, loop, table_of
from stablehlo_tools.schedules.table_simulator import Timeline, peak_bytes, simulate
from stablehlo_tools.schedules.validator import violations

CLOSE = 1e-9  # relative: what counts as equal
NAME = "auto"
SMALL = 1  # effort: a dozen drafts beside the named schedules


def named(setting: ScheduleSetting) -> Iterator[Timeline]:
    """Every named schedule of a training step, of 1, 2 and 4 chunks a rank where that is open."""
    for entry in entries():
        if entry.name == NAME or not entry.training:
            continue
        several = (None, 1, 2, 4) if entry.chunks is None and setting.chunks is None else (None,)
        for chunks in several:
            try:
                asked = replace(setting, chunks=setting.chunks or chunks)
                table = build(entry.name, asked)
            except ToolError:
                continue
            yield simulate(table, setting.costs(table.stages))


def check_best(setting: ScheduleSetting, effort: int) -> None:
    """The best is valid, fits, is not below its bound, and nothing named that fits is better."""
    best = find_best(setting, effort)
    timeline, limit = best.timeline, setting.limit
    assert not violations(best.table, timeline.costs, limit)
    assert simulate(best.table, setting.costs(best.table.stages)).ends == timeline.ends
    assert best.bound <= timeline.makespan * (1 + CLOSE)
    for other in named(setting):
        fits = limit is None or max(other.peak_bytes) <= limit
        assert not fits or timeline.makespan <= other.makespan * (1 + CLOSE), other.table.name


@pytest.mark.parametrize("first", one_in(4, range(0, 200, 20)))
def test_auto_is_never_worse_than_a_named_schedule(first: int) -> None:
    for number in range(first, first + 20):
        check_best(drawn_setting(number), SMALL)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 400, 20))
def test_auto_is_never_worse_than_a_named_schedule_with_all_effort(first: int) -> None:
    for number in range(first, first + 20):
        check_best(drawn_setting(number), EFFORT)


def test_the_settings_are_of_every_kind() -> None:
    settings = [drawn_setting(number) for number in range(200)]
    assert {setting.ranks for setting in settings} == set(range(1, 7))
    assert {setting.microbatches for setting in settings} == set(range(1, 13))
    assert {setting.chunks for setting in settings} == {None, 1, 2}
    assert {setting.slices.communication for setting in settings} == {0.0, 0.1, 0.5}
    tight = [
        setting
        for setting in settings
        if setting.limit is not None and setting.limit <= microbatches_held(setting.slices, 1.2)
    ]
    free = [setting for setting in settings if setting.limit is None]
    assert len(tight) >= 30
    assert 30 <= len(free) <= 100


@pytest.mark.parametrize("number", one_in(4, range(0, 200, 10)))
def test_more_effort_is_never_worse(number: int) -> None:
    setting = drawn_setting(number)
    few, more = find_best(setting, SMALL), find_best(setting, 20_000)
    assert more.timeline.makespan <= few.timeline.makespan * (1 + CLOSE)


@pytest.mark.parametrize("number", one_in(2, [3, 58, 111]))
def test_the_same_setting_gives_the_same_schedule(number: int) -> None:
    setting = drawn_setting(number)
    assert find_best(setting, 20_000) == find_best(setting, 20_000)


def own_room(table: Table, of: Costs) -> list[float]:
    """The bytes of activations that each rank of a table holds at most."""
    weights = [sum(of.weights[stage] for stage in own) for own in table.placement.held]
    return [peak - own for peak, own in zip(peak_bytes(table, of), weights, strict=True)]


def check_bound(timeline: Timeline) -> None:
    """The bound for memory that is just enough, and for any, is not above a schedule."""
    table, of = timeline.table, timeline.costs
    bound = lower_bound(table.placement, table.microbatches, of, own_room(table, of))
    assert lower_bound(table.placement, table.microbatches, of) <= bound
    assert bound <= timeline.makespan * (1 + CLOSE)


@pytest.mark.parametrize("number", one_in(5, range(30)))  # ranks and limits of every kind
def test_the_bound_is_below_every_named_schedule(number: int) -> None:
    for timeline in named(replace(drawn_setting(number), limit=None)):
        check_bound(timeline)


@pytest.mark.parametrize("number", one_in(5, range(30)))
def test_the_bound_is_below_what_is_found(number: int) -> None:
    timeline = find_best(drawn_setting(number), SMALL).timeline
    check_bound(timeline)


@pytest.mark.parametrize("first", one_in(3, (0, 20, 40)))
@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_bound_is_below_random_schedules(name: str, first: int) -> None:
    placement = PLACEMENTS[name]
    for seed in range(first, first + 20):
        table = random_table(seed, placement, seed % 5 + 1)
        times = random_costs(seed, placement.stages)
        held = drawn_costs(random.Random(seed), placement.stages)
        of = replace(times, activation=held.activation, kept=held.kept, weights=held.weights)
        check_bound(simulate(table, of))


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "of"),
    [
        ("zb-h1", 4, 8, (1.0, 1.0, 1.0)),
        ("zb-h2", 4, 8, (1.0, 1.0, 1.0)),
        ("zb-1p", 4, 8, (1.0, 1.0, 1.0)),
        ("zb-2p", 4, 8, (1.0, 1.0, 1.0)),
        ("zb-v", 4, 8, (1.0, 1.0, 1.0)),
        ("zb-v", 8, 16, (1.0, 1.0, 1.0)),
        ("gpipe", 4, 8, (1.0, 2.0, 0.0)),
        ("1f1b", 4, 8, (1.0, 2.0, 0.0)),
        ("interleaved-1f1b", 4, 8, (1.0, 2.0, 0.0)),
        ("interleaved-1f1b", 4, 4, (1.0, 2.0, 0.0)),
        ("looped-bfs", 4, 4, (1.0, 2.0, 0.0)),
        ("1f1b", 1, 5, (1.0, 1.0, 1.0)),
    ],
)
def test_the_bound_is_reached(
    name: str, ranks: int, microbatches: int, of: tuple[float, float, float]
) -> None:
    """Where a named schedule is known to be the best of its placement, the bound says so."""
    slices = costs(ranks, *of)
    table = build(name, ScheduleSetting(ranks, microbatches, slices))
    timeline = simulate(table, ScheduleSetting(ranks, microbatches, slices).costs(table.stages))
    bound = lower_bound(table.placement, microbatches, timeline.costs)
    assert timeline.makespan == pytest.approx(bound)


def test_a_tight_limit_raises_the_bound() -> None:
    """With room for one microbatch on rank 0, it is there from its forward to its gradient."""
    of = unit_costs(4)
    away = 4 * (1 + 1)  # of a microbatch: all forwards and input gradients
    assert lower_bound(loop(4), 8, of, [1.0] * 4) >= 8 * away
    assert lower_bound(loop(4), 8, of) < 4 * away


def random_draft(seed: int, placement: Placement, microbatches: int) -> OrderDraft:
    """The order of a random valid table: every gradient split, or some of them full."""
    table = random_table(seed, placement, microbatches)
    if seed % 2:
        return draft_from_table(table)
    orders = (
        tuple(action for action in actions_of(row) if action.kind is not ActionKind.WEIGHT_GRADIENT)
        for row in table.rows
    )
    return OrderDraft(placement, tuple(orders))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_filled_orders_are_valid_timed_and_within_room(name: str) -> None:
    placement = PLACEMENTS[name]
    fitted = 0
    for seed in range(40):
        dice = random.Random(seed)
        microbatches = dice.randint(1, 5)
        draft = random_draft(seed, placement, microbatches)
        of = drawn_costs(dice, placement.stages)
        limit = dice.choice((None, dice.uniform(1.0, 6.0) * placement.chunks))
        room = room_of(placement, of, limit)
        filled = fill(draft, microbatches, of, room, dice.choice(POLICIES))
        if filled is None:
            assert limit is not None, "without a limit every order can be filled"
            continue
        fitted += 1
        table = table_of("filled", placement, microbatches, filled.rows)
        check_filled(draft, table, of, room)
        timeline = simulate(table, of)
        assert filled.makespan == pytest.approx(timeline.makespan)
        assert filled.span == pytest.approx(timeline.span)
    assert fitted >= 15


def check_filled(draft: OrderDraft, table: Table, of: Costs, room: list[float]) -> None:
    """Valid, so that every W is there; the order is as it was; no rank holds more than its room."""
    assert not violations(table)
    without = tuple(
        tuple(action for action in actions_of(row) if action.kind is not ActionKind.WEIGHT_GRADIENT)
        for row in table.rows
    )
    assert without == draft.orders
    for held, most in zip(own_room(table, of), room, strict=True):
        assert held <= most * (1 + CLOSE) + CLOSE


def test_an_order_that_needs_more_than_the_room_is_not_filled() -> None:
    order = draft_from_table(build("gpipe", ScheduleSetting(2, 4, unit_costs(2))))
    of = costs(2, kept=0.5)
    policy = Policy()
    assert fill(order, 4, of, [4.0, 4.0], policy) is not None
    assert fill(order, 4, of, [4.0, 3.9], policy) is None


def test_weight_gradients_make_room() -> None:
    """1F1B order: without room for what W keeps, each W runs before the next forward."""
    order = draft_from_table(build("1f1b", ScheduleSetting(2, 4, unit_costs(2))))
    of = costs(2, kept=1.0)
    tight = fill(order, 4, of, [2.0, 1.0], Policy())
    assert tight is not None
    kinds = [action.kind.value for action in tight.rows[1]]
    assert "".join(kinds) == "FIW" * 4


@pytest.mark.parametrize("name", ["one-rank", "loop", "loop-3", "interleaved", "v", "v-3", "w"])
def test_list_scheduling_is_never_stuck_and_keeps_the_room(name: str) -> None:
    placement = PLACEMENTS[name]
    for seed in range(40):
        dice = random.Random(seed)
        microbatches = dice.randint(1, 8)
        of = drawn_costs(dice, placement.stages)
        share = dice.choice((1.0, 1.0, 1.3, 2.0, 5.0))  # of one microbatch
        room = [share * sum(of.activation[stage] for stage in own) for own in placement.held]
        for greedy in greedies(placement, of, room):
            draft = greedy.draft(microbatches)
            assert draft is not None
            filled = fill(draft, microbatches, of, room, dice.choice(POLICIES))
            assert filled is not None, (seed, greedy.gradient, greedy.deep)
            table = table_of("greedy", placement, microbatches, filled.rows)
            check_filled(draft, table, of, room)


def test_list_scheduling_refuses_what_cannot_hold_a_microbatch() -> None:
    of = unit_costs(4)
    for greedy in greedies(loop(2, 2), of, [2.0, 1.9]):
        assert greedy.draft(3) is None


def climbed(limit: int) -> tuple[list[float], OrderDraft]:
    """The makespans that climbing gets to see from the order of 1F1B, and the best order."""
    of = costs(3, communication=0.3)
    best = draft_from_table(build("1f1b", ScheduleSetting(3, 5, of)))
    seen: list[float] = []
    found: dict[float, OrderDraft] = {}

    def tried(draft: OrderDraft) -> float | None:
        if len(seen) >= limit:
            return None
        filled = fill(draft, 5, of, [4.0] * 3, Policy())
        seen.append(float("inf") if filled is None else filled.makespan)
        found.setdefault(seen[-1], draft)
        return None if filled is None else filled.makespan

    climb(best, float("inf"), False, tried)
    return seen, found[min(seen)]


def test_climbing_is_deterministic_and_gains() -> None:
    seen, order = climbed(400)
    again, order_again = climbed(400)
    assert (seen, order) == (again, order_again)
    assert len(set(seen)) > 3
    assert min(seen) < next(makespan for makespan in seen if makespan < float("inf"))


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_limit_below_one_microbatch_is_refused_with_the_least(chunks: int) -> None:
    of = costs(4, activation=3.0, weights=2.0)
    with pytest.raises(ToolError, match=r"no schedule fits.* 4\.9.* need 5\b"):
        find_best(ScheduleSetting(4, 6, of, chunks, 4.9), SMALL)
    best = find_best(ScheduleSetting(4, 6, of, chunks, 5.0), SMALL)
    assert max(best.timeline.peak_bytes) == pytest.approx(5.0)


def test_weights_above_the_limit_are_refused() -> None:
    with pytest.raises(ToolError, match=r"no schedule fits a memory limit of 1\.5.* need 3\b"):
        find_best(ScheduleSetting(2, 2, costs(2, weights=2.0), 1, 1.5), SMALL)


def test_chunks_that_the_slices_cannot_be_cut_into_are_refused() -> None:
    slices = costs(3)
    with pytest.raises(ToolError, match="figures"):
        find_best(ScheduleSetting(2, 2, slices, 1), SMALL)


def test_names_and_origins() -> None:
    best = find_best(ScheduleSetting(4, 8, unit_costs(4)), SMALL)
    assert best.table.name == NAME
    assert best.origin
    assert best.gap == pytest.approx(best.timeline.makespan / best.bound - 1)
