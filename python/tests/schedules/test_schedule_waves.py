"""Chimera and Hanayo: bubbles and memory as published, and derived again from one microbatch.

Sources. Neither paper was at hand; their figures are taken from public texts that quote them, and
every one is derived here as well. Chimera, arXiv 2107.06925: bubble (D - 2)/(2N + D - 2), weights
2 M_theta, activations of (D/2 + 1) M_a to D M_a. Hanayo, arXiv 2308.15762: W = S / 2P, one copy of
the weights, a bubble in proportion to (2P - 2)/(3PW + P - 1) at T_B = 2 T_F. The orders are
those of programs: Chimera's of its authors (github.com/Shigangli/Chimera,
chimera_pipeline_rank.py: each pipeline takes a microbatch every second step), Hanayo's of a public
generator of it (`generate_hanayo_schedule`), both restated below.
"""

from __future__ import annotations

from itertools import product

import pytest
from soaking import one_in

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.catalogue import build
from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.generators.by_rule import (
    chimera,
    hanayo,
    interleaved_one_f_one_b,
    one_f_one_b,
)
from stablehlo_tools.schedules.setting import Costs, ScheduleSetting, costs, unit_costs
from stablehlo_tools.schedules.table import Action, Table, actions_of, backward, forward
from stablehlo_tools.schedules.table_simulator import Timeline, simulate
from stablehlo_tools.schedules.validator import violations

EVEN_RANKS = (2, 4, 6, 8)
RANKS = (1, 2, 3, 4, *one_in(2, [5, 8]))
WAVES = (1, 2, 3)


def even(stages: int) -> Costs:
    """A backward that takes as long as a forward; one unit of weights a stage."""
    return costs(stages, 1, 0.5, 0.5, weights=1)


def timed(table: Table, figures: Costs) -> Timeline:
    """The timeline of a table that is valid."""
    assert violations(table) == []
    return simulate(table, figures)


@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("p", EVEN_RANKS)
def test_chimeras_bubble_is_the_papers(p: int, groups: int) -> None:
    m = groups * p
    timeline = timed(chimera(p, m), even(p))
    assert timeline.makespan == 2 * m + p - 2
    assert timeline.bubble == pytest.approx((p - 2) / (2 * m + p - 2))
    for idle in timeline.idle:
        assert idle == p - 2  # on every rank: half in the forwards, half in the backwards
    plain = simulate(one_f_one_b(p, m), even(p))
    assert plain.makespan == 2 * m + 2 * (p - 1)


@pytest.mark.parametrize("p", EVEN_RANKS)
def test_chimeras_memory_is_the_papers(p: int) -> None:
    for m in (p, 3 * p):
        timeline = timed(chimera(p, m), even(p))
        alive = timeline.peak_activations
        assert (min(alive), max(alive)) == (p // 2 + 1, p)
        assert timeline.peak_bytes == tuple(2 + count for count in alive)  # two stages' weights
        assert timeline.messages == 2 * m * (p - 1)


@pytest.mark.parametrize("p", EVEN_RANKS)
def test_chimera_with_backwards_of_two_forwards(p: int) -> None:
    """At m = p, (p - 2)/(3m/2 + p - 2); each p microbatches more add p - 2 forwards of bubble, the
    intermediate bubbles that the paper removes by recomputing or by halving microbatches."""
    timeline = timed(chimera(p, p), unit_costs(p))
    assert timeline.bubble == pytest.approx((p - 2) / (3 * p / 2 + p - 2))
    for groups in (2, 3, 4):
        idle = timed(chimera(p, groups * p), unit_costs(p)).makespan - 3 * groups * p
        assert idle == (p - 2) * (groups + 1)


@pytest.mark.parametrize("w", WAVES)
@pytest.mark.parametrize("p", RANKS)
def test_hanayos_bubble_and_memory(p: int, w: int) -> None:
    """At equal times each rank idles 2(p - 1) chunks: the way to the last rank, and back from it.

    That is the least there can be: the last rank starts after p - 1 chunks and ends p - 1 before.
    """
    for m in (p, 3 * p):
        table = hanayo(p, m, 2 * w)
        assert (table.placement.form, table.placement.chunks) == ("v" if p > 1 else "loop", 2 * w)
        timeline = timed(table, even(table.stages))
        assert timeline.makespan == 4 * w * m + 2 * (p - 1)
        assert timeline.bubble == pytest.approx((p - 1) / (2 * w * m + p - 1))
        assert max(timeline.peak_activations) == 2 * w * p  # p microbatches of a rank's share
        assert max(timeline.peak_bytes) == 2 * w * p + 2 * w  # the weights once


@pytest.mark.parametrize("w", WAVES)
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_hanayo_with_backwards_of_two_forwards(p: int, w: int) -> None:
    """At m = p, (2p - 2)/(3pw + 2p - 2).

    Below the ratio that is quoted of the paper, (2p - 2)/(3pw + p - 1): numerator and work are the
    same, its denominator is one bubble of p - 1 short of work and idle time together.
    """
    timeline = timed(hanayo(p, p, 2 * w), unit_costs(2 * w * p))
    assert timeline.bubble == pytest.approx((2 * p - 2) / (3 * p * w + 2 * p - 2))
    assert timeline.bubble < (2 * p - 2) / (3 * p * w + p - 1)
    interleaved = interleaved_one_f_one_b(p, p, 2 * w)
    assert timeline.messages < simulate(interleaved, unit_costs(2 * w * p)).messages


@pytest.mark.parametrize("p", [2, 4])
def test_more_waves_idle_less_and_one_is_chimera_folded(p: int) -> None:
    bubbles = [timed(hanayo(p, p, 2 * w), unit_costs(2 * w * p)).bubble for w in (1, 2, 4)]
    assert bubbles == sorted(bubbles, reverse=True)
    double = chimera(2 * p, 2 * p)
    folded = hanayo(p, p, 2)
    whole = simulate(double, even(2 * p)).makespan
    assert simulate(folded, even(2 * p)).makespan == whole
    down = [
        {
            action._replace(microbatch=action.microbatch // 2)
            for action in actions_of(row)
            if action.microbatch % 2 == 0
        }
        for row in double.rows
    ]
    for rank, row in enumerate(folded.rows):
        assert set(actions_of(row)) == down[rank] | down[2 * p - 1 - rank]


@pytest.mark.parametrize("w", WAVES)
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_hanayos_order_is_that_of_another_generator(p: int, w: int) -> None:
    for rank, row in enumerate(hanayo(p, p, 2 * w).rows):
        assert list(row) == others_row(p, w, rank)


def others_row(p: int, waves: int, rank: int) -> list[Action]:
    """A rank's row for p microbatches, by the rule of `generate_hanayo_schedule`.

    It fills up with forwards of its first chunk, then takes odd and even chunks in turn; once the
    even ones are out of forwards, backwards of the odd ones, and at last of both in turn.
    """
    own = [2 * p * w + place for w in range(waves) for place in (rank, 2 * p - 1 - rank)]
    evens = [forward(stage, i) for stage in own[::2] for i in range(p)]
    odds = [forward(stage, i) for stage in own[1::2] for i in range(p)]
    odd_backs = [backward(stage, i) for stage in own[:0:-2] for i in range(p)]
    even_backs = [backward(stage, i) for stage in own[-2::-2] for i in range(p)]
    beside = [*evens[p - rank :], *odd_backs]
    row = evens[: p - rank]
    for main in (*odds, *even_backs):
        row += [main, *beside[:1]]
        beside = beside[1:]
    return row


@pytest.mark.parametrize("p", EVEN_RANKS)
def test_chimeras_order_is_its_authors(p: int) -> None:
    """Of p microbatches: each pipeline starts one every second step, which moves a rank a step."""
    steps: list[list[tuple[int, Action]]] = [[] for _ in range(p)]
    for microbatch in range(p):
        step = 2 * (microbatch // 2)
        ranks = range(p) if microbatch % 2 == 0 else range(p - 1, -1, -1)
        for stage, rank in enumerate(ranks):
            steps[rank].append((step, forward(stage, microbatch)))
            step += 1
        for stage, rank in reversed(list(enumerate(ranks))):
            steps[rank].append((step, backward(stage, microbatch)))
            step += 1
    for row, own in zip(chimera(p, p).rows, steps, strict=True):
        assert len({step for step, _ in own}) == len(own)  # the pipelines never meet on a rank
        assert list(row) == [action for _, action in sorted(own, key=lambda each: each[0])]


@pytest.mark.parametrize(("p", "m"), [*product((2, 4), (1, 3, 5, 9)), (6, 7)])
def test_any_number_of_microbatches_runs(p: int, m: int) -> None:
    for table in (chimera(p, m), hanayo(p, m, 2), hanayo(p, m, 4)):
        assert violations(table) == []
        assert violations(with_communication(table)) == []


def test_they_say_where_they_exist() -> None:
    setting = ScheduleSetting(3, 6, unit_costs(3))
    with pytest.raises(ToolError, match="chimera: 3 ranks; it needs an even number of ranks"):
        build("chimera", setting)
    with pytest.raises(ToolError, match="hanayo: 3 chunks a rank; it needs an even number"):
        build("hanayo", ScheduleSetting(3, 6, unit_costs(3), chunks=3))
    with pytest.raises(ToolError, match="chimera has 2 chunks a rank, not 4"):
        build("chimera", ScheduleSetting(4, 8, unit_costs(4), chunks=4))
