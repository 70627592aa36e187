"""Devices that do the same taken for one, and what programs decide alike, against the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from order_cases import rule
from order_oracle import TooManyError, explore
from order_strategies import (
    FORMS,
    Flavor,
    all_of,
    chain,
    collective,
    partly,
    program,
    program_sets,
    recv,
    repeat,
    send,
)

from stablehlo_tools.order.coarsening import by_classes
from stablehlo_tools.order.program import (
    CollectiveIssue,
    CompiledOrder,
    Decision,
    Node,
    ProgramBlock,
    ProgramBranch,
    Rendezvous,
    rebuilt,
)
from stablehlo_tools.order.verdict import decide

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
FEW = Flavor(undecided=False, overlapping=False)
APART = 10  # between a device and its twin


def doubled(programs: Sequence[CompiledOrder], crossing: Mapping[int, bool]) -> list[CompiledOrder]:
    """Each device has a twin that does the same; some collectives link both, by their number."""

    def twin(device: int) -> int:
        return device + APART

    def issue(old: CollectiveIssue) -> CollectiveIssue:
        meetings: list[Rendezvous] = []
        for meeting in old.rendezvous:
            others = tuple(map(twin, meeting.members)), tuple(map(twin, meeting.issuers))
            if crossing.get(old.id % 4, False) and not old.transfer:
                meetings += all_of((*meeting.members, *others[0]))
            else:
                meetings += [meeting, Rendezvous(*others)]
        return replace(old, rendezvous=tuple(meetings))

    def decision(old: Decision) -> Decision:
        values = old.values
        return replace(
            old,
            classes=old.classes | {twin(d): known for d, known in old.classes.items()},
            values=None if values is None else values | {twin(d): v for d, v in values.items()},
        )

    return [
        replace(
            each,
            devices=(*each.devices, *map(twin, each.devices)),
            block=rebuilt(each.block, issue, decision),
            dead=(),
        )
        for each in programs
    ]


def check_sound(programs: list[CompiledOrder]) -> None:
    """What is said to be ordered never goes wrong."""
    if rule(decide(programs)) == "ordered":
        try:
            assert explore(programs).is_good
        except TooManyError:
            assume(False)


crossings = st.dictionaries(st.integers(0, 3), st.booleans())


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(program_sets(FEW), crossings)
def test_twins_are_ordered_only_where_they_never_hang(
    programs: list[CompiledOrder], crossing: dict[int, bool]
) -> None:
    check_sound(doubled(programs, crossing))


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(program_sets(FEW))
def test_twins_that_do_not_meet_are_ordered_as_one_is(programs: list[CompiledOrder]) -> None:
    alone = rule(decide([replace(each, dead=()) for each in programs]))
    assert (rule(decide(doubled(programs, {}))) == "ordered") == (alone == "ordered")


def test_one_device_stands_for_its_class() -> None:
    (one, other) = by_classes(
        doubled([program([0], chain(send(0, 1))), program([1], chain(recv(0, 1)))], {})
    ) or (None, None)
    assert one is not None
    assert other is not None
    assert (one.devices, other.devices) == ((0,), (1,))
    assert [node.rendezvous for node in one.block.nodes if isinstance(node, CollectiveIssue)] == [
        (Rendezvous((0, 1), (0,)),)
    ]


def test_a_transfer_within_a_class_is_left_as_it_is() -> None:
    within = CollectiveIssue(
        0, FORMS[0], (Rendezvous((0, 1), (0,)), Rendezvous((1, 0), (1,))), transfer="send"
    )
    assert by_classes([program([0, 1], chain(within))]) is None


# What is decided alike in programs compiled apart.


def decided(devices: Sequence[int], symbols: Mapping[int, str]) -> Decision:
    """What nobody knows before the run; devices of one symbol decide alike."""
    numbers = {symbol: n for n, symbol in enumerate(sorted(set(symbols.values())))}
    return Decision(
        {d: numbers[symbols[d]] for d in devices}, symbols={d: symbols[d] for d in devices}
    )


def branch(devices: Sequence[int], symbols: Mapping[int, str], *nodes: Node) -> ProgramBranch:
    return ProgramBranch(decided(devices, symbols), (ProgramBlock(), chain(*nodes)))


ALIKE = {0: "a", 1: "a", 2: "b", 3: "b"}


def test_devices_of_two_programs_decide_alike_by_their_own_symbols() -> None:
    """As along a data axis: 0 meets 1 and 2 meets 3, of which 0 and 2 run one program."""

    def one(devices: Sequence[int], symbols: Mapping[int, str]) -> CompiledOrder:
        inside = branch(devices, symbols, collective([0, 1], [2, 3]))
        return program(devices, chain(repeat(devices, 2, chain(inside))))

    assert rule(decide([one([0, 2], ALIKE), one([1, 3], ALIKE)])) == "ordered"
    other = ALIKE | {3: "c"}
    assert rule(decide([one([0, 2], ALIKE), one([1, 3], other)])) == "decided-at-run-time"
    assert rule(decide([one([0, 1], other), one([2, 3], other)])) == "divergent-control-flow"


def test_whom_a_branch_links_is_found_in_all_programs() -> None:
    """A chain of transfers in a branch: the first program knows no device behind its own."""
    symbols = dict.fromkeys(range(3), "a")
    pairs = ((0, 1), (1, 2))

    def end(kind: str, *own: tuple[int, int]) -> CollectiveIssue:
        place = 0 if kind == "send" else 1
        meetings = tuple(Rendezvous(pair, (pair[place],)) for pair in own)
        return CollectiveIssue(0, FORMS[0], meetings, transfer=kind, groups=pairs)

    def one(devices: Sequence[int], *ends: CollectiveIssue) -> CompiledOrder:
        inside = ProgramBranch(decided(devices, symbols), (ProgramBlock(), partly(*ends)))
        return program(devices, chain(repeat(devices, 2, chain(inside))))

    first = one([0], end("send", (0, 1)))
    middle = one([1], end("recv", (0, 1)), end("send", (1, 2)))
    last = one([2], end("recv", (1, 2)))
    assert rule(decide([first, middle, last])) == "ordered"
    cut = one([2], end("recv", (1, 2)), collective([2, 1]))
    assert rule(decide([first, middle, cut])) != "ordered"


def test_other_branches_of_the_same_decision_do_not_meet() -> None:
    turned = [collective([0, 1]), collective([0, 1], form=FORMS[2])]
    symbols = {0: "a", 1: "a"}
    programs = [
        program([d], chain(*(branch([d], symbols, node) for node in nodes)))
        for d, nodes in enumerate([turned, turned[::-1]])
    ]
    assert rule(decide(programs)) != "ordered"
