"""Both ends of one acyclic transfer in loops: no order between them is asked for, all else is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_oracle import TooManyError, explore
from order_strategies import TRANSFERS, chain, collective, each, partly, program, repeat, same
from test_order import broken, ordered

from stablehlo_tools.order.order_findings import Verdict
from stablehlo_tools.order.program import (
    CollectiveIssue,
    CollectiveSignature,
    CompiledOrder,
    Node,
    ProgramBlock,
    ProgramBranch,
    ProgramLoop,
    Rendezvous,
)
from stablehlo_tools.order.simulation import LoopMismatchError
from stablehlo_tools.order.verdict import decide

type Pairs = Sequence[tuple[int, int]]

CHAIN: Pairs = [(0, 1), (1, 2)]
BACK: Pairs = [(2, 0)]
FIRST, SECOND = TRANSFERS


def end(kind: str, pairs: Pairs, form: CollectiveSignature = FIRST) -> CollectiveIssue:
    """A send or recv of these pairs, as all devices of one program have it."""
    index = 0 if kind == "send" else 1
    meetings = tuple(Rendezvous(pair, (pair[index],)) for pair in pairs)
    return CollectiveIssue(0, form, meetings, transfer=kind)


def ends(
    pairs: Pairs, form: CollectiveSignature = FIRST
) -> tuple[CollectiveIssue, CollectiveIssue]:
    """The recv and the send of one transfer."""
    return end("recv", pairs, form), end("send", pairs, form)


def looped(body: ProgramBlock, devices: Sequence[int] = range(3), trips: int = 2) -> CompiledOrder:
    return program(devices, chain(repeat(devices, trips, body)))


STEPS = [(0, 2), (0, 3), (1, 2), (1, 3)]  # both ends of one transfer before both of the next
TWO_IN_A_CHAIN = partly(*ends(CHAIN), *ends(BACK, SECOND), pairs=STEPS)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("body", [partly(*ends(CHAIN)), TWO_IN_A_CHAIN])
def test_either_end_may_come_first(body: ProgramBlock, *, strict: bool):
    ordered([looped(body)], strict=strict)


def test_the_send_may_stand_in_front():
    recv, send = ends(CHAIN)
    ordered([looped(partly(send, recv))])


@pytest.mark.parametrize("strict", [False, True])
def test_other_collectives_between_the_transfers(strict: bool):
    order = [(0, 2), (1, 2), (2, 3), (2, 4)]
    body = partly(*ends(CHAIN), collective([0, 1, 2]), *ends(BACK, SECOND), pairs=order)
    ordered([looped(body)], strict=strict)


def test_in_a_loop_of_a_loop_and_in_a_branch():
    inner = repeat(range(3), 2, TWO_IN_A_CHAIN)
    taken = ProgramBranch(same(range(3), 1), (ProgramBlock(), partly(*ends(CHAIN))))
    ordered([looped(chain(inner, taken))])


def test_devices_elsewhere_stay_free():
    body = partly(*ends(CHAIN), collective([3, 4]))
    ordered([looped(body, range(5))])


# What is still reported.


@pytest.mark.parametrize("strict", [False, True])
def test_a_ring(strict: bool):
    assert broken([looped(partly(*ends([*CHAIN, *BACK])))], strict=strict).devices


CUTS = [cut for n in (1, 2, 3, 4) for cut in itertools.combinations(STEPS, n)]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("pairs", [BACK, CHAIN, [(2, 1), (1, 0)], [(0, 2)], [(1, 0)]])
def test_a_cut_chain(pairs: Pairs, *, strict: bool):
    doubted = 0
    for cut in CUTS:
        kept = [step for step in STEPS if step not in cut]
        body = partly(*ends(CHAIN), *ends(pairs, SECOND), pairs=kept)
        decided = decide([looped(body)], strict=strict)
        if decided.finding is None:
            assert explore(decided.programs).is_good
        else:
            doubted += 1
        if pairs == BACK:
            assert decided.verdict is Verdict.MAY_DEADLOCK
    assert doubted


def test_ends_of_unlike_pairs():
    body = partly(end("recv", CHAIN), end("send", [(2, 0), (0, 1)]))
    assert decide([looped(body)]).verdict is not Verdict.ORDERED


def test_ends_of_unlike_channels():
    """Each channel has both its ends, crosswise: nothing is one step."""
    first, second = ends(CHAIN), ends(CHAIN, SECOND)
    body = partly(first[0], second[1], second[0], first[1], pairs=STEPS)
    assert decide([looped(body)]).verdict is Verdict.MAY_DEADLOCK


def test_a_collective_that_can_come_between_the_ends():
    """3 sends to 0, 0 to 1: with the recv first and the send last, 1 meets 3 too late."""
    body = partly(*ends([(3, 0), (0, 1)]), collective([1, 3]))
    assert broken([looped(body, range(4))]).verdict is Verdict.MAY_DEADLOCK


def test_a_transfer_around_the_loop():
    """2 waits for 0 in front of the loop, 0 sends behind it: well if all receive first in it."""
    recv, send = ends([(0, 2)], SECOND)
    whole = chain(recv, repeat(range(3), 2, partly(*ends(CHAIN))), send)
    assert broken([program(range(3), whole)]).verdict is Verdict.MAY_DEADLOCK


def test_a_program_of_another_order():
    """3 meets first who comes last to it: well if all receive first in the loop."""
    front, behind = collective([2, 3]), collective([0, 3])
    ours = chain(front, repeat(range(3), 1, partly(*ends(CHAIN))), behind)
    for theirs in (chain(behind, front), partly(front, behind)):
        finding = broken([program(range(3), ours), program([3], theirs)])
        assert finding.verdict is Verdict.MAY_DEADLOCK


def test_iterations_that_overlap():
    loop = repeat(range(3), 2, partly(*ends(CHAIN)), is_chained=False)
    assert broken([program(range(3), chain(loop))]).rule == "overlapping-iterations"


def test_devices_that_decide_otherwise():
    loop = ProgramLoop(each({0: 1, 1: 2, 2: 1}), ProgramBlock(), partly(*ends(CHAIN)))
    assert decide([program(range(3), chain(loop))]).verdict is not Verdict.ORDERED


# Anything, against every schedule and interleaving.

_PAIRS: list[Pairs] = [CHAIN, BACK, [(2, 1), (1, 0)], [(0, 1)], [(1, 2)], [(0, 1), (1, 0)]]


@st.composite
def _bodies(draw: st.DrawFn) -> ProgramBlock:
    nodes: list[Node] = []
    for _ in range(draw(st.integers(1, 2))):
        two = ends(draw(st.sampled_from(_PAIRS)), draw(st.sampled_from(TRANSFERS)))
        nodes += draw(st.permutations(two))
    if draw(st.booleans()):
        members = draw(st.sampled_from([(0, 1), (0, 1, 2), (1, 2), (0, 2)]))
        nodes.insert(draw(st.integers(0, len(nodes))), collective(members))
    every = [(i, j) for j in range(len(nodes)) for i in range(j)]
    ends_of_one = draw(st.booleans())
    kept = [p for p in every if draw(st.integers(0, 5)) and not (ends_of_one and _same(nodes, p))]
    return partly(*nodes, pairs=kept)


def _same(nodes: Sequence[Node], positions: tuple[int, int]) -> bool:
    one, other = (nodes[position] for position in positions)
    assert isinstance(one, CollectiveIssue)
    assert isinstance(other, CollectiveIssue)
    return bool(one.transfer) and one.signature == other.signature


@st.composite
def _sets(draw: st.DrawFn) -> list[CompiledOrder]:
    inner = repeat(range(3), draw(st.integers(1, 2)), draw(_bodies()))
    other = collective((2, 3)), collective((0, 3))
    recv, send = ends(draw(st.sampled_from([[(0, 2)], [(2, 0)], [(0, 1)]])), SECOND)
    way = draw(st.integers(0, 3))
    if way == 0:
        return [program(range(3), chain(recv, inner, send))]
    if way == 1:
        ours = chain(other[0], inner, other[1])
        theirs = draw(st.sampled_from([chain(*other), chain(*reversed(other)), partly(*other)]))
        return [program(range(3), ours), program([3], theirs)]
    if way == 2:
        return [program(range(3), partly(inner, repeat(range(3), 1, draw(_bodies()))))]
    return [program(range(3), chain(inner))]


def check_sound(programs: list[CompiledOrder], *, strict: bool) -> bool:
    """Nothing that goes wrong is called ordered; whether it was."""
    try:
        decided = decide(programs, strict=strict)
        if decided.finding is None:
            assert explore(decided.programs, 1500).is_good
    except (TooManyError, LoopMismatchError):
        return False
    return decided.finding is None


@settings(max_examples=200)
@given(_sets(), st.booleans())
def test_ordered_is_never_wrong(programs: list[CompiledOrder], strict: bool):
    check_sound(programs, strict=strict)


@pytest.mark.soak
@settings(max_examples=20_000)
@given(_sets(), st.booleans())
def test_ordered_is_never_wrong_soak(programs: list[CompiledOrder], strict: bool):
    check_sound(programs, strict=strict)
