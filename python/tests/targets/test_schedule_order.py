"""When a schedule is in the program's order, and how a difference is told."""

from __future__ import annotations

from typing import Any

import pytest

from stablehlo_tools.hlo_input.async_forms import AsyncPhase
from stablehlo_tools.targets import schedule_order
from stablehlo_tools.targets.schedule_order import (
    Item,
    OrderDifference,
    OrderReport,
    Repeat,
    ScheduleBranch,
    ScheduledIssue,
    compare_order,
)
from stablehlo_tools.targets.scheduled_hlo import (
    CollectiveEvent,
    Conditional,
    HloSchedule,
    Node,
    ScheduledLoop,
)

A, B, C, D = range(4)


def program(*parts: int | Item) -> tuple[Item, ...]:
    """Numbers stand for collectives."""
    return tuple(ScheduledIssue(part) if isinstance(part, int) else part for part in parts)


def loop(*body: int | Item) -> Repeat:
    """A loop whose condition is silent."""
    return Repeat((), program(*body))


def compare(expected: tuple[Item, ...], *actual: Any) -> OrderReport:
    """Compares with a schedule of numbers, tuples of numbers (merged), and nodes made of them."""
    events: list[CollectiveEvent] = []

    def node(part: Any, depth: int) -> Node:
        if isinstance(part, ScheduledLoop):
            return ScheduledLoop(
                block(part.condition, depth + 1), block(part.body, depth + 1), part.trip_count
            )
        if isinstance(part, Conditional):
            return Conditional(tuple(block(branch, depth) for branch in part.branches))
        if isinstance(part, CollectiveEvent):
            event = part
        else:
            ids = part if isinstance(part, tuple) else (part,)
            event = CollectiveEvent(
                len(events), AsyncPhase.SYNC, "all-reduce", ids, "", "", "", ("while body",) * depth
            )
        events.append(event)
        return event

    def block(parts: tuple[Any, ...], depth: int) -> tuple[Node, ...]:
        return tuple(node(part, depth) for part in parts)

    return compare_order(expected, HloSchedule(block(actual, 0), tuple(events)))


def turns(*body: Any, condition: tuple[Any, ...] = (), trips: int | None = None) -> ScheduledLoop:
    """A loop of the schedule."""
    return ScheduledLoop(condition, body, trips)


def either(*branches: Any) -> Conditional:
    """A conditional of the schedule."""
    return Conditional(branches)


def test_straight_lines() -> None:
    assert compare(program(A, B, C), A, B, C).same_order
    report = compare(program(A, B, C), A, C, B)
    assert not report.same_order
    assert report.difference == OrderDifference(A, C, (B,), 1)


def test_deleted_ids_leave_the_order_of_the_others() -> None:
    report = compare(program(A, B, C), A, C)
    assert report.same_order
    assert report.deleted == (B,)


def test_collectives_of_xla_are_passed_over() -> None:
    report = compare(program(A, B), A, (), B)
    assert (report.same_order, report.added) == (True, 1)


def test_merging_neighbours_keeps_the_order() -> None:
    assert compare(program(A, B, C), (B, A), C).same_order
    report = compare(program(A, B, C), (C, A), B)
    assert not report.same_order  # B stood between them
    assert report.merged == ((A, C),)


def test_loops_may_be_unrolled_peeled_inlined_and_pipelined() -> None:
    looped = program(A, loop(B, C), D)
    assert compare(looped, A, turns(B, C), D).same_order
    assert compare(looped, A, B, C, B, C, D).same_order  # unrolled
    assert compare(looped, A, turns(B, C, B, C, trips=2), D).same_order  # in part
    assert compare(looped, A, turns(B, C), B, C, D).same_order  # the last iteration peeled
    assert compare(looped, A, B, C, D).same_order  # one trip
    assert compare(looped, A, B, turns(C, B), C, D).same_order  # B one iteration ahead
    assert compare(looped, A, B, C, D).moved == (B, C)
    assert compare(looped, A, turns(B, C), B, C, D).copied == (B, C)


def test_order_within_and_across_iterations() -> None:
    looped = program(A, loop(B, C), D)
    assert compare(looped, A, turns(C, B), D).difference == OrderDifference(A, C, (B, D), 1)
    assert compare(looped, A, B, turns(B, C), C, D).difference == OrderDifference(B, B, (C,), 2)
    hoisted = compare(looped, B, A, turns(C), D)
    assert hoisted.difference == OrderDifference(None, B, (A,), 0)


def test_condition_runs_once_more_than_the_body() -> None:
    tested = program(Repeat(program(A), program(B)))
    whole = turns(B, condition=(A,))
    assert compare(tested, whole).same_order
    assert not compare(tested, B, whole).same_order


def test_a_loop_with_a_known_trip_count_runs() -> None:
    at_least_once = program(A, B, loop(B))
    assert compare(at_least_once, A, turns(B, B, trips=2)).same_order
    unknown = compare(at_least_once, A, turns(B, B))
    assert unknown.difference == OrderDifference(A, None, (B,), None)


def test_branches_are_alternatives() -> None:
    branched = program(ScheduleBranch((program(A), program(B, C))), D)
    swapped = either((B, C), (A,))
    assert compare(branched, swapped, D).same_order
    assert not compare(branched, A, B, C, D).same_order


def test_a_function_called_twice_may_lose_a_copy() -> None:
    report = compare(program(A, B, A, B), A, B, B)
    assert report.same_order
    assert not compare(program(A, B, A, B), B, B, A).same_order


def test_a_copy_that_the_program_has_not_is_a_difference() -> None:
    report = compare(program(A, B), A, B, A)
    assert report.difference == OrderDifference(B, A, (), 2)
    assert report.copied == (A,)


def test_parts_of_one_collective_count_once() -> None:
    parts = [
        CollectiveEvent(position, AsyncPhase.SYNC, kind, (A,), "", "", "")
        for position, kind in enumerate(("reduce-scatter", "all-gather"))
    ]
    for expected in (program(A, B), program(loop(A), B)):
        report = compare(expected, *parts, B)
        assert (report.same_order, report.split, report.copied) == (True, (A,), ())
    assert compare(program(A, B), A, A, B).split == (A,)
    assert not compare(program(loop(A, B)), turns(A, A, B, B)).same_order  # no parts: out of order
    assert compare(program(A, A, B), A, A, B).split == ()


def test_a_schedule_that_ends_early_is_a_difference() -> None:
    sometimes = either((B,), ())
    report = compare(program(A, B), A, sometimes)
    assert report.difference == OrderDifference(A, None, (B,), None)


def test_ten_thousand_collectives_take_no_time() -> None:
    ids = range(10_000)
    assert compare(program(*ids), *ids).same_order
    assert compare(program(*(i % 10 for i in ids)), *(i % 10 for i in ids)).same_order


def test_too_many_alternatives_are_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_order, "_WORK_LIMIT", 100_000)
    report = compare(program(*([A, B, C] * 800)), *([A, B, C] * 400))
    assert (report.same_order, report.undecided, report.difference) == (False, True, None)
