"""Loops under check-order: matched without unrolling, unrolled, peeled, nested, overlapping."""

from __future__ import annotations

import pytest
from order_oracle import explore
from order_strategies import FORMS, chain, collective, each, partly, program, recv, repeat, send
from test_order import broken, ordered, two

from stablehlo_tools.order.order_findings import Verdict
from stablehlo_tools.order.program import CompiledOrder, Decision, ProgramBlock, ProgramLoop
from stablehlo_tools.order.verdict import decide

OFTEN = 10**9
ONE = collective([0, 1])
OTHER = collective([0, 1], form=FORMS[1])


def looped(trips: int, body: ProgramBlock, *, is_chained: bool = True) -> ProgramBlock:
    """A block of one loop."""
    return chain(repeat([0, 1], trips, body, is_chained=is_chained))


def test_billion_iterations_match():
    body = chain(ONE, OTHER)
    nested = looped(OFTEN, looped(OFTEN, body))
    for block in (looped(OFTEN, body), nested):
        assert decide(two(block, block)).verdict is Verdict.ORDERED


def test_billion_iterations_and_one_more():
    body = chain(ONE)
    finding = decide(two(looped(OFTEN, body), looped(OFTEN + 1, body))).finding
    assert finding is not None
    assert finding.verdict is Verdict.MISMATCH
    assert f"{OFTEN + 1} times" in finding.message


def test_billion_iterations_in_conflicting_orders():
    blocks = looped(OFTEN, chain(ONE, OTHER)), looped(OFTEN, chain(OTHER, ONE))
    finding = decide(two(*blocks)).finding
    assert finding is not None
    assert (finding.rule, finding.confirmed) == ("conflicting-order", True)


def test_unrolled_by_two():
    ordered(two(looped(4, chain(ONE, OTHER)), looped(2, chain(ONE, OTHER, ONE, OTHER))))


def test_unrolled_by_two_in_another_order():
    finding = broken(two(looped(4, chain(ONE, OTHER)), looped(2, chain(ONE, ONE, OTHER, OTHER))))
    assert finding.verdict is Verdict.MAY_DEADLOCK


@pytest.mark.parametrize("is_first", [True, False])
def test_peeled(is_first: bool):
    rest = repeat([0, 1], 2, chain(ONE, OTHER))
    peeled = chain(ONE, OTHER, rest) if is_first else chain(rest, ONE, OTHER)
    ordered(two(looped(3, chain(ONE, OTHER)), peeled))


def test_no_trips():
    ordered(two(looped(0, chain(ONE)), chain()))
    ordered(two(looped(0, partly(ONE, ONE)), looped(0, partly(ONE, ONE))))
    assert broken(two(looped(0, chain(ONE)), chain(ONE))).rule == "missing-collective"


def test_condition_runs_once_more():
    loop = ProgramLoop(each({0: 2, 1: 2}), chain(ONE), chain(OTHER))
    ordered(two(chain(loop), chain(ONE, OTHER, ONE, OTHER, ONE)))
    finding = broken(two(chain(loop), chain(ONE, OTHER, ONE, OTHER)))
    assert finding.verdict is Verdict.MISMATCH


def test_nested_loops():
    inner = looped(3, chain(ONE))
    ordered(two(looped(2, inner), looped(6, chain(ONE))))
    assert broken(two(looped(2, inner), looped(5, chain(ONE)))).verdict is Verdict.MISMATCH


def test_trips_that_differ_within_a_program():
    def loop(*trips: int) -> CompiledOrder:
        return program(
            [0, 1], chain(ProgramLoop(each(dict(enumerate(trips))), ProgramBlock(), chain(ONE)))
        )

    ordered([loop(2, 2)])
    assert broken([loop(2, 3)]).rule == "divergent-control-flow"


def test_unordered_in_the_body():
    finding = broken(two(looped(2, partly(ONE, OTHER)), looped(2, chain(ONE, OTHER))))
    assert (finding.rule, finding.confirmed) == ("unordered", True)


def test_unordered_in_the_body_within_one_program():
    inside = repeat([0, 1], 2, partly(ONE, OTHER))
    left = program([0, 1], partly(inside, collective([1, 2])))
    ordered([left, program([2], chain(collective([1, 2])))])


def test_unordered_with_a_loop():
    blocks = (
        partly(repeat([0, 1], 2, chain(ONE)), OTHER),
        chain(repeat([0, 1], 2, chain(ONE)), OTHER),
    )
    assert broken(two(*blocks)).rule == "unordered"


@pytest.mark.parametrize("trips", [1, 2])
def test_overlapping_iterations(trips: int):
    one, other = (looped(trips, chain(ONE, OTHER), is_chained=free) for free in (False, True))
    if trips == 1:
        ordered(two(one, other))
    else:
        assert broken(two(one, other)).rule == "overlapping-iterations"


def test_overlapping_condition_of_one_iteration():
    loop = ProgramLoop(each({0: 1, 1: 1}), chain(ONE), chain(OTHER), is_chained=False)
    assert broken(two(chain(loop), chain(loop))).rule == "overlapping-iterations"


def test_overlapping_iterations_of_devices_compiled_apart():
    """One file for three devices: the first of them takes no part."""
    body = chain(collective([1, 2]))
    loop = chain(repeat(range(3), 2, body, is_chained=False))
    finding = broken([program(range(3), loop)], strict=True)
    assert (finding.rule, finding.devices) == ("overlapping-iterations", (1, 2))


def test_overlapping_transfers_in_one_program():
    body = chain(send(0, 1), recv(0, 1))
    finding = broken([program([0, 1], looped(2, body, is_chained=False))])
    assert finding.rule == "overlapping-iterations"
    ordered([program([0, 1], looped(2, body))])


def test_unordered_transfers_in_the_body_of_one_program():
    body = partly(ONE, send(0, 1), recv(0, 1))
    assert broken([program([0, 1], looped(2, body))]).rule == "unordered"


def test_loop_decided_at_run_time():
    def loop(body: ProgramBlock) -> list[CompiledOrder]:
        return [program([0, 1], chain(ProgramLoop(Decision({0: 0, 1: 0}), ProgramBlock(), body)))]

    ordered(loop(chain(ONE, send(0, 1), recv(0, 1))))
    assert broken(loop(chain(ONE, send(0, 1)))).rule == "decided-at-run-time"
    assert broken(loop(partly(ONE, send(0, 1), recv(0, 1)))).rule == "unordered"


def test_oracle_sees_the_last_iteration():
    """The oracle itself: a fault in the last of three iterations."""
    late = ProgramLoop(each({0: 3}), ProgramBlock(), chain(ONE))
    report = explore(two(chain(late), chain(ONE, ONE, OTHER)))
    assert report.hang is not None
    assert report.hang[0].path == (2,)
