"""Seq1F1B and SlimPipe: time, bubble and memory in slices, and the order that slices have to keep.

Sources. Seq1F1B, arXiv 2406.03488: the warm-up of P - p - 2 + k slices, and the backwards of a
microbatch from its last slice on, are those of sail-sg/zero-bubble-pipeline-parallelism,
scheduler/seq1f1b.py, whose rows are restated here. SlimPipe, arXiv 2504.14519: "reduces the
accumulated activations from several microbatches to just one, which is split into several slices"
(abstract); the n + 2(p - 1 - r) slices in flight are those of an implementation in Megatron-LM
(pipelining_with_slicing: num_slices + 2 (size - rank - 1)). The rest is derived: the last rank
starts p - 1 slices late and ends p - 1 early, whatever the schedule.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.catalogue import build, compare
from stablehlo_tools.schedules.constraints import ScheduleRule
from stablehlo_tools.schedules.explicit_tables import align_columns, with_communication
from stablehlo_tools.schedules.forms import from_csv, from_json, from_text, to_csv, to_json, to_text
from stablehlo_tools.schedules.generators.by_rule import one_f_one_b, seq1f1b, slimpipe
from stablehlo_tools.schedules.search.auto import find_best
from stablehlo_tools.schedules.setting import ScheduleSetting, costs, unit_costs
from stablehlo_tools.schedules.table import (
    Action,
    Table,
    backward,
    bidirectional,
    drop_idle_cells,
    forward,
    input_gradient,
    loop,
    table_of,
    weight_gradient,
)
from stablehlo_tools.schedules.table_simulator import Timeline, simulate
from stablehlo_tools.schedules.validator import violations

SIZES = [*product((1, 2, 3, 4, 8), (1, 2, 5), (1, 2, 3, 4, 8))]


def timed(table: Table, setting: ScheduleSetting) -> Timeline:
    """The timeline of a table that is valid."""
    assert violations(table) == []
    return simulate(table, setting.costs_of(table))


@pytest.mark.parametrize(("p", "m", "k"), SIZES)
def test_time_and_memory_of_slices(p: int, m: int, k: int) -> None:
    setting = ScheduleSetting(p, m, costs(p, 2, 3, 1, weights=1), sequence_slices=k)
    for name, each_hop in (("seq1f1b", 1), ("slimpipe", 2)):
        table = build(name, setting)
        assert (table.sequences, table.sequence_slices) == (m, k)
        timeline = timed(table, setting)
        assert timeline.makespan == pytest.approx(6 * m + (p - 1) * 6 / k)
        slices = [min(m * k, k + each_hop * (p - 1 - rank)) for rank in range(p)]
        assert list(timeline.peak_activations) == slices
        assert timeline.peak_bytes == pytest.approx([1 + count / k for count in slices])
        assert timeline.messages == 2 * m * k * (p - 1)


@pytest.mark.parametrize(("p", "k"), [(2, 2), (4, 4), (4, 8), (8, 8), (3, 7), (4, 5)])
@pytest.mark.parametrize("v", [1, 2, 4])
def test_slimpipe_on_several_chunks(p: int, k: int, v: int) -> None:
    """Of the activations of the whole model, a pth, and 2(p - 1)/(vk) of that more."""
    for m in (1, 4):
        setting = ScheduleSetting(p, m, unit_costs(p), v, sequence_slices=k)
        timeline = timed(build("slimpipe", setting), setting)
        assert timeline.makespan == pytest.approx(3 * m + (p - 1) * 3 / (v * k))
        held = 1 + 2 * (p - 1) / (v * k) if m > 1 else 1
        assert max(timeline.peak_bytes) == pytest.approx(min(m, held))


@pytest.mark.parametrize("p", [2, 4, 8])
def test_against_one_f_one_b(p: int) -> None:
    """One slice is 1F1B; k slices leave a kth of its bubble and (k + p - 1)/k of p microbatches."""
    m = 2 * p
    assert seq1f1b(p, m, 1).rows == one_f_one_b(p, m).rows
    plain = simulate(one_f_one_b(p, m), unit_costs(p))
    for k in (2, 4, 16):
        setting = ScheduleSetting(p, m, unit_costs(p), sequence_slices=k)
        cut = timed(build("seq1f1b", setting), setting)
        assert cut.makespan - 3 * m == pytest.approx((plain.makespan - 3 * m) / k)
        assert max(plain.peak_bytes) == p
        assert max(cut.peak_bytes) == pytest.approx((k + p - 1) / k)


@pytest.mark.parametrize(("p", "m", "k"), [(2, 3, 2), (4, 2, 4), (4, 1, 2), (3, 4, 5)])
def test_rows_of_seq1f1b_are_its_authors(p: int, m: int, k: int) -> None:
    for rank, row in enumerate(seq1f1b(p, m, k).rows):
        warm = min(p - rank - 2 + k, m * k)
        forwards = [forward(rank, unit) for unit in range(m * k)]
        last_first = [i * k + part for i in range(m) for part in reversed(range(k))]
        backwards = [backward(rank, unit) for unit in last_first]
        steady = [step for pair in zip(forwards[warm:], backwards, strict=False) for step in pair]
        assert list(row) == [*forwards[:warm], *steady, *backwards[m * k - warm :]]


def exchanged(table: Table, rank: int, one: Action, other: Action) -> Table:
    """The table with two actions of a rank in each other's place."""
    swap = {one: other, other: one}
    rows = [list(row) for row in table.rows]
    rows[rank] = [swap.get(step, step) if isinstance(step, Action) else step for step in rows[rank]]
    return replace(table, rows=tuple(map(tuple, rows)))


def test_slices_keep_their_order() -> None:
    table = seq1f1b(2, 2, 3)
    wrong = exchanged(table, 1, forward(1, 0), forward(1, 1))
    [fault] = [each for each in violations(wrong) if each.rule is ScheduleRule.SLICE_ORDER]
    assert str(fault) == (
        "rank 1, step 0: 1F1 comes before 1F0, the previous slice, whose keys it reads (C16)"
    )
    wrong = exchanged(table, 1, backward(1, 4), backward(1, 5))
    [fault] = [each for each in violations(wrong) if each.rule is ScheduleRule.SLICE_ORDER]
    assert (fault.rank, fault.action) == (1, "1B4")
    assert "comes before 1B5, the next slice" in fault.message
    free = replace(wrong, sequence_slices=1)  # of microbatches the order is free
    assert not [each for each in violations(free) if each.rule is ScheduleRule.SLICE_ORDER]


def test_split_gradients_keep_it_too() -> None:
    def split(*order: int) -> Table:
        gradients = [input_gradient(0, unit) for unit in order]
        weights = [weight_gradient(0, unit) for unit in sorted(order)]
        row = [forward(0, 0), forward(0, 1), *gradients, *weights]
        return table_of("split", loop(1), 2, [row], sequence_slices=2)

    assert violations(split(1, 0)) == []
    assert [each.rule for each in violations(split(0, 1))] == [ScheduleRule.SLICE_ORDER]


def test_tables_that_cannot_be_of_slices() -> None:
    rows = [[forward(0, 0), backward(0, 0)]]
    [fault] = violations(table_of("odd", loop(1), 1, rows, sequence_slices=2))
    assert "1 slices, 2 a microbatch" in fault.message
    both = table_of("both", bidirectional(2), 2, [[], []], sequence_slices=2)
    assert any(
        "2 routes: a table with sequence slices must have exactly one" in str(each)
        for each in violations(both)
    )


@pytest.mark.parametrize("table", [seq1f1b(3, 2, 4), slimpipe(2, 3, 2, 2)], ids=["seq", "slim"])
def test_forms_keep_the_slices(table: Table) -> None:
    spread = align_columns(table)
    assert drop_idle_cells(spread) == table
    assert from_text(to_text(spread)) == spread
    assert from_json(to_json(table)) == table
    assert replace(from_csv(to_csv(table), table.name), sequence_slices=4).rows == table.rows
    explicit = with_communication(table)
    assert explicit.sequence_slices == table.sequence_slices
    assert violations(explicit) == []


def test_they_say_what_they_take() -> None:
    with pytest.raises(ToolError, match="seq1f1b: it cuts sequences and needs --slices K"):
        build("seq1f1b", ScheduleSetting(4, 8, unit_costs(4)))
    with pytest.raises(ToolError, match="2 chunks a rank, 3 slices and 4 ranks"):
        build("slimpipe", ScheduleSetting(4, 8, unit_costs(4), 2, sequence_slices=3))
    with pytest.raises(ToolError, match="slices of a microbatch: 0"):
        ScheduleSetting(4, 8, unit_costs(4), sequence_slices=0)
    with pytest.raises(ToolError, match="ranks x microbatches x chunks x slices are 8,192,000"):
        ScheduleSetting(8, 1024, unit_costs(8), sequence_slices=1000)


def test_compared_beside_whole_microbatches() -> None:
    """Slices are no part of the search, which moves whole microbatches."""
    asked = ScheduleSetting(4, 4, unit_costs(4), sequence_slices=4)
    comparison = compare(asked)
    by_name = {(each.name, each.chunks): each for each in comparison.candidates}
    assert by_name["seq1f1b", 1].activations == pytest.approx(7 / 4)
    assert by_name["1f1b", 1].activations == 4
    assert by_name["slimpipe", 2].makespan == pytest.approx(12 + 9 / 8)
    assert find_best(asked).table.sequence_slices == 1
    plain = compare(replace(asked, sequence_slices=None), search=False)
    assert {"seq1f1b", "slimpipe"} <= {refusal.name for refusal in plain.refusals}
