"""The named schedules: their closed forms, and the figures that others publish for theirs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from schedule_peers import BY_TORCH, RATES, TORCH, at_record, like_torchs
from schedule_settings import SLICES
from soaking import one_in

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.catalogue import build, entries
from stablehlo_tools.schedules.generators.by_rule import (
    circular,
    eager_one_f_one_b,
    gpipe,
    gpipe_but_1f1b_for_the_last,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from stablehlo_tools.schedules.generators.named import NamedSchedule
from stablehlo_tools.schedules.setting import Costs, ScheduleSetting, costs, unit_costs
from stablehlo_tools.schedules.table import Table
from stablehlo_tools.schedules.table_simulator import Timeline, simulate
from stablehlo_tools.schedules.validator import violations

F, I, W = 3.0, 2.0, 1.5  # noqa: E741
UNEVEN = (2.0, 0.5, 1.0, 3.0)


def small(fits: Callable[[int, int], bool] = lambda p, m: True) -> pytest.MarkDecorator:
    """Ranks and microbatches that fit: fewer, more, as many, multiples or not; many for soaking."""
    quick = [*product((1, 2, 3, 4), (1, 3, 4, 8, 13)), (8, 5), (8, 24)]
    sizes = filter(
        lambda size: fits(*size), product((1, 2, 3, 4, 5, 8), (1, 2, 3, 4, 5, 7, 8, 13, 24))
    )
    cases = [pytest.param(*size, marks=() if size in quick else pytest.mark.soak) for size in sizes]
    return pytest.mark.parametrize(("p", "m"), cases)


def unlike(stages: int) -> Costs:
    """Times that differ from phase to phase, alike on all stages."""
    return costs(stages, F, I, W)


def timed(table: Table, figures: Costs) -> Timeline:
    """The timeline of a table that is valid."""
    assert violations(table) == []
    return simulate(table, figures)


@pytest.mark.parametrize("name", BY_TORCH)
def test_no_schedule_is_slower_or_larger_than_pytorchs(name: str) -> None:
    records = [record for record in TORCH if record["schedule"] == name]
    assert records
    for record in records:
        table = like_torchs(record)
        timeline = timed(table, unit_costs(table.stages))
        assert timeline.makespan <= record["makespan"], record
        assert timeline.span <= record["span"], record
        assert timeline.messages == record["messages"], record
        pairs = zip(timeline.peak_activations, record["peak_activations"], strict=True)
        assert all(ours <= theirs for ours, theirs in pairs), record


@pytest.mark.parametrize("index", one_in(3, range(len(RATES))))
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_bubble_rates_are_the_papers(name: str, index: int) -> None:
    record = RATES[index]
    timeline = timed(*at_record(name, record))
    rate = timeline.bubble_of_span if name == "zb-h2" else timeline.bubble
    assert round(rate, 4) == record["rates"][name]


@pytest.mark.parametrize("index", one_in(3, range(len(RATES))))
def test_interleaved_bubble_rates_are_the_papers_and_the_hops_left_out_there(index: int) -> None:
    """The published rates charge the way from the last rank back to the first once for a group.

    The first microbatch of each group pays for the hop; the others do not wait for it, though what
    they read comes the same way. With every hop the makespan is longer by p hops, neither more nor
    less, at every setting.
    """
    record = RATES[index]
    table, figures = at_record("interleaved-1f1b", record)
    timeline = timed(table, figures)
    published = timeline.makespan - record["p"] * figures.communication
    work = sum(timeline.busy) / record["p"]
    assert round(1 - work / published, 4) == record["rates"]["interleaved-1f1b"]
    apart = simulate(
        table, at_record("interleaved-1f1b", record | {"times": [*record["times"][:3], 0]})[1]
    )
    hops = 2 * (table.stages - 1) * figures.communication
    assert timeline.makespan == pytest.approx(apart.makespan + hops)


@pytest.mark.parametrize("kept", one_in(2, ["published", "half"]))
@pytest.mark.parametrize("name", ["zb-1p", "zb-2p"])
def test_searched_bubble_rates_are_the_papers_or_better(name: str, kept: str) -> None:
    for record in RATES:
        if name not in record["rates"] or record["p"] > 8:
            continue
        share = record["kept"] if kept == "published" else 0.5
        table, figures = at_record(name, record, share)
        timeline = timed(table, figures)
        assert timeline.bubble_of_span <= record["rates"][name] + 0.002, record
        limit = record["p"] * (2 if name == "zb-2p" else 1)
        assert max(timeline.peak_bytes) <= limit * (1 + 1e-9), record


@pytest.mark.soak
@pytest.mark.parametrize("name", ["zb-1p", "zb-2p"])
def test_searched_bubble_rates_of_more_ranks(name: str) -> None:
    for record in RATES:
        if name in record["rates"] and record["p"] > 8:
            timeline = timed(*at_record(name, record, record["kept"]))
            assert timeline.bubble_of_span <= record["rates"][name] + 0.002, record


@small()
def test_gpipe_closed_form(p: int, m: int) -> None:
    for table in (gpipe(p, m), gpipe_but_1f1b_for_the_last(p, m)):
        timeline = timed(table, unlike(p))
        assert timeline.makespan == (m + p - 1) * (F + I + W)
        assert timeline.peak_activations[:-1] == (m,) * (p - 1)
        assert timeline.messages == 2 * m * (p - 1)


@small()
def test_one_f_one_b_closed_form(p: int, m: int) -> None:
    timeline = timed(one_f_one_b(p, m), unlike(p))
    assert timeline.makespan == (m + p - 1) * (F + I + W)
    assert timeline.peak_activations == tuple(min(m, p - rank) for rank in range(p))
    assert timeline.messages == 2 * m * (p - 1)


@small()
def test_eager_one_f_one_b_hides_hops_up_to_half_a_stage(p: int, m: int) -> None:
    table = eager_one_f_one_b(p, m)
    peaks = tuple(min(m, 2 * (p - rank) - 1) for rank in range(p))
    assert timed(table, unlike(p)).peak_activations == peaks
    hop = 0.5
    eager = simulate(table, costs(p, 1, 0.5, 0.5, communication=hop))
    assert eager.makespan == pytest.approx((m + p - 1) * 2 + 2 * (p - 1) * hop)
    plain = simulate(one_f_one_b(p, m), costs(p, 1, 0.5, 0.5, communication=hop))
    assert eager.makespan <= plain.makespan
    if p > 2 and m > 2 * p:
        assert eager.makespan < plain.makespan


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [1, 2, 3, 4, *one_in(2, [5, 7])])
def test_interleaved_has_no_more_bubble_than_must_be_for_any_m(p: int, v: int) -> None:
    """The first rank's first forward and last backward bound it from below, as does one path."""
    for m in range(1, 4 * p + 3):
        table = interleaved_one_f_one_b(p, m, v)
        timeline = timed(table, unlike(p * v))
        work = F + I + W
        assert timeline.makespan == max((m * v + p - 1) * work, (p * v + m - 1) * work)
        largest = -(-m // max(1, m // p))
        peaks = ((v - 1) * largest + 2 * (p - 1 - rank) + 1 for rank in range(p))
        pairs = zip(timeline.peak_activations, peaks, strict=True)
        assert all(found <= min(m * v, peak) for found, peak in pairs)
        assert timeline.messages == 2 * m * (p * v - 1) * (p > 1)


@small(lambda p, m: m % p == 0)
def test_interleaved_peak_closed_form(p: int, m: int) -> None:
    for v in (1, 2, 4):
        peaks = simulate(interleaved_one_f_one_b(p, m, v), unit_costs(p * v)).peak_activations
        assert max(peaks) == min(m * v, (v - 1) * p + 2 * (p - 1) + 1)


@pytest.mark.parametrize("v", [1, 2, 4])
@small()
def test_looped_bfs_closed_form(p: int, m: int, v: int) -> None:
    timeline = timed(looped_bfs(p, m, v), unlike(p * v))
    bubble = (p - 1) * (F + I + W) if m >= p else None
    if bubble is not None:
        assert timeline.makespan == m * v * (F + I + W) + bubble
    assert timeline.peak_activations == (m * v,) * p


@pytest.mark.parametrize("v", [1, 2, 4])
@small(lambda p, m: m >= p)
def test_circular_closed_form(p: int, m: int, v: int) -> None:
    forward = timed(circular(p, m, v, training=False), unlike(p * v))
    assert forward.bubble == pytest.approx((p - 1) / (m * v + p - 1))
    both = timed(circular(p, m, v), unlike(p * v))
    assert both.makespan == pytest.approx((m * v + p - 1) * (F + I + W))


@small(lambda p, m: m >= 2 * p)
def test_zero_bubble_closed_forms(p: int, m: int) -> None:
    alike = costs(p, 2, 2, 1)  # F = I >= W
    one = timed(zb_h1(p, m), alike)
    assert one.makespan == m * 5 + (p - 1) * (2 + 2 - 1)
    assert one.peak_activations == (p,) * p
    two = timed(zb_h2(p, m), alike)
    assert two.span == m * 5 + (p - 1) * (2 + 2 - 2)
    assert two.peak_activations == (2 * p - 1,) * p
    assert one.messages == two.messages == 2 * m * (p - 1)


@pytest.mark.parametrize("v", [2, 3, 4])
@small(lambda p, m: m % p == 0)
def test_interleaved_zero_bubble_closed_form(p: int, m: int, v: int) -> None:
    timeline = timed(zb_h1(p, m, v), unit_costs(p * v))
    assert timeline.makespan == 3 * m * v + p - 1
    assert max(timeline.peak_activations) == min(m * v, p * v)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_schedule_takes_uneven_stages(entry: NamedSchedule) -> None:
    for p, m in ((1, 2), (2, 4), (4, 8), (4, 9)):
        times = [UNEVEN[stage % 4] for stage in range(p)]
        uneven = costs(p, times, times[::-1], UNEVEN[0], communication=0.25)
        setting = ScheduleSetting(p, m, uneven, sequence_slices=SLICES[entry.name])
        if entry.name.startswith("dualpipe") and not (p % 2 == 0 == m % 2 and m >= 2 * p):
            continue  # where it does not exist; test_schedule_dualpipe.py tests the refusal
        if entry.name == "chimera" and p % 2:
            continue  # and test_schedule_waves.py this one
        table = build(entry.name, setting)
        figures = setting.costs_of(table)
        timeline = timed(table, figures)
        phases = figures.microbatch if entry.training else figures.forward
        assert sum(timeline.busy) == pytest.approx(table.microbatches * sum(phases))


def test_unknown_names_and_chunks_say_what_there_is() -> None:
    setting = ScheduleSetting(4, 8, unit_costs(4))
    with pytest.raises(
        ToolError, match=r"unknown schedule 'zb-3p'; did you mean 'zb-\dp'. known are: gpipe, "
    ):
        build("zb-3p", setting)
    with pytest.raises(ToolError, match="1f1b has 1 chunk a rank, not 2"):
        build("1f1b", ScheduleSetting(4, 8, unit_costs(4), chunks=2))
    with pytest.raises(ToolError, match=r"zb-1p: rank 0 has room for 0.5 .* needs 1"):
        build("zb-1p", ScheduleSetting(4, 8, unit_costs(4), limit=0.5))


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "limit", "message"),
    [
        (0, 1, None, None, "ranks: 0; give 1 or more"),
        (1, 0, None, None, "microbatches: 0; give 1 or more"),
        (1, 1, 0, None, "chunks a rank: 0; give 1 or more"),
        (1, 1, None, -1.0, "the memory limit is -1.0"),
        (1, 1, None, float("nan"), "the memory limit is nan"),
    ],
)
def test_settings_that_cannot_be(
    ranks: int, microbatches: int, chunks: int | None, limit: float | None, message: str
) -> None:
    with pytest.raises(ToolError, match=message):
        ScheduleSetting(ranks, microbatches, unit_costs(1), chunks, limit)


def test_slices_are_cut_and_joined() -> None:
    setting = ScheduleSetting(2, 1, costs(4, [1, 2, 3, 4]))
    assert setting.costs(8).forward == (0.5, 0.5, 1, 1, 1.5, 1.5, 2, 2)
    assert setting.costs(2).forward == (3, 7)
    with pytest.raises(ToolError, match="4 figures do not fit 6 stages"):
        setting.costs(6)
